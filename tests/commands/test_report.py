"""Who is to blame: made-up records of every kind of failure, and records that are none."""

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ringreduce.commands.report.flight_records import Records, read_records
from ringreduce.commands.report.verdict import Verdict, judge
from ringreduce.commands.report.view import show
from ringreduce.pure import flight
from ringreduce.pure.flight import CallRecord, Dump, Failure, Frame, Group, Stack, encode_dump
from ringreduce.vocabulary.errors import ConfigError

NOW = 1_800_000_000.0
PLACE = Frame("/home/ada/train.py", 12, "main", "model.fit(data)")
INSIDE = Frame("/x/ringreduce/ringreduce/communicator/communicator.py", 400, "_call", library=True)


def dump(rank: int, size: int = 4, calls: int = 17, **fields: Any) -> Dump:
    """A rank in user code for 20 s after `calls` calls, unless `fields` say otherwise."""
    defaults: dict[str, Any] = {
        **{"format": flight.FORMAT, "why": "SIGUSR1", "when": NOW, "since": NOW - 20},
        **{"host": "node", "pid": 100 + rank, "job": "job", "transport": "shm"},
        **{"operation": None, "nbytes": 0, "iso": "2027-01-15T08:00:00+00:00"},
        "stacks": [Stack("MainThread", True, [PLACE, INSIDE])],
    }
    return Dump(rank=rank, size=size, calls=calls, **(defaults | fields))


def waiting(rank: int, operation: str = "all_reduce", nbytes: int = 4096, **fields: Any) -> Dump:
    """A rank that has been in a call for 20 s."""
    return dump(rank, operation=operation, nbytes=nbytes, **fields)


def failed(
    rank: int,
    kind: str,
    *,
    after_s: float = 0.0,
    calls: int = 17,
    nbytes: int = 4096,
    **fields: Any,
) -> Dump:
    """A rank that failed `after_s` after the first, in all_reduce unless `in_call` is given."""
    groups = fields.pop("groups", [])
    error = {"in_call": "all_reduce", "text": f"rank {rank} of 4 failed.", **fields}
    failure = Failure(kind=kind, when=NOW - 10 + after_s, **error)
    call = CallRecord(calls, str(failure.in_call), nbytes, NOW - 20, 3.0, "MainThread", kind)
    entries = [] if failure.in_call is None else [call]
    return dump(rank, calls=calls, failure=failure, entries=entries, groups=groups)


def lost(rank: int, peer: int, **fields: Any) -> Dump:
    return failed(rank, "PeerLostError", peer=peer, **fields)


def timed_out(rank: int, peer: int, **fields: Any) -> Dump:
    return failed(rank, "PeerTimeoutError", peer=peer, **fields)


def verdict(*dumps: Dump, size: int = 4, **fields: Any) -> Verdict:
    return judge(Records(size, {d.rank: d for d in dumps}, **fields))


def part(of: Dump, members: list[int], number: int = 1) -> Group:
    """What `of` says, as that of a group."""
    names = {*Group.__struct_fields__} & {*Dump.__struct_fields__}
    fields = {name: getattr(of, name) for name in names}
    return Group(number=number, epoch=0, members=members, **fields)


# --- Verdicts ---------------------------------------------------------------------------------
PROTOCOL = failed(3, "ProtocolError")
OTHER_CALL = failed(1, "MismatchError", peer=0, nbytes=80)
RAISED = {"in_call": None, "text": "no such shard", "trace": [PLACE, INSIDE]}
WAIT_ROUND = [timed_out(rank, (rank - 1) % 4, after_s=rank) for rank in range(4)]
TOLD: dict[str, Any] = {"origin": 0, "in_call": None, "after_s": 0.3}
QUICK = {"since": NOW - 0.2}


def others_wait(*dumps: Dump) -> list[Dump]:
    """These, and the other ranks of four, which are in the same call."""
    named = {dump.rank: dump for dump in dumps}
    return [named.get(rank, waiting(rank)) for rank in range(4)]


# Records of ranks, who of how many is to blame, and the words that say why.
VERDICTS = {
    "an exception of the program goes before all that others say": (
        [lost(0, 3), lost(1, 2), failed(2, "ValueError", after_s=0.5, **RAISED), lost(3, 2)],
        "2 of 4: its own error came first, in user code, at train.py:12: ValueError: no such shard",
    ),
    "of several own errors the first counts": (
        [failed(0, "KeyError", after_s=1), failed(1, "MemoryError", after_s=0.5), lost(2, 1)],
        "1 of 4: MemoryError",
    ),
    "a rank interrupted in a call is to blame itself": (
        [lost(0, 1), lost(1, 1, text="was interrupted", after_s=1), lost(2, 1)],
        "1 of 4: in all_reduce #17, at train.py:12",
    ),
    "an error of the ring that a rank found itself counts as its own": (
        [*(failed(r, "ProtocolError", origin=3, after_s=1) for r in range(3)), PROTOCOL],
        "3 of 4: its own error came first",
    ),
    # --- Disagreement ---
    "one rank makes another call": (
        [*(failed(r, "MismatchError", peer=1) for r in (0, 2, 3)), OTHER_CALL],
        "1 of 4: was in all_reduce #17 of 80 bytes, at train.py:12, unlike all others",
    ),
    "two sides disagree": (
        [
            failed(r, "MismatchError", peer=1 - r % 2, in_call="barrier" if r % 2 else "broadcast")
            for r in range(4)
        ],
        "0, 1 of 4: Ranks 0, 1 disagree with each other. MismatchError: ",
    ),
    "a disagreement was told of, by the one that found it": (
        [failed(2, "MismatchError", origin=0, peer=3), dump(3)],
        "0, 3 of 4: Ranks 0, 3 disagree",
    ),
    "a rank leaves early, and others miss it": (
        [failed(rank, "MismatchError", peer=3) for rank in range(3)],
        "3 of 4: ranks 0, 1, 2 name it, and it left no record",
    ),
    "a rank disagrees with nobody in particular": ([failed(2, "MismatchError")], "2 of 4: Rank 2"),
    # --- Ranks that others name ---
    "a killed rank leaves no record": (
        [lost(0, 3), lost(1, 3, origin=0, after_s=0.1), lost(2, 3, after_s=0.1)],
        "3 of 4: ranks 0, 1, 2 lost it, and it left no record, so it was killed or ended. Rank",
    ),
    "who waits for whom is followed round the ring": (
        [timed_out(0, 3), dump(1), timed_out(2, 1, after_s=0.2), timed_out(3, 2)],
        "1 of 4: rank 2 waited for it, and it was in user code for 20.0 s, at train.py:12 (",
    ),
    "a rank told of the break in user code is still the culprit": (
        [timed_out(0, 1), timed_out(1, 1, **TOLD), timed_out(2, 1, origin=0)],
        "1 of 4: in user code for 10.3 s, at train.py:12, when the ring broke",
    ),
    "a stopped rank that complains when it is woken has one voice": (
        [timed_out(0, 1), lost(1, 0, after_s=30), timed_out(2, 1), timed_out(3, 1, after_s=0.1)],
        "1 of 4: Rank 1 is the culprit",
    ),
    "each waits for the next, and one is behind": (
        [timed_out(rank, (rank - 1) % 4, calls=16 if rank == 2 else 17) for rank in range(4)],
        "2 of 4: failed in all_reduce #16",
    ),
    "nothing but the first error tells": (WAIT_ROUND, "3 of 4: Rank 3"),
    "ranks never joined": (
        [failed(rank, "RendezvousError", in_call=None, calls=0) for rank in (0, 1)],
        "2, 3 of 4: Ranks 2, 3 are the culprits: without a record",
    ),
    # --- Records that were asked for ---
    "a rank is in user code while the others wait": (
        others_wait(dump(2, since=NOW - 21)),
        "2 of 4: while ranks 0, 1, 3 wait in all_reduce #17 for 20.0 s; it has not called that.",
    ),
    "the one with the fewest calls": (
        others_wait(dump(1), dump(2, calls=12), waiting(3, calls=16)),
        "2 of 4: Rank 2",
    ),
    "a rank is behind in a call": (
        others_wait(waiting(1, calls=16)),
        "1 of 4: the others have completed that",
    ),
    "a rank that could not be asked is suspected": (
        [waiting(0), waiting(2), waiting(3)],
        "1 of 4: Rank 1 is the culprit, probably: without a record",
    ),
    "different calls of the same number": (
        others_wait(waiting(1, "barrier", 0), waiting(2, "barrier", 0)),
        "0, 1, 2, 3 of 4: ranks 0, 3 are in all_reduce of 4096 bytes; ranks 1, 2 are in barrier.",
    ),
    "one rank in a different call of the same number": (
        others_wait(waiting(2, nbytes=8192)),
        "2 of 4: rank 2 is in all_reduce of 8192 bytes",
    ),
    "lengths of a gather may differ": (
        [waiting(rank, "all_gather", 80 * rank) for rank in range(4)],
        "nobody of 4: No culprit found. Longest of all, rank 0 was in all_gather #17",
    ),
    "a job is at work": (
        [waiting(0, **QUICK), dump(1, **QUICK), waiting(2, **QUICK), dump(3, **QUICK)],
        "nobody of 4: no rank had stood still for 1 s",
    ),
    "a rank that waits in a recv is not in user code": (
        others_wait(dump(2, pending="recv from rank 1, tag 7")),
        "2 of 4: it was in recv from rank 1, tag 7, for 20.0 s",
    ),
    "all are in user code": (
        [dump(rank, since=NOW - 10 - rank) for rank in range(4)],
        "nobody of 4: rank 3 was in user code for 13.0 s, at train.py:12 (model.fit(data))",
    ),
    # --- Groups ---
    "an exception goes before what it broke in a group": (
        [
            lost(0, 1, groups=[part(lost(0, 1, after_s=-1.0), [0, 1])], after_s=0.5),
            failed(1, "ValueError", in_call=None, text="no such shard"),
        ],
        "1 of 2: Rank 1 is the culprit: its own error came first, in user code",
    ),
    "a killed rank is named in its group": (
        [dump(r, groups=[part(lost(r, 3), [2, 3])] if r == 2 else []) for r in range(3)],
        "3 of 4: In the group of ranks 2 and 3, rank 3 is the culprit: rank 2 lost it, and it left",
    ),
    # Rank 1 keeps rank 0 waiting in the job, and is itself kept waiting by rank 2 in a group.
    "a rank holds up a group where nothing has failed": (
        [
            waiting(0),
            dump(1, groups=[part(waiting(1, calls=3), [1, 2])]),
            dump(2, groups=[part(dump(2, calls=3), [1, 2])]),
        ],
        "2 of 3: In the group of ranks 1 and 2, rank 2 is the culprit: it was in user code for 20",
    ),
    "a rank that has closed a group is in user code for it": (
        [dump(0, groups=[part(waiting(0, calls=2), [0, 1])]), dump(1)],
        "1 of 2: while rank 0 waits in all_reduce #2 for 20.0 s",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_who_is_to_blame_and_why(case):
    dumps, expected = VERDICTS[case]
    who, size, words = re.fullmatch(r"(.*?) of (\d): (.*)", expected).groups()
    found = verdict(*dumps, size=int(size))
    assert ", ".join(map(str, found.culprits)) == who.replace("nobody", "")
    assert words in found.text


def test_a_rank_whose_record_cannot_be_read_is_not_said_to_be_killed():
    found = verdict(lost(0, 3), lost(1, 3), skipped={"flight-rank3.json": "truncated"})
    assert found.culprits == (3,)
    assert "its record cannot be read" in found.text
    assert "killed" not in found.text
    # A peer that is no rank is not believed.
    assert verdict(lost(0, 99)).culprits != (99,)


OPERATION = st.sampled_from([None, "barrier", "all_reduce"])
ANY_FAILURE = st.builds(
    Failure,
    kind=st.sampled_from(["PeerLostError", "PeerTimeoutError", "MismatchError", "KeyError"]),
    text=st.just("x"),
    when=st.floats(0, 9),
    peer=st.none() | st.integers(0, 9),
    origin=st.none() | st.integers(0, 9),
    in_call=OPERATION,
)
ANY_RANK = st.tuples(st.booleans(), st.integers(0, 3), OPERATION, st.none() | ANY_FAILURE)


@given(st.lists(ANY_RANK, min_size=1, max_size=5))
def test_whatever_the_records_say_there_is_a_verdict(ranks):
    dumps = {
        rank: dump(rank, len(ranks), calls, operation=operation, failure=failure)
        for rank, (present, calls, operation, failure) in enumerate(ranks)
        if present or rank == 0
    }
    found = judge(Records(len(ranks), dumps))
    assert set(found.culprits) <= set(range(10))
    assert found.text.endswith((".", "!", "?"))


# --- Files ------------------------------------------------------------------------------------
def write(folder: Path, *dumps: Dump) -> None:
    for each in dumps:
        (folder / flight.file_name(each.rank)).write_bytes(encode_dump(each))


def test_records_come_back_as_they_were_written(tmp_path):
    dumps = [waiting(0), dump(1), lost(2, 3)]
    write(tmp_path, *dumps)
    records = read_records(tmp_path)
    assert dict(records.dumps) == {d.rank: d for d in dumps}
    assert (records.size, records.missing) == (4, [3])


TRUNCATED = [
    b"",
    encode_dump(dump(1))[:-20],
    b"\x00\xff" * 100,
    b'{"format": 2, "peers": ' + b"[" * 9**5,
]
OUT_OF_RANGE = [{"calls": -1}, {"why": "x" * 5000}, {"when": 1e300}, {"since": float("nan")}]
OUT_OF_RANGE += [{"stacks": [Stack("t", True, [PLACE] * 1000)]}]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((content, "truncated or not JSON") for content in TRUNCATED),
        *((content, "no flight record") for content in (b"[]", b"{}", b'{"format": 2, "rank": 1}')),
        *((encode_dump(dump(1, **fields)), "no flight record") for fields in OUT_OF_RANGE),
        (b'{"format": 1}', "format 1"),
        (encode_dump(dump(7)), "rank 7 of 4"),
        (encode_dump(dump(2)), "it speaks of rank 2"),
        (encode_dump(dump(1, groups=[part(dump(1), [0, 2])])), "in a group without it"),
        (encode_dump(dump(1, groups=[part(dump(1), [1, 4])])), "or too large"),
        (b" " * (flight.FILE_BYTES_MAX + 1), "more than"),
    ],
)
def test_what_is_no_record_is_skipped(tmp_path, content, why):
    write(tmp_path, waiting(0))
    (tmp_path / "flight-rank1.json").write_bytes(content)
    records = read_records(tmp_path)
    assert list(records.dumps) == [0]
    assert why in records.skipped["flight-rank1.json"]


@given(st.data())
def test_a_record_with_a_byte_changed_is_read_or_refused(data):
    content = bytearray(encode_dump(lost(1, 2)))
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] = data.draw(st.integers(0, 255))
    try:
        found = flight.decode_dump(bytes(content))
    except ValueError:
        return
    judge(Records(found.size, {found.rank: found}))


def test_other_files_are_left_alone(tmp_path):
    write(tmp_path, waiting(0))
    for name in ("notes.txt", "flight-rankx.json", ".flight-rank1.json.abc", "flight-rank1.json~"):
        (tmp_path / name).write_text("?")
    (tmp_path / "flight-rank2.json").mkdir()
    os.mkfifo(tmp_path / "flight-rank3.json")  # Opening it would wait for ever.
    special = ["flight-rank2.json", "flight-rank3.json"]
    assert read_records(tmp_path).skipped == dict.fromkeys(special, "no ordinary file")


def test_records_of_an_earlier_job_are_skipped(tmp_path):
    write(tmp_path, lost(0, 1), dump(1, job="old", when=NOW - 99))
    records = read_records(tmp_path)
    assert records.missing == [1, 2, 3]
    assert "of an earlier job, 2027-01-15" in records.skipped["flight-rank1.json"]


def test_a_folder_without_records_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no flight record .* in "):
        read_records(tmp_path)
    (tmp_path / "flight-rank0.json").write_text("{")
    with pytest.raises(ConfigError, match=r"flight-rank0.json: truncated"):
        read_records(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        read_records(tmp_path / "none")


# --- Groups -----------------------------------------------------------------------------------
def test_the_group_that_broke_first_is_explained():
    """Its ranks end with that error, which the job's ring has from them, later."""

    def broken(rank: int, peer: int) -> Dump:
        in_group = part(failed(rank, "MismatchError", peer=peer, calls=5), [0, 2])
        return failed(rank, "MismatchError", in_call=None, after_s=1.0, groups=[in_group])

    others = [lost(r, 0, after_s=2.0, groups=[part(waiting(r), [1, 3], 2)]) for r in (1, 3)]
    found = verdict(broken(0, 2), broken(2, 0), *others)
    assert found.culprits == (0, 2)
    assert found.text.startswith(
        "In the group of ranks 0 and 2, ranks 0, 2 disagree with each other."
    )


# --- What is shown ----------------------------------------------------------------------------
def shown(records: Records) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show(records, console)
    return console.file.getvalue()


def test_reports_in_80_columns(check_page):
    """The last has groups, of which that at rest is not shown."""
    busy, idle = part(waiting(0), [0, 1]), part(dump(0), [0, 2], 2)
    jobs = [
        Records(3, {0: waiting(0), 1: dump(1)}, {"flight-rank2.json": "truncated"}),
        Records(2, {0: lost(0, 1, text="rank 0 of 2 lost rank 1: it died.")}),
        Records(3, {0: dump(0, groups=[busy, idle]), 1: dump(1), 2: dump(2)}),
    ]
    check_page("reports.txt", "\n".join(map(shown, jobs)))


def test_what_a_record_says_is_shown_and_not_obeyed():
    evil = "[red]x[/red] \x1b]0;title\x07 \x1b[2J \r\n [/nonsense]"
    text = shown(Records(1, {0: failed(0, "ValueError", text=evil, in_call=evil[:20])}))
    assert "[red]x[/red]" in text
    assert not {"\x1b", "\x07", "\r"} & set(text)


def test_a_record_that_claims_a_huge_job_or_an_absurd_time_does_not_flood_the_terminal():
    lines = shown(Records(1 << 20, {0: waiting(0, size=1 << 20)})).splitlines()
    assert len(lines) < 100
    assert lines[-1] == f"and {(1 << 20) - 65} more ranks without a record"
    absurd = shown(Records(1, {0: dump(0, since=0.0, when=1e11)}))
    assert max(map(len, absurd.splitlines())) <= 80
