"""Callbacks that compile a model anew within training, or give it another optimizer."""

from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce.keras.elastic.backup import back_up
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import ConfigError, MismatchError, PeerLostError
from tests.scope import in_full

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

SGD = keras.optimizers.SGD
X = np.arange(16, dtype="float32").reshape(8, 2) % 3 - 1
Y = X.sum(1, keepdims=True)


def new(ring: Any, optimizer: Any = None, **options: Any) -> Any:
    """An eager model, unless options say otherwise."""
    frozen = keras.layers.Dense(3, trainable=False, kernel_initializer="ones")
    layers = [keras.Input((2,)), frozen, keras.layers.Dense(1, kernel_initializer="zeros")]
    model = keras.Sequential(layers)
    optimizer = optimizer or rr.DistributedOptimizer(SGD(2**-4), ring)
    model.compile(optimizer, "mse", **{"run_eagerly": True, **options})
    return model


def compiled(make: Any, model: Any, ring: Any) -> None:
    model.layers[0].trainable = True
    model.compile(make(ring), "mse", run_eagerly=True)
    model.make_train_function(force=True)  # Else Keras's own `fit` has none.


def by_name(model: Any, ring: Any) -> None:
    model.compile(loss="mse", run_eagerly=True)


def assigned(model: Any, ring: Any) -> None:
    model.optimizer = SGD(2**-4)


def wrapped(ring: Any, nesterov: bool = False) -> Any:
    """By Nesterov's momentum on rank 1, if at all."""
    inner = SGD(2**-5, momentum=0.5, nesterov=nesterov and ring.rank == 1)
    return rr.DistributedOptimizer(inner, ring)


def plain(ring: Any) -> Any:
    return SGD(2**-5, momentum=0.5)


class Unfreezes(keras.callbacks.Callback):
    """Calls `change` with the model when the second epoch begins, on some ranks."""

    def __init__(self, ring: Any, change: Any, hook: str, ranks: Any = (0, 1)) -> None:
        super().__init__()
        if ring is None or ring.rank in ranks:
            setattr(self, hook, lambda at, logs=None: at == 1 and change(self.model, ring))


OPTIONS: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": 0, "shuffle": False}


def training_of(
    model: Any,
    ring: Any,
    change: Any,
    hook: str = "on_epoch_begin",
    by: Any = rr.fit,
    ranks: Any = (0, 1),
) -> Any:
    """Train `model` of two batches an epoch, and return it."""
    callbacks = [Unfreezes(ring, change, hook, ranks)]
    if by is rr.fit:
        rr.fit(model, X, Y, callbacks=callbacks, communicator=ring, **OPTIONS)
    else:
        model.fit(X, Y, callbacks=[rr.callbacks.Together(callbacks, ring)], **OPTIONS)
    return model


BY_KERAS = pytest.mark.filterwarnings("ignore::ringreduce.keras.DataWarning")


@BY_KERAS
@pytest.mark.parametrize(
    ("change", "hook", "made", "by"),
    [
        (partial(compiled, plain), "on_epoch_begin", 2, rr.fit),
        (partial(compiled, plain), "on_epoch_begin", 2, keras.Model.fit),
        (partial(compiled, plain), "on_train_batch_begin", 1, rr.fit),
        in_full(partial(compiled, plain), "on_train_batch_begin", 1, keras.Model.fit),
        (by_name, "on_epoch_end", 4, rr.fit),
        in_full(by_name, "on_epoch_end", 4, keras.Model.fit),
        (assigned, "on_train_batch_end", 2, rr.fit),
        in_full(assigned, "on_train_batch_end", 2, keras.Model.fit),
    ],
    ids=[
        f"{change}-{by}"
        for change in ("epoch's begin", "batch's begin", "by name", "assigned")
        for by in ("rr.fit", "model.fit")
    ],
)
def test_no_step_is_made_with_a_plain_optimizer(change: Any, hook: str, made: int, by: Any) -> None:
    def work(ring: Any) -> int:
        first = rr.DistributedOptimizer(SGD(2**-4), ring)
        text = f"the callback Unfreezes, in {hook}, has replaced the model's DistributedOptimizer"
        with pytest.raises(ConfigError, match=text) as caught:
            training_of(new(ring, first), ring, change, hook, by)
        assert "Wrap it there too: model.compile(optimizer=rr.Distr" in str(caught.value)
        return int(first.iterations)

    assert ring_of_threads(2, work) == [made] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_optimizer_on_one_rank_ends_all(rank: int) -> None:
    def work(ring: Any) -> None:
        training_of(new(ring), ring, partial(compiled, plain), ranks=[rank])

    text = "would go on training apart from the other ranks: the callback Unfreezes"
    # That of rank 0, with those of others.
    with pytest.raises(PeerLostError if rank else ConfigError, match=text) as caught:
        ring_of_threads(2, work)
    assert len(caught.value.__notes__) == 1
    assert text in caught.value.__notes__[0]


def test_a_wrapped_optimizer_trains_on_to_what_one_process_does() -> None:
    def work(ring: Any) -> Any:
        model = new(ring)
        training_of(model, ring, partial(compiled, wrapped))
        assert int(model.optimizer.iterations) == 4
        return model.get_weights()

    weights = ring_of_threads(2, work)
    alone = new(None, SGD(2**-4))
    unfreezes = Unfreezes(None, partial(compiled, plain), "on_epoch_begin")
    alone.fit(X, Y, callbacks=[unfreezes], **OPTIONS)
    assert all(map(np.array_equal, *weights))
    for found, expected in zip(weights[0], alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (weights[0][0] != 1.0).any()


@pytest.mark.parametrize(
    ("options", "ranks", "text"),
    [
        ({"nesterov": True}, [0, 1], "nesterov is False on rank 0 and True on rank 1"),
        ({}, [1], "."),
    ],
)
def test_ranks_that_compile_differently_do_not_go_on(options: Any, ranks: Any, text: str) -> None:
    def work(ring: Any) -> None:
        change = partial(compiled, partial(wrapped, **options))
        training_of(new(ring), ring, change, ranks=ranks)

    with pytest.raises(MismatchError, match=text):
        ring_of_threads(2, work)


def test_ranks_with_other_numbers_of_batches_go_on_with_another_optimizer() -> None:
    def work(ring: Any) -> Any:
        model, count = new(ring), 2 + 2 * ring.rank
        own = tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(2)
        callbacks = [Unfreezes(ring, partial(compiled, wrapped), "on_epoch_begin")]
        options = {"epochs": 2, "verbose": 0, "communicator": ring, "per_rank_data": True}
        rr.fit(model, own, callbacks=callbacks, **options)
        assert int(model.optimizer.iterations) == 2
        return model.get_weights()

    assert all(map(np.array_equal, *ring_of_threads(2, work)))


def test_steps_of_a_backup_are_not_made_again_by_another_optimizer(tmp_path: Path) -> None:
    def work(ring: Any) -> None:
        model, backup = new(ring), keras.callbacks.BackupAndRestore(tmp_path)
        model.optimizer.build(model.trainable_variables)
        back_up([backup], model, 1, 1)
        unfreezes = Unfreezes(ring, partial(compiled, wrapped), "on_epoch_begin")
        rr.fit(model, X, Y, callbacks=[unfreezes, backup], communicator=ring, **OPTIONS)
        assert int(model.optimizer.iterations) == 3  # Of epochs 2 and 3, all but the first.

    ring_of_threads(1, work)


def test_a_profile_goes_on_where_steps_are_made_anew(capsys: pytest.CaptureFixture[str]) -> None:
    def work(ring: Any) -> None:
        model, profile = new(ring, run_eagerly=False), rr.callbacks.Profile(ring)
        unfreezes = Unfreezes(ring, partial(compiled, wrapped), "on_train_batch_begin")
        slow = keras.callbacks.LambdaCallback(on_train_batch_end=lambda at, logs: sum(range(10**6)))
        callbacks = [profile, unfreezes, slow]
        rr.fit(model, X, Y, callbacks=callbacks, communicator=ring, **OPTIONS)

    ring_of_threads(1, work)
    assert "Unfreezes, LambdaCallback look at each batch" in " ".join(
        capsys.readouterr().out.split()
    )
