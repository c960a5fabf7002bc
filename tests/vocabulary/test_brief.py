"""What messages say of a value that they were given."""

import numpy as np

from ringreduce.vocabulary.words import brief


def test_what_is_large_is_named_by_its_class_and_size():
    for value, said in (
        (np.ones((64, 4)), "ndarray of shape (64, 4)"),
        ([1] * 7, "list of length 7"),
        ("model", "'model'"),
        (None, "None"),
        ([], "[]"),
        (np.array(1.0), "array(1.)"),
        (np.ndarray, "<class 'numpy.ndarray'>"),
        ("x" * 100, "str"),
    ):
        assert brief(value) == said
