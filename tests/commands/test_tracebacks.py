"""Tracebacks among a worker's lines: where they are, and which line names the exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch import tracebacks
from ringreduce.commands.launch.tracebacks import (
    exception_in,
    is_traceback_start,
    last_traceback,
    last_words,
    without_internals,
)

VALUE_ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    '    raise ValueError("bad data")',
    "ValueError: bad data",
)
LOST = (
    "Traceback (most recent call last):",
    '  File "train.py", line 9, in <module>',
    "    comm.barrier()",
    "ringreduce.PeerLostError: rank 0 of 2 lost the connection with rank 1.",
)
MISMATCH = (
    *LOST[:3],
    "ringreduce.MismatchError: rank 1 of 3 is in barrier #3 while",
)
DIRECT = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"


def test_a_traceback_starts_with_its_title() -> None:
    assert is_traceback_start("Traceback (most recent call last):")


@pytest.mark.parametrize("line", ["", "ValueError: bad", "  Traceback (most recent call last):"])
def test_other_lines_start_no_traceback(line: str) -> None:
    assert not is_traceback_start(line)


def test_without_a_traceback_there_is_none() -> None:
    assert last_traceback(["epoch 1", "ValueError: only mentioned"]) == ()


def test_the_traceback_is_found_among_other_lines() -> None:
    assert last_traceback(["epoch 1", *VALUE_ERROR]) == VALUE_ERROR


def test_what_follows_is_kept_since_it_may_be_the_exceptions_text() -> None:
    lines = [*VALUE_ERROR[:3], "UnknownError: Graph execution error:", "", *LOST[3:], "bye"]
    assert last_traceback(["epoch 1", *lines]) == tuple(lines)


def test_what_follows_is_kept_up_to_a_limit() -> None:
    assert len(last_traceback([*VALUE_ERROR, *["a line"] * 1000])) == 63


def test_the_exception_is_that_of_the_last_traceback_of_a_chain() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *LOST)
    assert exception_in(lines) == LOST[-1]
    assert exception_in(()) == ""


def test_the_last_of_several_tracebacks_counts() -> None:
    assert last_traceback([*VALUE_ERROR, "epoch 2", *LOST]) == LOST


@pytest.mark.parametrize("link", [DIRECT, HANDLING])
def test_chained_exceptions_are_one_traceback(link: str) -> None:
    lines = (*VALUE_ERROR, "", link, "", *LOST)
    assert last_traceback(["epoch 1", *lines]) == lines


def test_a_chain_of_three_is_one_traceback() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *MISMATCH, "", DIRECT, "", *LOST)
    assert last_traceback(lines) == lines


def test_a_traceback_before_the_chain_is_left_out() -> None:
    lines = (*VALUE_ERROR, "", HANDLING, "", *LOST)
    assert last_traceback([*MISMATCH, "epoch 2", *lines]) == lines


def test_blank_source_lines_do_not_end_a_traceback() -> None:
    lines = (*VALUE_ERROR[:2], "", *VALUE_ERROR[2:])
    assert last_traceback(lines) == lines


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_traceback_cut_off_by_death_is_kept_as_far_as_it_goes(length: int) -> None:
    assert last_traceback(VALUE_ERROR[:length]) == VALUE_ERROR[:length]


@given(st.lists(st.sampled_from([*VALUE_ERROR, *LOST, "", HANDLING, "log"]), max_size=30))
def test_a_traceback_is_a_run_of_the_lines_it_was_found_in(lines: list[str]) -> None:
    found = list(last_traceback(lines))
    assert bool(found) == any(map(is_traceback_start, lines))
    assert any(lines[i : i + len(found)] == found for i in range(len(lines) + 1))


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
    ("lines", "exception"),
    [
        (VALUE_ERROR, "ValueError: bad data"),
        (FILTERED, "UnknownError: Graph execution error: RuntimeError: no file"),
        (IN_CALL, "ValueError: Exception encountered when calling Dense.call()."),
        (
            (*VALUE_ERROR[:3], "ValueError: in user code:", "", "  here"),
            "ValueError: in user code: here",
        ),
        (VALUE_ERROR[:3], ""),
    ],
)
def test_the_exception_is_the_line_that_names_it(lines: tuple[str, ...], exception: str) -> None:
    assert exception_in(["epoch 1", *lines]) == exception


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


OURS = str(Path(tracebacks.__file__).parents[2] / "communicator" / "calls.py")


def frame(path: str, source: str = "run()") -> list[str]:
    return [f'  File "{path}", line 3, in run', f"    {source}", "    ^^^^^"]


@pytest.mark.parametrize("ours", [OURS, "/opt/env/lib/site-packages/ringreduce/keras/fit.py"])
def test_our_frames_are_left_out_where_the_error_is_ours(ours: str) -> None:
    start, error = "Traceback (most recent call last):", "ringreduce.PeerLostError: rank 0 of 2"
    users = [*frame("/home/me/ringreduce/train.py"), *frame("/home/me/callback.py")]
    lines = [
        start,
        *users[:3],
        *frame(ours),
        *frame(ours),
        *users[3:],
        *frame(ours),
        error,
        "a log",
    ]
    assert without_internals(lines) == [
        *(start, *users[:3], "  ... 2 frames of ringreduce (--tracebacks all)"),
        *(*users[3:], "  ... a frame of ringreduce (--tracebacks all)", error, "a log"),
    ]
    other = [*lines[:-2], "ZeroDivisionError: division by zero"]
    assert without_internals(other) == other
