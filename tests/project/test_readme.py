"""README.md and the guides show programs that run, and commands, settings and files that exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ringreduce.vocabulary import config, launchers
from tests.jobs import run_job
from tests.processes import clean_environment
from tests.scope import in_full

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
GUIDES = [page for page in PAGES if "guides" in page.parts]
BY_HAND = {"README.md", "CONTRIBUTING.md", "docs/how-it-works.md", *map(str, GUIDES)}
SHOWN = "\n".join(text for page, text in PAGES.items() if str(page) in BY_HAND)
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", SHOWN, re.DOTALL))
LINKS = [
    (page, link)
    for page, text in PAGES.items()
    for link in re.findall(r"\]\(((?!https?:)[^)#]+)", text)
]


@pytest.fixture
def train(tmp_path):
    """The first example, as a file."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAMS["train.py"])
    return str(file)


def test_every_python_block_has_a_name():
    assert SHOWN.count("```python") == len(PROGRAMS) == 12


def test_the_readme_is_short():
    assert len(README.splitlines()) < 180


def test_the_diff_is_of_the_first_example():
    [diff] = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    program = [line.split("(", 1)[0] for line in PROGRAMS["train.py"].splitlines()]
    for line in diff.splitlines():
        assert line.startswith("-") or line[1:].split("(", 1)[0].removeprefix("comm = ") in [
            known.removeprefix("comm = ") for known in program
        ], line


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("size", [in_full(1), in_full(2), 4])
def test_the_first_example_ends_as_the_readme_says_on_any_number_of_ranks(train, size):
    command = shlex.split(re.search(r"\$ (ringreduce run .*)", README).group(1))
    assert command == ["ringreduce", "run", "-n", "4", "train.py"]
    [shown] = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    result = run_job(size, [train], directory=Path(train).parent)  # Where it saves its model.
    assert result.exit_code == 0, result.errors
    assert re.findall(r"loss: (\S+)", result.output)[-1:] == re.findall(r"loss: (\S+)", shown)
    last = dict(re.findall(rf"rank (\d) of {size}: first weight (-?\d\.\d{{6}})", result.output))
    assert sorted(map(int, last)) == list(range(size))
    assert len(set(last.values())) == 1


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "workers", "loss"),
    [
        in_full("full.py", 2, r"loss over all of it: (\S+)"),
        in_full("forms.py", 2, r"rank \d: loss (\S+)"),
        in_full("vote.py", 2, r"rank \d: loss (\S+)"),
        in_full("experts.py", 3, r"rank \d: loss (\S+)"),
        in_full("loop.py", 2, r"rank \d: loss (\S+)"),
        in_full("elastic_loop.py", 3, r"rank \d: loss (\S+)"),
    ],
)
def test_an_example_says_the_same_on_all_ranks(tmp_path, name, workers, loss):
    file = tmp_path / name
    file.write_text(PROGRAMS[name])
    result = run_job(workers, [str(file)], directory=tmp_path)  # Where it saves its model.
    assert result.exit_code == 0, result.errors
    losses = re.findall(loss, result.output)
    assert len(losses) == workers
    assert len(set(losses)) == 1


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
def test_prometheus_reads_what_the_example_writes(tmp_path):
    (tmp_path / "prometheus.py").write_text(PROGRAMS["prometheus.py"])
    result = run_job(2, [str(tmp_path / "prometheus.py")], directory=tmp_path)
    assert result.exit_code == 0, result.errors
    families = text_string_to_metric_families((tmp_path / "training.prom").read_text())
    found = {family.name: family.samples[0].value for family in families}
    assert found.keys() == {
        f"training_{name}"
        for name in ("epoch", "loss", "rr_bytes", "rr_hidden", "rr_slowest_rank", "rr_step_ms")
    } | {"training_rr_waiting_ms"}
    assert found["training_epoch"] == 3
    assert 0 <= found["training_rr_waiting_ms"] < found["training_rr_step_ms"]


@pytest.mark.tensorflow
@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_example_of_a_notebook_returns_what_the_workers_do(tmp_path):
    (tmp_path / "notebook.py").write_text(PROGRAMS["notebook.py"])
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert done.stdout == "[(0, 5), (1, 5)]\n", done.stderr


def test_the_ring_in_numpy_prints_what_the_page_says(tmp_path):
    (tmp_path / "ring.py").write_text(PROGRAMS["ring.py"])
    done = subprocess.check_output([sys.executable, "ring.py"], cwd=tmp_path, text=True)
    assert f"```text\n{done}```" in SHOWN


def test_the_first_change_mends_what_its_test_finds(tmp_path):
    file = Path("ringreduce/vocabulary/words.py")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text((ROOT / file).read_text())
    program = {}
    exec(PROGRAMS["test_words.py"], program)
    [test] = (value for name, value in program.items() if name.startswith("test_"))

    def failed():
        exec((tmp_path / file).read_text(), program)
        for case in test.pytestmark[0].args[1]:
            try:
                test(*case)
            except AssertionError:
                yield case[0]

    assert list(failed()) == [20]
    [change] = re.findall(r"```diff\n(---.*?)```", SHOWN, re.DOTALL)
    subprocess.run(["git", "apply"], cwd=tmp_path, input=change, text=True, check=True)
    assert list(failed()) == []


def test_the_example_on_arrays_runs(tmp_path):
    file = tmp_path / "arrays.py"
    file.write_text(PROGRAMS["arrays.py"])
    result = run_job(3, [str(file)])
    assert result.exit_code == 0, result.errors
    assert result.output.count("Statistics(") == 3


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r"^    make (\w+) ", README, re.MULTILINE)))
)
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_test_files_that_the_makefile_names_exist():
    targets = ("check-full", "check-lowest", "check-without-native")
    commands = subprocess.check_output(["make", "-n", *targets], cwd=ROOT, text=True)
    files = set(re.findall(r"tests/[\w/]+\.py", commands))
    assert {file for file in files if not (ROOT / file).exists()} == set()
    assert len(files) > 20


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"RINGREDUCE_\w+", SHOWN))))
def test_variables_are_settings(variable):
    # One that is no setting of a communicator is read by its full name.
    files = config.__file__, launchers.__file__
    by_name = any(f'"{variable}"' in Path(file).read_text(encoding="utf-8") for file in files)
    assert by_name or variable.removeprefix("RINGREDUCE_").lower() in config.SETTINGS


# What the launcher alone sets is left out.
@pytest.mark.parametrize("name", [name for name in config.SETTINGS if name != "rendezvous_fd"])
def test_every_setting_is_in_the_table_with_its_values_and_default(name):
    [row] = re.findall(rf"^\| .*`RINGREDUCE_{name.upper()}`.* \|$", SHOWN, re.MULTILINE)
    assert all(f"`{value}`" in row for value in config.SETTINGS[name].values)
    default = getattr(config.Config, name)
    if name == "link_timeout_s":
        default /= config.time_scale()
    if config.SETTINGS[name].reads in (int, float) and config.SETTINGS[name].is_choice:
        assert re.search(rf"\({default:.0f}[),]", row)


@pytest.mark.parametrize(("page", "link"), LINKS, ids=[f"{p}-{link}" for p, link in LINKS])
def test_links_lead_to_files(page, link):
    assert (ROOT / page.parent / link).is_file()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:docs|bench)/[\w.]+)`", SHOWN))))
def test_files_it_points_to_exist(path):
    assert (ROOT / path).is_file()
