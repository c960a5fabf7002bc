"""Data for `rr.fit` that each rank has for itself, such as a shard of Ray Data."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras.batches import Feed
from ringreduce.keras.join import join
from ringreduce.vocabulary.errors import ConfigError


def own_feed(data: Any, model: Any, ring: Communicator, **arguments: Any) -> Feed:
    """Training data of this rank's own batches; ranks may have different numbers. Collective.

    Args:
        arguments: of `fit`, which must be None here.
    """
    given = sorted(name for name, value in arguments.items() if value is not None)
    if given:
        raise ConfigError(
            f"got {', '.join(given)} with sharded=True",
            remedy="Pass a tf.data.Dataset of (x, y) or (x, y, sample_weight), batched; an epoch "
            "is one pass over it.",
        )
    feed = own_batches(data, "x")
    feed.dataset = join(feed.dataset, model, communicator=ring)
    return feed


def own_batches(data: Any, name: str) -> Feed:
    """The same as they are, for validation: its steps need no other rank. `name` is for errors."""
    if not isinstance(data, tf.data.Dataset):
        raise ConfigError(
            f"got {type(data).__name__} as {name} with sharded=True",
            remedy="Pass a tf.data.Dataset; of Ray Data, that is "
            "ray.train.get_dataset_shard(name).to_tf(features, labels, batch_size=n).",
        )
    feed = Feed()
    feed.dataset = data
    # `join` has done what unequal batches need.
    feed.is_even = True
    return feed
