"""CRC-32C: every way to compute it gives the published numbers, and those of the naive twin."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure import checksum
from tests import naive
from tests.processes import clean_environment

ALL_ONES = np.uint64(0xFFFFFFFF)
# Around the sizes at which a way changes its pace, and some that leave a rest of each kind.
SIZES = [0, 1, 7, 8, 9, 63, 64, 255, 256, 767, 768, 769, 1023, 1024, 1279, 1280, 1281]
SIZES += [6143, 6144, 6145, 6912, 9001, 20001]


def crc32c(message: bytes | np.ndarray) -> int:
    flat = np.frombuffer(message, np.uint8)
    return int(checksum.crc32c(flat.ctypes.data, flat.size))


def by(method: str, message: np.ndarray) -> int:
    state = checksum.METHODS[method](ALL_ONES, message.ctypes.data, message.size)
    return int(np.uint64(state) ^ ALL_ONES)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4.
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_published_values_come_out(message, expected):
    assert crc32c(message) == naive.crc32c(message) == expected


@pytest.mark.parametrize("method", checksum.METHODS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 3])
def test_each_way_agrees_with_the_naive_twin_on_any_length_and_alignment(method, size, offset):
    message = np.random.default_rng(size).integers(0, 256, size + offset, np.uint8)[offset:]
    assert by(method, message) == naive.crc32c(message.tobytes())


@pytest.mark.parametrize("method", checksum.METHODS)
def test_each_way_goes_on_from_where_another_message_ended(method):
    message = np.random.default_rng(0).integers(0, 256, 9000, np.uint8)
    state = ALL_ONES
    for start, end in [(0, 5), (5, 5000), (5000, 9000)]:
        part = message[start:end]
        state = np.uint64(checksum.METHODS[method](state, part.ctypes.data, part.size))
    assert int(state ^ ALL_ONES) == by(method, message) == crc32c(message)


@given(st.integers(0, 40_000), st.integers(1, 255), st.data())
def test_any_changed_byte_changes_the_sum(size, difference, data):
    message = np.zeros(size + 1, np.uint8)
    before = crc32c(message)
    message[data.draw(st.integers(0, size))] ^= difference
    assert crc32c(message) != before


def test_the_plainest_way_is_always_there_and_comes_first():
    assert next(iter(checksum.METHODS)) == "tables"


def test_a_processor_that_is_said_to_have_nothing_gets_the_tables():
    """As numba is told, not as the machine is: it would refuse to compile the instructions."""
    program = (
        "import numpy as np; from ringreduce.pure import checksum\n"
        "a = np.arange(49, 58, dtype=np.uint8)\n"
        "print(list(checksum.METHODS), hex(int(checksum.crc32c(a.ctypes.data, 9))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=clean_environment() | {"NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split() == ["['tables']", "0xe3069283"]


@pytest.mark.parametrize(
    ("integrity", "encrypted", "loopback", "wanted"),
    [
        ("auto", False, False, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("crc32", True, True, True),
        ("off", False, False, False),
    ],
)
def test_checksums_are_made_where_nothing_else_guards_the_bytes(
    integrity, encrypted, loopback, wanted
):
    assert checksum.is_wanted(integrity, encrypted=encrypted, loopback=loopback) is wanted
