"""Creates the variables of a model, its metrics and its optimizer, without a step."""

import contextlib
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from ringreduce.keras.data.uneven import empty_batch, filled
from ringreduce.keras.optimizers_in import build_optimizer_here, wrappers_in
from ringreduce.keras.step import Step, own_step


def build(model: Any, spec: Any) -> None:
    """Create the variables of model, metrics and optimizer, for batches like `spec`; runs no step.

    `spec` is a dataset's ``element_spec``; a batch may have any number of rows.
    """
    # TensorFlow creates none where they would depend on the exchange at a step's beginning. A loss
    # has metrics of its own, one for each output.
    compiled = [getattr(model, name, None) for name in ("_compile_metrics", "_compile_loss")]
    is_callable = type(model).call is not keras.Model.call
    if not (is_callable and model.built and all(part is None or part.built for part in compiled)):
        _build_by_tracing(model, spec, is_callable)
    build_optimizer_here(model)


def _build_by_tracing(model: keras.Model, spec: Any, is_callable: bool) -> None:
    def call(data: Any) -> Any:
        return model(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)

    own = own_step(model)
    steps: list[Step] = [partial(keras.Model.test_step, model), call]
    # Only its train_step knows what it needs of compile and data, or how its parts are called. An
    # eager one may keep numbers in lists, where a trace would leave tensors.
    if own is not None and not (model.run_eagerly and is_callable):
        steps.insert(0, own)
    problems = []
    for step in steps:
        try:
            return _trace(model, step, spec)
        except Exception as error:  # It may need what a callback sets, or works eagerly only.
            problems.append(error)
    if not model.built and not model.run_eagerly:
        raise problems[0]
    if not model.built and is_callable:
        call(filled(empty_batch(spec)))
    return None


def _trace(model: keras.Model, step: Step, spec: Any) -> None:
    """Create what `step` does when it is traced; what optimizers do at first waits for training."""
    with contextlib.ExitStack() as stack:
        held = [(w, stack.enter_context(w.deferred())) for w in wrappers_in(model)]
        tf.function(lambda data: step(filled(data)), autograph=False).get_concrete_function(spec)
    for wrapper, steps in held:
        for _, variables in steps:
            if variables is not None and not wrapper.built:
                wrapper.build_inner(variables)
