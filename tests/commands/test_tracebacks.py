"""The line of a log that says how a program ended."""

from __future__ import annotations

import pytest

from ringreduce.commands.launch.tracebacks import last_words

VALUE_ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    raise ValueError("bad data")',
    "ValueError: bad data",
)

# Keras leaves its own frames out, and Python then draws the marks further to the left.
FILTERED = (
    "Traceback (most recent call last):",
    '  File "train.py", line 8, in <module>',
    "    model.fit(data)",
    '  File "keras/src/utils/traceback_utils.py", line 122, in error_handler',
    "    raise e.with_traceback(filtered_tb) from None",
    '  File "tensorflow/python/eager/execute.py", line 53, in quick_execute',
    "    tensors = pywrap_tfe.TFE_Py_Execute(ctx._handle, device_name, op_name,",
    "^^^^^^^^^^^^^^^^^^^^^^^^^",
    "UnknownError: Graph execution error:",
    "",
    "Detected at node PyFunc defined at (most recent call last):",
    "<stack traces unavailable>",
    "RuntimeError: no file",
    "\t [[{{node PyFunc}}]] [Op:__inference_multi_step_on_iterator_348]",
)
IN_CALL = (
    *VALUE_ERROR[:3],
    "ValueError: Exception encountered when calling Dense.call().",
    "",
    "bad width",
)
WARNINGS = (
    "/usr/lib/python3/multiprocessing/resource_tracker.py:254: UserWarning: leaked objects",
    "  warnings.warn('resource_tracker')",
)


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        (("epoch 1", "epoch 2", ""), "epoch 2"),
        (("epoch 1", *WARNINGS), "epoch 1"),
        (("epoch 1", "W0000 00:00:17.17 9482 op_kernel.cc:1845] UNKNOWN"), "epoch 1"),
        ((*VALUE_ERROR, *WARNINGS), "ValueError: bad data"),
        (FILTERED[:8], FILTERED[6]),
        ((*IN_CALL[:4], "", "  bad width"), IN_CALL[3]),
        (WARNINGS, WARNINGS[1]),
        ((), ""),
    ],
)
def test_a_log_ends_with_what_is_no_warning(lines: tuple[str, ...], quoted: str) -> None:
    assert last_words(lines) == quoted
