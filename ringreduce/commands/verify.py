"""``ringreduce verify``: the first steps of a program with each number of ranks, compared."""

import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ringreduce.commands.launch.plan import Plan
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.pure.verification import HEADER, Comparison, Recorded, Run, compare, row, verdict
from ringreduce.vocabulary.errors import ConfigError


def verify(program: Sequence[str], counts: Sequence[int], steps: int, *, as_json: bool) -> int:
    """Run `program` with each number of ranks, and print what is found; return the exit code.

    Raises ConfigError if nothing is recorded.
    """
    with tempfile.TemporaryDirectory(prefix="ringreduce-verify-") as root:
        recorded, found = list[Recorded](), list[Comparison]()
        # Again if any differs: are two runs with the same number equal?
        for number, count in enumerate([*counts, counts[0]]):
            if number == len(counts) and all(each.agrees for each in found):
                break
            folder = Path(root, str(number))
            if code := _run(program, count, steps, folder):
                return code
            recorded.append(read(folder, " ".join(program), count))
            if number:
                found.append(compare(recorded[0], recorded[-1]))
            if number < len(counts) and not as_json:
                # As they come, since each takes seconds.
                lines = ([] if number else [HEADER]) + [row(recorded[-1].run, *found[-1:])]
                print(*lines, sep="\n", flush=True)
    again = found.pop() if len(found) == len(counts) else None
    runs = [each.run for each in recorded[: len(counts)]]
    lines = list(verdict(runs, found, again))
    if as_json:
        report = {"agree": again is None, "verdict": lines, "runs": runs, "differences": found}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("", *(textwrap.fill(line, 80, subsequent_indent="     ") for line in lines), sep="\n")
    return int(again is not None)


def _run(program: Sequence[str], count: int, steps: int, folder: Path) -> int:
    """Record a job; return 0, or if it fails, an exit code that is not 1."""
    folder.mkdir()
    variables = {"RINGREDUCE_VERIFY": f"{steps} {folder}"}
    # What it prints is shown if it fails.
    code = supervise(Plan(program, count, output="failed", variables=variables)).conclude()
    if code:
        print(f"ringreduce: that was with -n {count}", file=sys.stderr)
    return 2 if code == 1 else code


def read(folder: Path, program: str, count: int) -> Recorded:
    """What a job has recorded in a folder; ConfigError if it has recorded nothing."""
    try:
        run = msgspec.msgpack.decode((folder / "run").read_bytes(), type=Run)
    except FileNotFoundError:
        raise ConfigError(
            f"{program} with -n {count} has not trained by rr.fit, whose steps are compared",
            remedy="Call rr.fit(model, ...) instead of model.fit(...), with the same data on every "
            "rank and batches of all ranks together, and without rr.shard.",
        ) from None
    before, after = (np.load(folder / f"{name}.npz") for name in ("before", "after"))
    # Read when they are compared, one by one: there may be gigabytes.
    return Recorded(run, lambda n: before[f"arr_{n}"], lambda n: after[f"arr_{n}"])
