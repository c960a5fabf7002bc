"""README.md and the guides show programs that run, and commands, settings and files that exist."""

import re
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


@pytest.fixture
def played(tmp_path):
    """Run a program that pages show, where it may save its model; return what the ranks print."""

    def play(name, workers):
        (tmp_path / name).write_text(PROGRAMS[name])
        result = run_job(workers, [str(tmp_path / name)], directory=tmp_path)
        assert result.exit_code == 0, result.errors
        return result.output

    return play


def test_every_python_block_has_a_name_and_the_readme_is_short():
    assert SHOWN.count("```python") == len(PROGRAMS) == 18
    assert len(README.splitlines()) < 185


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
def test_the_first_example_ends_as_the_readme_says_on_any_number_of_ranks(played, size):
    command = re.search(r"\$ (ringreduce run .*)", README).group(1)
    assert command.split() == ["ringreduce", "run", "-n", "4", "train.py"]
    [shown] = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    output = played("train.py", size)
    assert re.findall(r"loss: (\S+)", output)[-1:] == re.findall(r"loss: (\S+)", shown)
    last = dict(re.findall(rf"rank (\d) of {size}: first weight (-?\d\.\d{{6}})", output))
    assert sorted(map(int, last)) == list(range(size))
    assert len(set(last.values())) == 1


@pytest.mark.tensorflow
@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["full", "forms", "vote", "experts", "loop", "elastic_loop"])
def test_an_example_says_the_same_on_all_ranks(played, name):
    workers = 3 if name in ("experts", "elastic_loop") else 2
    output = played(f"{name}.py", workers)
    losses = re.findall(r"(?:rank \d: loss|loss over all of it:) (\S+)", output)
    assert len(losses) == workers
    assert len(set(losses)) == 1


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
def test_prometheus_reads_what_the_example_writes(played, tmp_path):
    played("prometheus.py", 2)
    families = text_string_to_metric_families((tmp_path / "training.prom").read_text())
    found = {family.name: family.samples[0].value for family in families}
    names = "epoch loss rr_bytes rr_hidden rr_slowest_rank rr_step_ms rr_waiting_ms"
    assert found.keys() == {f"training_{name}" for name in names.split()}
    assert found["training_epoch"] == 3
    assert 0 <= found["training_rr_waiting_ms"] < found["training_rr_step_ms"]


@pytest.mark.tensorflow
@pytest.mark.full
@pytest.mark.timeout(200)
def test_the_example_of_a_notebook_returns_what_the_workers_do(tmp_path):
    (tmp_path / "notebook.py").write_text(PROGRAMS["notebook.py"])
    command, environment = [sys.executable, "notebook.py"], clean_environment()
    done = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    assert done == "[(0, 5), (1, 5)]\n"


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


def test_the_example_on_arrays_runs(played):
    assert played("arrays.py", 3).count("Statistics(") == 3


def test_make_targets_and_test_files_that_the_makefile_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^    make (\w+) ", README, re.MULTILINE)
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    targets = ("check-full", "check-lowest", "check-without-native")
    commands = subprocess.check_output(["make", "-n", *targets], cwd=ROOT, text=True)
    files = set(re.findall(r"tests/[\w/]+\.py", commands))
    assert [file for file in files if not (ROOT / file).exists()] == []
    assert len(files) > 20


def test_variables_are_settings():
    # One that is no setting of a communicator is read by its full name.
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (config, launchers)]
    assert not [
        variable
        for variable in re.findall(r"RINGREDUCE_\w+", SHOWN)
        if variable.removeprefix("RINGREDUCE_").lower() not in config.SETTINGS
        and not any(f'"{variable}"' in source for source in sources)
    ]


def test_every_setting_is_in_the_table_with_its_values_and_default():
    for name, setting in config.SETTINGS.items():
        if name == "rendezvous_fd":
            continue  # What the launcher alone sets.
        [row] = re.findall(rf"^\| .*`RINGREDUCE_{name.upper()}`.* \|$", SHOWN, re.MULTILINE)
        assert all(f"`{value}`" in row for value in setting.values), row
        default = getattr(config.Config, name)
        if name == "link_timeout_s":
            default /= config.time_scale()
        if setting.reads in (int, float) and setting.is_choice:
            assert re.search(rf"\({default:.0f}[),]", row), row


def test_links_and_paths_lead_to_files():
    pointed = [ROOT / path for path in re.findall(r"`((?:docs|bench)/[\w.]+)`", SHOWN)]
    for page, text in PAGES.items():
        links = re.findall(r"\]\(((?!https?:)[^)#]+)", text)
        pointed += [ROOT / page.parent / link for link in links]
    assert [path for path in pointed if not path.is_file()] == []
    assert len(pointed) > 100


def headings_of(page):
    """What a link to a heading of `page` has after ``#``, by the rule of git hosts and MyST."""
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for heading in re.findall(r"^#{1,4} (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_to_headings_lead_to_headings():
    known = {(ROOT / page): set(headings_of(page)) for page in PAGES}
    missing, count = [], 0
    for page, text in PAGES.items():
        for path, heading in re.findall(r"\]\(((?!https?:)[^)#\s]*)#([^)\s]+)\)", text):
            target = (ROOT / page.parent / path).resolve() if path else ROOT / page
            count += 1
            # Others are made by Sphinx from docstrings, or lie outside of docs/.
            if heading not in known.get(target, {heading}):
                missing.append((str(page), path, heading))
    assert missing == []
    assert count > 100
