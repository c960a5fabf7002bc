"""The data of `fit`, for training and validation, as feeds; of each rank's own too."""

from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.data.adapters import feed_of
from ringreduce.keras.data.arrays import are_arrays, split
from ringreduce.keras.data.batch_shares import Shares
from ringreduce.keras.data.division import Feed, Plan
from ringreduce.keras.data.fingerprint import passing
from ringreduce.keras.data.uneven import empty_batch, filled
from ringreduce.keras.rows import none_for_optionals
from ringreduce.keras.training.arguments import FitArguments
from ringreduce.keras.training.padded import padded
from ringreduce.keras.training.ranks import Training
from ringreduce.vocabulary.errors import ConfigError


def feeds_of(
    given: FitArguments,
    ring: Communicator,
    who: Training,
    shares: Shares,
    *,
    is_elastic: bool,
    may_count: bool,
) -> tuple[Feed, Feed | None]:
    """Make the feeds of training and validation from what `fit` was given; None: no validation.

    With `may_count` parts of batches may carry the number of rows of the whole. Collective.
    """
    data, validation = (given.x, given.y, given.sample_weight), given.validation_data
    if given.validation_split and validation is None:
        data, validation = split(data, given.validation_split)
    if given.per_rank_data:
        training = _sharded_feed(given, ring)
        # Steps of validation need no other rank.
        validation_feed = None if validation is None else _own_feed(validation, "validation_data")
        return training, validation_feed
    dividing = partial(
        Plan,
        ring,
        at_once=given.model.steps_per_execution,
        check=given.compares_data,
        readers=who.everyone,
        is_elastic=is_elastic,
    )
    plan = dividing(
        "the data given to rr.fit",
        batch_size=None if _is_batched(given.x, given.model) else given.batch_size,
        steps=given.steps_per_epoch,
        first=given.initial_epoch,
        shuffle=given.shuffle,
        seed=given.seed,
        class_weight=given.class_weight,
        shares=shares,
        # Unchecked ranks may read other batches.
        counts=may_count
        and not is_elastic
        and ring.size > 1
        and given.compares_data
        and not shares.is_measured,
    )
    training = feed_of(data, plan)
    if validation is None:
        return training, None
    parts = validation if isinstance(validation, (tuple, list)) else (validation,)
    rows = given.validation_batch_size or (given.batch_size if are_arrays(parts[0]) else None)
    # Whole batches go to the ranks in turn.
    plan = dividing(
        "the validation data given to rr.fit",
        batch_size=None if _is_batched(parts[0], given.model) else rows,
        steps=given.validation_steps,
        deal=True,
    )
    return training, feed_of(parts, plan)


def _sharded_feed(given: FitArguments, ring: Communicator) -> Feed:
    """This rank's own batches, of which ranks may have different numbers."""
    names = "y", "sample_weight", "batch_size", "batch_share", "steps_per_epoch"
    of_batches = {name: getattr(given, name) for name in sorted(names)}
    if given.batch_share == "equal":
        del of_batches["batch_share"]
    if unused := [name for name, value in of_batches.items() if value is not None]:
        raise ConfigError(
            f"got {', '.join(unused)} with per_rank_data=True",
            remedy="Pass a tf.data.Dataset of (x, y) or (x, y, sample_weight), batched, on a "
            "slow rank by less: gradients count by rows. An epoch is one pass over it.",
        )
    training = _own_feed(given.x, "x")
    padded_batches = padded(training.dataset, given.model, ring)
    training.dataset = passing(padded_batches, lambda _, batch: batch, None, training.note_first)
    return training


def _own_feed(data: Any, name: str) -> Feed:
    """This rank's own batches, such as a shard of Ray Data."""
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"got {type(data).__name__} as {name} with per_rank_data=True",
            remedy="Pass a tf.data.Dataset; of Ray Data, that is "
            "ray.train.get_dataset_shard(name).to_tf(features, labels, batch_size=n).",
        )
    feed = Feed()
    feed.dataset, feed.is_even = none_for_optionals(data), True
    return feed


def _is_batched(data: Any, model: keras.Model) -> bool:
    """Whether `data` is a tf.data.Dataset of batches: its inputs have the rank of the model's."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not isinstance(data, tf.data.Dataset) or not inputs:
        return False
    return bool(tf.nest.flatten(data.element_spec)[0].shape.rank == len(inputs[0].shape))


def example_of(spec: Any) -> Any:
    """Inputs for the model: a row of zeros."""
    return keras.utils.unpack_x_y_sample_weight(filled(empty_batch(spec)))[0]
