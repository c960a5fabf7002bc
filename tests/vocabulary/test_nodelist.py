"""Slurm's short form of a list: every example of its documentation, and what is none."""

import pytest

from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.launchers import first_host


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


@pytest.mark.parametrize("text", ["", ",a", "n[1-2", "n1-2]", "n[a-b]", "n[]", "n[1-]", "n[[1]]"])
def test_other_hosts_are_refused(text):
    with pytest.raises(ConfigError, match="cannot read"):
        first_host(text)
