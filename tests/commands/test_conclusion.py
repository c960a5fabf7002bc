"""What the launcher says at the end: the cause in full, one line for every other rank."""

from types import SimpleNamespace

import msgspec

from ringreduce.commands.launch.conclusion import APART, conclude, others
from ringreduce.commands.launch.failure import Cause, Failure
from ringreduce.commands.launch.job import Job
from ringreduce.commands.launch.program import as_unchanged
from ringreduce.commands.launch.worker_records import Raised

BAD = Raised("ValueError", None, None, "ValueError: bad data", ["Traceback:", "", "  x"])
LOST = Raised("PeerLostError", 1, None, "PeerLostError: rank 0 lost rank 1.", ["y"], ["y", "z"])
FIRST = Failure(1, 3, 5.0, BAD)
CAUSE, CONSEQUENCE = Cause(FIRST), Failure(0, 1, 6.0, LOST)
TITLE = "rank 1 failed first (exit code 3); all workers were stopped"


def test_the_cause_is_shown_in_full_and_a_consequence_in_one_line():
    shown = conclude(CAUSE, [CONSEQUENCE, FIRST])
    assert shown == [
        *(TITLE, "  Traceback:", "", "    x"),
        "then rank 0 (exit code 1): PeerLostError: rank 0 lost rank 1.",
        "--log-dir DIR keeps the tracebacks of all ranks",
    ]
    kept = conclude(CAUSE, [CONSEQUENCE, FIRST], log_dir="logs")
    assert kept == [*shown[:-1], "logs has the tracebacks of all ranks"]


def test_where_the_frames_that_were_left_out_are_is_said():
    cut = FIRST._replace(raised=msgspec.structs.replace(BAD, whole=["Traceback:", "", "", "  x"]))
    left_out = "the tracebacks of all ranks, with the frames that are left out"
    assert conclude(Cause(cut), [cut])[-1] == f"--log-dir DIR keeps {left_out}"
    assert conclude(Cause(cut), [cut], log_dir="logs")[-1] == f"logs has {left_out}"


def test_a_program_that_finds_no_horovod_is_told_what_to_import_in_its_place():
    for name, is_told in (("horovod", True), ("horovod.torch", False), ("pandas", False)):
        text = f"ModuleNotFoundError: No module named '{name}'"
        failure = Failure(1, 1, 5.0, Raised("ModuleNotFoundError", exception=text))
        told = [line for line in conclude(Cause(failure), [failure]) if "install_as" in line]
        assert len(told) == is_told


def test_an_unchanged_program_is_not_told_to_call_what_it_cannot():
    said = []
    workers = {rank: SimpleNamespace(rank=rank, rings={}, keras_s=0.0) for rank in range(2)}
    screen = SimpleNamespace(say=said.append)
    for arguments in (as_unchanged(["train.py"], {}), ["train.py"]):
        plan = SimpleNamespace(size=2, arguments=arguments)
        job = SimpleNamespace(_workers=workers, _plan=plan, _screen=screen, _has_warned=False)
        Job._warn_of_ranks_apart(job, APART)
    assert said == [APART.format("ranks 0, 1")]


def test_ranks_that_say_the_same_get_one_line():
    left = "of 4 was left by rank 1, which ended. Read rank 1's log first."
    texts = [f"rank 2 {left}", f"rank 0 of 4 was told by rank 2: rank 2 {left}", f"rank 3 {left}"]
    them = [
        Failure(rank, 1, at, Raised("PeerLostError", exception=f"PeerLostError: {text}"))
        for rank, at, text in zip((2, 0, 3), (6.0, 7.0, 8.0), texts, strict=True)
    ]
    them[1] = them[1]._replace(was_stopped=True)
    together = f"then ranks 0, 2, 3 (exit code 1): PeerLostError: rank 2 {left}"
    assert others(FIRST, [*them, FIRST]) == [together]
    assert others(them[0], them) == ["then ranks 0, 3 (exit code 1): the same"]
    hosts = [failure._replace(host="b" if failure.rank else "a") for failure in them]
    assert others(FIRST, hosts) == [
        f"then ranks 2, 3 on b (exit code 1): PeerLostError: rank 2 {left}",
        f"then rank 0 on a: PeerLostError: {texts[1]}",
    ]


def test_a_cause_that_was_stopped_is_named_by_its_exception_and_shown_once():
    stopped = FIRST._replace(returncode=1, was_stopped=True)
    title = "rank 1 failed first (ValueError); all workers were stopped"
    assert conclude(Cause(stopped), [stopped]) == [title, "  Traceback:", "", "    x"]
    shown = conclude(Cause(stopped), [stopped], was_shown=True)
    assert shown == [title, "  ValueError: bad data"]
    left = Failure(1, 143, 5.0, Raised("SystemExit", code=143), was_stopped=True)
    assert left.describe() == "exit code 143"


def test_a_rank_without_a_traceback_gets_one_line():
    ended = Failure(1, 3, 5.0, Raised("SystemExit", exception="SystemExit: no data"))
    assert conclude(Cause(ended), [ended]) == [TITLE, "  SystemExit: no data"]
    killed, left = Failure(2, -9, 1.0), Failure(0, 4, 2.0)
    title = "rank 2 failed first (killed by signal 9 (SIGKILL)); all workers were stopped"
    assert conclude(Cause(killed), [left, killed]) == [title, "then rank 0 (exit code 4)"]
    # Others may wait for ranks that ended by themselves.
    ends, exits = "its program has ended", "SystemExit in train.py:9"
    given = {0: exits}, {2: ends, 3: exits, 4: ends}
    one, several = (conclude(Cause(killed), [killed], ended) for ended in given)
    assert one[1:] == [f"rank 0 had ended by itself, exit code 0: {exits}"]
    them = "ranks 2, 3, 4 had ended by themselves, exit code 0"
    assert several[1:] == [f"{them}: {ends}, {exits}"]
