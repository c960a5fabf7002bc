"""`SyncBatchNormalization`: N ranks of batch B are one process of batch N B, and it saves plain."""

import json
import runpy
import zipfile

import keras
import numpy as np
import pytest

import ringreduce.keras as rr
from ringreduce.keras import private
from ringreduce.vocabulary.errors import ClosedError, ConfigError
from tests.scope import in_full
from tests.tensor_facts import facts_of, needs_xla, of_every_rank, on_2_only

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

IN_FIT = [
    (2, "fit"),
    *(in_full(size, way) for size in (1, 3) for way in ("fit", "eager")),
    *(pytest.param(size, "jit", marks=(pytest.mark.full, needs_xla)) for size in (1, 3)),
]
in_fit = pytest.mark.parametrize(("size", "way"), IN_FIT)


@in_fit
def test_ranks_end_bit_identical_moving_statistics_included(way, size):
    assert len({fact["digest"] for fact in facts_of(size)[f"normalization {way}"]}) == 1


@in_fit
def test_workers_end_where_one_process_does(way, size):
    alone = facts_of(size)["normalization alone"][0]
    shared = facts_of(size)[f"normalization {way}"][0]
    # Otherwise equal weights would prove nothing.
    assert alone["moved"] > 0.1
    for expected, actual in zip(alone["weights"], shared["weights"], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=5e-6, atol=5e-6)


@pytest.mark.full
@pytest.mark.parametrize("way", ["fit", "eager", "jit"])
def test_inference_sends_nothing(way):
    """On 2 ranks a call of the layer for inference is looked at below."""
    for fact in facts_of(3)[f"normalization {way}"]:
        assert fact["sent"] == 0


def assert_is_of_all_rows_together(case, how, size):
    for outcome in of_every_rank(case, size, how):
        for got, wanted in zip(outcome["got"], outcome["want"], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5)


@on_2_only("eager", "jit")
def test_outputs_gradients_and_statistics_are_those_of_all_rows_together(how, size):
    assert_is_of_all_rows_together("moments masked", how, size)


@on_2_only("eager")
@pytest.mark.parametrize("case", ["moments uneven", "moments of the first axis"])
def test_so_they_are_without_a_mask_and_of_another_axis(case, how, size):
    assert_is_of_all_rows_together(case, how, size)


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_the_variance_is_right_far_from_zero(size):
    for fact in facts_of(size)["moments far from zero"]:
        np.testing.assert_allclose(fact["got"], fact["want"], rtol=2e-3)


@pytest.mark.parametrize("size", [2, in_full(3)])
def test_frozen_it_sends_nothing_and_a_copy_synchronizes(size):
    for fact in facts_of(size)["frozen"]:
        assert fact["sent"] == 1
        assert fact["mean"] == pytest.approx([(size - 1) / 2] * 3)


def model_with_it():
    keras.utils.set_random_seed(4)
    layers = [keras.Input((3,)), keras.layers.Dense(4), rr.SyncBatchNormalization(momentum=0.5)]
    return keras.Sequential(layers)


def test_it_is_saved_as_plain_batch_normalization(tmp_path):
    """`test_saving` loads such a file where ringreduce is not installed."""
    file = tmp_path / "model.keras"
    model_with_it().save(file)
    with zipfile.ZipFile(file) as archive:
        config = archive.read("config.json").decode()
    assert "ringreduce" not in config
    assert "Sync" not in config
    assert json.loads(config)["config"]["layers"][-1]["class_name"] == "BatchNormalization"


def test_it_can_be_loaded_to_go_on_synchronized(tmp_path):
    model_with_it().save(tmp_path / "model.keras")
    custom = {"BatchNormalization": rr.SyncBatchNormalization}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=custom)
    assert isinstance(loaded.layers[-1], rr.SyncBatchNormalization)
    assert loaded.layers[-1].momentum == 0.5


@needs_xla
def test_keras_may_compile_it_where_the_ring_can_be_called(monkeypatch):
    layer = rr.SyncBatchNormalization()
    assert layer.supports_jit
    monkeypatch.setattr("ringreduce.tensorflow.xla.why_not", lambda: "for once")
    assert not layer.supports_jit


def test_training_without_a_ring_says_what_to_do():
    with pytest.raises(ClosedError, match="ring"):
        rr.SyncBatchNormalization()(np.ones((2, 3)), training=True)


def test_synchronized_is_refused():
    with pytest.raises(ConfigError, match=r"tf\.distribute"):
        rr.SyncBatchNormalization(synchronized=True)


def test_a_keras_that_computes_moments_elsewhere_is_refused(monkeypatch):
    monkeypatch.delattr(keras.layers.BatchNormalization, "_moments")
    monkeypatch.setattr(keras.layers.BatchNormalization, "call", lambda self, inputs: inputs)
    with pytest.raises(ConfigError, match=f"{keras.__version__} has no BatchNormalization"):
        runpy.run_path(private.__file__)
