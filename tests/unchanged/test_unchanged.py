"""How a program that nobody has changed is started, what is refused, what is left alone."""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.commands.verify import _copied
from ringreduce.keras.checks.warnings import differences
from ringreduce.keras.data.division import remedy_of_unlike_data
from ringreduce.pure.notification import left_error
from ringreduce.unchanged import draws, guard, packages, table, written
from ringreduce.vocabulary import words
from ringreduce.vocabulary.errors import ConfigError
from tests.jobs import _ROOT as ROOT
from tests.jobs import run_job
from tests.launching import run
from tests.processes import Process, clean_environment, wait_until

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(180)]

AT = {"RINGREDUCE_RENDEZVOUS": "127.0.0.1:1", "RINGREDUCE_JOB_ID": "a", "TF_CPP_MIN_LOG_LEVEL": "3"}
MODEL = """
import keras, numpy as np
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
x = np.ones((8, 4), "float32")
y = x[:, :1]
"""


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SimpleNamespace(rank=1, size=2, who={"rank": 1, "size": 2})
    for module in (guard, packages):
        monkeypatch.setattr(module, "job", lambda: job)


def unchanged(folder: Path, text: str, fresh: dict[str, str] | None = None) -> Any:
    """A job of two ranks of a program with this text; with `fresh` variables not forked."""
    (folder / "train.py").write_text(text)
    arguments = ["ringreduce/unchanged/__main__.py", str(folder / "train.py")]
    unlike = dict.fromkeys(range(2), fresh) if fresh else {}
    seed = {"PYTHONHASHSEED": "0"}
    return run_job(2, arguments, environment=seed, unlike=unlike, directory=folder)


def test_nothing_is_replaced_where_nobody_asks():
    functions = [keras.Model.fit, keras.Model.save, keras.saving.save_model, keras.utils.get_file]
    for function in (*functions, keras.optimizers.Optimizer.apply, tf.saved_model.save, input):
        assert not hasattr(function, "replaces")


def test_it_starts_before_keras_and_with_the_same_random_numbers(tmp_path):
    (tmp_path / "train.py").write_text(
        """
import os, sys
assert not {"numpy", "keras", "tensorflow"} & {*sys.modules}
os.environ["KERAS_BACKEND"] = "tensorflow"
import tensorflow as tf
import keras, numpy, random
from keras.models import save_model
for _ in range(2):
    if not os.fork():
        print(float(tf.random.uniform(())), flush=True)
        os._exit(0)
    os.wait()
assert keras.Model.fit.replaces and keras.Sequential.fit is keras.Model.fit
assert save_model is keras.saving.save_model is tf.keras.models.save_model
assert save_model.replaces and keras.src.datasets.mnist.get_file.replaces
assert sys.argv[1:] == ["--epochs", "3"] and __name__ == "__main__"
print(hash("a"), random.random(), numpy.random.rand(), numpy.random.default_rng().random())
print(numpy.random.RandomState().rand(), numpy.random.default_rng().random())
print(float(tf.random.uniform(())), keras.initializers.GlorotUniform()((1,)).numpy())
print([int(n) for n in tf.data.Dataset.range(9).shuffle(9)])
"""
    )
    command = [sys.executable, "-m", "ringreduce.unchanged", "-m", "train", "--epochs", "3"]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            own = clean_environment(RINGREDUCE_RANK=str(rank), RINGREDUCE_SIZE="2", **AT)
            process = Process(command, tmp_path, name=f"rank{rank}", environment=own)
            ranks.append(stack.enter_context(process))
        for rank in ranks:
            rank.wait(150)
        one, two = (rank.stdout for rank in ranks)
        errors = [rank.stderr for rank in ranks]
    assert one.count("\n") == 6, errors
    assert one == two
    assert len({*one.splitlines()}) == 6  # A forked process draws other numbers than its sibling.
    numbers = one.splitlines()[3].split()
    assert numbers[0] != numbers[1]  # Each generator has another seed.
    warning = (
        "[0/2] the program has not called Model.fit, so each rank has done all of its work. "
        "Start it by itself, without ringreduce; or let it train by Model.fit."
    )
    assert [warning in said for said in errors] == [True, False]


FORKS = """
import os, random, sys, threading

def drawn():
    import numpy
    fresh = [numpy.random.default_rng().random(), numpy.random.RandomState().rand()]
    numpy.random.seed()
    return [random.random(), *fresh, numpy.random.rand()]

def forked(function, *arguments):
    child = os.fork()
    if not child:
        function(*arguments)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def show():
    print(*drawn(), sep="\\n", flush=True)

def show_and_fork():
    show()
    forked(show)

def first_import():
    assert "numpy" not in sys.modules
    import numpy
    print(numpy.random.rand(), flush=True)

random.seed(5)
forked(first_import)
forked(first_import)
forked(show)
show()
forked(show_and_fork)
forked(show)
"""


def test_a_forked_process_draws_other_numbers_and_on_all_ranks_the_same(tmp_path):
    result = unchanged(tmp_path, FORKS, {"TMPDIR": str(tmp_path)})
    assert result.exit_code == 0, result.errors
    one, two = ([line[4:] for line in result.output.splitlines() if line[1] == r] for r in "01")
    assert len({*one}) == len(one) == 2 + 5 * 4
    assert one == two


def test_threads_that_fork_at_once_have_children_with_other_numbers(monkeypatch):
    at = threading.Barrier(4)
    monkeypatch.setattr(draws._Forks, "made", 0)
    seen: list[int] = []

    def fork() -> None:
        at.wait()
        draws._count()
        try:
            made = draws._Forks.made
            os.sched_yield()
            assert draws._Forks.made == made  # Until the child has begun.
            seen.append(made)
        finally:
            draws._Forks.lock.release()

    with ThreadPoolExecutor(4) as pool:
        for forking in [pool.submit(fork) for _ in range(4)]:
            forking.result(20)
    assert sorted(seen) == [1, 2, 3, 4]


def test_a_plain_optimizer_is_refused_but_within_a_distributed_one(two_ranks):
    inner, plain = keras.optimizers.SGD(), keras.optimizers.Adam(name="adam")
    outer = rr.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner))
    guard.require_distributed(inner)
    guard.require_distributed(outer)
    text = r"rank 1 of 2 applies gradients by adam in test_unchanged.py:\d+, outside of Model.fit"
    with pytest.raises(ConfigError, match=text):
        guard.require_distributed(plain)


def test_no_step_looks_through_all_objects(two_ranks, monkeypatch):
    """Nor is anything looked for on one rank, where nothing is refused."""
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("looked at all objects"))
    late = keras.optimizers.Lion()
    outer = rr.DistributedOptimizer(scaled := keras.optimizers.LossScaleOptimizer(late))
    for optimizer in (outer, scaled, late):
        guard.require_distributed(optimizer)
    plain = keras.optimizers.SGD()
    with pytest.raises(ConfigError, match="applies gradients by"):
        guard.require_distributed(plain)
    # As `compile` does for mixed_float16.
    around = keras.optimizers.LossScaleOptimizer(rr.DistributedOptimizer(plain))
    del outer
    guard.require_distributed(around)
    guard.require_distributed(plain)
    monkeypatch.setattr(guard, "job", lambda: SimpleNamespace(size=1))
    guard.require_distributed(keras.optimizers.SGD())


def test_optimizers_in_lists_and_tables_are_distributed():
    class Holder:
        pass

    model, one, two = Holder(), keras.optimizers.SGD(), keras.optimizers.Adam()
    vars(model).update(first=one, several=[one, None, two], named={"two": two}, numbers=(1, 2))
    table._distribute(model)
    found = [model.first, *model.several, model.named["two"]]
    assert [type(each).__name__ for each in found] == ["SGD", "SGD", "NoneType", "Adam", "Adam"]
    assert {type(each) for each in found} - {type(None)} == {type(found[0]), type(found[3])}
    assert all(isinstance(found[n], rr.DistributedOptimizer) for n in (0, 1, 3, 4))
    assert found[0] is found[1]
    assert found[3] is found[4]


def test_other_ways_to_train_are_refused(two_ranks, monkeypatch):
    guard.refuse_strategy(tf.distribute.get_strategy())
    with pytest.raises(ConfigError, match=r"uses tf.distribute.OneDeviceStrategy in test_unch"):
        guard.refuse_strategy(tf.distribute.OneDeviceStrategy("/cpu:0"))
    backend = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    with pytest.raises(ConfigError, match="has Keras on jax, which trains a model on each of 2"):
        packages.require_tensorflow(backend)
    with pytest.raises(ConfigError, match=r"import ringreduce.keras.horovod in place of horovod"):
        packages.replace_in("horovod")

    class Tuner:
        def search(self) -> None:
            """Train many models."""

    tuners = types.ModuleType("keras_tuner")
    tuners.Tuner = Tuner
    monkeypatch.setitem(sys.modules, "keras_tuner", tuners)
    packages.replace_in("keras_tuner")
    with pytest.raises(ConfigError, match=r"calls keras_tuner.Tuner.search"):
        Tuner().search()


def test_ranks_that_take_other_ways_are_named(tmp_path):
    text = f"{MODEL}\nimport os\nif os.environ['RINGREDUCE_RANK'] == '0':\n    model.fit(x, y)\n"
    result = unchanged(tmp_path, f"{text}model.predict(x)\n")
    assert result.exit_code
    found = "found rank 1 in its call 1 of these, Model.predict in train.py:11, while rank 0 is in"
    assert found in result.errors
    assert "Model.fit in train.py:10" in result.errors


def test_x_that_differs_is_a_warning(tmp_path):
    text = """
import os, tensorflow as tf
data = tf.data.Dataset.from_tensor_slices((x + int(os.environ["RINGREDUCE_RANK"]), y)).batch(4)
model.fit(data, verbose=0)
"""
    result = unchanged(tmp_path, MODEL + text)
    assert result.exit_code == 0, result.errors
    warning = "the ranks have read other values in x of the first batch: on rank 1 not those of"
    assert result.errors.count(warning) == 1


def test_files_of_all_ranks_are_named_below_the_temporary_folder_too(tmp_path):
    """But not those that `tempfile` makes, which each rank has for itself."""
    (folder := tmp_path / "run").mkdir()
    text = """
import tempfile
from ringreduce.unchanged import written
written.watch(lambda: False)
open("log.csv", "a").close()
open("../beside.csv", "w").close()
with tempfile.NamedTemporaryFile("w"), tempfile.TemporaryDirectory() as made:
    open(f"{made}/x", "w").close()
    tempfile.TemporaryFile().close()
print(written.found(1))
written.warn()
"""
    own = clean_environment(TMPDIR=str(tmp_path), RINGREDUCE_RANK="0", RINGREDUCE_SIZE="2", **AT)
    command = [sys.executable, "-c", text]
    done = subprocess.run(
        command, cwd=folder, env=own, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "['log.csv', '../beside.csv']\n"
    told = "[0/2] each rank has written log.csv, ../beside.csv: what is appended is there 2 times."
    assert done.stderr.startswith(told)


@pytest.fixture
def unchanged_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_is_unchanged", True)


def test_advice_is_what_an_unchanged_program_can_follow(unchanged_program):
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    elsewhere = "in a program with rr.fit, without --unchanged"
    assert differences(model)[0].endswith(f"(use rr.SyncBatchNormalization {elsewhere})")
    remedy = "sort lists of files. check=False leaves this check out"
    assert remedy_of_unlike_data().endswith(f"{remedy} {elsewhere}.")
    with pytest.raises(ConfigError, match=r"Leave that out and take a larger batch_size"):
        rr.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2))
    assert "shard" not in str(left_error(1, 3, "", rank=0, size=2))


def test_a_loop_of_its_own_is_named_at_its_line(tmp_path):
    text = """
import tensorflow as tf

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(x))
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)

step()
"""
    result = unchanged(tmp_path, MODEL + text)
    assert "applies gradients by adam in train.py:16, outside of Model.fit" in result.errors
    assert "each rank has written" not in result.errors


def test_another_ranks_folder_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "mkdir", make := os.mkdir)
    written.share_folders()
    os.makedirs(tmp_path / "run" / "logs")
    os.makedirs(tmp_path / "run" / "logs")
    os.mkdir = make
    monkeypatch.setattr(written, "time", SimpleNamespace(time=lambda: time.time() + 100))
    written.share_folders()
    with pytest.raises(FileExistsError):
        os.mkdir(tmp_path / "run")


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    """The file that processes lock which download."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(written, "job", lambda: SimpleNamespace(who={"rank": 1, "size": 2}))
    return tmp_path / f"ringreduce-{os.geteuid()}" / "download.lock"


def is_locked(path: Path) -> bool:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_process_of_a_host_downloads(lock, monkeypatch):
    class Builder:
        def download_and_prepare(self, folder: str) -> str:
            assert is_locked(lock)
            return folder

    datasets = SimpleNamespace(core=SimpleNamespace(DatasetBuilder=Builder))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", datasets)
    packages.download_once()
    assert Builder().download_and_prepare("data") == "data"
    assert not is_locked(lock)
    assert lock.parent.stat().st_mode & 0o777 == 0o700


def test_downloads_within_one_go_on(lock):
    """In the same thread, in another, and in a process that was forked meanwhile."""

    def once_more() -> None:
        with written.alone_on_host():
            assert is_locked(lock)

    with written.alone_on_host():
        once_more()
        thread = threading.Thread(target=once_more)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        child = multiprocessing.get_context("fork").Process(target=once_more)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert is_locked(lock)
    assert not is_locked(lock)


def test_whoever_waits_says_for_whom(lock, monkeypatch, caplog):
    with written.alone_on_host():
        pass
    monkeypatch.setattr(written, "TIMES", written.TIMES.scaled(0.01))
    monkeypatch.setattr(sys, "argv", ["folder/other.py"])
    with open(lock, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write("process 7, rank 0 of 2 of train.py,")
        other.flush()

        def released() -> bool:
            if said := caplog.text:
                fcntl.flock(other, fcntl.LOCK_UN)
            return bool(said)

        waiter = threading.Thread(target=wait_until, args=(released, "a warning", 20.0))
        waiter.start()
        with written.alone_on_host():
            assert lock.read_text() == f"process {os.getpid()}, rank 1 of 2 of other.py,"
        waiter.join()
    assert "[1/2] has waited 0 s to download" in caplog.text
    assert "process 7, rank 0 of 2 of train.py, is at it" in caplog.text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder, _: os.mkfifo(folder), "is no folder"),
        (lambda folder, _: folder.write_text(""), "is no folder"),
        (lambda folder, other: folder.symlink_to(other), "is no folder"),
        (lambda folder, other: folder.symlink_to(other / "none"), "is no folder"),
        (lambda folder, _: folder.mkdir(0o755), "other users may enter"),
        (lambda folder, other: in_folder(folder).symlink_to(other / "file"), "symbolic links"),
        (lambda folder, _: os.mkfifo(in_folder(folder)), "Invalid argument"),
    ],
    ids=["pipe", "file", "link", "link to nowhere", "open folder", "lock a link", "lock a pipe"],
)
def test_what_others_have_put_in_the_way_is_named(lock, tmp_path, make, said):
    (other := tmp_path / "other").mkdir()
    make(lock.parent, other)
    with pytest.raises(ConfigError, match=f"rank 1 of 2 cannot have one process .*{said}") as info:
        written.alone_on_host().__enter__()
    assert "Set TMPDIR to a folder of your own" in str(info.value)
    assert not [*other.iterdir()]


def in_folder(folder: Path) -> Path:
    folder.mkdir(0o700)
    return folder / "download.lock"


def test_a_strangers_folder_is_named(lock, monkeypatch):
    (stranger := lock.parent.with_name("ringreduce-12345")).mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    text = f"{stranger} belongs to another user, of number {stranger.stat().st_uid}"
    with pytest.raises(ConfigError, match=text):
        written.alone_on_host().__enter__()


DOWNLOADS = """
import os, tensorflow_datasets as tfds

class Outer(tfds.DatasetBuilder):
    def _split_generators(self):
        os.close(os.open("busy", os.O_CREAT | os.O_EXCL))
        Inner().download_and_prepare()
        os.remove("busy")

class Inner(tfds.DatasetBuilder):
    def _split_generators(self):
        assert os.path.exists("busy")

for _ in range(50):
    Outer().download_and_prepare()
print("downloaded")
"""
DATASETS = """
import types

class DatasetBuilder:
    def download_and_prepare(self):
        self._split_generators()

core = types.SimpleNamespace(DatasetBuilder=DatasetBuilder)
"""


def test_ranks_download_in_turn_though_one_download_makes_another(tmp_path):
    (tmp_path / "tensorflow_datasets.py").write_text(DATASETS)
    result = unchanged(tmp_path, DOWNLOADS, {"TMPDIR": str(tmp_path)})
    assert result.exit_code == 0, result.errors
    assert result.output == "[0] downloaded\n[1] downloaded\n"


@pytest.mark.full
def test_children_files_and_errors(tmp_path):
    """A child is no rank, and trains by itself; rank 0 says what all have written."""
    text = """
import multiprocessing, sys

def work(rows):
    model.fit(x[:rows], y[:rows], verbose=0)
    return keras.Model.fit.__module__, int(model.optimizer.iterations)

if __name__ == "__main__":
    model.fit(x, y, verbose=0)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(work, [3]) == [("keras.src.backend.tensorflow.trainer", 1)]
    open("notes.txt", "w").close()
    try:
        model.fit(x, y[:5])
    except ValueError as error:
        print("said:", str(error).splitlines()[0])
    model.save("last.keras")
    raise SystemExit(3)
"""
    (tmp_path / "temporary").mkdir()
    result = unchanged(tmp_path, MODEL + text, {"TMPDIR": str(tmp_path / "temporary")})
    assert result.exit_code == 3, result.errors
    assert result.output.count("said:") == 2
    [told] = [line for line in result.errors.splitlines() if "each rank has written" in line]
    assert told.startswith("[0] [0/2] each rank has written notes.txt:")
    assert {path.name for path in tmp_path.iterdir()} >= {"notes.txt", "last.keras"}


@pytest.mark.full
def test_what_is_tried_out_writes_nothing(tmp_path, tmp_path_factory):
    # The program runs in a copy of its folder.
    saves = f"model.save({str(tmp_path / 'm.keras')!r})\n    open('n', 'w')\n"
    text = f"{MODEL}try:\n    model.fit(x, y)\nfinally:\n    {saves}"
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "ringreduce", "verify", "--unchanged", "train.py"]
    command += ["--steps", "1"]
    quiet, output = clean_environment(TF_CPP_MIN_LOG_LEVEL="3"), tmp_path_factory.mktemp("output")
    with Process(command, tmp_path, output=output, environment=quiet) as found:
        assert found.wait(120) == 0, found.stderr
        assert "Fastest on this machine" in found.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_copy_links_what_is_large(tmp_path, monkeypatch):
    from_ = tmp_path / "from"
    from_.mkdir()
    (from_ / "small").write_text("1")
    (from_ / "large").write_bytes(bytes((16 << 20) + 1))
    (from_ / ".git").mkdir()
    monkeypatch.chdir(from_)
    (inside := from_ / "ringreduce-verify-1").mkdir()
    with _copied(inside / "to"):
        assert Path.cwd() == inside / "to"
        assert sorted(path.name for path in Path().iterdir()) == ["large", "small"]
        assert [Path(name).is_symlink() for name in ("large", "small")] == [True, False]
    assert Path.cwd() == from_
    monkeypatch.setattr("ringreduce.commands.verify._FILES_MAX", 1)
    with pytest.raises(ConfigError, match="found more than 1 files"), _copied(tmp_path / "other"):
        pass


def test_the_launcher_starts_a_program_and_shows_rank_0(tmp_path):
    text = "import sys\nprint('ringreduce.unchanged' in sys.modules, *sys.argv[1:])\n"
    (tmp_path / "train.py").write_text(text)
    found = run(tmp_path, "-n", "2", "--unchanged", "train.py", "--epochs", "3")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["[0] True --epochs 3"]


@pytest.mark.full
def test_the_launcher_starts_the_example_and_shows_rank_0(tmp_path):
    program = str(ROOT / "examples" / "plain.py")
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    found = run(tmp_path, "-n", "2", "--unchanged", program, timeout_s=200.0, **quiet)
    assert found.returncode == 0, found.stderr
    shown = found.stdout.splitlines()
    assert [line for line in shown if "Epoch" in line] == [f"[0] Epoch {n}/8" for n in range(1, 9)]
    assert re.fullmatch(r"\[0\] accuracy on 360 other digits: 0\.9\d\d", shown[-1])
    assert not [*tmp_path.iterdir()]
