"""Messages that were sent and never received, for a warning when a rank closes. Pure."""

from collections.abc import Iterable
from typing import NamedTuple

from ringreduce.pure.wire import Header

_NAMED = 3  # named in a warning; of the others it gives the number


class Unreceived(NamedTuple):
    """The header of a message, and the rank at its other end, which received or sent it."""

    peer: int
    is_own: bool  # This rank has sent it.
    header: Header


def describe(messages: Iterable[Unreceived]) -> list[str]:
    """What to warn of: a text for each other rank and direction."""
    by_peer: dict[tuple[int, bool], list[Header]] = {}
    for peer, is_own, header in messages:
        if not header.is_length:
            by_peer.setdefault((peer, is_own), []).append(header)
    return [_describe(peer, is_own, headers) for (peer, is_own), headers in sorted(by_peer.items())]


def _describe(peer: int, is_own: bool, headers: list[Header]) -> str:
    count = f"{len(headers)} message{'' if len(headers) == 1 else 's'}"
    which = "; ".join(header.describe() for header in headers[:_NAMED])
    if len(headers) > _NAMED:
        which += f"; and {len(headers) - _NAMED} more"
    if is_own:
        text = f"sent {count} that rank {peer} had not received when it closed: {which}"
        return f"{text}. Let rank {peer} call recv for each send"
    text = f"closed without receiving {count} that rank {peer} had sent: {which}"
    return f"{text}. Call recv for each send, before close() or the end of the program"
