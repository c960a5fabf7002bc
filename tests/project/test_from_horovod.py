"""docs/from-horovod.md: its scripts run; Horovod's with another import and an option renamed."""

import operator
import re
from pathlib import Path

import pytest
import tensorflow as tf

import ringreduce.keras as rr
import ringreduce.keras.horovod as hvd
from ringreduce.keras import advice
from tests.jobs import run_job

PAGE = (Path(__file__).parents[2] / "docs" / "from-horovod.md").read_text(encoding="utf-8")
PROGRAMS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))

# Nothing is downloaded, and a few steps do.
SMALLER = {
    "keras.datasets.mnist.load_data()": "((np.ones((640, 28, 28)), np.arange(640) % 10), None)",
    "import keras\n": "import keras\nimport numpy as np\n",
    "60_000 // 64": "16",
}
RENAMED = {
    "import horovod.tensorflow.keras as hvd": "import ringreduce.keras.horovod as hvd",
    "backward_passes_per_step=2": "gradient_accumulation_steps=2",
    "    average_aggregated_gradients=True,\n": "",
}


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["before.py", "after.py"])
def test_the_scripts_train_on_two_workers(name, tmp_path):
    text = PROGRAMS[name]
    for old, new in {**SMALLER, **(RENAMED if name == "before.py" else {})}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    text = text.replace("epochs=8", "epochs=2").replace('"mnist.keras"', f'"{tmp_path}/m.keras"')
    file = tmp_path / name
    file.write_text(text)
    result = run_job(2, [str(file)])
    assert result.exit_code == 0, result.errors
    assert result.output.count("Epoch 2/2") == 1
    assert (tmp_path / "m.keras").is_file()


def test_names_it_speaks_of_and_that_are_provided_exist_under_horovods_names():
    names = re.findall(r"\brr\.([\w.]+)", PAGE)
    assert [operator.attrgetter(name)(rr) for name in names]
    assert None not in [getattr(hvd, name) for name in advice._PROVIDED]
    assert not any(getattr(hvd, name)() for name in advice.ABSENT)
    assert hvd.fit is rr.fit
    callbacks = ("BroadcastGlobalVariables", "MetricAverage")
    for name in (*callbacks, "LearningRateWarmup", "LearningRateSchedule"):
        callback = getattr(hvd.callbacks, f"{name}Callback")
        assert issubclass(callback, rr.callbacks.VerifyReplicas.__base__)
        with pytest.raises(AttributeError, match="whose callbacks have it"):
            getattr(rr.callbacks, f"{name}Callback")


def test_names_that_are_missing_say_what_to_use():
    for name in advice._NAMES:
        with pytest.raises(AttributeError, match=f"'{name}': .*docs/from-horovod.md"):
            getattr(rr, name)
    with pytest.raises(AttributeError, match="save_best_only=True"):
        _ = hvd.callbacks.BestModelCheckpoint


@pytest.mark.parametrize(("name", "dtype"), [("none", "float32"), ("fp16", "float16")])
def test_compressions_round_tensors_as_horovods_do(name, dtype):
    compression = getattr(hvd.Compression, name)
    # By these names the optimizer takes them.
    assert (compression, hvd.Compression.bf16) == (name, "bf16")
    for tensor in (tf.constant([1.0, 3.0]), tf.constant([1, 3])):
        rounded, context = compression.compress(tensor)
        assert rounded.dtype.name == (dtype if tensor.dtype.is_floating else "int32")
        restored = compression.decompress(rounded, context)
        assert restored.dtype == tensor.dtype
        assert restored.numpy().tolist() == [1, 3]
