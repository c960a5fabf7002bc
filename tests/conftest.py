"""What every test is held to: no thread of a ring outlives the test that formed it.

Also where hypothesis takes its examples from: the same in each run, or other ones each time where
RINGREDUCE_TEST_RANDOM is 1.
"""

import gc
import os
import random
import secrets
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import again, forkserver
from tests.naming import name_of
from tests.ranks import Ranks
from tests.scheduling import Scheduling

# Tests have limits of their own; on a busy machine an example takes many times its time.
hypothesis.settings.register_profile("other", deadline=None)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.load_profile("other")
if os.environ.get("RINGREDUCE_TEST_RANDOM", "") != "1":
    hypothesis.settings.load_profile("same")

# How often we look whether a thread has ended: the kernel takes a moment to forget one. Counted,
# since on a busy machine none may have had its turn for seconds.
_LOOKS = 5000


def pytest_addoption(parser: pytest.Parser) -> None:
    again.pytest_addoption(parser)
    parser.addoption("--renew", action="store_true", help="write the pages under golden/ anew")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    again.pytest_configure(config)
    if config.getoption("--renew") and os.environ.get("CI"):
        raise pytest.UsageError("--renew writes the pages that tests compare with; CI compares")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order the tests, as variables say.

    With RINGREDUCE_TEST_HALF=0, or 1, leave out one half of those that `make test-full` alone runs,
    or the other. With RINGREDUCE_TEST_REVERSED=1 run the last first: none may need one before it.
    """
    if half := os.environ.get("RINGREDUCE_TEST_HALF", ""):
        left_out = [
            item
            for item in items
            if item.get_closest_marker("full") and zlib.crc32(item.nodeid.encode()) % 2 == int(half)
        ]
        items[:] = [item for item in items if item not in {*left_out}]
        config.hook.pytest_deselected(items=left_out)
    if os.environ.get("RINGREDUCE_TEST_REVERSED", "") == "1":
        items.reverse()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out of later collections what is imported: TensorFlow's objects take half a second."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a test by the values of its parameters, where pytest would number them: ``layout4``."""
    try:
        return name_of(val)
    except ValueError as error:
        text = f"for a test's parameter {argname!r}, {error}: pass ids=, or pytest.param(..., id=)"
        raise pytest.Collector.CollectError(text) from None


def pytest_unconfigure() -> None:
    forkserver.close()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread of Python's, or of libzmq's, which own all sockets."""
    before = _threads()
    yield
    for _ in range(_LOOKS):
        if not (left := _threads() - before):
            return
        time.sleep(0.001)  # Python's lock is theirs meanwhile.
    stacks = ["".join(traceback.format_stack(f)) for f in sys._current_frames().values()]
    pytest.fail("\n".join([f"still running: {sorted(left)}", *stacks]))


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    """Functions of the test's module on a ring: ``ranks(size, function, *arguments)``.

    TensorFlow takes long to rewrite graphs: under `make check` they are run as they are traced,
    but in files that say ``REWRITES_GRAPHS = True``, since they are about what is in them.
    """
    rewrites = getattr(request.module, "REWRITES_GRAPHS", False)
    keep = "0" if rewrites else os.environ.get("KEEP_GRAPHS", "0")
    rings = Ranks(tmp_path_factory.mktemp("ranks"), {"KEEP_GRAPHS": keep})
    yield rings
    rings.close()


@pytest.fixture
def check_page(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a page with the file of that name in golden/; ``--renew`` writes the file.

    Spaces at ends of lines do not count.
    """

    def check(name: str, page: str) -> None:
        file = request.path.parent / "golden" / name
        page = "".join(f"{line.rstrip()}\n" for line in page.splitlines())
        if request.config.getoption("--renew"):
            file.write_text(page)
        assert page == file.read_text()

    return check


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Another sequence each time; FUZZ_SEED repeats the one that a failed test has printed."""
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    print(f"FUZZ_SEED={seed}")
    return random.Random(f"{seed} {request.node.name}")


def _threads() -> set[tuple[int, str]]:
    """Kernel id and name of each thread that a ring may have started."""
    found = {
        (thread.native_id or 0, thread.name)
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and (not thread.daemon or thread.name.startswith("ringreduce"))
        and thread.name != "ringreduce flight recorder"  # which stays, for all
    }
    for task in Path("/proc/self/task").glob("*"):  # Empty where there is no such folder.
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # It has just ended.
        if name.startswith("ZMQbg"):
            found.add((int(task.name), name))
    return found
