"""What ranks know of each other beside the data: failures in user code, stalls, slow ranks."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ringreduce import native
from tests.figures import record
from tests.processes import wait_until
from tests.rings import Ring

# Three times what is promised.
TOLD_S = 3.0


@pytest.fixture(params=["zmq", "shm", "hosts"])
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    """Ring's options for each way that four ranks can reach each other."""
    if request.param != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    if request.param == "hosts":
        return {"transport": "auto", "hosts": ["a", "a", "b", "b"]}
    return {"transport": request.param}


# Ranks that compute look at what the watcher has told them, as a training loop might.
COMPUTING = """
ring = join()
ring.barrier()
say("ready")
if RANK == 3:
    hold()
    {failing}
deadline = time.monotonic() + 20
while ring.failure is None and time.monotonic() < deadline:
    sum(range(1000))
say("told", at=time.monotonic())
attempt("result", ring.barrier)
hold()
"""


def test_a_death_is_known_to_ranks_in_user_code(tmp_path: Path, way: dict[str, object]) -> None:
    with Ring(tmp_path, 4, COMPUTING.format(failing=""), **way) as ring:  # type: ignore[arg-type]
        ring.wait("ready")
        killed_s = time.monotonic()
        ring.workers[3].signal(signal.SIGKILL)
        for fact in ring.wait("told", [0, 1, 2]):
            assert fact["at"] - killed_s < TOLD_S
            record(f"SIGKILL in user code, known in user code, {way['transport']}",
                   fact["at"] - killed_s)  # fmt: skip
        for fact in ring.wait("result", [0, 1, 2]):
            assert (fact["kind"], fact["peer"]) == ("PeerLostError", 3), fact
            assert fact["seconds"] < 0.5


def test_a_failure_goes_both_ways_round_past_a_stopped_rank(
    tmp_path: Path, way: dict[str, object]
) -> None:
    failing = """ring.fail(rr.MismatchError("has seen enough", rank=RANK, size=SIZE))"""
    program = COMPUTING.format(failing=failing)
    with Ring(tmp_path, 4, program, **way) as ring:  # type: ignore[arg-type]
        ring.wait("ready")
        # Between 3 and 1 there are two ways: by 0 and by 2.
        ring.workers[2].signal(signal.SIGSTOP)
        ring.workers[3].stdin.close()
        for fact in ring.wait("result", [0, 1]):
            assert fact["kind"] == "MismatchError", fact
            assert "rank 3 of 4 has seen enough" in fact["text"]
            assert fact["seconds"] < 0.5
        ring.workers[2].signal(signal.SIGCONT)
        [fact] = ring.wait("result", [2])
        assert fact["kind"] == "MismatchError", fact
        assert "rank 3 of 4 has seen enough" in fact["text"]


SLOW = """
ring = join()
for number in range({rounds}):
    if RANK == 1:
        time.sleep({pause_s})
    ring.barrier()
say("done")
hold()
"""


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_rank_in_user_code_is_named_after_five_seconds_and_waited_for(
    tmp_path: Path, transport: str
) -> None:
    if transport == "shm" and native.library() is None:
        pytest.skip(native.why_missing())
    program = SLOW.format(rounds=1, pause_s=6.5)
    with Ring(tmp_path, 4, program, transport=transport) as ring:
        ring.wait("done")
        for rank in (0, 2):  # its neighbours
            text = ring.workers[rank].stderr
            assert f"[{rank}/4] has waited 5." in text
            assert "in barrier after 1 calls: rank 1 is alive and has been in user code" in text
        assert ring.workers[3].stderr == ""
        assert ring.workers[1].stderr == ""


def test_a_rank_that_is_slower_all_the_time_is_named(tmp_path: Path) -> None:
    with Ring(tmp_path, 3, SLOW.format(rounds=8, pause_s=1.2)) as ring:
        ring.wait("done")
        for rank in (0, 2):
            text = ring.workers[rank].stderr
            assert f"[{rank}/3] has waited for rank 1 most of the last 5 s: it is slower" in text


THROTTLED = """
ring = join()
ring.barrier()
say("ready")
hold()
data = np.full(1 << 21, RANK + 1.0)
attempt("result", lambda: ring.all_reduce(data))
assert (data == sum(range(1, SIZE + 1))).all()
say("right")
"""


def test_a_slow_connection_is_named_after_five_seconds_and_waited_for(tmp_path: Path) -> None:
    with Ring(tmp_path, 3, THROTTLED, proxied=True) as ring:
        ring.wait("ready")
        # Two thirds of 16 MiB, twice, in about seven seconds.
        ring.proxy.set("1>2/addresses/*", bytes_per_s=3 << 20)
        for worker in ring.workers:
            worker.stdin.close()
        ring.wait("right")
        assert [fact["kind"] for fact in ring.said(0, "result")] == [""]
        said = "".join(worker.stderr for worker in ring.workers)
        assert "in all_reduce after 2 calls: rank 2 is the slowest" in said
        assert "lost" not in said


GARBAGE = """
ring = join()
if RANK == 1:
    from ringreduce import liveness
    for number in range(5000):
        ring._watcher._words.append(os.urandom(number % 300))
    ring._watcher._words.append(liveness.encode(liveness.Left(0, 0))[:-1])
for number in range(50):
    data = np.full(1000, RANK + 1.0)
    ring.all_reduce(data)
    assert (data == 6).all()
    time.sleep(0.01)
say("done")
hold()
"""


def test_words_that_cannot_be_read_are_ignored_with_few_complaints(tmp_path: Path) -> None:
    with Ring(tmp_path, 3, GARBAGE) as ring:
        ring.wait("done")
        for rank in (0, 2):
            worker = ring.workers[rank]
            wait_until(lambda w=worker: w.stderr.count("ignored a word of rank 1") >= 8, "words")
            assert worker.stderr.count("ignored a word") == 8
        ring.release()
