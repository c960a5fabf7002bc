"""The parameters of the model from measured calls of two ranks, by least squares. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bench.simulate.model import Link, Memory, is_exchanged


def line(samples: Mapping[tuple[int, int], float]) -> tuple[float, float]:
    """The a and b with which a * messages + b * bytes is nearest to the measured seconds.

    `samples` has seconds for each (messages, bytes). Errors count relative to the measured time,
    so that a small call weighs as much as a large one. Neither is negative.
    """
    terms = np.array(list(samples), float)
    seconds = np.array(list(samples.values()))
    scaled = terms / seconds[:, None]
    found = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)[0]
    if found.min() < 0:
        # One term alone explains these times best.
        kept = int(found.argmax())
        column = scaled[:, kept]
        found = np.zeros(2)
        found[kept] = column.sum() / (column @ column)
    return float(found[0]), float(found[1])


def link(all_reduces: Mapping[int, float], gamma: float = 0.0) -> Link:
    """The link of two ranks whose all-reduces of so many bytes took so many seconds.

    Between two ranks, an exchange is one message of the whole array each way, and the ring two of
    a half. `gamma` is known from a link without a wire.
    """
    samples = {
        (1 if is_exchanged(2, nbytes) else 2, nbytes): seconds
        for nbytes, seconds in all_reduces.items()
    }
    alpha, per_byte = line(samples)
    return Link(alpha, max(0.0, per_byte - gamma), gamma)


def cores(all_reduces: Mapping[int, float]) -> Link:
    """The same for two ranks of one machine, where no wire limits: all bytes cost the cores."""
    found = link(all_reduces)
    return Link(found.alpha, 0.0, found.beta)


def memory(all_reduces: Mapping[int, float]) -> Memory:
    """Shared memory in which two ranks' all-reduces of so many bytes took so many seconds."""
    return Memory(*line({(1, nbytes): seconds for nbytes, seconds in all_reduces.items()}))
