"""Elastic jobs, one after the other, of which random ranks are lost at random moments.

    python -m tests.soak_elastic --minutes 2 [--seed N] [--kinds kill,stop,exit,reset,write]

Each trains 10 MB of weights on 4 ranks; up to 3 are killed, stopped, or exit, at random moments or
at once. In some, ranks also end their connections at random moments, or one writes a file in a
callback, for longer than a lost rank is waited for. After each: exit code 0, every step made once,
the ranks that are left all those that nothing was done to, with equal weights, and these those of a
job that nothing has disturbed, but for rounding; of what was written, each epoch, the bytes of one
rank. The first violation ends the soak with exit code 1 and all that was said. At the end: seconds
from a kill, or from the time limit of a stopped rank, to the end of the next step, in jobs in which
nothing else happens.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from tests.jobs import facts_in
from tests.processes import launcher, wait_until

SIZE, EPOCHS, STEPS = 4, 6, 40
PROGRAM = str(Path(__file__).parent / "programs" / "soaked.py")
TIMEOUT_S, DEADLINE_S = 2.0, 240.0
WRITES_S = 2.5
KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}


def run(
    folder: Path, chosen: random.Random, count: int, kinds: Collection[str]
) -> tuple[list[tuple[int, float]], list[str], Any]:
    """One job that loses `count` ranks: which, when; what else happens.

    And by rank what the others say in the end.
    """
    victims = chosen.sample(range(SIZE), count)
    at_once = chosen.random() < 0.3
    writes = "write" in kinds and chosen.random() < 0.5
    resets = chosen.choices(range(SIZE), k=2) if "reset" in kinds and chosen.random() < 0.5 else []
    hows = {}
    for victim in victims:
        how = "stop" if chosen.random() < 0.1 else chosen.choice(["kill", "exit"])
        hows[victim] = how if how in kinds else "kill"
    # Over sockets nobody kills a stopped rank, and half of the ranks may not go on without it.
    transport = "auto" if "stop" in hows.values() else chosen.choice(["auto", "zmq"])
    done = ["writes"] * writes + [f"reset of {rank}" for rank in resets]
    options = ("-n", str(SIZE), "--elastic")
    variables = {
        **{"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        "RINGREDUCE_TIMEOUT_S": str(TIMEOUT_S),
        "RINGREDUCE_JOIN_TIMEOUT_S": "60",
        "RINGREDUCE_TRANSPORT": transport,
    }
    struck: list[tuple[int, float]] = []
    command = ("run", *options, PROGRAM, str(EPOCHS), str(WRITES_S * writes), str(folder))
    with launcher(folder, *command, **variables) as job:

        def processes() -> dict[int, int]:
            said = facts_in(job.stdout)
            return {fact["rank"]: fact["pid"] for fact in said if "pid" in fact}

        try:
            wait_until(lambda: len(processes()) == SIZE, "the beginning", DEADLINE_S)
            events = [*hows.items(), *((rank, "reset") for rank in resets)]
            if resets:
                chosen.shuffle(events)
            for place, (rank, how) in enumerate(events):
                if not (at_once and place):
                    time.sleep(chosen.uniform(0.0, 2.0 + 4.0 * writes))
                if how == "reset":
                    (folder / f"reset{rank}").touch()
                    continue
                done += [how] * (how != "kill")
                struck.append((rank, time.monotonic() + TIMEOUT_S * (how == "stop")))
                os.kill(processes()[rank], KINDS[how])
            assert job.wait(DEADLINE_S) == 0
            found = {fact["rank"]: fact for fact in facts_in(job.stdout) if "digest" in fact}
            assert sorted(found) == sorted({*range(SIZE)} - {*victims})
            for fact in found.values():
                assert fact["iterations"] == len(fact["ended"]) == EPOCHS * STEPS
                assert fact["digest"] == found[min(found)]["digest"]
            written = [fact for fact in facts_in(job.stdout) if "writes" in fact]
            assert all(fact["found"] == [fact["writes"]] for fact in written)
            assert {fact["epoch"] for fact in written} == set(range(EPOCHS * writes))
        except (AssertionError, ProcessLookupError):
            what = f"lost {victims}, at once: {at_once}; {done}; {transport}"
            print(what, job.stdout, job.stderr, sep="\n")
            raise
    return struck, done, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", default="kill,stop,exit,reset,write")
    given = parser.parse_args()
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    chosen, until = random.Random(seed), time.monotonic() + 60 * given.minutes
    print(f"seed {seed}, {given.minutes:g} minutes", flush=True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    expected = None
    number = 0
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as folder:
            count = 0 if expected is None else 1 + number % 3
            struck, done, found = run(Path(folder), chosen, count, given.kinds.split(","))
        first = found[min(found)]
        expected = first["weights"] if expected is None else expected
        assert np.allclose(first["weights"], expected, rtol=0, atol=1e-5), "other weights"
        # A step is by those left once the victim is no member of its ring.
        each = [
            min(end for end, members in first["ended"] if victim not in members) - began
            for victim, began in struck
            if any(victim not in members for _, members in first["ended"])
        ]
        if {*done} <= {"stop"}:
            taken["stop" in done] += each
        left = ", ".join(map(str, sorted(found)))
        seconds = " ".join(f"{each_s:.2f} s" for each_s in each)
        print(f"#{number} left: {left}; {seconds}; {', '.join(done)}", flush=True)
        number += 1
    for stops, all_s in taken.items():
        if all_s:
            which = "of jobs that also stop one" if stops else "all killed"
            at = [float(np.percentile(all_s, share)) for share in (50, 99, 100)]
            text = "{} losses, {}: median {:.2f} s, 99 % {:.2f} s, max {:.2f} s"
            print(text.format(len(all_s), which, *at))


if __name__ == "__main__":
    main()
