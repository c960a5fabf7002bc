"""What goes wrong inside a training step, in real processes: every rank ends, with our errors.

Each test runs with the native ops, with the Python function that stands in for them, and with the
custom calls of a step that XLA compiles.
"""

import functools
import os
import signal
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import MismatchError, PeerLostError, PeerTimeoutError
from ringreduce.communicator.reforming import reform
from ringreduce.effects import native
from ringreduce.tensorflow import GradientBridge, failures, ops
from tests.processes import wait_until
from tests.ranks import Ranks, on_ranks
from tests.rings import Ring
from tests.scope import in_full
from tests.ways import needs_xla

pytestmark = pytest.mark.tensorflow
REWRITES_GRAPHS = True

ONES = np.ones((2, 8), np.float32)
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
MISMATCH = "pybind11::error_already_set: MISMATCH of original and normalized active exception types"


@pytest.mark.parametrize(
    ("replacing", "kind", "arguments"),
    [
        ("KeyboardInterrupt: ", KeyboardInterrupt, ()),
        ("SystemExit: 3", SystemExit, (3,)),
        ("SystemExit: gone", SystemExit, ("gone",)),
        ("SystemExit", SystemExit, (None,)),
        ("ValueError: 3", RuntimeError, None),
    ],
)
def test_what_a_signal_handler_raises_while_a_function_fails_comes_through(
    replacing, kind, arguments
):
    def fail():
        raise RuntimeError(f"{MISMATCH}: ORIGINAL UnknownError REPLACED BY {replacing}\n\nAt:\n")

    with pytest.raises(kind) as caught:
        failures._call(functools.partial(fail))
    assert arguments is None or caught.value.args == arguments


@pytest.fixture(params=["native", in_full("python"), "jit"])
def bridge(request: pytest.FixtureRequest) -> str:
    """Which bridge the workers must use."""
    if request.param != "python" and native.library() is None:
        pytest.skip(native.why_missing())
    return str(request.param)


def ring_of(ranks: Ranks, bridge, size, lost=(), **environment):
    """Ranks that use this bridge, some of which will be lost."""
    if bridge == "python":
        environment["RINGREDUCE_NATIVE"] = "0"
    return ranks.ring(size, lost=lost, **environment)


def make_model(bridge, communicator=None, **options):
    assert ops.are_available() is (bridge != "python")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8) for _ in range(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    # A bucket for each layer, so that some are under way while others are still computed.
    inner = keras.optimizers.SGD(0.0)
    optimizer = rr.DistributedOptimizer(inner, communicator, bucket_bytes=300)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=bridge == "jit", **options)
    model.optimizer.build(model.trainable_variables)
    return model


def train(model, then=None):
    """Train for ever, and call `then` after each step from the third one on."""
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: then() if then and batch >= 2 else None
    )
    endless = tf.data.Dataset.from_tensors((ONES, ONES)).repeat()
    model.fit(endless, steps_per_epoch=10**9, verbose=0, callbacks=[callback])


def step_of(model, loss_of, jit=False):
    """A training step outside of Keras's loop."""

    @tf.function(jit_compile=jit)
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(ONES) ** 2)
        weights = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, weights), weights)

    return step


def for_ever(step):
    while True:
        step()


def on_rank(rank, number):
    """Return what sends that rank's process a signal, on that rank."""
    return functools.partial(os.kill, os.getpid(), number) if rr.rank() == rank else None


def killed(bridge, options):
    model = make_model(bridge, **options)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1") as raised:
            train(model, on_rank(1, signal.SIGKILL))
        assert raised.value.peer == 1


# What runs eagerly is not compiled.
FITS = [
    ("jit", {}),
    in_full("native", {"steps_per_execution": 4}),
    ("python", {"run_eagerly": True}),
    in_full("native", {}),
    in_full("python", {"steps_per_execution": 4}),
]


@pytest.mark.parametrize(("bridge", "options"), FITS, indirect=["bridge"])
def test_a_killed_rank_comes_out_of_fit_as_our_error(ranks, bridge, options):
    ring_of(ranks, bridge, 3, [1])(killed, bridge, options)


def formed_anew(bridge):
    comm, made = rr.init(), GradientBridge(16)  # Each gradient has a bucket.
    own = [tf.fill([5], 3.0 * comm.rank**2), tf.fill([7], 3.0 * comm.rank)]
    step = tf.function(lambda: made.mean(comm, own, ["a", "b"]), jit_compile=bridge == "jit")

    def check(first, second):
        assert [mean.numpy().tolist() for mean in step()] == [[first] * 5, [second] * 7]

    check(5.0, 3.0)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 1") as raised:
        for_ever(lambda: check(5.0, 3.0))
    assert raised.value.peer == 1
    if comm.rank == 0:
        # As if the failure had cut its comparison short, after it had ended well on rank 2.
        made._agreed._plans.clear()
    reform(comm, [1])
    for _ in range(3):
        check(6.0, 3.0)


def test_a_traced_step_goes_on_in_a_ring_formed_anew_of_the_ranks_that_are_left(ranks, bridge):
    ring_of(ranks, bridge, 3, [1])(formed_anew, bridge)


@pytest.mark.full
@needs_xla
@on_ranks(2, lost=[0], RINGREDUCE_TIMEOUT_S="2")
def test_a_stopped_rank_times_out_in_fit():
    with pytest.raises(PeerTimeoutError) as raised:
        train(make_model("native"), on_rank(0, signal.SIGSTOP))
    assert raised.value.peer == 0


def interrupted(bridge, in_fit):
    """Rank 0 stops after a step. When rank 1 waits for it, it is interrupted, and rank 0 dies."""
    comm, model = rr.init(), make_model(bridge)
    stopped, waiting = comm.all_gather_object(os.getpid())
    step, stop = step_of(model, model, bridge == "jit"), on_rank(0, signal.SIGSTOP)
    step()

    def is_waiting():
        call = comm._session._recorder.current_call()
        return call.operation is not None and time.monotonic() - call.since_s > 0.5

    def interrupt():
        wait_until(is_waiting, "a call that waits")
        os.kill(waiting, signal.SIGINT)
        os.kill(stopped, signal.SIGKILL)

    if comm.rank == 1:
        threading.Thread(target=interrupt, daemon=True).start()
    elif not in_fit:
        stop()
    with pytest.raises(KeyboardInterrupt):
        train(model, stop) if in_fit else for_ever(step)


@pytest.mark.parametrize(
    ("bridge", "in_fit"),
    [("native", True), in_full("jit", False), in_full("python", True), in_full("python", False)],
    indirect=["bridge"],
)
def test_ctrl_c_is_a_keyboard_interrupt_though_the_step_fails(ranks, bridge, in_fit):
    """Of ranks that were interrupted together one ends first, while others wait for it."""
    ring_of(ranks, bridge, 2, [0])(interrupted, bridge, in_fit)


def test_nothing_of_tensorflow_or_keras_is_replaced(tmp_path: Path) -> None:
    """Training in half precision changes neither their classes nor their modules."""
    program = """
import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

def theirs():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("keras.", "tensorflow.python.")):
            for owner in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                if getattr(owner, "__module__", name).startswith(("keras", "tensorflow")):
                    found[owner] = {k: v for k, v in vars(owner).items() if callable(v)}
    return found

before = theirs() if RANK == 0 else {}
import ringreduce.keras as rr_keras

ring = join()
keras.config.set_dtype_policy("mixed_float16")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
optimizer = rr_keras.DistributedOptimizer(keras.optimizers.SGD(0.0), communicator=ring)
model.compile(optimizer=optimizer, loss="mse")
model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
ring.close()
attempt("result", lambda: model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0))
after = theirs() if RANK == 0 else {}
changed = [
    f"{owner.__name__}.{name}"
    for owner, members in before.items()
    for name in {*members, *(after[owner] if isinstance(owner, type) else ())}
    if after[owner].get(name) is not members.get(name)
]
say("changed", names=changed, number=len(before))
"""
    with Ring(tmp_path, 2, program, transport="auto", environment=QUIET) as ring:
        [fact] = ring.wait("changed", [0])
        assert fact["names"] == []
        assert fact["number"] > 1000
        # A graph of a communicator that was closed says so.
        assert {fact["kind"] for fact in ring.wait("result")} == {"ClosedError"}


def failing_midway(bridge):
    """Return a step, and the variable that lets it fail.

    In the backward pass of the second layer, when buckets of the layers behind it have been handed
    over and those before it have not.
    """
    failing = tf.Variable(False)

    @tf.custom_gradient
    def fails_backward(x):
        def gradient(upstream):
            # Long enough for the buckets of the layers behind this one to leave.
            long = tf.zeros((512, 512)) + tf.reduce_sum(upstream)
            for _ in range(60):
                long = tf.matmul(long, long) * 0.001
            bad = tf.logical_and(failing, tf.reduce_sum(long * 0.0) == 0.0)
            # Not an assertion: that is stateful, and starts would wait for it in program order.
            return upstream + tf.gather([0.0], tf.where(bad, 99, 0))

        return tf.identity(x), gradient

    model = make_model(bridge)
    first, second, third, fourth = model.layers
    step = step_of(model, lambda x: fourth(third(fails_backward(second(first(x))))))
    step()
    failing.assign(rr.rank() == 1)
    return step, failing


def failed_midway(bridge):
    step, _ = failing_midway(bridge)
    if rr.rank() == 1:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            step()
        raise raised.value  # It ends the process.
    with pytest.raises(PeerLostError, match="rank 1") as lost:
        for_ever(step)
    assert lost.value.peer == 1
    assert "InvalidArgumentError" in str(lost.value)


# Nothing that XLA compiles fails like that: it clamps an index that is out of range.
@pytest.mark.parametrize("bridge", ["native", in_full("python")], indirect=True)
def test_a_step_that_fails_midway_ends_every_rank(ranks, bridge):
    ring_of(ranks, bridge, 2, [1])(failed_midway, bridge)


@needs_xla
@on_ranks(2)
def test_going_on_after_a_step_that_failed_midway_is_an_error_on_all_ranks():
    """Without the native ops nothing is under way yet when it fails, so ranks are just late."""
    step, failing = failing_midway("native")
    if rr.rank() == 1:
        with pytest.raises(tf.errors.InvalidArgumentError):
            step()
        failing.assign(False)
    with pytest.raises(MismatchError, match="that step failed midway"):
        for_ever(step)


@pytest.mark.parametrize(
    ("bridge", "way"),
    [
        ("native", "sys.exit(3)"),
        in_full("jit", "raise ValueError('of the user')"),
        in_full("python", "sys.exit(3)"),
    ],
    indirect=["bridge"],
)
def test_the_interpreter_ends_though_a_thread_sits_in_a_step(tmp_path, bridge, way):
    program = f"""
WHOLE_END = True
from tests.tensorflow.test_bridge_failures import make_model, train

ring = join()
model = make_model({bridge!r}, ring)
if RANK == 1:
    train(model)
trains = threading.Event()
threading.Thread(target=train, args=(model, trains.set), daemon=True).start()
trains.wait()
say("trains")
os.kill(int(sys.stdin.readline()), signal.SIGSTOP)
# Until nothing is completed any more: the thread waits for the other rank, in a step.
done, since = -1, time.monotonic()
while time.monotonic() - since < 0.3:
    if ring.statistics().collectives != done:
        done, since = ring.statistics().collectives, time.monotonic()
{way}
"""
    environment = QUIET | ({"RINGREDUCE_NATIVE": "0"} if bridge == "python" else {})
    with Ring(tmp_path, 2, program, transport="auto", environment=environment) as ring:
        ring.wait("trains", [0])
        leaving = ring.workers[0]
        leaving.stdin.write(f"{ring.workers[1].pid}\n".encode())
        leaving.stdin.flush()
        assert leaving.wait(20) == (3 if "exit" in way else 1), leaving.stderr
