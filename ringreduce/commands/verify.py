"""``ringreduce verify``: the first steps of a program with each number of ranks, compared."""

import contextlib
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.program import as_unchanged
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.pure.verification import Arrays, Comparison, Recorded, Run, compare
from ringreduce.pure.verification_words import HEADER, row, verdict
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import note_unchanged

# Larger files are not copied but linked: a program's data, seldom what it writes.
_COPIED_BYTES, _FILES_MAX = 16 << 20, 20_000
# Exit codes, beside 2 for what could not be compared: numbers differ; something that matters was
# not seen or is not finite, while nothing that was seen differs.
_DIFFERS, _NOT_SEEN = 1, 3


def verify(
    program: Sequence[str],
    counts: Sequence[int],
    steps: int,
    *,
    as_json: bool,
    unchanged: bool = False,
) -> int:
    """Run `program` with each number of ranks, and print what is found; return the exit code.

    A program that is `unchanged` runs in a copy of the working folder, since it writes files as
    ever. Raises ConfigError if nothing is recorded, or that folder has too many files.
    """
    if unchanged:
        note_unchanged()
    with tempfile.TemporaryDirectory(prefix="ringreduce-verify-") as root:
        recorded, compared = list[Recorded](), list[Comparison]()
        # Again if any differs: are two runs with the same number equal?
        for number, count in enumerate([*counts, counts[0]]):
            if number == len(counts) and all(comparison.agrees for comparison in compared):
                break
            folder = Path(root, str(number))
            with _copied(Path(root, "program")) if unchanged else contextlib.nullcontext():
                if code := _run(program, count, steps, folder, unchanged):
                    return code
            recorded.append(read(folder, " ".join(program), count, unchanged))
            if number:
                compared.append(compare(recorded[0], recorded[-1]))
            if number < len(counts) and not as_json:
                # Row by row, since each takes seconds.
                lines = ([] if number else [HEADER]) + [row(recorded[-1].run, *compared[-1:])]
                print(*lines, sep="\n", flush=True)
    again = compared.pop() if len(compared) == len(counts) else None
    runs = [record.run for record in recorded[: len(counts)]]
    lines = list(verdict(runs, compared, again))
    is_open = any(comparison.is_open for comparison in compared)
    code = _DIFFERS if again is not None else _NOT_SEEN if is_open else 0
    if as_json:
        differences = list(map(_as_object, compared))
        report = {"agree": code == 0, "verdict": lines, "runs": runs, "differences": differences}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("", *(textwrap.fill(line, 80, subsequent_indent="     ") for line in lines), sep="\n")
    return code


def _as_object(comparison: Comparison) -> dict[str, Any]:
    """A comparison for JSON, with names."""
    parts = [part._asdict() for part in comparison.parts]
    first = None if comparison.first is None else comparison.first._asdict()
    names = {"agrees": comparison.agrees, "parts": parts, "first": first}
    return {**comparison._asdict(), **names}


@contextlib.contextmanager
def _copied(folder: Path) -> Iterator[None]:
    """Within the block a copy of the working folder, made at `folder`, is the working folder."""
    count = 0

    def copy(source: str, target: str) -> None:
        nonlocal count
        count += 1
        if count > _FILES_MAX:
            raise ConfigError(
                f"found more than {_FILES_MAX} files in {os.getcwd()}, which is copied for each "
                "number of ranks, so that the program overwrites nothing",
                remedy="Start it in the program's own folder.",
            )
        if os.path.getsize(source) > _COPIED_BYTES:
            os.symlink(os.path.abspath(source), target)
        else:
            shutil.copy2(source, target)

    # Nor the copy itself, where the temporary folder is in this one.
    left_out = shutil.ignore_patterns(".*", "__pycache__", "ringreduce-verify-*")
    shutil.copytree(".", folder, symlinks=True, ignore=left_out, copy_function=copy)
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def _run(program: Sequence[str], count: int, steps: int, folder: Path, unchanged: bool) -> int:
    """Record a job; return 0, or if it fails, an exit code that is none of ours but 2."""
    folder.mkdir()
    variables = {"RINGREDUCE_VERIFY": f"{steps} {folder}"}
    program = as_unchanged(program, variables) if unchanged else program
    # What it prints is shown if it fails.
    code = supervise(JobPlan(program, count, output="failed", variables=variables)).conclude()
    if code:
        print(f"ringreduce: that was with -n {count}", file=sys.stderr)
    return 2 if code in (_DIFFERS, _NOT_SEEN) else code


def read(folder: Path, program: str, count: int, unchanged: bool = False) -> Recorded:
    """Read a job's record from a folder; ConfigError if there is none."""
    if (folder / "run").exists():
        return _read(folder / "run", folder / "arrays.npz")
    parts = [(folder / f"run-{rank}", folder / f"arrays-{rank}.npz") for rank in range(count)]
    if all(run.exists() for run, _ in parts):
        return _together([_read(*part) for part in parts], f"{program} with -n {count}")
    by = "Model.fit" if unchanged else "rr.fit, or averaged gradients in a loop of its own"
    raise ConfigError(
        f"{program} with -n {count} has not trained by {by}, whose steps are compared",
        remedy="A program with a loop of its own is run with -n 1."
        if unchanged
        else "Call rr.fit(model, ...) instead of model.fit(...), with the same data on every "
        "rank and batches of all ranks together, and without rr.shard.",
    )


def _read(run: Path, arrays: Path) -> Recorded:
    with np.load(arrays) as loaded:
        return Recorded(msgspec.msgpack.decode(run.read_bytes(), type=Run), Arrays(**loaded))


def _together(parts: Sequence[Recorded], who: str) -> Recorded:
    """The record of a loop, of which each rank has its part."""
    run, first = parts[0]
    for rank, (other, _) in enumerate(parts):
        if (other.names, other.gradient_names) != (run.names, run.gradient_names):
            raise ConfigError(
                f"{who} trains other variables on rank {rank} than on rank 0: nothing to compare",
                remedy="Make the same model and optimizer on every rank.",
            )
    steps = min(len(arrays.changes) for _, arrays in parts)

    def total(name: str) -> np.ndarray:
        found: np.ndarray = np.sum([getattr(each, name)[:steps] for _, each in parts], 0)
        return found

    arrays = first._replace(
        before=np.sum([each.before for _, each in parts], 0),
        changes=total("changes"),
        gradients=total("gradients"),
        calls=first.calls[:steps],
        own=np.concatenate([each.own[:, :steps] for _, each in parts]),
    )
    memory = [most for other, _ in parts for most in other.memory]
    return Recorded(msgspec.structs.replace(run, memory=memory, steps=steps), arrays)
