"""Proves that the suite notices mistakes: makes each deliberate breakage in a copy of the tree.

    python -m tests.breakages [NAME ...] [--touched [COMMIT]] [--list] [--jobs N] [--again]

The breakages are in `tests/breakage_list.txt`. For each, the C tests run if it is in the C library;
then its likely test files, up to the first failure, also those cases that `make test-full` alone
runs; and if they pass, the whole suite, as `make test` runs it. A failing Python test counts only
if it passes without the breakage. Results are kept in build/breakages.json, so an interrupted run
continues. A breakage that was caught is run again when its entry or the file that it is made in has
changed, or the test that caught it is gone; with ``--again`` in any case. ``--touched`` runs those
again of which the entry, the file, or a test file has changed since COMMIT, by default the last.

Exit code 1: a breakage was missed, or could not be made.
"""

import argparse
import contextlib
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.breakage_list import BREAKAGES, Breakage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "breakages.json"
# Where the tests of a copy write what fails; by it the tool knows its processes too.
_REPORT = "BREAKAGES_REPORT"
_BUILD_S, _FILES_S, _SUITE_S = 600.0, 1200.0, 5400.0
_WIDTH = 80
# But for the test of the list, which sees every breakage.
_SUITE = ("-n", "2", "--dist", "loadfile", "--ignore=tests/test_breakages.py")
# sitecustomize.py of a copy: the finder of an editable installation comes before PYTHONPATH.
_SITE = """
import sys

sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if isinstance(finder, type) or finder.find_spec("ringreduce", None) is None
]
"""
_WHERE = """
import ringreduce
from ringreduce.effects.native import library

print(ringreduce.__file__)
print(library()._name)
"""


class BrokenTool(Exception):
    """A breakage could not be tried."""


# ---- In the copies: pytest loads this file as a plugin (-p) and reports what fails. ----


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    _report("started", nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        _report("failed", report.nodeid)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _report("failed", report.nodeid)


def _report(what: str, nodeid: str) -> None:
    with open(os.environ[_REPORT], "a", encoding="utf-8") as report:
        report.write(json.dumps([what, nodeid]) + "\n")


# ---- The tool ----


class Workspace:
    """A copy of the working tree, always at the same path, and the processes that run in it.

    Args:
        folder: an empty one.
        library: the C library of the current environment.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self.tree = folder / "tree"
        self._folder, self._library = folder, library
        self._output, self._failures = folder / "output", folder / "report"
        self._is_over = threading.Event()
        folder.mkdir()
        ours = ("RINGREDUCE_", "PYTEST_")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self._environment |= _scales() | {
            "PYTHONPATH": str(self.tree),
            _REPORT: str(self._failures),
        }

    def renew(self, breakage: Breakage) -> None:
        """Copy the working tree anew, without the breakage."""
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in _files():
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        (self.tree / "sitecustomize.py").write_text(_SITE)
        cache = self._folder / ("compiled by a breakage" if _is_compiled(breakage) else "compiled")
        self._environment["NUMBA_CACHE_DIR"] = str(cache)
        self._place(self._library)

    def make(self, breakage: Breakage) -> str | None:
        """Make the breakage, also in the library; return the C test that fails by it, if any."""
        (self.tree / breakage.file).write_text(breakage.applied(self.tree))
        self._forget_compiled(breakage)
        if not breakage.is_native:
            return None
        build, tools = self._folder / "build", Path(sys.executable).parent
        if not build.exists():
            self._build(
                *(tools / "cmake", "-S", self.tree / "native", "-B", build, "-G", "Ninja"),
                *(f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DRINGREDUCE_TESTS=ON"),
            )
        self._build(tools / "cmake", "--build", build)
        [library] = build.glob("libringreduce_native.*")
        self._place(library)
        self.run([tools / "ctest", "--test-dir", build, "--stop-on-failure"], _BUILD_S)
        # "2/5 Test #2: handoff ....***Failed"; also after a timeout or a crash.
        failed = re.search(r"Test +#\d+: (\w+) .*\*\*\*", self._output.read_text())
        return f"ctest {failed[1]}" if failed else None

    def unmake(self, breakage: Breakage) -> None:
        """Undo the breakage, and put back the library of the current environment."""
        (self.tree / breakage.file).write_text((ROOT / breakage.file).read_text())
        self._forget_compiled(breakage)
        self._place(self._library)

    def _forget_compiled(self, breakage: Breakage) -> None:
        """Compile anew: numba goes by each file's time, and knows nothing of what that calls."""
        if _is_compiled(breakage):
            shutil.rmtree(self._environment["NUMBA_CACHE_DIR"], ignore_errors=True)

    def forget_build(self) -> None:
        """Build the C library from nothing next time."""
        shutil.rmtree(self._folder / "build", ignore_errors=True)

    def check(self) -> None:
        """Raise BrokenTool unless tests would import the copy, with its own library."""
        self.run([sys.executable, "-c", _WHERE], _BUILD_S, self._folder)
        found = self._output.read_text().splitlines()[-2:]
        package = self.tree / "ringreduce"
        if [Path(path).parent for path in found] != [package, package]:
            raise BrokenTool(f"what is imported is not the copy in {package}: {found}")

    def first_failure(self, arguments: Sequence[str], limit_s: float) -> str | None:
        """The first test that fails, or that is running when pytest dies; None: all pass."""
        self._failures.write_text("")
        options = ("-x", "-q", "-p", "tests.breakages", "-p", "no:cacheprovider")
        code = self.run([sys.executable, "-m", "pytest", *options, *arguments], limit_s)
        events = [json.loads(line) for line in self._failures.read_text().splitlines()]
        failed = [nodeid for what, nodeid in events if what == "failed"]
        if failed:
            return failed[0]
        if code == 0:
            return None
        if not events or code in (3, 4, 5):
            raise BrokenTool(f"pytest ended with {code}: {self._output.read_text()[-2000:]}")
        return events[-1][1]

    def run(self, command: Sequence[object], limit_s: float, folder: Path | None = None) -> int:
        """Run `command` to its end, or to the time limit; end all that it started."""
        if self._is_over.is_set():
            raise BrokenTool("interrupted")
        with self._output.open("w") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                **{"cwd": folder or self.tree, "env": self._environment, "stdout": output},
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return -signal.SIGKILL
            finally:
                self._end_processes()
                process.wait()
                if self._is_over.is_set():
                    raise BrokenTool("interrupted")

    def close(self) -> None:
        """End what runs, and have nothing else run."""
        self._is_over.set()
        self._end_processes()

    def _build(self, *command: object) -> None:
        if self.run(command, _BUILD_S) != 0:
            raise BrokenTool(f"it does not build: {self._output.read_text()[-2000:]}")

    def _place(self, library: Path) -> None:
        shutil.copy2(library, self.tree / "ringreduce" / self._library.name)

    def _end_processes(self) -> None:
        """Kill every process that has our report in its environment: all that we started."""
        left = True
        while left:
            left = False
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    ours = process.environ().get(_REPORT) == str(self._failures)
                    if ours and process.status() != psutil.STATUS_ZOMBIE:
                        process.kill()
                        left = True


def caught_by(workspace: Workspace, breakage: Breakage) -> str | None:
    """The test that fails with the breakage and passes without it; None: there is none."""
    workspace.forget_build()
    workspace.renew(breakage)
    if (failed := workspace.make(breakage)) is not None:
        return failed
    workspace.check()
    files, quick = breakage.tests, ("-m", "not full")
    tries = ((*files, *quick), _FILES_S), (files, _FILES_S), ((*_SUITE, *quick), _SUITE_S)
    for arguments, limit_s in tries:
        ignored: list[str] = []
        while True:
            failed = workspace.first_failure([*arguments, *ignored], limit_s)
            if failed is None:
                break
            workspace.unmake(breakage)
            if workspace.first_failure([failed], _FILES_S) is None:
                return failed
            # It fails without the breakage too: no proof.
            ignored += ["--deselect", failed]
            workspace.make(breakage)
    return None


def try_all(chosen: Sequence[Breakage], jobs: int, note: Callable[..., None]) -> None:
    """Try each breakage, `jobs` at a time; `note` gets it, what came of it, and the seconds."""
    library = _library()
    with tempfile.TemporaryDirectory(prefix="ringreduce-breakages-") as folder:
        workspaces = [Workspace(Path(folder, str(i)), library) for i in range(jobs)]
        free: queue.Queue[Workspace] = queue.Queue()
        for workspace in workspaces:
            free.put(workspace)

        def attempt(breakage: Breakage) -> None:
            workspace = free.get()
            began_s = time.monotonic()
            try:
                outcome = {"caught_by": caught_by(workspace, breakage)}
            except Exception as error:
                outcome = {"error": f"{type(error).__name__}: {error}"}
            finally:
                free.put(workspace)
            note(breakage, outcome, time.monotonic() - began_s)

        pool = ThreadPoolExecutor(jobs)
        try:
            for future in [pool.submit(attempt, breakage) for breakage in chosen]:
                future.result()
        finally:
            for workspace in workspaces:
                workspace.close()
            pool.shutdown(cancel_futures=True)


def _files() -> list[str]:
    """The files of the working tree, but for what git ignores."""
    listed = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()})


def _digest(file: str) -> str:
    return hashlib.blake2b((ROOT / file).read_bytes(), digest_size=8).hexdigest()


def _is_there(test: str) -> bool:
    """Whether a test that has caught something still exists: ``ctest NAME``, or a pytest node."""
    if test.startswith("ctest "):
        file, name = "native/CMakeLists.txt", test.removeprefix("ctest ")
    else:
        file, _, name = test.partition("::")
        name = name.rpartition("::")[2].partition("[")[0]
    path = ROOT / file
    return path.is_file() and re.search(rf"\b{re.escape(name)}\b", path.read_text()) is not None


def _touched(since: str) -> list[Breakage]:
    """The breakages of which the entry, the file or a test file has changed since a commit."""
    changed = {*_git("diff", "--name-only", since).splitlines()}
    changed |= {*_git("ls-files", "--others", "--exclude-standard").splitlines()}
    before = _git("grep", "-h", "-e", "", since, "--", "tests/breakage_list.*")
    known = {*re.findall(r"[\w'-]+", before)}
    return [
        each for each in BREAKAGES if changed & {each.file, *each.tests} or each.name not in known
    ]


def _is_compiled(breakage: Breakage) -> bool:
    return "import numba" in (ROOT / breakage.file).read_text()


def _scales() -> dict[str, str]:
    """The variables with which `make test` runs the suite."""
    text = (ROOT / "Makefile").read_text()
    found = dict(re.findall(r"^(QUICK|GRAPHS) := (.*)$", text, re.MULTILINE))
    quick = found["QUICK"].replace("$(GRAPHS)", found["GRAPHS"])
    return dict(setting.split("=", 1) for setting in quick.split())


def _library() -> Path:
    from ringreduce.effects import native

    library = native.library()
    if library is None:
        raise SystemExit(native.why_missing())
    return Path(library._name)


def _git(*command: str) -> str:
    found = subprocess.run(
        ("git", *command), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    return found.stdout


def _table(results: dict[str, dict[str, Any]]) -> str:
    width = max(map(len, results), default=0)
    lines = []
    for name, result in results.items():
        test = result.get("caught_by") or result.get("error") or "MISSED: every test passes"
        test = " ".join(re.sub(r"^[\w/]*/", "", test).split())
        room = _WIDTH - width - 8
        shown = test if len(test) <= room else test[: room - 3] + "..."
        lines.append(f"{name:{width}} {result['seconds']:5d}s {shown}")
    caught = sum(1 for result in results.values() if result.get("caught_by"))
    return "\n".join([*lines, f"{caught} of {len(results)} caught"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.breakages", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    parser.add_argument("--list", action="store_true", help="show the breakages, run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time")
    parser.add_argument("--again", action="store_true", help="forget the results so far")
    touched = "those that a change since COMMIT touches, again"
    parser.add_argument("--touched", nargs="?", const="HEAD", metavar="COMMIT", help=touched)
    chosen = parser.parse_args()
    known = {breakage.name: breakage for breakage in BREAKAGES}
    if unknown := set(chosen.names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    wanted = [known[name] for name in chosen.names]
    if chosen.touched is not None:
        wanted += [each for each in _touched(chosen.touched) if each not in wanted]
    elif not wanted:
        wanted = list(BREAKAGES)
    if chosen.list:
        for breakage in wanted:
            print(f"{breakage.name} ({breakage.file})\n    {breakage.harm}")
        return 0
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: result for name, result in results.items() if name in known}
    if chosen.again or chosen.touched is not None:
        results = {name: result for name, result in results.items() if known[name] not in wanted}
    RESULTS.parent.mkdir(exist_ok=True)
    lock = threading.Lock()

    def note(breakage: Breakage, outcome: dict[str, Any], seconds: float) -> None:
        if outcome.get("error", "").endswith("interrupted"):
            return
        with lock:
            results[breakage.name] = {
                **outcome,
                "seconds": round(seconds),
                "entry": breakage.digest,
                "file": _digest(breakage.file),
            }
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(_table({breakage.name: results[breakage.name]}).splitlines()[0], flush=True)

    def is_done(breakage: Breakage) -> bool:
        result = results.get(breakage.name, {})
        was_same = (result.get("entry"), result.get("file")) == (
            breakage.digest,
            _digest(breakage.file),
        )
        return was_same and _is_there(result.get("caught_by") or "")

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try_all([breakage for breakage in wanted if not is_done(breakage)], chosen.jobs, note)
    shown = {breakage.name: results[breakage.name] for breakage in wanted}
    print(f"\n{_table(shown)}")
    return 0 if all(result.get("caught_by") for result in shown.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
