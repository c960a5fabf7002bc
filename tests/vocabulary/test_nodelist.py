"""Slurm's short forms: every example of its documentation, and what is none."""

from __future__ import annotations

import pytest

from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.launchers import count_of, first_host


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a,b", "a"),
        ("gpu[08-10],login", "gpu08"),
        ("lx[15,18,32-33]", "lx15"),
        ("rack[0-1]node[1,3]", "rack0node1"),
        ("n[1-2]-ib.site", "n1-ib.site"),
        ("n[098-101]", "n098"),
        ("b[2],a1", "b2"),
        ("n[1-999999999]", "n1"),
    ],
)
def test_the_first_host_is_found(text, host):
    assert first_host(text) == host


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2", [2]), ("2,1", [2, 1]), ("2(x3),1", [2, 2, 2, 1]), ("16(x2)", [16, 16])],
)
def test_the_count_of_each_host_is_found(text, counts):
    assert [count_of(text, host) for host in range(len(counts))] == counts
    assert count_of(text, len(counts)) == 0


@pytest.mark.parametrize("text", ["", ",a", "n[1-2", "n1-2]", "n[a-b]", "n[]", "n[1-]", "n[[1]]"])
def test_other_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read"):
        first_host(text)


@pytest.mark.parametrize("text", ["", "x", "2(x)", "2x3", "2(3)", "1,,2"])
def test_other_counts_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read"):
        count_of(text, 9)
