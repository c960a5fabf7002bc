"""What goes wrong inside a training step, in real processes: every rank ends, with our errors.

Each test runs with the native ops, with the Python function that stands in for them, and with the
custom calls of a step that XLA compiles.
"""

import functools
import signal
from pathlib import Path

import pytest

from ringreduce.effects import native
from ringreduce.tensorflow import failures
from tests.rings import Ring, assert_lost
from tests.scope import in_full

pytestmark = pytest.mark.tensorflow

TRAINING = """
import keras
import tensorflow as tf
from ringreduce.keras import DistributedOptimizer
from ringreduce.tensorflow import ops

ring = join()
assert ops.are_available() is {native}
JIT = {jit}

def make_model(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8) for _ in range(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    # A bucket for each layer, so that some are under way while others are still computed.
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.0), communicator=ring, bucket_bytes=300
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=JIT, **options)
    return model

said = []

class Say(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch >= 2 and not said:
            said.append(batch)
            say("trains")

ones = np.ones((2, 8), np.float32)
endless = tf.data.Dataset.from_tensors((ones, ones)).repeat()

def train(model, **options):
    model.fit(endless, steps_per_epoch=10**9, verbose=0, callbacks=[Say()], **options)
"""


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


def training_ring(
    directory: Path, size: int, bridge: str, program: str, alone: bool = False, **options: object
) -> Ring:
    """A ring that runs `program` after `TRAINING`, or `alone`."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    if bridge == "python":
        environment["RINGREDUCE_NATIVE"] = "0"
    preamble = TRAINING.replace("{native}", str(bridge != "python"))
    preamble = preamble.replace("{jit}", str(bridge == "jit"))
    return Ring(
        directory,
        size,
        program if alone else preamble + program,
        transport="auto",
        environment=environment,
        **options,
    )


# What runs eagerly is not compiled.
FITS = [
    ("jit", ""),
    ("native", "steps_per_execution=4"),
    ("python", "run_eagerly=True"),
    in_full("native", ""),
    in_full("python", "steps_per_execution=4"),
]


@pytest.mark.parametrize(("bridge", "options"), FITS, indirect=["bridge"])
def test_a_killed_rank_comes_out_of_fit_as_our_error(
    tmp_path: Path, bridge: str, options: str
) -> None:
    program = f"""
model = make_model({options})
attempt("result", lambda: train(model))
attempt("again", lambda: train(model))
hold()
"""
    with training_ring(tmp_path, 3, bridge, program) as ring:
        ring.wait("trains")
        ring.workers[1].signal(signal.SIGKILL)
        for event in ("result", "again"):
            facts = ring.wait(event, [0, 2])
            assert_lost([{**fact, "seconds": 0.0} for fact in facts], 1)
        ring.workers[1].wait()
        for rank in (0, 2):
            ring.workers[rank].stdin.close()
            assert ring.workers[rank].wait(20) == 0, ring.workers[rank].stderr


def test_a_traced_step_goes_on_in_a_ring_formed_anew_of_the_ranks_that_are_left(
    tmp_path: Path, bridge: str
) -> None:
    program = """
from ringreduce.communicator.reforming import reform
from ringreduce.tensorflow import GradientBridge

bridge = GradientBridge(16)  # Each gradient has a bucket.
own = [tf.fill([5], 3.0 * RANK**2), tf.fill([7], 3.0 * RANK)]

@tf.function(jit_compile=JIT)
def step():
    return bridge.mean(ring, own, ["a", "b"])

def check(*means):
    for found, mean in zip(step(), means, strict=True):
        assert (found.numpy() == mean).all(), found

def rounds():
    while True:
        check(5.0, 3.0)

check(5.0, 3.0)
say("trains")
attempt("failed", rounds)
if RANK == 0:
    # As if the failure had cut its comparison short, after it had ended well on rank 2.
    bridge._agreed._plans.clear()
reform(ring, [1])
for _ in range(3):
    check(6.0, 3.0)
ring.close()
"""
    with training_ring(tmp_path, 3, bridge, program) as ring:
        ring.wait("trains")
        ring.workers[1].signal(signal.SIGKILL)
        assert_lost([{**fact, "seconds": 0.0} for fact in ring.wait("failed", [0, 2])], 1)
        for rank in (0, 2):
            assert ring.workers[rank].wait(30) == 0, ring.workers[rank].stderr


@pytest.mark.parametrize("bridge", ["native"], indirect=True)
def test_a_stopped_rank_times_out_in_fit(tmp_path: Path, bridge: str) -> None:
    program = """
attempt("result", lambda: train(make_model()))
hold()
"""
    with training_ring(tmp_path, 2, bridge, program, timeout_s=2.0) as ring:
        ring.wait("trains")
        ring.workers[0].signal(signal.SIGSTOP)
        [fact] = ring.wait("result", [1])
        assert fact["kind"] == "PeerTimeoutError"
        assert fact["peer"] == 0


STOPS = """
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            stop()

def stop():
    if RANK == 0:
        say("stops")
        os.kill(os.getpid(), signal.SIGSTOP)

model = make_model()

@tf.function(jit_compile=JIT)
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)

def rounds():
    for number in range(10**9):
        step(ones)
        if number == 3:
            stop()
"""


FIT = "model.fit(endless, steps_per_epoch=10**9, verbose=0, callbacks=[Stop()])"


@pytest.mark.parametrize(
    ("bridge", "call"),
    [("native", FIT), ("jit", "rounds()"), in_full("python", FIT), in_full("python", "rounds()")],
    indirect=["bridge"],
)
def test_ctrl_c_is_a_keyboard_interrupt_though_the_step_fails(
    tmp_path: Path, bridge: str, call: str
) -> None:
    """Of ranks that were interrupted together one ends first, while others wait for it."""
    program = f"{STOPS}\nattempt('result', lambda: {call})\nhold()\n"
    with training_ring(tmp_path, 2, bridge, program) as ring:
        ring.wait("stops", [0])
        ring.workers[1].signal(signal.SIGINT)
        ring.workers[0].signal(signal.SIGKILL)
        [fact] = ring.wait("result", [1])
        assert fact["kind"] == "KeyboardInterrupt", fact


def test_nothing_of_tensorflow_or_keras_is_replaced(tmp_path: Path) -> None:
    """Of neither their classes nor their modules, by training in half precision."""
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
    with training_ring(tmp_path, 2, "native", program, alone=True) as ring:
        [fact] = ring.wait("changed", [0])
        assert fact["names"] == []
        assert fact["number"] > 1000
        # A graph of a communicator that was closed says so.
        assert {fact["kind"] for fact in ring.wait("result")} == {"ClosedError"}


# Fails in the backward pass of the second layer on rank 1, when buckets of the layers behind it
# have been handed over and those before it have not.
FAILING = """
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

failing = tf.Variable(False)
model = make_model()
optimizer = model.optimizer
optimizer.build(model.trainable_variables)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        h = model.layers[1](model.layers[0](x))
        loss = tf.reduce_mean(model.layers[3](model.layers[2](fails_backward(h))) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables))

step(ones)
say("trains")
failing.assign(RANK == 1)
"""


# Nothing that XLA compiles fails like that: it clamps an index that is out of range.
@pytest.mark.parametrize("bridge", ["native", in_full("python")], indirect=True)
def test_a_step_that_fails_midway_ends_every_rank(tmp_path: Path, bridge: str) -> None:
    program = f"""{FAILING}
atexit.register(ring.close)
if RANK == 1:
    step(ones)  # raises, and ends the process
attempt("result", lambda: until_error(lambda: step(ones)))
hold()
"""
    with training_ring(tmp_path, 2, bridge, program) as ring:
        ring.wait("trains")
        assert_lost([{**ring.wait("result", [0])[0], "seconds": 0.0}], 1)
        assert ring.workers[1].wait(20) == 1
        assert "InvalidArgumentError" in ring.workers[1].stderr


def test_going_on_after_a_step_that_failed_midway_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """Without the native ops nothing is under way yet when it fails, so ranks are just late."""
    if native.library() is None:
        pytest.skip(native.why_missing())
    program = f"""{FAILING}
if RANK == 1:
    attempt("first", lambda: step(ones))
    failing.assign(False)
attempt("result", lambda: until_error(lambda: step(ones)))
hold()
"""
    with training_ring(tmp_path, 2, "native", program) as ring:
        [first] = ring.wait("first", [1])
        assert first["kind"] == "InvalidArgumentError"
        facts = ring.wait("result")
        assert [fact["kind"] for fact in facts] == ["MismatchError"] * 2, facts
        assert "that step failed midway" in facts[0]["text"]
        assert "that step failed midway" in facts[1]["text"]


@pytest.mark.parametrize(
    ("bridge", "way"),
    [
        ("native", "sys.exit(3)"),
        in_full("jit", "raise ValueError('of the user')"),
        in_full("python", "sys.exit(3)"),
    ],
    indirect=["bridge"],
)
def test_the_interpreter_ends_though_a_thread_sits_in_a_step(
    tmp_path: Path, bridge: str, way: str
) -> None:
    program = f"""
WHOLE_END = True
if RANK == 1:
    train(make_model())
    hold()
model = make_model()
trains = threading.Event()

class Note(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        trains.set()

def work():
    model.fit(endless, steps_per_epoch=10**9, verbose=0, callbacks=[Note()])

threading.Thread(target=work, daemon=True).start()
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
    with training_ring(tmp_path, 2, bridge, program) as ring:
        ring.wait("trains")
        leaving = ring.workers[0]
        leaving.stdin.write(f"{ring.workers[1].pid}\n".encode())
        leaving.stdin.flush()
        assert leaving.wait(20) == (3 if "exit" in way else 1), leaving.stderr
