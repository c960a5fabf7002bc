"""``ringreduce run`` with real processes: what it passes on, shows, stops and returns.

Most scripts here know nothing of ringreduce, since the launcher runs any program.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import types
from pathlib import Path

import psutil
import pytest
import typer

import ringreduce
from ringreduce.commands import cli
from ringreduce.commands.cli import app
from ringreduce.commands.launch.local import default_threads
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.processes import Pipe
from ringreduce.testing import ring_of_processes
from tests.launching import RANK, WAITS, command_line, numbers, run, script
from tests.processes import DEADLINE_S, clean_environment, launcher, wait_gone
from tests.scope import in_full

SOON = {"RINGREDUCE_TIME_SCALE": "0.02"}
THREAD_VARIABLES = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"]


NOTHING_FAILED = types.SimpleNamespace(conclude=lambda: 0)


def environments(directory: Path, *options: str, **variables: str) -> list[dict[str, str]]:
    """The environment of each worker that is started so."""
    name = script(directory, "import json, os\nprint(json.dumps(dict(os.environ)))\n")
    done = run(directory, *options, name, **variables)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.partition(" ")[2]) for line in sorted(done.stdout.splitlines())]


# --- What is shown --------------------------------------------------------------------------
def test_every_line_begins_with_its_rank_and_is_whole(tmp_path):
    text = """
        for number in range(300):
            for part in (f"line {number}", " of ", f"rank {rank}", "\\n"):
                os.write(1, part.encode())
        """
    lines = run(tmp_path, "-n", "3", script(tmp_path, RANK, text)).stdout.splitlines()
    assert sorted(lines, key=lambda line: line[:3]) == [
        f"[{rank}] line {number} of rank {rank}" for rank in range(3) for number in range(300)
    ]


def test_output_and_errors_stay_apart_and_lack_no_letter_and_get_no_color(tmp_path):
    text = "import os\nos.write(1, '\N{EURO SIGN} 5\\n'.encode())\nos.write(2, b'err\\n')"
    done = run(tmp_path, "-n", "1", script(tmp_path, text), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] ? 5\n", "[0] err\n")


def test_a_line_that_a_child_holds_open_is_shown_at_the_end(tmp_path):
    # The child leaves the worker's group, so it lives on with the worker's output.
    text = """
        import subprocess
        print("no end", end="", flush=True)
        subprocess.Popen(["cat", "fifo"], start_new_session=True)
        """
    os.mkfifo(tmp_path / "fifo")
    with launcher(tmp_path, "run", "-n", "1", script(tmp_path, text)) as job:
        assert job.wait() == 0
        assert job.stdout == "[0] no end\n"
    (tmp_path / "fifo").write_text("")


def test_a_reader_that_leaves_does_not_end_the_job(tmp_path):
    text = "for _ in range(2000):\n    print('x' * 100)\nbeside('done').touch()\n"
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "1", script(tmp_path, RANK, text)]
    environment = clean_environment()
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as job:
        job.stdout.close()
        assert job.wait(DEADLINE_S) == 0
    assert (tmp_path / "done").exists()


# --- What workers are given -----------------------------------------------------------------
def test_arguments_pass_unchanged_and_standard_input_is_at_its_end(tmp_path):
    arguments = ["--", "--version", "-n", "5", "--help", "--", "-m", "two words", "", "*", "$HOME"]
    text = "import json, sys\nprint(json.dumps([*sys.argv[1:], sys.stdin.read()]))"
    done = run(tmp_path, "-n", "1", script(tmp_path, text), *arguments, "\N{EURO SIGN}")
    assert json.loads(done.stdout.removeprefix("[0] ")) == [*arguments, "\N{EURO SIGN}", ""]


def test_no_help_has_square_brackets_which_would_be_taken_for_markup():
    for command in typer.main.get_command(app).commands.values():
        texts = [command.help, *(getattr(option, "help", "") for option in command.params)]
        assert any(texts)
        assert not [text for text in texts if "[" in (text or "")]


def test_a_module_is_run_by_its_name(tmp_path):
    (tmp_path / "keras.py").touch()
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    text = "import keras, sys\nprint(__name__, sys.argv[1:])"
    (tmp_path / "trainer" / "main.py").write_text(text)
    done = run(tmp_path, "-n", "1", "-m", "trainer.main", "-m", "x")
    # That one worker imports Keras and joins no ring is no fault.
    assert (done.stdout, done.stderr) == ("[0] __main__ ['-m', 'x']\n", "")


def test_each_worker_knows_its_place_and_not_that_in_an_outer_job(tmp_path):
    outer = {"RANK": "7", "SIZE": "9", "LOCAL_RANK": "3", "LOCAL_SIZE": "4", "JOB_ID": "outer"}
    outer |= {"RENDEZVOUS": "192.0.2.1:4000", "RENDEZVOUS_FD": "77"}
    outer = {f"RINGREDUCE_{name}": value for name, value in outer.items()}
    limits = {"RINGREDUCE_TIMEOUT_S": "7", "RINGREDUCE_SEGMENT_BYTES": "4096"}
    variables = environments(tmp_path, "-n", "3", **outer, **limits)
    assert len({(v["RINGREDUCE_JOB_ID"], v["RINGREDUCE_RENDEZVOUS"]) for v in variables}) == 1
    for rank, worker in enumerate(variables):
        place = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 3, "LOCAL_SIZE": 3}
        assert {f"RINGREDUCE_{name}": str(n) for name, n in place.items()}.items() <= worker.items()
        assert ("RINGREDUCE_RENDEZVOUS_FD" in worker) == (rank == 0)
        assert not outer.items() & worker.items()
        assert limits.items() <= worker.items()
        assert {worker[name] for name in THREAD_VARIABLES} == {str(default_threads(3))}
        assert "COLUMNS" not in worker  # Only of a terminal.
    assert default_threads(10_000) == 1


def test_ranks_have_cores_of_their_own(tmp_path):
    here = os.sched_getaffinity(0)
    (tmp_path / "cores.py").write_text(
        "import os; print(os.environ.get('RINGREDUCE_CORES'), *sorted(os.sched_getaffinity(0)))"
    )

    def cores(*options, **variables):
        """Of how many cores the ranks have some, and those of each, as it sees them."""
        done = run(tmp_path, "-n", "2", *options, "cores.py", **variables)
        found = [line.split()[1:] for line in sorted(done.stdout.splitlines())]
        return done.stderr, [each[0] for each in found], [{*map(int, each[1:])} for each in found]

    if len(here) == 1:
        assert "cannot bind 2 ranks to cores: this process may use 1" in cores("--bind")[0]
    else:
        _, counts, (first, second) = cores("--bind", RINGREDUCE_CORES="99")
        assert len(first) == len(second) == len(here) // 2
        assert not first & second
        assert first | second <= here
        assert counts == [str(len(first | second))] * 2
    # A number of threads that the user has chosen may be another one than of the cores.
    assert cores("--threads-per-worker", "1")[1:] == (["None"] * 2, [here] * 2)
    assert cores("--no-bind", RINGREDUCE_CORES="99")[1:] == (["None"] * 2, [here] * 2)
    assert cores(TF_NUM_INTRAOP_THREADS="1")[1:] == (["None"] * 2, [here] * 2)


def test_options_become_variables_and_only_threads_do_not_replace_the_users(tmp_path):
    options = ("--timeout", "3.5", "--threads-per-worker", "3", "--profile", "--elastic")
    users = {"RINGREDUCE_TIMEOUT_S": "7", "OMP_NUM_THREADS": "5"}
    [variables] = environments(tmp_path, "-n", "1", *options, **users)
    assert [variables[name] for name in THREAD_VARIABLES] == ["5", "3", "3"]
    assert variables["RINGREDUCE_TIMEOUT_S"] == "3.5"
    assert (variables["RINGREDUCE_PROFILE"], variables["RINGREDUCE_ELASTIC"]) == ("1", "1")


# --- The command line -----------------------------------------------------------------------
def test_version_and_help_in_80_columns_with_defaults():
    done = command_line("--version")
    assert (done.exit_code, done.stdout) == (0, f"ringreduce {ringreduce.__version__}\n")
    for line in ("", "run", "--help", "run --help"):
        done = command_line(*line.split())
        assert "Usage: ringreduce" in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(line.strip("\u2502 ").split()) for line in lines)
    for default in ("(1, or all slots of the hosts)", "(cores / N)", "(30)", "(auto)"):
        assert f"[default: {default}]" in shown


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ringreduce ", {"run", "report", "doctor", "trace", "verify"}),
        ("ringreduce run --out", {"--output"}),
        ("ringreduce run --output ", {"all", "rank0", "failed"}),
        ("ringreduce run --transport ", {"auto", "shm", "zmq"}),
    ],
)
def test_a_shell_completes_commands_options_and_values(typed, offered):
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = command_line(_RINGREDUCE_COMPLETE="complete_bash", **asked)
    assert set(done.stdout.split()) == offered


NODE = "--nnodes 2 --node-rank"
SECRET = "need a secret that all of them have, and there is none"
# What is said of command lines of `ringreduce run`.
WRONG = {
    "-n 0 script.py": "-n",
    "-n two script.py": "-n",
    "-np 2 script.py": "-np is read as -n with",
    "-n 2": "SCRIPT",
    "--grace -1 script.py": "accepted: 0 or more",
    "--timeout 0 script.py": "--timeout",
    "--transport tcp script.py": "accepted: auto, shm, zmq",
    "--threads-per-worker 0 script.py": "--threads-per-worker",
    "--output rank1 script.py": "accepted: all, rank0, failed",
    "--max-restarts -1 script.py": "accepted: 0 or more",
    "--wokers 2 script.py": "--wokers",
    "-n 2 --stdin 2 script.py": "accepted: 0 to 1",
    "-n 2 --elastic 3 script.py": "--elastic is 3; accepted: 1 to 2, all ranks",
    "--elastic --stdin 0 script.py": "not with --nnodes or --elastic",
    "-n 2 --max-restarts 3 missing.py": "there is no script 'missing.py' in ",
    "python train.py": "'python' is no script; ringreduce starts Python itself. Leave",
    "/usr/bin/python3.11 -m json": "'/usr/bin/python3.11' is no script; ringreduce",
    # Of several hosts.
    "-H a --hostfile b script.py": "give it or --hostfile, not both",
    "-H a:2 -n 3 script.py": "3 workers are asked for, and the hosts have 2 slots",
    "-H a:2 --stdin 0 script.py": "--stdin: not with -H or --hostfile",
    "--python python3 script.py": "--python: only with -H or --hostfile",
    "-H a --ssh /no/ssh script.py": "cannot run '/no/ssh' to reach a",
    "-H a --env NOT_SET script.py": "--env NOT_SET: it is not set here",
    "-H a --env =x script.py": "--env '=x' names no variable",
    "--hostfile missing script.py": "the hostfile missing cannot be read: No such file",
    "--nnodes 2 script.py": "are given together",
    "--nnodes 2 -H a:2 script.py": "not with -H or --hostfile",
    f"{NODE} 2 --rendezvous a:1 script.py": "2; accepted: 0 to 1",
    f"{NODE} 0 --rendezvous a script.py": "rendezvous is 'a', from the argument rendezvous",
    f"{NODE} 1 --rendezvous 192.0.2.1:4000 script.py": SECRET,
    f"{NODE} 1 --rendezvous no.such.name.invalid:4000 script.py": SECRET,
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_refused_and_starts_nothing(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "open('ran', 'w')")
    done = command_line("run", *line.split(), COLUMNS="300", HOME=str(tmp_path))
    assert done.exit_code == 2 or isinstance(done.exception, ringreduce.ConfigError)
    assert WRONG[line] in f"{done.stderr} {done.exception}"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("misplaced", [["-n", "2"], ["-np", "2"], ["-n2"], ["-H", "a:2"]])
def test_an_option_that_the_script_gets_is_a_hint_if_there_is_none_before_it(
    tmp_path, monkeypatch, misplaced
):
    plans: list[JobPlan] = []
    monkeypatch.setattr(cli, "supervise", lambda plan, node: plans.append(plan) or NOTHING_FAILED)
    monkeypatch.chdir(tmp_path)
    name = script(tmp_path, "")
    assert command_line("run", name, "--epochs", "3", *misplaced).stderr == (
        f"ringreduce: starts 1 worker, and script.py gets {misplaced[0]}, which stands after it; "
        "for 2 workers write `ringreduce run -n 2 script.py ...`\n"
    )
    assert command_line("run", "-n", "1", name, *misplaced).stderr == ""
    assert command_line("run", name, "-v").stderr == ""
    programs = [[name, "--epochs", "3", *misplaced], [name, *misplaced], [name, "-v"]]
    assert [(plan.arguments, plan.size) for plan in plans] == [(each, 1) for each in programs]


def test_what_is_missing_in_a_folder_python_says(tmp_path):
    (tmp_path / "folder").mkdir()
    done = run(tmp_path, "folder")
    assert done.returncode == 1
    assert "can't find '__main__' module in" in done.stderr


# --- How a job ends -------------------------------------------------------------------------
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_a_worker_that_ended_well_before_is_named(tmp_path):
    os.mkfifo(tmp_path / "number of rank 1")
    text = """
        import contextlib, select
        with open("number of rank 1", "w" if rank else "r") as pipe:
            number = 0 if rank else int(pipe.read())
            rank and pipe.write(str(os.getpid()))
        with contextlib.suppress(ProcessLookupError):
            number and select.select([os.pidfd_open(number)], [], [])  # Until it has ended.
        os._exit(0 if rank else 3)
        """
    done = run(tmp_path, "-n", "2", script(tmp_path, RANK, text))
    assert done.returncode == 3
    assert (
        "ringreduce: rank 1 had ended by itself, exit code 0: its program has ended\n"
        in done.stderr
    )


def test_a_rank_that_leaves_before_it_joins_ends_the_job_that_waits_for_it(tmp_path):
    name = script(tmp_path, RANK + "if rank != 1:\n    import ringreduce\n    ringreduce.init()\n")
    done = run(tmp_path, "-n", "2", name)
    assert done.returncode == 1
    title, advice = done.stderr.splitlines()
    assert title == (
        "ringreduce: rank 1 failed first (exit code 0, before it joined the ring for which others "
        "wait); all workers were stopped"
    )
    assert "look for what ends the program of rank 1 early" in advice


def test_ranks_that_import_keras_and_never_join_are_named(tmp_path):
    (tmp_path / "keras.py").touch()
    name = script(tmp_path, RANK + "if rank:\n    import keras\n")
    said = "ringreduce: ranks 1, 2 imported Keras and joined no ring, so each ran by itself"
    assert run(tmp_path, "-n", "3", name).stderr.startswith(said)


def test_ranks_that_import_keras_are_named_while_they_run(tmp_path):
    (tmp_path / "keras.py").touch()
    name = script(tmp_path, RANK + "import keras, colorsys\n" + WAITS)
    with launcher(tmp_path, "run", "-n", "2", name, **SOON) as job:
        job.wait_error("imported Keras, and no rank has joined a ring yet")
        job.signal(signal.SIGTERM)
        job.wait()
        assert job.stderr.count("imported Keras") == 1


def test_a_rank_that_is_stopped_is_named_and_the_job_ends_soon(tmp_path):
    text = """
        import numpy, ringreduce
        ring = ringreduce.init()
        ring.all_reduce(numpy.ones(3))
        ring._session._waiting.timeouts.timeout_s = 1  # It may take longer until here.
        if ring.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ring.all_reduce(numpy.ones(3))
        """
    done = run(tmp_path, "-n", "2", "--grace", "60", script(tmp_path, RANK, text))
    assert done.returncode == 1
    assert "ringreduce: rank 1 held up or left the others and did not fail itself; " in done.stderr
    assert "killed" not in done.stderr  # As those are that do not end in their grace.


def test_workers_that_still_run_are_stopped_after_a_failure(tmp_path):
    text = """
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: exit("asked to end"))
            beside("ready").touch()
            while True:
                signal.pause()
        wait_for("ready")
        raise ValueError("bad data")
        """
    done = run(tmp_path, "-n", "2", script(tmp_path, RANK, text))
    assert "[0] asked to end" in done.stderr
    assert "rank 0" not in done.stderr  # It only did as it was told.


def test_what_an_ended_worker_said_last_is_read_before_it_is_judged(tmp_path):
    # Rank 0 leaves more in its pipe than is read at once, so that its exit is seen while what it
    # told waits to be read. Rank 1, the cause, ends later.
    text = """
        import fcntl, ringreduce
        if rank == 0:
            fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 1 << 20)
            text = b"a line of a log that fills the pipe\\n" * 20_000
            while text:
                text = text[os.write(2, text):]
            beside("writes").write_text(str(os.getpid()))
            os.rename("writes", "left")
            raise ringreduce.PeerLostError("lost rank 1", peer=1)
        wait_for("left")
        while pathlib.Path("/proc", beside("left").read_text()).exists():
            pass  # until the launcher has seen that it has ended
        raise ValueError("bad data")
        """
    done = run(tmp_path, "-n", "2", script(tmp_path, RANK, text))
    assert "ringreduce: rank 1 failed first" in done.stderr


def test_a_cause_that_takes_long_to_end_is_named_with_its_traceback(tmp_path):
    text = """
        import atexit
        if rank == 0:
            # As TensorFlow's threads may keep Python from ending.
            atexit.register(signal.pause)
            atexit.register(beside("raised").touch)
            raise ValueError("bad data")
        wait_for("raised")
        raise RuntimeError("was left by rank 0, which ended with ValueError: bad data")
        """
    done = run(tmp_path, "-n", "2", script(tmp_path, RANK, text))
    assert "ringreduce: rank 0 failed first (ValueError)" in done.stderr
    assert done.stderr.count('raise ValueError("bad data")') == 1
    assert "then rank 1 (exit code 1): RuntimeError: was left by rank 0" in done.stderr


def test_a_child_left_behind_by_a_good_worker_ends_with_it(tmp_path):
    # It holds the worker's output open, which must not keep the launcher waiting either.
    child = "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
    done = run(tmp_path, "-n", "1", script(tmp_path, child + "print('pid', child.pid)"))
    assert done.returncode == 0
    assert len(numbers(done.stdout)) == 1
    wait_gone(numbers(done.stdout))


# --- Signals to the launcher ----------------------------------------------------------------
@pytest.mark.parametrize("number", [signal.SIGTERM, in_full(signal.SIGHUP)])
def test_a_signal_reaches_every_worker(tmp_path, number):
    text = f"""
        def leave(number, frame):
            print("got", signal.Signals(number).name, flush=True)
            raise SystemExit(0)
        signal.signal({int(number)}, leave)
        """
    with launcher(tmp_path, "run", "-n", "2", script(tmp_path, RANK, text, WAITS)) as job:
        job.wait_shown("pid", times=2)
        job.signal(number)
        assert job.wait() == 128 + number
        for rank in (0, 1):
            assert job.stdout.count(f"[{rank}] got {number.name}\n") == 1
        assert f"ringreduce: stopped by {number.name}" in job.stderr


def test_a_repeated_signal_kills_at_once(tmp_path):
    deaf = "signal.signal(signal.SIGINT, lambda *_: print('no', flush=True))\n"
    options = ("-n", "2", "--grace", "60")
    with launcher(tmp_path, "run", *options, script(tmp_path, RANK, deaf, WAITS)) as job:
        job.wait_shown("pid", times=2)
        job.signal(signal.SIGINT)
        job.wait_shown("no", times=2)
        job.signal(signal.SIGINT)
        assert job.wait() == 130  # Long before the grace that a first signal gives.
        wait_gone(numbers(job.stdout))


def test_a_handler_has_its_grace_and_the_launcher_says_that_it_waits(tmp_path):
    text = """
        try:
            print("ready", flush=True)
            signal.pause()
        except KeyboardInterrupt:
            wait_for("end")
            print("saved", flush=True)
        """
    options = ("-n", "2", "--grace", "60")
    with launcher(tmp_path, "run", *options, script(tmp_path, RANK, text), **SOON) as job:
        job.wait_shown("ready", times=2)
        job.signal(signal.SIGINT)
        job.wait_error("waits up to 60 s for ranks 0, 1 to end; Ctrl-C now kills at once\n")
        (tmp_path / "end").touch()
        assert job.wait() == 130
        assert job.stdout.count("saved") == 2
        assert job.stderr.count("waits up to") == 1
        assert "killed" not in job.stderr


def test_ctrl_c_after_a_failure_kills_at_once_and_the_failure_is_shown(tmp_path):
    text = """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            beside("ready").touch()
        else:
            wait_for("ready")
            raise SystemExit(3)
        """
    options = ("-n", "2", "--grace", "60", "--max-restarts", "1")
    with launcher(tmp_path, "run", *options, script(tmp_path, RANK, text, WAITS), **SOON) as job:
        job.wait_error("waits up to 60 s for rank 0 to end")
        job.signal(signal.SIGINT)
        assert job.wait() == 3
        assert "rank 1 failed first (exit code 3)" in job.stderr
        assert "starting again" not in job.stderr
        wait_gone(numbers(job.stdout))


def test_a_stopped_worker_ends_with_ctrl_c(tmp_path):
    command = ("run", "-n", "1", "--grace", "60", script(tmp_path, WAITS))
    with launcher(tmp_path, *command) as job:
        job.wait_shown("pid")
        os.kill(numbers(job.stdout)[0], signal.SIGSTOP)
        job.signal(signal.SIGINT)
        assert job.wait() == 130
        assert "killed" not in job.stderr


def test_sigusr1_reaches_every_worker_and_the_job_goes_on(tmp_path):
    text = "signal.signal(signal.SIGUSR1, lambda *_: print('saved', flush=True))\n"
    text += "print('ready', flush=True)\nsignal.pause()"
    with launcher(tmp_path, "run", "-n", "2", script(tmp_path, RANK, text)) as job:
        job.wait_shown("ready", times=2)
        job.signal(signal.SIGUSR1)
        assert job.wait() == 0
        assert job.stdout.count("saved") == 2


def test_a_killed_launcher_leaves_no_process_behind_that_ignores_signals(tmp_path):
    text = "import signal, subprocess\nfor n in (1, 2, 15):\n    signal.signal(n, signal.SIG_IGN)\n"
    child = "print('pid', subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
    with launcher(tmp_path, "run", "-n", "2", script(tmp_path, text, child, WAITS)) as job:
        job.wait_shown("pid", times=4)
        family = [process.pid for process in psutil.Process(job.pid).children(recursive=True)]
        assert set(numbers(job.stdout)) < set(family)  # The guard is in it too.
        job.signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        wait_gone(family)


# --- Several jobs ---------------------------------------------------------------------------
RING = """
import os, sys, keras, ringreduce, numpy
ring = ringreduce.init()
total = ring.all_reduce(numpy.full(3, ring.rank + 1.0))
print("total", int(total[0]), os.environ["RINGREDUCE_JOB_ID"], flush=True)
print("err", file=sys.stderr) if len(sys.argv) > 1 else None
"""


@pytest.mark.full
def test_two_launchers_at_once_do_not_disturb_each_other(tmp_path):
    """Nor is anything said of ranks that import Keras and join, but once of a misspelt variable."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        (folder / "keras.py").touch()
        command = "run", "-n", "2", script(folder, RING)
    with (
        launcher(folders[0], *command, RINGREDUCE_TIMEOUT="5") as one,
        launcher(folders[1], *command) as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0)
        assert numbers(one.stdout, "total") == numbers(two.stdout, "total") == [3, 3]
        [first], [other] = (
            {line.split()[-1] for line in j.stdout.splitlines()} for j in (one, two)
        )
        assert first != other
        hint = "nothing reads the variable RINGREDUCE_TIMEOUT; is RINGREDUCE_TIMEOUT_S meant?"
        assert (one.stderr, two.stderr) == (f"[0] {hint}\n", "")


def test_ring_of_processes_gives_output_and_restores_the_signal_handlers(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "keras.py").touch()
    name = str(tmp_path / script(tmp_path, RING))
    result = ring_of_processes(2, [name, "says"], timeout_s=30)
    assert result.exit_code == 0, result.errors
    assert numbers(result.output, "total") == [3, 3]
    assert sorted(result.errors.splitlines()) == ["[0] err", "[1] err"]
    assert {number: signal.getsignal(number) for number in before} == before


def test_what_an_ended_process_has_left_is_read_to_its_end():
    reader, writer = os.pipe()
    os.write(writer, b"last words")
    os.close(writer)
    with open(reader, "rb", buffering=0) as file, selectors.DefaultSelector() as selector:
        assert Pipe(file, selector, lambda data: [data]).drain() == [b"last words", b""]
