"""How compiled functions come out of numba's cache."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import clean_environment

# All that a ring over sockets has compiled; what numba imports in order to compile is named.
PROGRAM = """
import sys
import numpy as np
from ringreduce.testing import ring_of_threads

def work(ring):
    for dtype in (np.float32, np.float16):
        for count in (4, 20_000):
            array = ring.all_reduce(np.ones(count, dtype), "mean")
            assert (array == 1).all()
            sent = ring.send(array, 1 - ring.rank, async_op=True)
            ring.recv(array, 1 - ring.rank)
            sent.wait()

ring_of_threads(2, work, transport="zmq", encryption="on")
print([name for name in ("numba.np.arraymath", "numba.np.npyimpl") if name in sys.modules])
"""


def test_a_ring_loads_its_compiled_functions_without_the_compiler() -> None:
    for _ in range(2):  # The first may have to compile them.
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        if done.stdout == "[]\n":
            return
    raise AssertionError(f"imported: {done.stdout}")
