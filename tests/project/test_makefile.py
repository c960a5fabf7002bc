"""What `make` starts, with programs of our own in the environment's place, and runs of tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import causes, junit_file
from tests.processes import clean_environment

ROOT = Path(__file__).parents[2]


SHOWS = """#!/bin/sh
case $1 in -c) exit;; esac
echo "$(basename $0) $1 $2: flags $MAKEFLAGS."
"""


@pytest.mark.parametrize("target", ["native", "{venv}/.installed", "{venv}/lowest/.installed"])
def test_programs_that_build_with_ninja_see_no_job_slots_of_make(tmp_path, target):
    """Else ninja says "error: Could not initialize jobserver", and builds all the same."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python", "cmake", "ctest", "ninja"):
        (programs / name).write_text(SHOWS)
        (programs / name).chmod(0o755)
    lowest = tmp_path / "lowest"
    lowest.mkdir()
    (lowest / "bin").symlink_to(programs)
    if target == "native":
        (tmp_path / ".installed").touch()
    places = [f"VENV={tmp_path}", f"LOWEST={lowest}", f"PYTHON={programs / 'python'}"]
    done = subprocess.run(
        ["make", "-j", "2", "--silent", *places, target.format(venv=tmp_path)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    started = [line for line in done.stdout.splitlines() if ": flags" in line]
    building = [line for line in started if line.startswith(("cmake --build", "python -m pip"))]
    assert building, done.stdout
    assert all(line.endswith(": flags .") for line in building), started


FLAKY = """
import pathlib
import pytest

@pytest.mark.parametrize("name", ["one", "other"])
def test_flaky(name):
    seen = pathlib.Path(__file__).with_name(name)
    is_first = not seen.exists()
    seen.touch()
    assert not is_first
"""


def test_a_second_run_that_was_needed_fails_unless_its_test_is_listed_with_a_cause(tmp_path):
    (tmp_path / "test_sometimes.py").write_text(FLAKY)
    listed = tmp_path / "list.txt"
    listed.write_text("# why\ntest_sometimes.py::test_flaky[one]\n    A race\n    of two ranks.\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.again", "--rootdir", str(tmp_path)]
        command += ["-c", "/dev/null", "-o", "cache_dir=cache", "--junit-xml=junit.xml"]
        return subprocess.run(
            [*command, "--part", "full", *arguments],
            cwd=tmp_path,
            env=clean_environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert run().returncode == 1
    again = run("--last-failed", "--listed", str(listed))
    assert again.returncode == 1, again.stdout
    assert "2 passed" in again.stdout
    told = again.stdout.partition("not listed with a cause")[2]
    assert "test_flaky[other]" in told
    assert "test_flaky[one]" not in told
    assert "test_flaky[one]" in (tmp_path / "build/run_again").read_text()
    # Both runs have a file.
    assert 'failures="2"' in (tmp_path / "junit.full.xml").read_text()
    assert 'failures="0"' in (tmp_path / "junit.full.again.xml").read_text()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a.py::test\nb.py::test\n  why\n", "a.py::test has no cause"),
        ("  why\na.py::test\n  why\n", "'why' is the cause of no test"),
    ],
    ids=["no cause", "no test"],
)
def test_a_list_without_causes_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        causes(text)


def test_tests_that_may_fail_at_first_are_listed_as_what_they_are():
    """Each is a test of this project."""
    for test in causes((ROOT / "tests/run_again.txt").read_text(encoding="utf-8")):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("part", "is_again", "name"),
    [
        ("", False, "junit.xml"),
        ("", True, "junit.again.xml"),
        ("full", True, "junit.full.again.xml"),
    ],
)
def test_each_run_of_tests_has_a_junit_file_of_its_own(part, is_again, name):
    assert junit_file("build/junit.xml", part, is_again) == f"build/{name}"
