"""Threads of TensorFlow."""

import tensorflow as tf

from ringreduce.vocabulary.worker_environment import compute_threads


def threads_in_use() -> int:
    """With how many threads TensorFlow computes in this process."""
    return tf.config.threading.get_intra_op_parallelism_threads() or compute_threads()
