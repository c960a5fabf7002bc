"""Hosts as users name them, who has which ranks, and the command that reaches a host. Pure."""

import re
import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.commands.launch.hosts import Host, labels, parse_hostfile, parse_hosts, share_out
from ringreduce.commands.launch.spread import Spread, read_hostfile, spread_over
from ringreduce.vocabulary.errors import ConfigError


def reached(directory: str, python: str, path: str) -> Spread:
    """Hosts that are reached by plain ssh, and this one, which needs none."""
    return Spread((), "", 0, ["ssh"], {"localhost"}, directory, python, path)


SPREAD = reached("/work", "/usr/bin/python3", "")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a", "a", 1)]),
        ("a:2,b:3", [Host("a", "a", 2), Host("b", "b", 3)]),
        ("me@a.example.org:2", [Host("me@a.example.org", "a.example.org", 2)]),
        ("10.0.0.4:2, a", [Host("10.0.0.4", "10.0.0.4", 2), Host("a", "a", 1)]),
        ("[fd00::4]:2", [Host("fd00::4", "fd00::4", 2)]),
    ],
)
def test_hosts_have_names_and_slots(text, hosts):
    assert parse_hosts(text) == hosts


def test_a_hostfile_is_read_in_the_forms_of_mpi_and_horovod():
    text = "# ours\na slots=2\n\nb:3  # big\n  c\nd slots=1 max_slots=4\n"
    found = [(host.name, host.slots) for host in parse_hostfile(text, "hosts")]
    assert found == [("a", 2), ("b", 3), ("c", 1), ("d", 1)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        *((t, f"{t!r} is no host") for t in ("", "-oProxyCommand=x", "me@-x", "a; rm -rf x")),
        *((t, "is no host") for t in ("a,,b", "$(id)", "a\nb", "\N{LATIN SMALL LETTER AE}")),
        *((f"a:{n}", f"'{n}' is no number of slots for a") for n in ("0", "-1", "two", "")),
        ("a:2,b:1,a:1", "the host a is named twice. Name it once, with all its slots: a:3."),
        ("fd00::4:2", "an IPv6 address in brackets"),
    ],
)
def test_what_is_no_host_is_refused_and_named(text, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "the hostfile hosts names no host"),
        ("# nothing\n\n", "the hostfile hosts names no host"),
        ("a slots=0", "'0' is no number of slots for a, in line 1 of hosts"),
        ("a\nb cpus=2", "line 2 of hosts has 'cpus=2'"),
        ("a 2", "line 1 of hosts has '2'"),
        ("a:2 slots=3", "'a:2:3' is no host, in line 1"),
        ("a\na", "the host a is named twice"),
        ("a; rm", "line 1 of hosts has 'rm'"),
    ],
)
def test_what_is_no_hostfile_is_refused_with_its_line(text, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse_hostfile(text, "hosts")


def test_a_hostfile_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("missing", "binary"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            read_hostfile(tmp_path / name)


def test_slots_are_filled_in_order_and_no_more_than_there_are():
    def shares(text: str, count: int | None = None) -> list[tuple[str, int, int]]:
        found = share_out(parse_hosts(text), count)
        return [(share.host.name, share.first_rank, share.count) for share in found]

    assert shares("a:2,b:1,c:3") == [("a", 0, 2), ("b", 2, 1), ("c", 3, 3)]
    assert shares("a:2,b:2,c:2", 3) == [("a", 0, 2), ("b", 2, 1)]
    with pytest.raises(ConfigError, match="5 workers are asked for, and the hosts have 4 slots"):
        shares("a:2,b:2", 5)


@given(slots=st.lists(st.integers(1, 9), min_size=1, max_size=9), data=st.data())
def test_every_rank_is_on_one_host(slots, data):
    count = data.draw(st.integers(1, sum(slots)))
    hosts = [Host(f"h{index}", f"h{index}", number) for index, number in enumerate(slots)]
    shares = share_out(hosts, count)
    ranks = [s.first_rank + place for s in shares for place in range(s.count)]
    assert ranks == list(range(count))
    assert all(share.count <= share.host.slots for share in shares)


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("node1.example.org:2,node2.example.org", "node1:0 node1:1 node2:2"),
        ("n.one.org,n.two.org", "n.one.org:0 n.two.org:1"),
        ("10.0.0.4,10.0.0.5", "10.0.0.4:0 10.0.0.5:1"),
    ],
)
def test_lines_are_marked_with_short_names_that_differ(text, marks):
    assert labels(share_out(parse_hosts(text), None)) == marks.split()


AGENT = "ringreduce.commands.launch.agent"
ANY_TEXT = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1)


def test_ssh_never_asks_gives_up_in_seconds_and_has_the_users_options_first():
    command = SPREAD.command(Host("me@a", "a", 1))
    assert command[0] == "ssh"
    assert {"BatchMode=yes", "ConnectTimeout=10"} <= {*command}
    assert command[-2:] == ["me@a", "cd /work && exec /usr/bin/python3 -m " + AGENT]
    spread = spread_over(share_out(parse_hosts("a"), None), "ssh -p 2 -i 'my key'", "p", None)
    assert spread.command(Host("a", "a", 1))[:5] == ["ssh", "-p", "2", "-i", "my key"]
    # This host by its own name needs no ssh.
    assert SPREAD.command(Host("localhost", "localhost", 1))[:2] == ["sh", "-c"]
    assert SPREAD.command(Host("me@localhost", "localhost", 1))[0] == "ssh"


@given(directory=ANY_TEXT, path=ANY_TEXT)
def test_the_other_ends_shell_reads_the_words_that_were_meant(directory, path):
    spread = reached(directory, "py thon", path)
    words = shlex.split(spread.command(Host("a", "a", 1))[-1])
    meant = ["env", f"PYTHONPATH={path}", "py thon", "-m", AGENT]
    assert words == ["cd", directory, "&&", "exec", *meant]


def test_a_real_shell_reads_them_too(tmp_path):
    folder = tmp_path / 'it\'s $HOME; `id` "x" !\\ *'
    folder.mkdir()
    text = reached(str(folder), "pwd", "").command(Host("a", "a", 1))[-1]
    done = subprocess.run(["sh", "-c", text.replace("-m " + AGENT, "")], capture_output=True)
    assert done.stdout.decode() == f"{folder}\n"


@pytest.mark.parametrize(
    ("returncode", "said", "why"),
    [
        (255, ["ssh: connect to host b port 22: Connection refused"], "BatchMode=yes me@b"),
        (2, ["sh: 1: cd: can't cd to /work", ""], "(exit code 2): sh: 1: cd: can't cd to /work. "),
        (1, [], "it said nothing. It needs the folder /work, and the same ringreduce in /usr/bin/"),
    ],
)
def test_what_ssh_says_becomes_what_to_do(returncode, said, why):
    assert why in SPREAD.explain("me@b", returncode, said)


def test_ranks_meet_on_the_first_host_or_where_the_user_says():
    def meeting(rendezvous: str | None) -> tuple[str, int]:
        spread = spread_over(share_out(parse_hosts("a:2,b:2"), None), "ssh", "python", rendezvous)
        return spread.meeting_host, spread.meeting_port

    assert meeting(None) == ("a", 0)
    for host, written in (("10.0.0.4", "10.0.0.4"), ("fd00::4", "[fd00::4]")):
        assert meeting(host) == meeting(written) == (host, 0)
        assert meeting(f"{written}:5000") == (host, 5000)


def test_an_ssh_that_is_no_command_is_refused():
    for ssh in ("", "ssh 'x"):
        with pytest.raises(ConfigError, match="--ssh"):
            spread_over(share_out(parse_hosts("a"), None), ssh, "python", None)
