"""The data of `fit`, for training and validation, as feeds; of each rank's own too."""

from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.arrays import are_arrays, split
from ringreduce.keras.batches import feed_of
from ringreduce.keras.data_fingerprint import passing
from ringreduce.keras.join import empty_batch, filled, padded
from ringreduce.keras.plan import Feed
from ringreduce.vocabulary.errors import ConfigError


def split_off(whole: Any, validation_split: float) -> tuple[Any, Any]:
    """Arrays without their last rows, and these, for validation."""
    if not are_arrays(whole[0]):
        raise ConfigError(
            f"cannot take a validation_split of {type(whole[0]).__name__}",
            remedy="Pass validation_data, such as dataset.take(n) and dataset.skip(n).",
        )
    return split(whole, validation_split)


def joined_feed(
    model: Any, ring: Communicator, whole: Any, batch_size: Any, batch_share: Any, steps: Any
) -> Feed:
    """This rank's own batches, of which ranks may have different numbers."""
    x, y, sample_weight = whole
    of_batches = {
        "y": y,
        "sample_weight": sample_weight,
        "batch_size": batch_size,
        "batch_share": batch_share,
        "steps_per_epoch": steps,
    }
    if unused := sorted(name for name, value in of_batches.items() if value is not None):
        raise ConfigError(
            f"got {', '.join(unused)} with sharded=True",
            remedy="Pass a tf.data.Dataset of (x, y) or (x, y, sample_weight), batched, on a "
            "slow rank by less: gradients count by rows. An epoch is one pass over it.",
        )
    training = own_feed(x, "x")
    own = padded(training.dataset, model, ring)
    training.dataset = passing(own, lambda _, batch: batch, None, training.note_first)
    return training


def validation_feed(
    model: Any, data: Any, own_rows: int | None, rows: int | None, steps: int | None, dividing: Any
) -> Feed:
    """Validation data, whole batches of which go to the ranks in turn; `rows` are those of fit."""
    is_alone = not isinstance(data, (tuple, list))
    parts = (data,) if is_alone else data
    of_validation = own_rows or (rows if are_arrays(parts[0]) else None)
    plan = dividing(
        "the validation data given to rr.fit",
        batch_size=None if is_batched(parts[0], model) else of_validation,
        steps=steps,
        deal=True,
    )
    return feed_of(parts, plan)


def own_feed(data: Any, name: str) -> Feed:
    """This rank's own batches, such as a shard of Ray Data."""
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"got {type(data).__name__} as {name} with sharded=True",
            remedy="Pass a tf.data.Dataset; of Ray Data, that is "
            "ray.train.get_dataset_shard(name).to_tf(features, labels, batch_size=n).",
        )
    feed = Feed()
    feed.dataset, feed.is_even = data, True
    return feed


def is_batched(data: Any, model: Any) -> bool:
    """Whether `data` is a tf.data.Dataset of batches: its inputs have the rank of the model's."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not isinstance(data, tf.data.Dataset) or not inputs:
        return False
    return bool(tf.nest.flatten(data.element_spec)[0].shape.rank == len(inputs[0].shape))


def example_of(spec: Any) -> Any:
    """Inputs for the model: a row of zeros."""
    return keras.utils.unpack_x_y_sample_weight(filled(empty_batch(spec)))[0]
