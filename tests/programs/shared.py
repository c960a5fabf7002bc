"""What the programs beside it share: how a case says its facts, and how weights are compared."""

import contextlib
import hashlib
import json
import os
import socket

import numpy as np
import tensorflow as tf

import ringreduce.keras as rr
from ringreduce import RingReduceError

__all__ = ["built", "difference", "digest", "error_of", "keep_graphs", "reset_connections", "say"]


def keep_graphs():
    """Run graphs as they are traced, under `make check`: TensorFlow takes long to rewrite them.

    For programs that make many, and are not about what is in them.
    """
    if os.environ.get("KEEP_GRAPHS") == "1":
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def reset_connections():
    """End those of this process, as a firewall does that forgets them."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            descriptor = os.dup(int(name))
            opened.callback(os.close, descriptor)
            one = socket.socket(fileno=descriptor)
            opened.callback(one.detach)
            one.getpeername()
            if one.family == socket.AF_INET:
                one.shutdown(socket.SHUT_RDWR)


def say(case, **facts):
    """Print one line of JSON, with the rank in it."""
    print(json.dumps({"case": case, "rank": rr.rank(), **facts}), flush=True)


def built(model, *example):
    """The compiled model, with its variables: Keras traces a step that creates some twice.

    With an example of inputs and targets, those of loss and metrics too, for which `rr.fit` would
    trace a step.
    """
    if example:
        inputs, targets = example
        outputs = model(inputs)
        model.compute_loss(inputs, targets, outputs)
        model.compute_metrics(inputs, targets, outputs)
        model.reset_metrics()
    model.optimizer.build(model.trainable_variables)
    return model


def digest(weights):
    """Of the bytes of all arrays, tensors or variables."""
    arrays = [np.asarray(weight) for weight in weights]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def difference(model, other):
    """The largest of all weights' differences."""
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a.astype("float64") - b).max()) for a, b in pairs)


def error_of(action):
    """What an action raised; nothing where it raised nothing."""
    try:
        action()
    except (RingReduceError, tf.errors.OpError) as error:
        return {
            "error": type(error).__name__,
            "ours": isinstance(error, RingReduceError),
            "text": str(error),
        }
    return {"error": "", "ours": False, "text": ""}
