"""Slurm's short forms: every example of its documentation, and what is none."""

from __future__ import annotations

import pytest

from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.nodelist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-2]", ["n1", "n2"]),
        ("a,b", ["a", "b"]),
        ("gpu[08-10],login", ["gpu08", "gpu09", "gpu10", "login"]),
        ("lx[15,18,32-33]", ["lx15", "lx18", "lx32", "lx33"]),
        ("rack[0-1]node[1,3]", ["rack0node1", "rack0node3", "rack1node1", "rack1node3"]),
        ("n[1-2]-ib.site", ["n1-ib.site", "n2-ib.site"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("b[2],a1", ["b2", "a1"]),
    ],
)
def test_hosts_are_expanded_in_their_order(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2,1", [2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("16(x2)", [16, 16])],
)
def test_counts_are_expanded(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "n[1-2", "n1-2]", "n[2-1]", "n[a-b]", "n[]", "a,,b", "n[1-999999999]", "n[[1]]"]
)
def test_other_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read"):
        expand_hosts(text)


def test_products_of_ranges_are_limited():
    with pytest.raises(ConfigError, match="cannot read"):
        expand_hosts("a[1-999]b[1-999]")


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(3)", "1,,2", "1(x999999999)"])
def test_other_counts_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read"):
        expand_counts(text)
