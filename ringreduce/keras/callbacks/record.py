"""Records the first steps of `rr.fit` for ``ringreduce verify``, and then ends the program."""

import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import msgspec
import numpy as np

from ringreduce.communicator.communicator import Communicator
from ringreduce.keras import private
from ringreduce.keras.callbacks.profile import threads_in_use
from ringreduce.keras.mistakes import differences
from ringreduce.keras.parts.part import part_of
from ringreduce.keras.wrappable import wrappers_in
from ringreduce.pure.verification import Run
from ringreduce.tensorflow.variables import path_of, value_of

_HALVES = {"float16", "bfloat16"}


class Record(keras.callbacks.Callback):
    """Records steps on all ranks; rank 0 writes them into a folder, then all leave. Comes last."""

    def __init__(self, steps: int, folder: str, arguments: Mapping[str, str], ring: Communicator):
        super().__init__()
        self._wanted, self._folder, self._ring = steps, Path(folder), ring
        self._settings = dict(arguments)
        # Each step's sum of losses, number of rows, and seconds, on this rank.
        self._steps: list[list[float]] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._save_weights("before.npz")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before: Any = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        seconds, sums = time.perf_counter() - self._began_s, self._loss_sums()
        self._steps.append([*(sums - self._before).tolist(), seconds])
        self._before = sums
        if len(self._steps) == 1:
            self._save_weights("after.npz")
        if len(self._steps) == self._wanted:
            self.on_train_end()

    def on_train_end(self, logs: Any = None) -> None:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # Linux says KiB.
        gathered = self._ring.all_gather_object([memory, self._steps])
        if self._ring.rank == 0:
            run = self._run([memory for memory, _ in gathered], [steps for _, steps in gathered])
            (self._folder / "run").write_bytes(msgspec.msgpack.encode(run))
        sys.exit()

    def _run(self, memory: list[int], steps: Any) -> Run:
        model, shared = self.model, self._shared()
        sums, rows, _ = np.sum(steps, 0).T
        is_own_step = type(model).train_step is not keras.Model.train_step
        for wrapper in wrappers_in(model):
            rate = np.asarray(wrapper.learning_rate)
            self._settings[f"{wrapper.name}: learning_rate"] = f"{rate:g}"
            for what, texts, _ in wrapper.settings():
                which = what.removeprefix("models: ").replace("optimizers", wrapper.name)
                self._settings |= {f"{which}: {name}": text for name, text in texts.items()}
        seconds = [step[2] for step in self._steps]
        trained = {id(variable) for variable in model.trainable_variables}
        return Run(
            ranks=self._ring.size,
            losses=[float(a / b) if b else np.nan for a, b in zip(sums, rows, strict=True)],
            # A step of one's own may count no more than batches.
            rows=0 if is_own_step else int(rows[0]),
            step_s=statistics.median(seconds[1:] or seconds),
            threads=threads_in_use(),
            memory=memory,
            settings=self._settings,
            names=[f"{path_of(variable)} {tuple(variable.shape)}" for variable in shared],
            trained=[id(variable) in trained for variable in shared],
            is_half=any(layer.compute_dtype in _HALVES for layer in private.layers_of(model)),
            of_batches=differences(model),
            of_gradients=list(dict.fromkeys(_of_gradients(model))),
        )

    def _loss_sums(self) -> np.ndarray:
        """The sum of losses, and the number of rows, of the epoch's batches so far."""
        for metric in self.model.metrics:
            # A step of one's own may have another name for it.
            if isinstance(metric, keras.metrics.Mean) and "loss" in metric.name:
                return np.array([value_of(metric.total), value_of(metric.count)], np.float64)
        return np.zeros(2)

    def _shared(self) -> list[Any]:
        """Weights that are equal on all ranks, and whole."""
        weights = getattr(self.model.optimizer, "shared", list)(self.model.weights)
        return [variable for variable in weights if part_of(variable) is None]

    def _save_weights(self, name: str) -> None:
        if self._ring.rank == 0:
            # numpy would not read 16-bit floats again.
            values = [value_of(variable).astype(np.float32) for variable in self._shared()]
            np.savez(self._folder / name, *values)


def _of_gradients(model: keras.Model) -> Iterator[str]:
    """Say what ranks do differently from one process with gradients, as far as it is known."""
    step = type(model).train_step
    if step is not keras.Model.train_step:
        clips = next((name for name in step.__code__.co_names if name.startswith("clip_")), None)
        does = f"calls {clips}, which clips" if clips else "may change"
        yield (
            f"{type(model).__name__}.train_step {does} each rank's gradients before the optimizer "
            "averages them (leave it to the optimizer: clipnorm, clipvalue, global_clipnorm)"
        )
    for wrapper in wrappers_in(model):
        options = wrapper.settings()[0].found
        if "SUM" in options["op"]:
            yield 'op="sum" makes gradients as many times as large as there are ranks'
        if wrapper.is_alone:
            yield f"strategy={options['strategy']}: ranks step alone between meetings"
