"""What every test is held to: no thread of a ring outlives the test that formed it.

Also which tests need no second run without the native library: it is nowhere near them, or so far
below that others see to it, or they hide it themselves. And which need one with the lowest version
of Keras, since it is what they are about.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduling import Scheduling

_ONCE = {
    "test_agreement",
    "test_bench",
    "test_bridge_failures",
    "test_buckets",
    "test_callbacks",
    "test_checksum",
    "test_config",
    "test_corruption",
    "test_dumping",
    "test_errors",
    "test_evaluation",
    "test_examples",
    "test_faults",
    "test_flight_jobs",
    "test_from_horovod",
    "test_fuzz",
    "test_half_open",
    "test_jit",
    "test_kernels",
    "test_launch",
    "test_launch_failure",
    "test_launch_output",
    "test_layers",
    "test_liveness",
    "test_normalization",
    "test_numerics",
    "test_optimizer_keras",
    "test_placement",
    "test_proxy",
    "test_public_api",
    "test_readme",
    "test_recorder",
    "test_rendezvous",
    "test_report",
    "test_saving",
    "test_schedule",
    "test_scheduling",
    "test_security",
    "test_tape",
    "test_tensors",
    "test_tf_api",
    "test_types",
    "test_watch",
    "test_wire",
    "test_zeromq",
}
_KERAS = {
    "test_callbacks",
    "test_evaluation",
    "test_jit",
    "test_keras",
    "test_normalization",
    "test_optimizer",
    "test_optimizer_keras",
    "test_parity",
    "test_replicas",
    "test_saving",
    "test_steps",
    "test_uneven",
}
# The kernel takes a moment to forget a thread that has been joined.
_SETTLE_S = 5.0


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in _ONCE:
            item.add_marker("once")
        if item.path.stem in _KERAS:
            item.add_marker("keras")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Fail a test that leaves a thread of Python's, or of libzmq's, which own all sockets."""
    before = _threads()
    yield
    deadline = time.monotonic() + _SETTLE_S
    while (left := _threads() - before) and time.monotonic() < deadline:
        os.sched_yield()
    assert not left, f"still running: {sorted(left)}"


def _threads() -> set[tuple[int, str]]:
    """Kernel id and name of each thread that a ring may have started."""
    found = {
        (thread.native_id or 0, thread.name)
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
        and (not thread.daemon or thread.name.startswith("ringreduce"))
    }
    for task in Path("/proc/self/task").glob("*"):  # Empty where there is no such folder.
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # It has just ended.
        if name.startswith("ZMQbg"):
            found.add((int(task.name), name))
    return found
