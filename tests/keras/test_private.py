"""A Keras or TensorFlow that lacks private names: one line says so, and all else works."""

import subprocess
import sys
import textwrap

import pytest

from tests.processes import clean_environment

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

# As a version that nobody has tried might be.
PROGRAM = """
    import importlib
    import sys
    import types

    import keras
    import numpy as np
    import tensorflow as tf

    for name in (
        "keras.src.api_export.REGISTERED_OBJS_TO_NAMES",
        "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter",
        "keras.src.saving.keras_saveable.KerasSaveable",
        "tensorflow.compiler.tf2xla.python.xla.call_module",
    ):
        module, _, name = name.rpartition(".")
        known = vars(importlib.import_module(module))
        # Keras itself has the whole one.
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update({k: v for k, v in known.items() if k != name})

    import ringreduce.keras as rr

    rr.init()

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return X, X[:, :1]

    X = np.ones((8, 2), "float32")

    def made(**options):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(rr.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **options)
        return model

    model = made()
    print(len(rr.fit(model, X, X[:, :1], epochs=2, verbose=0).history["loss"]), flush=True)
    try:
        rr.fit(made(), Batches(), verbose=0)
    except rr.ConfigError as error:
        print(error)
"""


def test_what_needs_a_private_name_that_is_missing_fails_by_name_and_all_else_works():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    environment = clean_environment(TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    trained, refused = done.stdout.splitlines()
    assert trained == "2"
    assert "py_dataset_adapter.PyDatasetAdapter, which ringreduce needs for this" in refused
    assert "Install Keras 3.12 to " in refused
    lines = [line for line in done.stderr.splitlines() if "what needs it fails" in line]
    missing = [line.partition(" has no ")[2].partition(":")[0] for line in lines]
    assert [name.rpartition(".")[2] for name in missing] == [
        *("call_module", "REGISTERED_OBJS_TO_NAMES", "KerasSaveable", "PyDatasetAdapter")
    ]
