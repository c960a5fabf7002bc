"""Which addresses a host offers, in which order others try them, and the table of failures."""

import pytest

from ringreduce.pure import networks
from ringreduce.pure.networks import Local, Unreached, offered, unreached_table, ways
from ringreduce.vocabulary.endpoints import patterns

FOUND = [Local("lo", "127.0.0.1/8"), Local("lo", "::1/128"), Local("docker0", "172.17.0.1/16")]
FOUND += [Local("br-0123456789ab", "172.18.0.1/16"), Local("virbr0", "192.168.122.1/24")]
FOUND += [Local("eth0", address) for address in ("10.0.0.4/24", "fd00::4/64", "fe80::4/64")]
FOUND += [Local("eth1", "169.254.7.7/16"), Local("ib0", "10.1.0.4/16")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, "10.0.0.4/24 fd00::4/64 10.1.0.4/16") for text in ("", "^docker1")),
        *((text, "10.0.0.4/24 fd00::4/64") for text in ("eth0", "^ib0")),
        *((text, "10.0.0.4/24") for text in ("10.0.0.0/8,^ib0", "^fd00::/8,^10.1.0.0/16")),
        ("ib*", "10.1.0.4/16"),
        ("ib0, 10.0.0.0/24", "10.0.0.4/24 10.1.0.4/16"),
        ("fd00::/8", "fd00::4/64"),
        ("docker0", "172.17.0.1/16"),
    ],
)
def test_offered_addresses(text, expected):
    assert [each.network for each in offered(FOUND, patterns(text))] == expected.split()


@pytest.mark.parametrize("text", ["eth9", "eth0,10.9.0.0/24", "lo", "eth1"])
def test_why_none_is_offered(text):
    with pytest.raises(ValueError, match=f"{text.removeprefix('eth0,')} matches no address"):
        offered(FOUND, patterns(text))
    with pytest.raises(ValueError, match="every address of this host is excluded"):
        offered(FOUND, patterns("eth0,^10.0.0.0/8,^fd00::/8"))


def test_addresses_of_an_error_are_those_that_can_be_chosen():
    assert networks.described(FOUND) == (
        "docker0 172.17.0.1/16, br-0123456789ab 172.18.0.1/16, virbr0 192.168.122.1/24, "
        "eth0 10.0.0.4/24, eth0 fd00::4/64, ib0 10.1.0.4/16"
    )
    assert networks.described(FOUND[:2]) == "none"


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        # A common subnet comes first, then the family of the first address.
        ("10.1.0.1/24", "10.2.0.2/24 10.1.0.2/24", "10.1.0.2 10.2.0.2"),
        (
            "10.1.0.1/24 fd00::1/64",
            "10.9.0.2/24 fd00::2/64 10.8.0.2/24",
            "fd00::2 10.9.0.2 10.8.0.2",
        ),
        ("192.0.2.1/32", "fd00::2/64 10.2.0.2/24 fd01::2/64", "fd00::2 fd01::2 10.2.0.2"),
        # A subnet counts if it is one for both: 10.0.0.0/8 is not.
        ("10.1.0.1/8", "10.2.0.2/24 10.3.0.2/8", "10.3.0.2 10.2.0.2"),
        # Each host has this docker0.
        ("172.17.0.1/16 10.1.0.1/24", "172.17.0.1/16 10.2.0.2/24", "10.2.0.2"),
        # Both are on one host.
        ("10.1.0.1/24 10.2.0.1/24", "10.1.0.1/24 10.2.0.1/24", "10.1.0.1 10.2.0.1"),
        ("10.1.0.1/24", "", ""),
    ],
)
def test_order_of_attempts(own, theirs, expected):
    assert list(ways(own.split(), theirs.split())) == expected.split()


@pytest.mark.parametrize(
    ("texts", "holds"),
    [
        (["10.0.0.4/24", "fd00::4/64"], True),
        ([], True),
        *(([text], False) for text in ("10.0.0.4/33", "localhost", "1" * 100)),
        (["10.0.0.4/24"] * networks.OFFERED_MAX, True),
        (["10.0.0.4/24"] * (networks.OFFERED_MAX + 1), False),
    ],
)
def test_what_a_rank_may_offer(texts, holds):
    assert networks.are_networks(texts) is holds


def test_table_of_failures():
    rows = [Unreached(0, 1, "10.0.0.5:41873", "refused")]
    rows += [Unreached(2, 1, "[fd00::5]:41873", "no answer in 5 s")]
    table = unreached_table(rows, {0: "alpha", 1: "beta", 2: "gamma"})
    assert table.splitlines() == [
        "  from     to      at               why",
        "  0 alpha  1 beta  10.0.0.5:41873   refused",
        "  2 gamma  1 beta  [fd00::5]:41873  no answer in 5 s",
    ]


def test_a_table_of_failures_stays_small():
    rows = [Unreached(1000, peer, "10.0.0.5:41873", "no answer in 5 s") for peer in range(100)]
    hosts = {rank: f"a-very-long-name-of-host-{rank}" for rank in range(1001)}
    lines = unreached_table(rows, hosts).splitlines()
    assert len(lines) == 18
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "  and 84 more"
    assert lines[1].startswith("  1000 a-very-long-  0 a-very-long-  ")
