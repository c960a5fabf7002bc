"""How much each host's link carried in a stretch of time, and how much of that it was full.

``python -m bench.strategies.meter`` runs where the links' other ends are, at the switch, and reads
the kernel's counts every so often; orders name a stretch of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np

from bench.turns import Line

SAMPLE_S = 0.02
KEPT_S = 600.0
# Of the rate, in a sample: a link is full. Counts leave out the headers of frames that the kernel
# keeps in one piece, some 4 %.
FULL = 0.8


def carried(ports: int) -> list[float]:
    """Bytes so far that each port's host has sent, and received: two numbers for each."""
    counts = {}
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        counts[name.strip()] = numbers.split()
    # What arrives at the switch is what the host has sent.
    return [float(counts[f"p{port}"][column]) for port in range(ports) for column in (0, 8)]


def use(
    times: np.ndarray, counts: np.ndarray, began: float, ended: float, bytes_per_s: float
) -> list[dict[str, float]]:
    """What each link carried from `began` to `ended`, and its share of the time when it was full.

    Args:
        times: shape (samples,).
        counts: shape (samples, 2 * links), as `carried` has them.
        bytes_per_s: which a full link carries.
    """
    at = np.concatenate([[began], times[(times > began) & (times < ended)], [ended]])
    columns = [np.interp(at, times, column) for column in counts.T]
    spans, found = np.diff(at), []
    for sent, received in zip(columns[::2], columns[1::2], strict=True):
        fullest = np.maximum(np.diff(sent), np.diff(received)) / spans / bytes_per_s
        found.append(
            {
                "sent": float(sent[-1] - sent[0]),
                "received": float(received[-1] - received[0]),
                "full": float(np.sum(spans[fullest >= FULL]) / (ended - began)),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ports", type=int, required=True)
    parser.add_argument("--bytes-per-s", type=float, required=True)
    arguments = parser.parse_args()

    samples: deque[tuple[float, list[float]]] = deque(maxlen=int(KEPT_S / SAMPLE_S))
    lock = threading.Lock()

    def sample() -> None:
        with lock:
            samples.append((time.perf_counter(), carried(arguments.ports)))

    def keep_sampling() -> None:
        while True:
            sample()
            time.sleep(SAMPLE_S)

    sample()
    threading.Thread(target=keep_sampling, daemon=True).start()
    line = Line(0)
    for order in line.orders():
        sample()
        with lock:
            times, counts = zip(*samples, strict=True)
        found = use(
            np.array(times), np.array(counts), order["began"], order["ended"], arguments.bytes_per_s
        )
        line.answer(links=found)


if __name__ == "__main__":
    main()
