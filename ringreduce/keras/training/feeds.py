"""The data of `fit`, for training and validation, as feeds; of each rank's own too."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.data.adapters import WholeData, feed_of, whole_of
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

_TRAINING = "the data given to rr.fit"  # in errors


@dataclass(frozen=True)
class Looked:
    """The data that `fit` was given, as one rank sees them before they are divided."""

    spec: Any  # the `element_spec` of batches to train on
    training: WholeData | None  # None: they are each rank's own
    batch_size: int | None  # None for a tf.data.Dataset of batches
    validation: Any  # as given, or split off; None: none
    validation_rows: int | None  # of its batches; None for a tf.data.Dataset of batches


def look(given: FitArguments) -> Looked:
    """Look at the data that `fit` was given; local. Called before the model is built.

    Once it is built it has inputs, which would say of another tf.data.Dataset that it has batches.
    ConfigError as `feed_of`.
    """
    if given.per_rank_data:
        _require_data_alone(given)
        spec = _own_batches(given.x, "x").element_spec
        return Looked(spec, None, None, given.validation_data, None)
    data, validation = (given.x, given.y, given.sample_weight), given.validation_data
    if given.validation_split and validation is None:
        data, validation = split(data, given.validation_split)
    rows = None if _is_batched(given.x, given.model) else given.batch_size
    whole = whole_of(data, _TRAINING, rows, given.class_weight)
    first = _parts(validation)[0]
    of_validation = given.validation_batch_size
    if of_validation is None and are_arrays(first):
        of_validation = given.batch_size
    is_batched = _is_batched(first, given.model)
    return Looked(whole.spec, whole, rows, validation, None if is_batched else of_validation)


def feeds_of(
    given: FitArguments,
    looked: Looked,
    who: Training,
    shares: Shares,
    *,
    is_elastic: bool,
    may_count: bool,
) -> tuple[Feed, Feed | None]:
    """Make the feeds of training and validation from what `fit` was given; None: no validation.

    With `may_count` parts of batches may carry the number of rows of the whole. Collective.
    """
    ring, validation = who.data, looked.validation
    if looked.training is None:
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
        _TRAINING,
        batch_size=looked.batch_size,
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
    whole = looked.training
    training = whole.divided(plan)
    training.facts = lambda: {**given.of_steps, "data": whole.in_short()}
    if validation is None:
        return training, None
    # Whole batches go to the ranks in turn.
    plan = dividing(
        "the validation data given to rr.fit",
        batch_size=looked.validation_rows,
        steps=given.validation_steps,
        deal=True,
    )
    return training, feed_of(_parts(validation), plan)


def _parts(data: Any) -> Any:
    return data if isinstance(data, (tuple, list)) else (data,)


def _require_data_alone(given: FitArguments) -> None:
    """ConfigError if something was given beside data that are each rank's own."""
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


def _sharded_feed(given: FitArguments, ring: Communicator) -> Feed:
    """This rank's own batches, of which ranks may have different numbers."""
    training = _own_feed(given.x, "x")
    padded_batches = padded(training.dataset, given.model, ring)
    training.dataset = passing(padded_batches, lambda _, batch: batch, None, training.note_first)
    return training


def _own_feed(data: Any, name: str) -> Feed:
    feed = Feed()
    feed.dataset, feed.is_even = _own_batches(data, name), True
    return feed


def _own_batches(data: Any, name: str) -> Any:
    """This rank's own batches, such as a shard of Ray Data."""
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"got {type(data).__name__} as {name} with per_rank_data=True",
            remedy="Pass a tf.data.Dataset; of Ray Data, that is "
            "ray.train.get_dataset_shard(name).to_tf(features, labels, batch_size=n).",
        )
    return none_for_optionals(data)


def _is_batched(data: Any, model: keras.Model) -> bool:
    """Whether `data` is a tf.data.Dataset of batches: its inputs have the rank of the model's."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    if not isinstance(data, tf.data.Dataset) or not inputs:
        return False
    return bool(tf.nest.flatten(data.element_spec)[0].shape.rank == len(inputs[0].shape))


def example_of(spec: Any) -> Any:
    """Inputs for the model: a row of zeros."""
    return keras.utils.unpack_x_y_sample_weight(filled(empty_batch(spec)))[0]
