"""What a communicator has recorded of its calls, for tests."""

from ringreduce.effects.events import Events
from ringreduce.pure.spans import Span, decode_spans


def parts_of(events: Events) -> list[Span]:
    """The last parts of calls, by their beginnings."""
    found = decode_spans(b"".join(events.added(ring, 0)[1] for ring in (1, 2)))
    return sorted(found, key=lambda span: span.began_s)
