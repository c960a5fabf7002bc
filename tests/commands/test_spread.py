"""``ringreduce run -H``: jobs of several hosts, by an ssh that runs its command on this one.

The stand-in for ssh does with a command what ssh does: a shell runs it, in another folder. With a
real sshd: `test_ssh.py`.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
from pathlib import Path

import psutil
import pytest

from ringreduce.commands.launch.exchange import MAGIC, Hello
from ringreduce.commands.launch.frames import encode
from tests.launching import RANK, WAITS, numbers, script
from tests.processes import Process, launcher, wait_gone
from tests.scope import in_full

SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case $1 in
    unknown) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255;;
    old) cat old; exec cat > /dev/null;;
esac
echo "Welcome to $1, where a login shell writes something"
echo $$ >> started
cd / && exec sh -c "$2"
"""
HOSTS = ("-H", "127.0.0.2:2,127.0.0.3:2")


def job(directory: Path, *arguments: str, **environment: str) -> Process:
    """``ringreduce run``, with the stand-in for ssh in a file of `directory`."""
    path = directory / "ssh"
    path.write_text(SSH)
    path.chmod(0o755)
    command = ("run", "--ssh", shlex.quote(str(path)), *arguments)
    return launcher(directory, *command, **environment)


def started(directory: Path) -> list[int]:
    """What ran as ssh, by their numbers: each has become an agent."""
    return [int(line) for line in (directory / "started").read_text().split()]


def family(pids: list[int]) -> list[int]:
    """These processes and all that they have started."""
    return [*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children(True))]


def knows(pid: int, secret: str) -> bool:
    """Whether a process shows it in its arguments or its environment."""
    files = [Path("/proc", str(pid), name) for name in ("cmdline", "environ")]
    with contextlib.suppress(OSError):  # It has ended, or is another user's.
        return secret.encode() in b"".join(file.read_bytes() for file in files)
    return False


def test_ranks_of_all_hosts_know_their_place_and_the_program_its_arguments(tmp_path):
    text = """
        import json, os, sys
        names = "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "JOB_ID", "RENDEZVOUS", "TIMEOUT_S"
        own = [os.environ["RINGREDUCE_" + name] for name in names]
        others = [os.environ.get(name) for name in ("GIVEN", "TAKEN", "KEPT")]
        print(json.dumps([own, sys.argv[1:], os.getcwd(), others]))
        print("err", file=sys.stderr)
        """
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    words = ["two words", "", "*", "$HOME", "'\"`id`\\", "\N{EURO SIGN}"]
    options = (*HOSTS, "-n", "3", "--env", "GIVEN=a b", "--env", "TAKEN", "--timeout", "7")
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
    ports = f"{port}-{port}"
    variables = {"TAKEN": "$x", "RINGREDUCE_TIMEOUT_S": "8", "RINGREDUCE_PORTS": ports}
    with job(folder, *options, script(folder, text), *words, **variables) as run:
        assert run.wait() == 0, run.stderr
    shown = sorted(run.stdout.splitlines())
    marks, found = zip(*(line.split(" ", 1) for line in shown), strict=True)
    assert marks == ("[127.0.0.2:0]", "[127.0.0.2:1]", "[127.0.0.3:2]")
    assert sorted(run.stderr.splitlines()) == [f"{mark} err" for mark in marks]
    places = ("0 3 0 2", "1 3 1 2", "2 3 0 1")
    for (own, *others), place in zip(map(json.loads, found), places, strict=True):
        assert own == [*place.split(), json.loads(found[0])[0][4], f"127.0.0.2:{port}", "7.0"]
        assert others == [words, str(folder), ["a b", "$x", None]]


# The ids are in the environment of each process here.
@pytest.mark.parametrize(
    "given", ["", in_full("a secret of the user's own")], ids=["made", "given"]
)
def test_only_the_ranks_know_the_secret_and_ctrl_c_ends_all(tmp_path, given):
    """And the launcher, to which the user has given it."""
    variables = {"RINGREDUCE_SECRET": given} if given else {}
    with job(tmp_path, *HOSTS, script(tmp_path, WAITS), **variables) as run:
        run.wait_shown("pid", times=4)
        ranks = numbers(run.stdout)
        secret = psutil.Process(ranks[0]).environ()["RINGREDUCE_SECRET"]
        knowing = [pid for pid in psutil.pids() if knows(pid, secret)]
        assert knowing == sorted([*ranks, *[run.pid] * bool(given)])
        assert secret == given or not given
        everybody = family(started(tmp_path))
        assert set(ranks) < set(everybody)
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT
        assert "ringreduce: stopped by SIGINT" in run.stderr
        assert run.stderr.count("KeyboardInterrupt") == 1
        assert "ringreduce: ranks 0, 1, 2, 3: KeyboardInterrupt (File " in run.stderr
        wait_gone(everybody)


def test_ranks_of_all_hosts_have_the_grace_and_no_more(tmp_path):
    deaf = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with job(tmp_path, *HOSTS, "--grace", "0.5", script(tmp_path, deaf + WAITS)) as run:
        run.wait_shown("pid", times=4)
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT
        assert "killed ranks 0, 1, 2, 3, which had not ended 0.5 s after SIGINT" in run.stderr
        wait_gone([*started(tmp_path), *numbers(run.stdout)])


def test_a_failure_is_named_with_its_host_and_ends_all_hosts(tmp_path):
    name = script(tmp_path, RANK + "if rank == 3:\n    raise ValueError('bad data')\n" + WAITS)
    with job(tmp_path, *HOSTS, name) as run:
        assert run.wait() == 1
        assert "ringreduce: rank 3 on 127.0.0.3 failed first (exit code 1)" in run.stderr
        assert "ringreduce:   ValueError: bad data" in run.stderr
        wait_gone([*started(tmp_path), *numbers(run.stdout)])


def test_a_lost_connection_ends_the_job_and_leaves_no_process(tmp_path):
    child = "import subprocess\nprint('pid', subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
    name = script(tmp_path, child + WAITS)
    with job(tmp_path, *HOSTS, name) as run:
        run.wait_shown("pid", times=8)
        everybody = family(started(tmp_path))
        os.kill(max(started(tmp_path)), signal.SIGKILL)
        assert run.wait() == 255
        assert "failed first (its host was lost: " in run.stderr
        wait_gone(everybody)


@pytest.mark.full
def test_a_killed_launcher_leaves_no_process_on_any_host(tmp_path):
    deaf = "import signal\nfor n in (1, 2, 15):\n    signal.signal(n, signal.SIG_IGN)\n"
    with job(tmp_path, *HOSTS, script(tmp_path, deaf + WAITS)) as run:
        run.wait_shown("pid", times=4)
        everybody = family([run.pid])
        assert set(started(tmp_path)) < set(everybody)
        run.signal(signal.SIGKILL)
        wait_gone(everybody)


@pytest.mark.full
def test_a_ring_forms_over_hosts_and_starts_again_after_a_failure(tmp_path):
    text = """
        import os, ringreduce, numpy
        ring = ringreduce.init()
        total = ring.all_reduce(numpy.full(3, ring.rank + 1.0))
        if os.environ["RINGREDUCE_RESTART"] == "0":
            raise ValueError("bad data")
        print("total", int(total[0]), flush=True)
        """
    options = (*HOSTS, "--max-restarts", "1", "--log-dir", "logs")
    with job(tmp_path, *options, script(tmp_path, text)) as run:
        assert run.wait() == 0, run.stderr
        assert numbers(run.stdout, "total") == [10, 10, 10, 10]
        assert "ringreduce: starting again, 1 of 1" in run.stderr
        assert (tmp_path / "logs" / "restart-1" / "rank-3.log").read_text() == "total 10\n"


UNUSABLE = {
    "-H 127.0.0.2,unknown script.py": "unknown: ssh failed, as it says above",
    "-H old script.py": "old: it has ringreduce 0.0, and this host has ",
    "-H localhost,two script.py": "localhost: localhost, where the ranks are to meet, is ",
    "-H 127.0.0.2 missing.py": "127.0.0.2: there is no script 'missing.py' in ",
    "-H 127.0.0.2 --python /no/python script.py": "127.0.0.2: no agent started (exit code 127)",
    "-H 127.0.0.2 --python /bin/false script.py": "127.0.0.2: no agent started (exit code 1)",
    "-H 127.0.0.2,127.0.0.3 --rendezvous 192.0.2.1 script.py": "127.0.0.",
    "-H 127.0.0.2,127.0.0.3 --rendezvous no.such.name.invalid script.py": "127.0.0.",
}


@pytest.mark.parametrize("options", [o if "unknown" in o else in_full(o) for o in UNUSABLE])
def test_a_host_that_cannot_be_used_is_named(tmp_path, options):
    (tmp_path / "old").write_bytes(MAGIC + encode(Hello("0.0")))
    script(tmp_path, "print('ran')")
    with job(tmp_path, "--max-restarts", "3", *options.split()) as run:
        assert run.wait() == 2
        assert run.stdout == ""
        assert f"ringreduce: cannot start on {UNUSABLE[options]}" in run.stderr
        assert run.stderr.count("cannot start on") in (1, options.count("127.0.0."))
        if "unknown" in options:
            assert "ringreduce: unknown: ssh: Could not resolve hostname unknown: " in run.stderr
        if "--rendezvous" in options:
            assert f": the ranks cannot meet at {options.split()[3]}" in run.stderr
        if "localhost" in options:
            assert "--rendezvous ADDRESS" in run.stderr


@pytest.mark.full
def test_ctrl_c_ends_a_job_whose_hosts_have_not_answered(tmp_path):
    (tmp_path / "old").touch()
    with job(tmp_path, "-H", "old", script(tmp_path, "")) as run:
        while len(everybody := family([run.pid])) == 1:
            pass
        run.signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT
        wait_gone(everybody)
