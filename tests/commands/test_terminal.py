"""``ringreduce run --stdin RANK``: one rank has the keyboard, and its debugger works."""

import pytest

from tests.launching import RANK, Terminal, run, script


def test_breakpoint_works_on_the_rank_that_has_the_terminal(tmp_path):
    # Skipped on rank 0, which has no keyboard.
    name = script(tmp_path, RANK + "x = 41 + rank\nbreakpoint()\nprint('x is', x)")
    with Terminal(tmp_path, "-n", "2", "--stdin", "1", name) as job:
        job.wait_shown("(Pdb) ")
        job.type("p 'it is', x\r")
        job.wait_shown("('it is', 42)")
        job.type("c\r")
        assert job.wait() == 0
    lines = job.shown.decode().splitlines()
    assert any(line.endswith("[0] x is 41") for line in lines)
    assert any(line.endswith("x is 42") for line in lines)
    assert any("[1] " in line and "('it is', 42)" in line for line in lines)


@pytest.mark.full
def test_ctrl_c_ends_the_job_of_a_rank_that_has_the_keyboard(tmp_path):
    text = "import signal\nif rank == 1: print('hello', input('name? '))\nsignal.pause()"
    name = script(tmp_path, RANK + text)
    with Terminal(tmp_path, "-n", "2", "--stdin", "1", name) as job:
        job.wait_shown("[1] name? ")
        job.type("Ada\r")
        job.wait_shown("hello Ada")
        job.type("\x03")
        assert job.wait() == 130


def test_other_ranks_share_the_session_and_cannot_read_from_its_terminal(tmp_path):
    """Stopped they would be, as groups in the background are, did they not ignore the signal."""
    text = """
        print("session", os.getsid(0) == os.getsid(os.getppid()), os.getpgrp() == os.getpid())
        try:
            open("/dev/tty").read(1)
        except OSError as error:
            print("read:", error.strerror, flush=True)
        """
    with Terminal(tmp_path, "-n", "2", script(tmp_path, RANK, text)) as job:
        assert job.wait() == 0
    for rank in (0, 1):
        assert f"[{rank}] session True True\r\n" in job.shown.decode()
        assert f"[{rank}] read: Input/output error\r\n" in job.shown.decode()


def test_a_pipe_is_that_ranks_standard_input(tmp_path):
    name = script(tmp_path, "import sys\nprint(repr(sys.stdin.read()))")
    done = run(tmp_path, "-n", "3", "--stdin", "2", name, typed="typed")
    assert sorted(done.stdout.splitlines()) == ["[0] ''", "[1] ''", "[2] 'typed'"]


def test_a_debugger_without_a_keyboard_says_how_to_get_one(tmp_path):
    name = script(tmp_path, RANK + "import signal\nbreakpoint() if rank else signal.pause()")
    done = run(tmp_path, "-n", "2", name)
    assert done.returncode == 1
    assert "ringreduce: --stdin 1 gives rank 1 the keyboard\n" in done.stderr


def test_nothing_times_out_meanwhile(tmp_path):
    text = "import ringreduce\nprint(ringreduce.Config.from_environment())"
    name = script(tmp_path, text)
    done = run(tmp_path, "--stdin", "0", name, RINGREDUCE_TIMEOUT_S="5")
    for limit in ("timeout_s", "busy_timeout_s", "join_timeout_s"):
        assert done.stdout.count(f" {limit}=604800.0") == 1
    done = run(tmp_path, "--stdin", "0", "--timeout", "7", name)
    assert done.stdout.count(" timeout_s=7.0") == 1
