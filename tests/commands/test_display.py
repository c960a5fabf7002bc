"""What is seen of workers' output: live lines, whose lines, and each failure once."""

import io
import re
import types
from pathlib import Path

import pytest

from ringreduce.commands.launch import display
from ringreduce.commands.launch.display import STARTUP, Display, Logs
from ringreduce.commands.launch.exchange import Output
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.screen import Screen
from ringreduce.vocabulary.config import TIMES
from tests.launching import RANK, Terminal, run, script
from tests.processes import launcher

# Draws as Keras's bar does: what was there is overwritten, and the line ends with the epoch.
BAR = f"""{RANK}
def draw(text, end=""):
    sys.stdout.write("\\b" * 60 + "\\r\\x1b[1m" + text + "\\x1b[0m" + end)
    sys.stdout.flush()
"""
ONE_EPOCH = f"""{BAR}
losses = "0.7 0.7 0.7".split() if rank else "0.5 0.4 0.3".split()
if rank == 0:
    print("Epoch 1/1")
draw("1/3 loss: " + losses[0])
wait_for("line")
draw("2/3 loss: " + losses[1])
if rank == 1:
    print(" from rank 1", file=sys.stderr)
wait_for("end")
draw("3/3 loss: " + losses[2], "\\n")
"""


def screen_of(output: bytes) -> list[str]:
    """The rows of a terminal after `output`, for what the launcher uses of terminals."""
    rows = []
    for written in output.decode().replace("\r\n", "\n").split("\n"):
        row, column = "", 0
        for letter in written.replace("\x1b[K", "\0"):
            if letter in "\r\b":
                column = max(0, column - 1) if letter == "\b" else 0
            elif letter == "\0":
                row = row[:column]
            else:
                row = row[:column] + letter + row[column + 1 :]
                column += 1
        rows.append(row)
    return rows


def test_at_a_terminal_rank_0s_bar_moves_and_other_lines_stand_above(tmp_path):
    with Terminal(tmp_path, "-n", "2", script(tmp_path, ONE_EPOCH)) as job:
        job.wait_shown("1/3 loss: 0.5")
        assert screen_of(job.shown)[-1] == "[0] 1/3 loss: 0.5"
        (tmp_path / "line").touch()
        for text in ("2/3 loss: 0.4", "from rank 1", "2/3 loss: 0.4"):
            job.wait_shown(text)
        assert screen_of(job.shown)[-2:] == ["[1]  from rank 1", "[0] 2/3 loss: 0.4"]
        (tmp_path / "end").touch()
        assert job.wait() == 0
    rows = ["", "[0] 3/3 loss: 0.3", "[0] Epoch 1/1", "[1]  from rank 1", "[1] 3/3 loss: 0.7"]
    assert sorted(screen_of(job.shown)) == rows


def test_a_live_line_is_cut_to_the_terminals_width(tmp_path):
    text = BAR + "draw('x' * 100)\nwait_for('end')\ndraw('y' * 30, '\\n')"
    with Terminal(tmp_path, "-n", "1", script(tmp_path, text), columns=40) as job:
        job.wait_shown("xxx")
        assert screen_of(job.shown)[-1] == "[0] " + "x" * 35
        (tmp_path / "end").touch()
        assert job.wait() == 0
    assert screen_of(job.shown) == ["[0] " + "y" * 30, ""]


def test_workers_learn_the_width_that_their_lines_have(tmp_path):
    name = script(tmp_path, "import os\nprint('width', os.environ.get('COLUMNS'))")
    with Terminal(tmp_path, "-n", "11", name, columns=100) as job:
        assert job.wait() == 0
    # A line may be shown before it is whole, and once more then.
    shown = set(re.findall(r"\[[ \d]+\] width \d+", job.shown.decode()))
    assert shown == {f"[{rank:2}] width 95" for rank in range(11)}


def test_into_a_file_a_bar_is_a_line_now_and_then(tmp_path):
    command = ("run", "-n", "2", "--log-dir", "logs", script(tmp_path, ONE_EPOCH))
    with launcher(tmp_path, *command, RINGREDUCE_TIME_SCALE="0.02") as job:
        job.wait_shown("[0] 1/3 loss: 0.5\n")
        (tmp_path / "line").touch()
        job.wait_shown("[0] 2/3 loss: 0.4\n")
        (tmp_path / "end").touch()
        assert job.wait() == 0
        kept = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
        assert kept == ["Epoch 1/1", "1/3 loss: 0.5", "2/3 loss: 0.4", "3/3 loss: 0.3"]
        lines = job.stdout.splitlines()
        assert [line for line in lines if line.startswith("[0]")] == [f"[0] {k}" for k in kept]
        assert [line for line in lines if line.startswith("[1]")] == ["[1] 3/3 loss: 0.7"]
        assert job.stderr == "[1]  from rank 1\n"


def test_a_line_in_parts_is_shown_once(tmp_path, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(display, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    screens = io.StringIO(), io.StringIO()
    logs = Logs(tmp_path, range(1))
    shows = Display(Screen(["0"], *screens), logs, JobPlan([], 1))
    for wait, text in [
        *[(1, "start\n"), (11, "loss 0.5"), (0.3, "\n")],  # begun late, and soon whole
        *[(11, "loads "), (11, "weights"), (11, " done\nsaves"), (11, "\n")],
        *[(0, "\r1/2"), (11, "\r2/2"), (11, "\n"), (11, "at the end"), (11, "")],
    ]:
        now_s += wait * TIMES.partial_line_s / 10
        shows.tick()
        shows.take(Output(0, False, text.encode()))
    shows.end_lines()
    expected = ["start", "loss 0.5", "loads ", "weights", " done", "saves", "1/2", "2/2"]
    expected.append("at the end")
    assert (tmp_path / "rank-0.log").read_text().splitlines() == expected
    assert screens[0].getvalue().splitlines() == [f"[0] {line}" for line in expected]


# --- Whose lines ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("output", "shown"), [("rank0", ["[0] here", "[1] here"]), ("failed", ["[1] here"])]
)
def test_whose_lines_are_shown(tmp_path, output, shown):
    fails = """
        print("here")
        if rank != 1:
            signal.pause()
        while len(list(pathlib.Path("logs").glob("rank-*.log"))) < 3:
            time.sleep(0.01)
        print("abort: no memory", file=sys.stderr)
        os._exit(3)
        """
    name = script(tmp_path, RANK, fails)
    done = run(tmp_path, "-n", "3", "--output", output, "--log-dir", "logs", name)
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == shown
    assert "[1] abort: no memory\n" in done.stderr
    assert "ringreduce: rank 1 failed first (exit code 3)" in done.stderr
    assert (tmp_path / "logs" / "rank-2.log").read_text() == "here\n"


def test_what_tensorflow_says_as_it_starts_is_shown_of_rank_0(tmp_path):
    text = """
        print("I0000 00:00:1.2 3 port.cc:153] oneDNN custom operations are on.", file=sys.stderr)
        print("E0000 00:00:1.2 3 cuda_dnn.cc:5] Could not create cudnn handle", file=sys.stderr)
        """
    done = run(tmp_path, "-n", "2", "--log-dir", "logs", script(tmp_path, RANK, text))
    assert (done.stderr.count("oneDNN"), done.stderr.count("cudnn handle")) == (1, 2)
    assert "[0] I0000" in done.stderr
    assert "oneDNN" in (tmp_path / "logs" / "rank-1.log").read_text()


OF_EVERY_START = """
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795.218074    9398 port.cc:153] oneDNN custom operations are on. You may see slightly
2026-01-01 10:00:00.1: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may
I0000 00:00:1795.218074    9398 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU
2025-01-01 10:00:00.1: E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to\
 register cuFFT factory: Attempting to register factory for plugin cuFFT when one has already been
I0000 00:00:1795.218074    9398 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use
I0000 00:00:1795.218074    9398 generator_dataset_op.cc:213] Memory patch applied: M_TRIM_THRESHOLD=
To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow with the
E0000 00:00:1.5 9398 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call\
 to cuInit: UNKNOWN ERROR (303)
"""
THAT_MATTER = """
E0000 00:00:1.5 9398 cuda_dnn.cc:52] Could not create cudnn handle
failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY: out of memory
W0000 00:00:1.5 9482 op_kernel.cc:1845] UNKNOWN: RuntimeError: no file
I1122 10:00:00.000000 140 train.py:12] epoch 1
ValueError: To enable the following instructions
"""


def test_what_every_process_says_as_it_starts_is_told_from_what_matters():
    of_every_start = OF_EVERY_START.strip().splitlines()
    assert [line for line in of_every_start if not STARTUP.search(line)] == []
    assert [line for line in THAT_MATTER.splitlines() if STARTUP.search(line)] == []


# --- Tracebacks -----------------------------------------------------------------------------
def test_the_traceback_of_the_cause_is_shown_and_the_logs_have_all(tmp_path):
    text = """
        import atexit, ringreduce
        if rank == 0:
            atexit.register(beside("raised").touch)
            raise ringreduce.PeerLostError("lost", peer=1)
        wait_for("raised")
        raise ValueError("bad data")
        """
    done = run(tmp_path, "-n", "2", "--log-dir", "logs", script(tmp_path, RANK, text))
    assert done.stderr.count("Traceback (most recent call last):") == 1
    title, *rest = done.stderr.partition("ringreduce: rank 1 failed first")[2].splitlines()
    assert title == " (exit code 1); all workers were stopped"
    assert "ringreduce:   ValueError: bad data" in rest
    assert f"ringreduce: {tmp_path / 'logs'} has the tracebacks of all ranks" in rest
    for rank in (0, 1):
        assert "Traceback (most" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()


def test_a_traceback_that_was_only_logged_is_shown(tmp_path):
    # After a while, since the program runs on.
    text = """
        import traceback
        try:
            raise ValueError("bad data")
        except ValueError:
            traceback.print_exc()
        wait_for("end")
        print("later", flush=True)
        """
    command = ("run", "-n", "1", script(tmp_path, RANK, text))
    with launcher(tmp_path, *command, RINGREDUCE_TIME_SCALE="0.02") as job:
        job.wait_error("[0] ValueError: bad data")
        (tmp_path / "end").touch()
        assert job.wait() == 0
        assert job.stderr.count("ValueError: bad data") == 1


def test_a_traceback_that_several_ranks_have_is_shown_once(tmp_path):
    text = """
        import atexit
        beside(f"raises{rank}").touch()
        for other in range(3):
            wait_for(f"raises{other}")
        atexit.register(wait_for, "end")
        raise ValueError("bad data")
        """
    name = script(tmp_path, RANK, text)
    with launcher(tmp_path, "run", "-n", "3", name, RINGREDUCE_TIME_SCALE="0.05") as job:
        job.wait_error("(the same on ranks 0, 1, 2)")
        (tmp_path / "end").touch()
        job.wait()
        assert job.stderr.count("Traceback (most recent call last):") == 1
        first = r"ringreduce: rank \d failed first \(.*\nringreduce:   ValueError: bad data\n"
        then = r"ringreduce: then ranks \d, \d.*: the same\n"
        assert re.search(rf"^{first}{then}", job.stderr, flags=re.MULTILINE)


def line_of(program: Path, text: str) -> int:
    return program.read_text().partition(text)[0].count("\n") + 1


def test_of_an_interrupted_job_little_is_shown_but_errors_of_handlers(tmp_path):
    """Interrupted below a line of the program, which is what is shown."""
    text = """
        import threading
        try:
            threading.Event().wait(print("ready", flush=True))
        except KeyboardInterrupt:
            if rank == 2:
                raise OSError("no space")
            raise
        """
    name = script(tmp_path, RANK, text)
    with launcher(tmp_path, "run", "-n", "3", name) as job:
        job.wait_shown("ready", times=3)
        job.signal(2)
        assert job.wait() == 130
        # Where Python takes long to end, the launcher says that it waits.
        said = [line for line in job.stderr.splitlines() if "waits up to" not in line]
        assert said[0] == "ringreduce: stopped by SIGINT"
        assert said[1].startswith("ringreduce: ranks 0, 1: KeyboardInterrupt (File ")
        line = line_of(tmp_path / name, "threading.Event().wait(")
        assert said[1].endswith(f'script.py", line {line}, in <module>)')
        assert said[2] == "ringreduce: rank 2:"
        assert said[-1] == "ringreduce:   OSError: no space"


# --- With Keras -----------------------------------------------------------------------------
# `at` is called after each batch.
KERAS = f"""{RANK}
import keras, numpy
import ringreduce.keras as rr
class At(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        at(batch)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
"""


@pytest.mark.full
@pytest.mark.tensorflow
def test_ctrl_c_in_training_reaches_each_ranks_handler_and_shows_few_lines(tmp_path):
    text = """
        rr.init()
        def at(batch):
            if batch == 9:
                print("trains", flush=True)
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        data = numpy.ones((1 << 20, 3), "float32")
        try:
            rr.fit(model, data, data[:, :1], batch_size=8, verbose=0, callbacks=[At()])
        except KeyboardInterrupt:
            print("saves", flush=True)
            raise
        """
    name, quiet = script(tmp_path, KERAS, text), {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with launcher(tmp_path, "run", "-n", "2", name, **quiet, CUDA_VISIBLE_DEVICES="") as job:
        job.wait_shown("trains", times=2)
        shown = len(job.stderr.splitlines())
        job.signal(2)
        assert job.wait() == 130
        assert sorted(job.stdout.splitlines()[-2:]) == ["[0] saves", "[1] saves"]
        *waits, stopped, where = job.stderr.splitlines()[shown:]
        assert all("waits up to" in line for line in waits)  # Where Python takes long to end.
        assert stopped == "ringreduce: stopped by SIGINT"
        assert where.startswith("ringreduce: ranks 0, 1: KeyboardInterrupt (File ")
        line = line_of(tmp_path / name, "rr.fit(")
        assert where.endswith(f'script.py", line {line}, in <module>)')


@pytest.mark.full
@pytest.mark.tensorflow
def test_the_bar_of_keras_moves_while_the_epoch_runs(tmp_path):
    text = """
        def at(batch):
            if batch == 4:
                wait_for("end")
        model.compile("sgd", "mse")
        data = numpy.ones((64, 3), "float32")
        model.fit(data, data[:, :1], batch_size=8, callbacks=[At()])
        """
    with Terminal(tmp_path, "-n", "2", script(tmp_path, KERAS, text), columns=120) as job:
        # The callback runs before the bar is drawn, and Keras leaves out states that come soon.
        job.wait_shown("/8")
        assert re.match(r"\[0\] .*/8 ", screen_of(job.shown)[-1])
        (tmp_path / "end").touch()
        assert job.wait() == 0
    rows = screen_of(job.shown)
    for rank in (0, 1):
        assert [row for row in rows if row.startswith(f"[{rank}] 8/8 ")]
    assert b"\x1b[1m" not in job.shown  # NO_COLOR is set.


def test_a_process_that_follows_writes_a_file_and_lines_of_its_own(tmp_path):
    out = io.StringIO()
    plan = JobPlan([], 2, output="rank0")
    logs = Logs(tmp_path, range(2))
    shows = Display(Screen(["0", "1"], out, io.StringIO()), logs, plan)
    shows.take(Output(0, False, b"half"))
    shows.follow([1])
    shows.start(0, 1)
    shows.take(Output(0, False, b"of the next\n", life=1))
    shows.take(Output(0, False, b" a line\n"))
    shows.take(Output(1, False, b"of rank 1\n"))
    assert (tmp_path / "rank-0.log").read_text() == "half a line\n"
    assert (tmp_path / "rank-0.1.log").read_text() == "of the next\n"
    # Rank 1 is now the first.
    assert out.getvalue() == "[1] of rank 1\n"
    shows.reveal(0)
    assert "[0] of the next\n" in out.getvalue()


def test_a_file_of_an_earlier_job_is_written_anew(tmp_path):
    (tmp_path / "rank-0.1.log").write_text("old")
    logs = Logs(tmp_path, range(1))
    logs.start(0, 1)
    assert (tmp_path / "rank-0.1.log").read_text() == ""
