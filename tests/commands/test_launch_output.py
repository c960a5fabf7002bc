"""LineBuffer: lines come out whole, whatever the chunks they arrived in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.output import LineBuffer, cut, last_state, without_colors
from tests.launching import pieces

# Mostly what matters: line ends, redrawing, backspaces, parts of UTF-8, broken UTF-8.
fragments = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b"\b", b"a", b"loss: 0.5", "\N{EURO SIGN}".encode(), b"\xe2", b"\xff"]
)
outputs = st.lists(fragments, max_size=30).map(b"".join) | st.binary(max_size=60)


def lines_of(*chunks: bytes) -> list[str]:
    buffer = LineBuffer()
    lines = [line for chunk in chunks for line in buffer.feed(chunk)]
    return lines + buffer.feed(b"")


@given(output=outputs, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_chunking_changes_nothing(output, cuts):
    # An empty chunk is the end.
    assert lines_of(*filter(None, pieces(output, cuts))) == lines_of(output)


@given(output=outputs)
def test_a_line_holds_no_line_end_and_no_redrawing(output):
    for line in lines_of(output):
        assert not set(line) & set("\n\r\b")


@given(lines=st.lists(st.text(st.characters(exclude_characters="\n\r\b", codec="utf-8"))))
def test_plain_text_passes_unchanged(lines):
    assert lines_of("".join(f"{line}\n" for line in lines).encode()) == lines


def test_a_line_waits_until_it_is_whole_and_the_end_gives_the_rest_only_once():
    buffer = LineBuffer()
    assert buffer.feed(b"half ") == []
    assert buffer.feed(b"a line\nand") == ["half a line"]
    assert (buffer.feed(b""), buffer.feed(b"")) == (["and"], [])
    assert lines_of(b"one\n\ntwo\n") == ["one", "", "two"]


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (b"a\xffb\n", "a\N{REPLACEMENT CHARACTER}b"),
        (b"1/3\r2/3\r", "2/3"),
        (b"1/3\r2/3\r3/3\n", "3/3"),
        (b"\r3/3\n", "3/3"),
        (b"2/3\r3/3\r\n", "3/3"),
        (b"windows\r\n", "windows"),
        (b"\b\b\b\b3/3\n", "3/3"),
        (b"2/3\b\b\b\r3/3\n", "3/3"),
        (b"2/3\b\b\b3/3\n", "3/3"),
        (b"typot\b \bs\n", "typos"),
        (b"2/3\b\b\b\n", "2/3"),
        (b"\x1b[2K\x1b]0;title\x07\x1b[1m3/3\x1b[0m\n", "\x1b[1m3/3\x1b[0m"),
    ],
)
def test_of_a_redrawn_line_the_last_state_is_shown(output, shown):
    assert lines_of(output) == [shown]


def test_the_line_that_is_not_whole_can_be_looked_at():
    buffer = LineBuffer()
    assert buffer.feed(b"Epoch 1\n\r1/3\b\b\b\r2/3") == ["Epoch 1"]
    assert buffer.partial == "2/3"
    assert buffer.feed(b"\b\b\b\r3/3\n") == ["3/3"]
    assert buffer.partial == ""


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("12345", 5, "12345"),
        ("123456", 5, "12345"),
        ("\x1b[1m12\x1b[0m3456", 3, "\x1b[1m12\x1b[0m3"),
        ("\x1b[1m123\x1b[0m456", 2, "\x1b[1m12\x1b[0m"),
    ],
)
def test_a_text_is_cut_to_columns_with_its_colors(text, columns, shown):
    assert cut(text, columns) == shown


def test_colors_can_be_left_out():
    assert without_colors(last_state("\x1b[1m3/3\x1b[0m \x1b[38;5;12mloss\x1b[0m")) == "3/3 loss"


def test_an_overlong_line_is_cut_between_characters_rather_than_kept():
    text, buffer = "x" + "\N{EURO SIGN}" * 130_000, LineBuffer()
    chunks = filter(None, pieces(text.encode(), range(0, 390_000, 1000)))
    shown = "".join(line for chunk in chunks for line in buffer.feed(chunk))
    assert len(shown) > 60_000
    assert shown + "".join(buffer.feed(b"")) == text
