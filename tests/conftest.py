"""Which tests need no second run without the native library, since it is nowhere near them."""

from __future__ import annotations

import pytest

ONCE = {
    "test_buckets",
    "test_checksum",
    "test_config",
    "test_errors",
    "test_fuzz",
    "test_half_open",
    "test_kernels",
    "test_launch_failure",
    "test_launch_output",
    "test_layers",
    "test_liveness",
    "test_placement",
    "test_proxy",
    "test_public_api",
    "test_recorder",
    "test_rendezvous",
    "test_report",
    "test_schedule",
    "test_security",
    "test_types",
    "test_wire",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in ONCE:
            item.add_marker("once")
