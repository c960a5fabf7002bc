"""``ringreduce run --elastic``: the launcher, while ranks are lost and the others go on."""

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from ringreduce.commands.launch.conclusion import lost
from ringreduce.commands.launch.exchange import Ended, Told
from ringreduce.commands.launch.failure import Failure, find_repeated
from ringreduce.commands.launch.local import standing_of
from ringreduce.commands.launch.standings import Standings
from ringreduce.commands.launch.worker_records import Raised, Stands
from ringreduce.pure.views import Standing
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import ConfigError
from tests.commands.test_nodes import jobs
from tests.launching import RANK, WAITS, numbers, run, script
from tests.processes import Process, launcher, wait_gone, wait_until
from tests.scope import in_full

# The beginning of every program.
ENDS = f"""{RANK}
def pid_of(rank):
    return int(beside(f"pid{{rank}}").read_text())
def wait_for_end_of(rank):
    while pathlib.Path(f"/proc/{{pid_of(rank)}}").exists():  # until the launcher knows
        time.sleep(0.01)

beside(f"pid{{rank}}").write_text(str(os.getpid()))
"""
# Its arguments say in which step a rank fails and how, and without whom the others go on.
TRAINS = f"""{ENDS}
import numpy
import ringreduce
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Reformed
from ringreduce.communicator.reforming import reform

def bad(how):
    raise ValueError(how)

failing = dict(each.split(":") for each in sys.argv[2:])
ring, number = ringreduce.init(), 0
for step in range(1, int(sys.argv[1])):
    how = failing.get(f"{{rank}}@{{step}}")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how:
        sys.exit(int(how)) if how.isdecimal() else bad(how)
    try:
        ring.all_reduce(numpy.ones(3))
    except ringreduce.PeerLostError as error:
        if "RINGREDUCE_ELASTIC" not in os.environ:
            raise
        wait_for_end_of(error.peer)
        reform(ring, [error.peer])
        number += 1
        members = ring._session.membership.members
        handover.tell(Reformed(number, members, f"in step {{step}}", 0.44))
print("ended with", ring.size, flush=True)
"""
EXITS = f"script.py:{TRAINS[: TRAINS.index('sys.exit(int')].count(chr(10)) + 1}"
# Tells the launcher of rings without forming any. What ranks wait for are files beside the program.
TELLS = f"""{ENDS}
from ringreduce import RendezvousError
from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Joins, Killed, Reformed

handover.tell(Joins(int(os.environ["RINGREDUCE_SIZE"])))
if not os.environ.get("FORMS"):
    handover.tell(Joins(int(os.environ["RINGREDUCE_SIZE"]), "formed"))
print("pid", os.getpid(), flush=True)
wait_for("all have told")
"""


def play(directory: Path, size: int, text: str, *options: str, **variables: str) -> Process:
    """A job whose ranks tell, to its end."""
    options = ("run", "-n", str(size), *options, script(directory, TELLS, text))
    with launcher(directory, *options, **variables) as job:
        job.wait_shown("pid", times=size)
        (directory / "all have told").touch()
        job.wait()
        wait_gone(numbers(job.stdout))
    return job


def said(text: str) -> list[str]:
    """What the launcher itself wrote, without tracebacks."""
    return re.findall(r"^ringreduce: (?!  )(.*)", text, flags=re.MULTILINE)


def test_others_go_on_without_ranks_that_are_lost(tmp_path):
    options = ("-n", "4", "--output", "rank0", "--elastic")
    failing = ("0@3:kill", "2@5:bad", "3@6:0")
    done = run(tmp_path, *options, script(tmp_path, TRAINS), "7", *failing)
    assert done.returncode == 0, done.stderr
    assert said(done.stderr) == [
        "rank 0 was lost in step 3 (killed by signal 9 (SIGKILL)): ranks 1, 2, 3 went on after "
        "0.4 s",
        "rank 2 was lost in step 5 (exit code 1): ranks 1, 3 went on after 0.4 s",
        f"rank 3 was lost in step 6 (exit code 0: SystemExit in {EXITS}): rank 1 went on after "
        "0.4 s",
        "ended well without ranks 0, 2, 3",
    ]
    assert done.stderr.count("[2] ValueError: bad") == 1
    # The lowest rank that is left is shown in place of rank 0.
    assert "[1] ended with 1" in done.stdout


def test_a_launcher_says_that_ranks_have_died_whose_end_is_not_seen_otherwise(tmp_path):
    """Over sockets a refused port proves nothing, and rank 1 is the half without the lowest."""
    variables = {"RINGREDUCE_TRANSPORT": "zmq"}
    options = ("-n", "2", "--elastic", script(tmp_path, TRAINS), "5", "0@3:kill")
    done = run(tmp_path, *options, **variables)
    assert done.returncode == 0, done.stderr
    assert said(done.stderr)[-1] == "ended well without rank 0"


@pytest.mark.full
def test_launchers_tell_each_other_of_ranks_that_have_died(tmp_path):
    script(tmp_path, TRAINS)
    options = ("--elastic", "--env", "RINGREDUCE_TRANSPORT=zmq")
    with jobs(tmp_path, *options, arguments=("5", "0@3:kill")) as launchers:
        for each in launchers:
            assert each.wait() == 0, each.stderr
            assert said(each.stderr)[-1] == "ended well without rank 0"


def test_a_ring_of_ranks_that_were_left_out_is_none(tmp_path):
    """Though its number is higher: its ranks are none of the ring that has gone on."""
    text = """
        if rank < 2:
            handover.tell(Reformed(4, (0, 1), "in step 3", 0.1))
            beside(f"told{rank}").touch()
            wait_for("tells")
        else:
            wait_for("told0")
            handover.tell(Reformed(9, (2,), "in step 3", 0.1))
            beside("tells").touch()
            exit(1)
        """
    done = play(tmp_path, 3, text, "--elastic")
    assert done.wait() == 0
    assert said(done.stderr)[-1] == "ended well without rank 2"
    assert "rank 2 went on" not in done.stderr


def test_a_stopped_rank_that_the_others_have_left_out_is_killed_at_once(tmp_path):
    """Before they end, as in a callback it could write over what they have written."""
    text = """
        if rank == 1:
            os.kill(os.getpid(), 19)
        while ") T " not in pathlib.Path(f"/proc/{pid_of(1)}/stat").read_text():
            time.sleep(0.01)
        handover.tell(Reformed(4, (0,), "in step 3", 0.1))
        wait_for_end_of(1)
        """
    done = play(tmp_path, 2, text, "--elastic")
    assert done.wait() == 0
    why = "stopped, and killed since the others went on without it"
    assert said(done.stderr)[0].startswith(f"rank 1 was lost in step 3 ({why}): rank 0 went on")


def test_only_a_process_that_was_seen_to_end_counts_as_gone():
    assert standing_of(Ended(1, 255, "its launcher is gone")) is None
    assert standing_of(Ended(1, -9, is_seen=True)) == Standing(is_gone=True)
    assert standing_of(Told(1, Stands(4, 1, is_gone=False))) == Standing(4, 1)
    assert standing_of(Told(1, Raised("ValueError"))) is None


def test_the_end_of_a_life_is_none_of_the_next_one_at_that_place():
    standings = Standings.create(2)
    standings.write(Standing(4, 1, is_gone=True), 1)
    assert standings.read(1) == Standing(4, 1, is_gone=True)
    assert standings.read(1, life=1) == Standing(4, 1)
    standings.write(Standing(6), 1, life=1)
    assert standings.read(1, life=1) == Standing(6, 1)
    standings.write(Standing(is_gone=True), 1, life=1)
    assert standings.read(1, life=1).is_gone
    assert standings.read(1).is_gone
    assert not standings.read(0).is_gone


def test_a_rank_that_exits_in_training_has_left_the_others(tmp_path):
    done = run(tmp_path, "-n", "2", script(tmp_path, TRAINS), "4", "1@3:0")
    assert "rank 1 held up or left the others and did not fail itself" in done.stderr
    assert f"left by rank 1, which ended with SystemExit: 0 in {EXITS} after 3" in done.stderr
    by = f"SystemExit in {EXITS}"
    assert f"ringreduce: rank 1 had ended by itself, exit code 0: {by}\n" in done.stderr


def test_a_stopped_rank_does_not_hold_up_a_job_that_all_others_have_left(tmp_path):
    text = """
        if rank == 1:
            os.kill(os.getpid(), 19)
        while ") T " not in pathlib.Path(f"/proc/{pid_of(1)}/stat").read_text():
            time.sleep(0.01)
        raise SystemExit(3)
        """
    done = play(tmp_path, 2, text, "--elastic")
    assert done.wait() == 3
    assert said(done.stderr)[0].startswith("rank 0 failed first (exit code 3)")


def test_what_ends_two_ranks_ends_the_job(tmp_path):
    bad = """
        import atexit
        if rank == 2:
            atexit.register(beside("bad").touch)  # once the launcher has been told
            raise ValueError("bad")
        wait_for("bad")
        handover.tell(Reformed(1, (0, 1), "in step 3", 0.4))
        if rank == 1:
            raise ValueError("bad")
        signal.pause()
        """
    done = play(tmp_path, 3, bad, "--elastic", "1")
    assert done.wait() == 1
    assert [re.sub(r"( \(|: ).*", "", line) for line in said(done.stderr)] == [
        "rank 2 was lost in step 3",
        "rank 2 failed first",
        "then rank 1",
        "--log-dir DIR keeps the tracebacks of all ranks",
        "before, rank 2 was lost in step 3",
    ]


def test_too_few_ranks_end_by_themselves_and_the_one_that_was_lost_is_named(tmp_path):
    saves = """
        if rank == 0:
            os.kill(os.getpid(), 9)
        wait_for_end_of(0)
        print("saves", flush=True)
        raise RendezvousError("too few ranks are left")
        """
    done = play(tmp_path, 2, saves, "--elastic=2")
    assert done.wait() == 128 + signal.SIGKILL
    assert said(done.stderr)[0].startswith("rank 0 failed first (killed by signal 9 (SIGKILL))")
    assert "[1] saves" in done.stdout


def test_a_rank_lost_before_or_while_the_ring_forms_ends_the_job(tmp_path):
    name = script(tmp_path, RANK + "if rank == 1:\n    exit(3)\n" + WAITS)
    done = run(tmp_path, "--elastic", "-n", "2", name)
    assert done.returncode == 3
    assert said(done.stderr) == ["rank 1 failed first (exit code 3); all workers were stopped"]
    ends = "if rank == 1:\n    os.kill(os.getpid(), 9)\nsignal.pause()"
    how = "killed by signal 9 (SIGKILL)"
    forming = play(tmp_path, 2, ends, "--elastic", FORMS="1")
    assert said(forming.stderr)[0] == f"rank 1 failed first ({how}); all workers were stopped"


def test_a_program_may_go_on_without_a_ring_that_did_not_form(tmp_path):
    goes_on = 'handover.tell(Joins(2, "failed"))\nif rank == 1:\n    exit()'
    assert play(tmp_path, 2, goes_on, FORMS="1").wait() == 0


def test_ranks_that_were_left_out_end_with_the_others(tmp_path):
    """One is told so and fails, the other does not end."""
    outs = """
        if rank == 0:
            raise RendezvousError("was left out of the ring")
        if rank > 1:
            handover.tell(Reformed(1, (2, 3), "", 0.0))
            exit(0)
        while True:
            signal.pause()
        """
    variables = {"RINGREDUCE_ELASTIC": "2", "RINGREDUCE_TIME_SCALE": "0.1"}
    done = play(tmp_path, 4, outs, **variables)
    assert done.wait() == 0, done.stderr
    # The end of rank 0's process may be seen before its report.
    text = r"ranks 0, 1 were lost \((exit code 1|RendezvousError)\): ranks 2, 3 went on after 0.0 s"
    assert re.search(text, done.stderr)
    assert said(done.stderr)[-1] == "ended well without ranks 0, 1"


def test_a_rank_that_another_has_killed_is_said_to_be(tmp_path):
    kills = """
        if rank == 0:
            handover.tell(Killed(1))
            os.kill(pid_of(1), 9)
            handover.tell(Reformed(1, (0,), "after step 75", 0.1))
            exit()
        signal.pause()
        """
    done = play(tmp_path, 2, kills, "--elastic")
    how = "(killed by rank 0, which it did not answer)"
    assert said(done.stderr)[0].startswith(f"rank 1 was lost after step 75 {how}: rank 0 went on")


def test_a_rank_that_fails_when_nobody_goes_on_without_it_fails_the_job(tmp_path):
    """As one that cannot save what was trained."""
    done = play(tmp_path, 2, "exit(3 * rank)", "--elastic")
    assert done.wait() == 3
    assert said(done.stderr)[0].startswith("rank 1 failed first (exit code 3)")


# Rank 1 is lost; rank 0 goes on without it, and without node 1 when the test says so.
TELLS_NODES = """
if rank == 1:
    exit(3)
if rank == 0:
    wait_for_end_of(1)
    handover.tell(Reformed(1, (0, 2), "in step 7", 0.1))
wait_for("second")
if rank == 0:
    handover.tell(Reformed(2, (0,), "in step 8", 0.1))
wait_for("third")
"""


@pytest.mark.parametrize("kills", ["rank", in_full("launcher")])
def test_launchers_of_several_hosts_know_of_all_that_are_lost(tmp_path, kills):
    """One whose ranks are lost waits for the others; one that is gone is the ranks that it had."""
    script(tmp_path, TELLS, TELLS_NODES)
    here = f"on {socket.gethostname()} was lost"
    with jobs(tmp_path, "--elastic", more=("-n", "2")) as (one, other):
        one.wait_shown("pid", times=2)
        other.wait_shown("pid")
        (tmp_path / "all have told").touch()
        first = f"rank 1 {here} in step 7 (exit code 3): ranks 0, 2 went"
        wait_until(lambda: first in one.stderr and first in other.stderr, first)
        lost = numbers(other.stdout)
        os.kill(lost[0] if kills == "rank" else other.pid, signal.SIGKILL)
        wait_gone(lost)
        (tmp_path / "second").touch()
        how = "killed by signal 9 (SIGKILL)" if kills == "rank" else "its launcher is gone, or the"
        second = f"rank 2 {here} in step 8 ({how}"
        wait_until(lambda: second in one.stderr, second)
        (tmp_path / "third").touch()
        assert one.wait() == 0
        assert said(one.stderr)[-1] == "ended well without ranks 1, 2"
        if kills == "rank":
            assert other.wait() == 0
            assert said(other.stderr) == said(one.stderr)


def test_an_exception_that_several_ranks_had_is_found():
    def failure(rank: int, kind: str, text: str) -> Failure:
        return Failure(rank, 1, 0.0, Raised(kind, exception=text))

    own = [failure(rank, "ValueError", text) for rank, text in enumerate("aba")]
    lost = [failure(rank, "PeerLostError", "the same") for rank in (3, 4)]
    killed = [Failure(rank, -9, 0.0) for rank in (5, 6)]
    exits = [
        failure(rank, kind, "") for kind in ("SystemExit", "KeyboardInterrupt") for rank in (7, 8)
    ]
    failures = [*own, *lost, *killed, *exits, own[1]]
    assert find_repeated(failures, by_text=True) == [own[0], own[2]]
    assert find_repeated(failures, by_text=False) == [*own, own[1]]


def test_one_exception_that_one_place_had_again_and_again_is_not_several():
    def failure(rank: int) -> Failure:
        return Failure(rank, 1, 0.0, Raised("ValueError", exception="a"))

    assert find_repeated([failure(2), failure(2)], by_text=True) == []
    failures = [failure(2), failure(2), failure(0)]
    assert find_repeated(failures, by_text=True) == failures


def test_ranks_that_were_lost_are_named_with_what_is_known():
    gone = [Failure(rank, 255, 0.0, host="b", how="its host was lost") for rank in (2, 3)]
    named = "ranks 2, 3 on b were lost in step 5 (its host was lost)"
    assert lost([2, 3], gone, "in step 5") == named
    assert lost([2, 3], [], "") == "ranks 2, 3 were lost"


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_number_of_ranks_that_is_none_is_refused(value):
    assert elastic_minimum({"RINGREDUCE_ELASTIC": ""}) is None
    with pytest.raises(ConfigError, match=f"RINGREDUCE_ELASTIC is '{value}'"):
        elastic_minimum({"RINGREDUCE_ELASTIC": value})
