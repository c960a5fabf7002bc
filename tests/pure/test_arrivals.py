"""What a newcomer is told of the job: whole tables, and a view of its ranks."""

from typing import Any

import msgspec
import pytest

from ringreduce.pure.arrivals import Knock, ToDoor, Welcome
from ringreduce.pure.views import Row, View

TABLES: dict[str, Any] = {
    **{"hosts": ("a", "a"), "domains": ("", ""), "standbys": ("", ""), "keys": ("", "")},
    "networks": ((), ("10.0.0.4/24",)),
}
WELCOME = Welcome(number=(1 << 64) - 1, size=2, view=View(3, (1, 0)), **TABLES)


def test_a_welcome_arrives_with_all_that_it_has():
    row = Row(0, 2, "a", "", "tcp://127.0.0.1:9", "", ("10.0.0.4/24",))
    view = View(4, (1, 0), (2, 0), (row,))
    facts = {"steps": [1, 2], "text": None}
    whole = msgspec.structs.replace(WELCOME, view=view, facts=facts, journal=b"\0\xff", training=2)
    decoder = msgspec.msgpack.Decoder(Welcome)
    assert decoder.decode(msgspec.msgpack.encode(whole)) == whole


@pytest.mark.parametrize(
    "changed",
    [
        {"hosts": ("a",)},
        {"networks": ((), (), ())},
        {"networks": ((), ("nowhere",))},
        {"size": 3},
        {"view": View(3, (1, 2))},
        {"view": View(3, ())},
        {"view": View(3, (0, 1), (0, 0, 1))},
    ],
    ids=str,
)
def test_a_welcome_whose_parts_do_not_fit_is_none(changed):
    with pytest.raises(ValueError, match="that"):
        msgspec.structs.replace(WELCOME, **changed).__post_init__()


@pytest.mark.parametrize(("place", "life"), [(-1, 1), (0, 0)])
def test_a_knock_without_a_place_or_a_life_cannot_be_read(place, life):
    data = msgspec.msgpack.encode(Knock("1", "job", 0, 1))
    fields = {**msgspec.msgpack.decode(data), "place": place, "life": life}
    with pytest.raises(msgspec.ValidationError, match="without a place"):
        msgspec.msgpack.Decoder(ToDoor).decode(msgspec.msgpack.encode(fields))
