"""``ringreduce run --trace`` and ``ringreduce trace``: what is said of jobs, real and made up."""

import json
import signal
from pathlib import Path

import msgspec
import pytest

from ringreduce.commands.trace import describe
from ringreduce.pure.spans import CODES, SPAN, SpanKind
from ringreduce.pure.trace import Head, file_name
from ringreduce.vocabulary.errors import ConfigError
from tests.processes import launcher
from tests.pure.test_trace import Times, head

PROGRAM = """
import os, signal, time
from pathlib import Path
import numpy as np
import ringreduce
from ringreduce.pure.trace import decode_trace

comm = ringreduce.init()
traced = [Path("traces", f"rank-{rank}.trace") for rank in range(2)]
for number in range(20):
    if comm.rank == 1 and number in (5, 11, 12):
        time.sleep(0.1)
    comm.all_reduce(np.ones(1000, np.float32))
if comm.rank == 1:
    # Until all calls are in the files: the launcher ends rank 0 then.
    while min(max(s.number for s in decode_trace(t.read_bytes()).spans) for t in traced) < 20:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
comm.barrier()
"""


def said(folder: Path) -> str:
    """All but where the drawing is; no line has more than 80 columns."""
    *lines, _ = describe(folder)
    text = "\n".join(lines)
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_late_rank_that_is_killed_afterwards_is_named(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    with launcher(tmp_path, "run", "-n", "2", "--trace", "traces", "train.py") as process:
        assert process.wait() == 128 + signal.SIGKILL
        assert "`ringreduce trace traces` says who was late" in process.stderr
    with launcher(tmp_path, "trace", "traces") as process:
        assert process.wait() == 0, process.stderr
        assert process.stdout.startswith("Rank 1 was the last to begin ")
        assert "of 20 calls: others waited for it" in " ".join(process.stdout.split())
        rows = [line.split() for line in process.stdout.splitlines()]
    [row] = [row for row in rows if row[:2] == ["1", "20"]]
    assert float(row[5]) >= 50.0  # the worst, in milliseconds
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        calls = [each for each in events if each["pid"] == rank and each.get("cat") == "call"]
        assert [each["name"] for each in calls][:21] == ["barrier"] + ["all_reduce"] * 20
        assert [each["args"]["call"] for each in calls][:21] == list(range(21))
    began = {(e["pid"], e["args"]["call"]): e["ts"] for e in events if e.get("cat") == "call"}
    late = {number: began[1, number] - began[0, number] for number in range(1, 21)}
    assert sorted(sorted(late, key=late.__getitem__)[-3:]) == [6, 12, 13]


def test_a_folder_without_traces_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no trace") as caught:
        list(describe(tmp_path))
    assert "ringreduce run --trace" in str(caught.value)


def write(folder: Path, of: Head, times: Times, lost: int = 0) -> None:
    records = [
        SPAN.pack(number + 1, SpanKind.CALL, CODES["all_reduce"], 0, number, 80, 7, *both)
        for number, both in enumerate(times, 1)
    ]
    records += [SPAN.pack(1, SpanKind.LOST, 0, 0, lost, 0, 0, 0.0, 0.0)] * (lost > 0)
    (folder / file_name(of)).write_bytes(msgspec.json.encode(of) + b"\n" + b"".join(records))


def test_nobody_is_named_where_nobody_was_late(tmp_path):
    for rank in range(2):
        write(tmp_path, head(rank, size=2), [(1 + rank / 1000, 2), (2, 3)])
    assert said(tmp_path).startswith("No rank was late: others waited for each less than 1% of")


def test_ranks_are_named_by_how_long_others_waited(tmp_path, check_page):
    """Of the latest job; some traces are missing, or lack records."""
    write(tmp_path, head(0, size=5), [(1, 5), (5, 9), (10, 11)])
    write(tmp_path, head(1, size=5), [(4, 5), (5, 9), (11, 11)], lost=500)
    write(tmp_path, head(2, size=5), [(1, 5), (7, 9), (10, 11)], lost=1000)
    write(tmp_path, head(3, job="old", when=0.5), [(1, 2)])
    page = said(tmp_path)
    assert page.startswith("Rank 1 was the last to begin 2 of 3 calls: others waited for it 40.0%")
    check_page("trace.txt", page)
    (tmp_path / "rank-7.trace").write_bytes(b"text")
    assert "Note: rank-7.trace is left out: it is no trace" in said(tmp_path)


def test_clocks_of_several_hosts_are_compared(tmp_path):
    """Rank 1 is 1 s late in the first call, and its clock 100 s ahead."""
    write(tmp_path, head(0, size=2), [(1, 2.01), (3, 4), (5, 6)])
    write(tmp_path, head(1, size=2, clock="other"), [(102, 103), (102.9, 103.01), (104.9, 106)])
    text = " ".join(said(tmp_path).split())
    assert text.startswith("Rank 1 was the last to begin 1 of 3 calls")
    assert "the hosts' clocks are known to 10.00 ms; less lateness says nothing" in text
    assert "1,000.00 ms" in text


def test_a_rank_alone_has_nobody_to_compare_with(tmp_path):
    write(tmp_path, head(0, size=1), [(1, 2)])
    assert said(tmp_path).startswith("No call is recorded of several ranks.")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 3
