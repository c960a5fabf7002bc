"""Tests that failed and are run once more by themselves: shown, written down, and a fault if new.

A race may pass the second time, so a second run hides it. `make test` shows such tests; `make
test-full` fails for them (``--listed``), but for those in tests/run_again.txt with their cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["causes", "junit_file", "pytest_addoption"]


def causes(text: str) -> dict[str, str]:
    """Read a list: each test with its cause, which is on the lines after it, indented.

    Lines that begin with ``#`` and empty ones do not count. Raises ValueError for a test without a
    cause, or a cause without a test.
    """
    found: dict[str, str] = {}
    test = ""
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("#"):
            continue
        if not line.startswith((" ", "\t")):
            test = line.strip()
            found[test] = ""
        elif not test:
            raise ValueError(f"{line.strip()!r} is the cause of no test")
        else:
            found[test] = f"{found[test]} {line.strip()}".strip()
    for test, cause in found.items():
        if not cause:
            raise ValueError(f"{test} has no cause: write it below, indented")
    return found


def junit_file(path: str, part: str, is_again: bool) -> str:
    """The file for one of several runs that are given the same `path`: ``junit.full.again.xml``."""
    file = Path(path)
    names = [file.stem, *filter(None, (part, "again" if is_again else ""))]
    return str(file.with_name(".".join(names) + file.suffix))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="", help="this run's name, which its JUnit file gets too")
    parser.addoption(
        "--listed",
        type=Path,
        help="of tests that are run again, let the run fail for those that are not in this list",
    )


class Again:
    """Watches one run of pytest; `is_again`: what failed before is run once more."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_again = bool(config.getoption("--last-failed", False))
        self._tests: list[str] = []
        self._shown_in = config.rootpath / "build" / "run_again"
        listed = config.getoption("--listed")
        try:
            self._causes = None if listed is None else causes(listed.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"--listed {listed}: {error}") from None
        if path := getattr(config.option, "xmlpath", None):
            part = config.getoption("--part")
            config.option.xmlpath = junit_file(path, part, self._is_again)

    @property
    def _unlisted(self) -> Sequence[str]:
        return () if self._causes is None else [t for t in self._tests if t not in self._causes]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._is_again:
            self._tests = [item.nodeid for item in session.items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unlisted and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the tests, and append them to the file that `.ci/run` shows at its end."""
        if not self._tests:
            return
        terminalreporter.section("failed, and run again by themselves")
        self._shown_in.parent.mkdir(exist_ok=True)
        with self._shown_in.open("a", encoding="utf-8") as shown:
            for nodeid in self._tests:
                terminalreporter.line(nodeid)
                shown.write(f"{nodeid}\n")
        if self._unlisted:
            terminalreporter.line("")
            terminalreporter.line(
                "This run fails, since these needed it and are not listed with a cause in "
                "tests/run_again.txt:"
            )
            for nodeid in self._unlisted:
                terminalreporter.line(nodeid)


@pytest.hookimpl(tryfirst=True)  # before the plugin that opens the JUnit file
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Again(config))
