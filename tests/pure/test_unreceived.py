"""What a warning says of messages that nobody received."""

from __future__ import annotations

from ringreduce.pure.unreceived import Unreceived, describe
from ringreduce.pure.wire import Header, Kind
from ringreduce.vocabulary.types import dtype_code, dtype_named


def message(sequence: int, count: int, dtype: str = "float32", kind: Kind = Kind.SEND) -> Header:
    code = dtype_code(dtype_named(dtype))
    return Header(kind, 1, 0, sequence, dtype=code, count=count, signature=sequence + 5)


def test_each_rank_and_direction_is_described_once() -> None:
    first, second = message(0, 3), message(1, 7)
    assert describe([]) == []
    assert describe([Unreceived(2, True, first), Unreceived(1, False, first)]) == [
        "closed without receiving 1 message that rank 1 had sent: send #0 of 3 float32, tag 5. "
        "Call recv for each send, before close() or the end of the program",
        "sent 1 message that rank 2 had not received when it closed: send #0 of 3 float32, tag 5. "
        "Let rank 2 call recv for each send",
    ]
    [text] = describe([Unreceived(1, False, first), Unreceived(1, False, second)])
    assert "2 messages that rank 1 had sent: send #0 of 3 float32, tag 5; send #1 of 7" in text


def test_many_are_counted_and_an_object_is_one() -> None:
    [text] = describe([Unreceived(1, False, message(n, 3)) for n in range(9)])
    assert "9 messages" in text
    assert "send #2 of 3 float32, tag 7; and 6 more." in text
    kind = Kind.SEND_OBJECT
    both = message(0, 1, "int64", kind), message(1, 20, "uint8", kind)
    [text] = describe([Unreceived(1, False, header) for header in both])
    assert "1 message that rank 1 had sent: send_object #1 of 20 bytes" in text
