"""How a rank leaves when things are not as usual: in a call, after a failure, without notice."""

import numpy as np
import pytest

from ringreduce.testing import ring_of_threads
from tests.rings import SOON_S, Ring


@pytest.mark.parametrize("count", [1, 100_000])
@pytest.mark.parametrize("transport", ["zmq", "auto"])
def test_a_signal_handler_may_close_the_ring_in_the_middle_of_a_call(tmp_path, transport, count):
    program = f"""
        ring = join()
        if {count} == 1:
            ring.all_reduce(np.ones(1))  # From now on it runs in C.
        if RANK == 0:
            signal.signal(signal.SIGALRM, lambda *_: ring.close())
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            attempt("call", lambda: ring.all_reduce(np.ones({count})))
            attempt("next", ring.barrier)
            say("closed", closed=ring.closed)
        hold()
        ring.close()
    """
    with Ring(tmp_path, 2, program, transport=transport) as ring:
        [call] = ring.wait("call", [0])
        assert (call["kind"], call["peer"]) == ("PeerLostError", 0)
        assert call["seconds"] < SOON_S
        assert ring.wait("next", [0])[0]["kind"] == "ClosedError"
        assert ring.wait("closed", [0])[0]["closed"]
        ring.release()


@pytest.mark.parametrize("again", [False, True])
def test_a_call_within_a_call_is_an_error(tmp_path, again):
    """It would go on with the other call's part in it. `again`: in C."""
    program = f"""
        ring = join()
        if {again}:
            ring.all_reduce(np.ones(3))
        if RANK == 0:
            signal.signal(signal.SIGALRM, lambda *_: ring.all_reduce(np.ones(3)))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            attempt("call", lambda: ring.all_reduce(np.ones(3)))
        else:
            hold()
        attempt("next", ring.barrier)
        ring.close()
    """
    with Ring(tmp_path, 2, program) as ring:
        [call] = ring.wait("call", [0])
        assert call["kind"] == "MismatchError"
        assert "in a signal handler" in call["text"]
        ring.release()
        for rank in (0, 1):
            assert ring.wait("next", [rank])[0]["kind"] in ("MismatchError", "PeerLostError")


def test_a_signal_handler_may_close_the_ring_while_the_engine_waits_for_a_call(tmp_path):
    program = """
        ring = join()
        def hand_over():
            while ring._session.calls.caller is None:
                os.sched_yield()
            work = ring.all_reduce(np.ones(10), async_op=True)
            engine = ring._session.lasting.engine
            while not engine._queue.wait_idle(0.01) and engine._work:
                pass  # It has not taken it yet.
            os.kill(os.getpid(), signal.SIGALRM)
            attempt("work", work.wait)
        if RANK == 0:
            signal.signal(signal.SIGALRM, lambda *_: ring.close())
            threading.Thread(target=hand_over, daemon=True).start()
            attempt("call", ring.barrier)
            say("closed", closed=ring.closed)
        hold()
        ring.close()
    """
    with Ring(tmp_path, 2, program) as ring:
        [call] = ring.wait("call", [0])
        assert call["kind"] == "PeerLostError"
        assert call["seconds"] < SOON_S
        assert ring.wait("work", [0])[0]["kind"] in ("PeerLostError", "ClosedError")
        assert ring.wait("closed", [0])[0]["closed"]
        ring.release()


def test_a_signal_handler_may_close_the_ring_while_its_traffic_is_counted():
    """Here, another function's return stands for the signal."""

    def work(comm):
        comm.all_reduce(np.ones(3))
        if comm.rank == 1:
            return None
        pairs = comm._session.collectives.links[-1].pairs
        count = pairs.traffic

        def close_and_count():
            if not comm.closed:
                comm.close()
            return count()

        pairs.traffic = close_and_count
        return comm.statistics().bytes_sent

    counted, _ = ring_of_threads(2, work)
    assert counted > 0


def test_a_communicator_that_nobody_keeps_does_not_hang_its_process(tmp_path):
    program = """
        import gc, logging
        from ringreduce.pure.watching import Watch

        logging.disable(logging.CRITICAL)
        ring = join()
        if RANK == 0:
            def fail(*_):
                raise RuntimeError("a bug")
            watchers = [t for t in threading.enumerate() if "ringreduce watch" in t.name]
            beat, Watch.beat = Watch.beat, fail
            for watcher in watchers:
                watcher.join(10)
            Watch.beat = beat
            say("ended", watchers=[w.is_alive() for w in watchers])
        attempt("call", lambda: until_error(ring.barrier))
        del ring
        gc.collect()
        say("collected")
        ring = join(1)
        ring.barrier()
        say("again")
    """
    with Ring(tmp_path, 2, program, rings=2) as ring:
        assert ring.wait("ended", [0])[0]["watchers"] == [False]
        for call in ring.wait("call"):
            assert call["kind"] == "MismatchError"
            assert "failed in the watcher: RuntimeError: a bug" in call["text"]
        ring.wait("again")
