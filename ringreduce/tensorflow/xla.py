"""The native ops as custom calls of XLA, for what `jit_compile=True` compiles.

TensorFlow's op `XlaCallModule` adds a call to a graph as a module of StableHLO, XLA's input
language. Ordering tokens, int32 scalars that go in and come out, fix the order of calls.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ringreduce.effects import native
from ringreduce.tensorflow import ops, private

# The version of XlaCallModule's format; TensorFlow reads all since 5.
_VERSION = 9


def is_compiling() -> bool:
    """Whether XLA will compile the graph that is being traced."""
    if tf.executing_eagerly():
        return False
    return bool(private.is_compiled_by_xla(tf.compat.v1.get_default_graph()))


def compiled_alike(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """`gradient`, a backward pass, traced for XLA if the forward pass being traced is."""
    # TensorFlow has the gradients of a compiled function compiled, but traces them as if not.
    if not is_compiling():
        return gradient

    def compiled(*upstream: Any) -> Any:
        if tf.executing_eagerly() or is_compiling():
            return gradient(*upstream)
        context = private.XLAControlFlowContext()
        context.Enter()
        try:
            return gradient(*upstream)
        finally:
            context.Exit()

    return compiled


@cache
def why_not() -> str | None:
    """Why this process has no custom calls, or None. The first call registers them."""
    if native.library() is None:
        return native.why_missing()
    if tf.config.get_visible_devices("GPU"):
        return "XLA compiles for the GPU here, where the ring cannot be called from."
    try:
        futures_at = ctypes.c_int(native.xla_futures_at(tf.sysconfig.get_include()))
        # Up to TensorFlow 2.19 only the second library exports XLA's interface.
        why = ops.register("rr_xla_register", ("framework", "cc"), futures_at)
    except (OSError, ValueError) as error:
        why = f"the order of the functions in XLA's table is not known: {error}"
    return None if why is None else f"XLA cannot call the ring: {why}."


def start(
    plan: int, bucket: int, gradients: Sequence[Any], after: Any, in_place: bool = False
) -> list[Any]:
    """Add the call that packs `gradients`, in the order of slots, for the engine; return a token.

    `after` is the token of the collective before. With `in_place` there is one gradient, which is
    reduced in XLA's memory; it is returned too, before the token and for `wait` alone.
    """
    operands = [*gradients, after]
    results = [(gradient.shape, gradient.dtype) for gradient in gradients] if in_place else []
    # Marked as having an effect: else XLA moves it out of a loop that does not change its operands.
    return _call("start", plan, bucket, operands, results, in_place, has_effect=True)


def wait(
    plan: int,
    bucket: int,
    results: Sequence[tuple[Any, Any]],
    tokens: Sequence[Any],
    kept: Sequence[Any] = (),
    last: bool = True,
) -> list[Any]:
    """Add the call that waits for a bucket; return `results`, of these shapes and dtypes, a token.

    `tokens` are those of all starts of the step and of waits that must end first; `kept` is what
    `start` returned before its token. With `last` XLA keeps this call if nothing uses its results.
    """
    operands = [*kept, *tokens]
    return _call("wait", plan, bucket, operands, results, bool(kept), has_effect=last)


def _call(
    name: str,
    plan: int,
    bucket: int,
    operands: Sequence[Any],
    results: Sequence[tuple[Any, Any]],
    in_place: bool,
    has_effect: bool = False,
) -> list[Any]:
    """Add a custom call; the last result is a token, and the first shares memory if `in_place`."""
    found = [*results, ((), tf.int32)]
    given = [_type(tensor.shape, tensor.dtype) for tensor in operands]
    types = [_type(shape, dtype) for shape, dtype in found]
    names = [f"%a{i}" for i in range(len(given))]
    values = [f"%r#{i}" for i in range(len(types))] if len(types) > 1 else ["%r"]
    alias = ""
    if in_place:
        alias = (
            "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [0], "
            "operand_index = 0, operand_tuple_indices = []>],"
        )
    module = f"""
module @ringreduce_{name} {{
  func.func public @main({", ".join(f"{n}: {t}" for n, t in zip(names, given, strict=True))})
      -> ({", ".join(types)}) {{
    %r{f":{len(types)}" if len(types) > 1 else ""} =
        stablehlo.custom_call @ringreduce_{name}({", ".join(names)}) {{
      api_version = 4 : i32, has_side_effect = {str(has_effect).lower()}, {alias}
      backend_config = {{
        plan = {plan} : i64, bucket = {bucket} : i64, in_place = {int(in_place)} : i64
      }}
    }} : ({", ".join(given)}) -> ({", ".join(types)})
    return {", ".join(values)} : {", ".join(types)}
  }}
}}
"""
    return list(
        private.call_module(
            list(operands),
            version=_VERSION,
            module=module,
            Sout=[tf.TensorShape(shape) for shape, _ in found],
            Tout=[dtype for _, dtype in found],
            platforms=["CPU"],
            # It is compiled for the platform of the function around it.
            disabled_checks=["platform"],
        )
    )


def _type(shape: Any, dtype: Any) -> str:
    # StableHLO's names of the dtypes that can travel: f32, bf16, i64, ui8.
    name = tf.as_dtype(dtype).name.replace("float", "f").replace("int", "i")
    return f"tensor<{''.join(f'{n}x' for n in shape)}{name}>"
