"""The programs of docs/guides/recipes.md do what the page says, and are those that it shows."""

import json
import re
import shutil
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from ringreduce.vocabulary.cores import bound_cores
from tests.commands.test_nodes import free_port
from tests.jobs import run_job
from tests.on_ray import output_of
from tests.processes import Process, clean_environment, launcher

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/recipes.md").read_text(encoding="utf-8")
FOLDER = ROOT / "examples/recipes"
NAMES = sorted(file.name for file in FOLDER.glob("*.py"))
# Half of it on two cores that others use too.
LIMIT_S = 300.0
# Of 200 held out rounding may decide another class for one.
ONE_ROW = 0.006
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def recipe(*packages):
    """A test of `make test-full`, left out by name where one of the packages is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    reason = f"not installed: {', '.join(missing)}"
    marks = pytest.mark.full, pytest.mark.tensorflow, pytest.mark.timeout(2 * LIMIT_S)

    def mark(test):
        for each in (*marks, *[pytest.mark.skipif(True, reason=reason)] * bool(missing)):
            test = each(test)
        return test

    return mark


def trained(size, name, *arguments, **options):
    """What the ranks of a job print, by rank."""
    result = run_job(size, [str(FOLDER / name), *arguments], **options)
    assert result.exit_code == 0, result.errors
    return ranks_of(result.output, size)


def ranks_of(output, size):
    """The lines of each rank, without its mark."""
    lines = [line.partition("] ") for line in output.splitlines()]
    return ["\n".join(text for mark, _, text in lines if mark == f"[{r}") for r in range(size)]


def said_alone(folder, name, *arguments):
    """What a program prints that is one process, and has workers of its own."""
    command = [sys.executable, str(FOLDER / name), *arguments]
    with Process(command, folder, environment=clean_environment(**QUIET)) as process:
        assert process.wait(LIMIT_S) == 0, process.stderr
        return process.stdout


def facts(text):
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


def found(pattern, text):
    """The one word that follows."""
    [word] = re.findall(rf"{pattern} (\S+)", text)
    return word


def numbers(text, name="losses"):
    """Those of the line that begins with this name."""
    [line] = re.findall(rf"^{name} (.*)$", text, re.MULTILINE)
    return [float(word) for word in line.split()]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_names_the_program_and_shows_lines_of_it(name):
    assert f"`{name}`" in PAGE or f"recipes/{name}" in PAGE
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    for block in re.findall(rf"```python\n# {name}\n(.*?)```", PAGE, re.DOTALL):
        shown = block.splitlines()
        places = (lines[at : at + len(shown)] for at in range(len(lines) - len(shown) + 1))
        assert shown in [textwrap.dedent("\n".join(place)).splitlines() for place in places]


def test_the_page_shows_no_other_program():
    assert set(re.findall(r"```python\n# (\S+)\n", PAGE)) <= set(NAMES)


@recipe("keras_tuner")
def test_the_best_trial_of_keras_tuner_is_that_of_the_least_loss(tmp_path):
    *trials, last = facts(said_alone(tmp_path, "tune_keras.py", "--trials", "2", "--epochs", "3"))
    assert len(trials) == 2
    for trial in trials:
        assert len(trial["weights_sha256"]) == 2
        assert len(set(trial["weights_sha256"])) == 1
    best = min(trials, key=lambda trial: trial["val_loss"])
    assert (last["best"], last["val_loss"]) == (best["values"], best["val_loss"])
    assert last["loaded"] == pytest.approx(last["val_loss"], rel=1e-4)


@recipe("ray")
def test_ray_tune_sees_each_epoch_and_keeps_the_best_model(tmp_path):
    output = output_of(tmp_path, FOLDER / "tune_ray.py", "--storage", str(tmp_path))
    digests = [json.loads(line) for line in re.findall(r'(\{"weights_sha256".*\})', output)]
    assert len(digests) == 2
    for trial in digests:
        assert len(trial["weights_sha256"]) == 2
        assert len(set(trial["weights_sha256"])) == 1
    *trials, last = facts(output)
    trials = [trial for trial in trials if "losses" in trial]
    assert [len(trial["losses"]) for trial in trials] == [4, 4]
    assert last["best"] == min(trials, key=lambda trial: trial["losses"][-1])["rate"]
    assert (Path(last["model"]) / "model.keras").is_file()


@recipe()
def test_rows_of_the_tf_data_service_are_read_once_by_all_ranks_together():
    ranks = trained(2, "data_service.py")
    shares = [list(map(int, re.findall(r"\d+", text.splitlines()[0]))) for text in ranks]
    assert sum(share for share, _, _ in shares) == 400
    assert [everything for _, *everything in shares] == [[400, 400]] * 2
    assert len({found("weights", text) for text in ranks}) == 1
    losses = numbers(ranks[0])
    assert losses[-1] < losses[0] / 10


@recipe()
def test_the_same_batches_of_the_tf_data_service_train_as_in_one_process():
    (alone,), ranks = (trained(size, "data_service.py", "--same") for size in (1, 2))
    assert [text.splitlines()[0].split(",")[0] for text in ranks] == ["read 400 rows"] * 2
    assert len({found("weights", text) for text in ranks}) == 1
    assert numbers(ranks[0]) == pytest.approx(numbers(alone), rel=1e-4)


@recipe("orbax")
def test_training_goes_on_from_orbaxs_files_to_the_same_bits(tmp_path):
    def train(folder, epochs):
        options = "--folder", str(tmp_path / folder), "--epochs", str(epochs)
        ranks = trained(2, "big_checkpoints.py", *options)
        assert len({found("with", text) for text in ranks}) == 1
        return re.findall(r"epochs (.*) end with (\S+)", ranks[0])[0]

    assert train("parts", 3)[0] == "0 1 2"
    epochs, last = train("parts", 6)
    assert epochs == "3 4 5"
    assert train("whole", 6) == ("0 1 2 3 4 5", last)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["4", "5"]


@recipe("orbax")
def test_orbax_writes_on_rank_0_alone(tmp_path):
    homes = [tmp_path / str(rank) for rank in range(2)]
    unlike = {rank: {"HOME": str(home), **QUIET} for rank, home in enumerate(homes)}
    trained(2, "big_checkpoints.py", "--folder", "~/files", unlike=unlike, directory=tmp_path)
    written = [sorted(path.name for path in home.glob("files/*")) for home in homes]
    assert written == [["1", "2"], []]


@recipe("keras_hub")
def test_a_model_of_keras_hub_trains_as_in_one_process():
    (alone,), ranks = (trained(size, "hub.py") for size in (1, 2))
    assert len({found("weights", text) for text in ranks}) == 1
    assert numbers(ranks[0]) == pytest.approx(numbers(alone), rel=1e-3)
    assert {found("accuracy", text) for text in (alone, *ranks)} == {"1.0"}


@recipe("sklearn")
def test_a_pipeline_has_the_scores_of_one_process(tmp_path):
    one, two = (
        facts(said_alone(tmp_path, "sklearn_pipeline.py", "--workers", workers))[0]["scores"]
        for workers in ("1", "2")
    )
    assert two == pytest.approx(one, abs=ONE_ROW)
    assert min(one) > 0.8


@recipe("sklearn")
def test_kerass_wrapper_trains_unchanged_as_in_one_process(tmp_path):
    alone = said_alone(tmp_path, "sklearn_plain.py")
    command = "run", "-n", "2", "--unchanged", "--output", "all", str(FOLDER / "sklearn_plain.py")
    with launcher(tmp_path, *command, **QUIET) as job:
        assert job.wait(LIMIT_S) == 0, job.stderr
    texts = alone, *ranks_of(job.stdout, 2)
    assert len({found("weights", text) for text in texts[1:]}) == 1
    scores, *others = (numbers(text, "scores") for text in texts)
    assert others == [pytest.approx(scores, abs=ONE_ROW)] * 2
    first, *others = (numbers(text) for text in texts)
    assert [others[0], others[0]] == others
    assert others[0] == pytest.approx(first, rel=1e-3)


few_cores = pytest.mark.skipif(len(bound_cores()) < 2, reason="needs two cores")


@recipe()
@few_cores
def test_each_rank_has_cores_of_its_own(tmp_path):
    with launcher(tmp_path, "run", "-n", "2", str(FOLDER / "own_cores.py"), **QUIET) as job:
        assert job.wait(LIMIT_S) == 0, job.stderr
    check_cores(job.stdout, bound_cores())


@recipe()
@few_cores
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed")
def test_a_launcher_for_each_socket_makes_one_ring_of_one_host(tmp_path):
    cores = sorted(bound_cores())[:2]
    port = free_port()
    # They make the secret that they need, and end with an error if they could not share memory.
    shared = {"HOME": str(tmp_path), "RINGREDUCE_TRANSPORT": "shm"}
    environment = clean_environment(**shared, **QUIET)
    launchers = []
    for node, core in enumerate(cores):
        command = ["taskset", "-c", str(core), sys.executable, "-m", "ringreduce", "run"]
        command += ["--nnodes", "2", "--node-rank", str(node), "-n", "1"]
        command += ["--rendezvous", f"127.0.0.1:{port}", str(FOLDER / "own_cores.py")]
        launchers.append(Process(command, tmp_path, name=f"node{node}", environment=environment))
    with launchers[0] as first, launchers[1] as second:
        assert [first.wait(LIMIT_S), second.wait(LIMIT_S)] == [0, 0], first.stderr + second.stderr
    check_cores(first.stdout + second.stdout, set(cores))


def check_cores(output, cores):
    """Two ranks of one host have had these cores, and none of them together."""
    shown = re.findall(r"rank \d: cores (\S+), (\d+) threads", output)
    first, second = (set(map(int, text.split(","))) for text, _ in shown)
    assert first | second == cores
    assert not first & second
    assert [int(threads) for _, threads in shown] == [len(cores) // 2] * 2
    ends = re.findall(r"hosts 1 weights (\S+)", output)
    assert len(ends) == 2
    assert len(set(ends)) == 1
