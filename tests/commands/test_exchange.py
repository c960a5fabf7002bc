"""What launcher and agents send each other: whole records out of any pieces, and nothing else."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ringreduce.commands.launch import exchange
from ringreduce.commands.launch.exchange import MAGIC, Order, Report, Signal, Start
from ringreduce.commands.launch.frames import Records, encode
from ringreduce.vocabulary.errors import ConfigError
from tests.launching import pieces

REPORTS = [exchange.Hello("1.0"), exchange.Ready(4000), exchange.Ended(1, -9)]
REPORTS += [exchange.Output(1, True, b"\0x\n"), exchange.Output(0, False, b"")]
ORDERS = [Start(4000), Signal(1, 15)]


@given(cuts=st.lists(st.integers(0, 300), max_size=8), noise=st.binary(max_size=40))
def test_reports_arrive_whole_after_what_a_login_shell_wrote(cuts, noise):
    assume((noise + MAGIC).index(MAGIC) == len(noise))
    data = noise + MAGIC + b"".join(map(encode, REPORTS))
    reports = Records[Report](Report, after=MAGIC)
    assert [report for piece in pieces(data, cuts) for report in reports.feed(piece)] == REPORTS


def test_orders_arrive_whole_byte_by_byte():
    orders = Records[Order](Order)
    data = b"".join(map(encode, ORDERS))
    assert [one for byte in data for one in orders.feed(bytes([byte]))] == ORDERS


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 4, b"\0\0\0\x01\xc1", b"\0\0\0\x03abc", encode(Start(4000)), b"GET / HTTP/1"],
    ids=["length", "msgpack", "type", "order", "text"],
)
def test_what_no_agent_sends_is_refused(data):
    with pytest.raises(ConfigError, match="ringreduce does not send"):
        Records[Report](Report, after=MAGIC).feed(MAGIC + data)


def test_without_an_agent_nothing_is_kept_but_the_last_bytes():
    reports = Records[Report](Report, after=MAGIC)
    for _ in range(100):
        assert reports.feed(b"noise" * 1000) == []
    assert len(reports._data) <= len(MAGIC)
