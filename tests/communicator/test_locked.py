"""A rank between two neighbours that both keep Python's lock: bad news comes when one lets go."""

import sys
import time
from pathlib import Path

import pytest

from ringreduce.vocabulary.config import TIMES
from tests.figures import record
from tests.processes import wait_until
from tests.rings import Ring

# Ranks 0 and 2 read a byte without giving the lock away; rank 3 gives up; rank 1 waits for all.
PROGRAM = """
import ctypes
read_with_lock = ctypes.PyDLL(None).read
ring = join()
ring.barrier()
say("ready")
if RANK in (0, 2):
    read_with_lock(0, ctypes.create_string_buffer(1), 1)
elif RANK == 3:
    sys.stdin.readline()
    ring._session.fail(rr.MismatchError("cannot go on", rank=3, size=4))
    say("failed")
attempt("result", lambda: ring.all_reduce(np.ones(1000)))
hold()
"""
LOCKED, GIVES_UP, WAITS = (0, 2), 3, 1
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks in /proc")


def fail_between_locked(ring: Ring) -> float:
    """Have rank 3 fail while both neighbours of rank 1 keep their locks; return when."""
    ring.wait("ready")
    for rank in LOCKED:
        # Its main thread is in read(0, ...).
        file = Path(f"/proc/{ring.workers[rank].pid}/syscall")
        wait_until(lambda file=file: file.read_text().startswith("0 0x0 "), f"lock of {rank}")
    failed_s = time.monotonic()
    ring.tell(GIVES_UP)
    ring.wait("failed", [GIVES_UP])
    return failed_s


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_an_abort_passes_the_first_neighbour_that_lets_go(tmp_path, transport):
    with Ring(tmp_path, 4, PROGRAM, transport=transport) as ring:
        fail_between_locked(ring)
        released_s = time.monotonic()
        ring.tell(LOCKED[1])
        [fact] = ring.wait("result", [WAITS])
        assert fact["kind"] == "MismatchError", fact
        assert "was told by rank 3: " in fact["text"]
        assert "cannot go on" in fact["text"]
        assert fact["at"] - released_s < 3.0
        record(f"two locked neighbours, one lets go, {transport}", fact["at"] - released_s)


def test_in_shared_memory_it_is_named_while_both_keep_their_locks(tmp_path):
    """Its flag is seen at once; why it gave up, nobody can tell."""
    with Ring(tmp_path, 4, PROGRAM, transport="shm") as ring:
        failed_s = fail_between_locked(ring)
        [fact] = ring.wait("result", [WAITS])
        assert (fact["kind"], fact["peer"]) == ("PeerLostError", GIVES_UP), fact
        limit_s = TIMES.explanation_s + TIMES.explain_s + 3.0
        assert fact["at"] - failed_s < limit_s
        record("two locked neighbours, shm", fact["at"] - failed_s)
