"""``ringreduce doctor``: what follows from facts, what is measured, and what a user sees."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from ringreduce.commands.cli import app
from ringreduce.commands.doctor.findings import SIZES, Facts, Link, find, turns
from ringreduce.commands.doctor.view import show
from ringreduce.commands.doctor.worker import examine
from ringreduce.testing import ring_of_threads
from tests.processes import DEADLINE_S, clean_environment

GIB = 1 << 30
WITHIN = Link((0, 1), "shm", (2e-6, 5e-3))
BETWEEN = Link((0, 2), "zmq", (80e-6, 60e-3))


def facts(rank: int, host: str = "alpha", **changes: Any) -> Facts:
    """A rank on one of two hosts with two ranks and four cores each, where all is well."""
    usual: dict[str, Any] = {
        "versions": {"ringreduce": "0.1.0", "TensorFlow": "2.21.0", "numpy": "2.4.6"},
        "native": "",
        "xla": "",
        "compiled": "",
        "cores": (0, 1, 2, 3),
        "quota": None,
        "host_cores": 4,
        "load": 0.4,
        "memory": 16 * GIB,
        "available": 12 * GIB,
        "copied_s": 4e-3,
        "address_space": None,
        "files": 4096,
        "files_needed": 1024,
        "addresses": "eth0 10.0.0.4/24",
    }
    return Facts(rank=rank, host=host, **(usual | changes))


def job(*changes: dict[str, Any]) -> list[Facts]:
    """Two ranks on alpha, two on beta; `changes` are of the first ranks."""
    own = [*changes, {}, {}, {}, {}]
    return [facts(rank, ("alpha", "beta")[rank // 2], **own[rank]) for rank in range(4)]


LINKS = [WITHIN, msgspec.structs.replace(WITHIN, ranks=(2, 3)), BETWEEN]


def changed(link: Link, **fields: Any) -> list[Link]:
    return [msgspec.structs.replace(each, **fields) if each is link else each for each in LINKS]


def test_nothing_is_found_where_all_is_well() -> None:
    assert find(job(), LINKS) == []
    assert find([facts(0)], []) == []


ALL = (0, 1, 2, 3)
WITHOUT_TENSORFLOW = {"versions": {"ringreduce": "0.1.0"}, "xla": "TensorFlow is not installed"}


@pytest.mark.parametrize(
    ("them", "links", "ranks", "text"),
    [
        (
            job({"versions": {**facts(0).versions, "numpy": "1.26.4"}}),
            LINKS,
            ALL,
            "numpy differs: 1.26.4 on rank 0, 2.4.6 on ranks 1, 2, 3.",
        ),
        (
            job(*[{"versions": {"ringreduce": "0.1.0", "numpy": "2.4.6"}}] * 3),
            LINKS,
            ALL,
            "TensorFlow differs: missing on ranks 0, 1, 2, 2.21.0 on rank 3.",
        ),
        (job({}, {"native": "It was not built."}), LINKS, (1,), "It was not built."),
        (job(*[{"quota": 1.5}] * 2), LINKS, (0, 1), "2 ranks share 1.5 cores of alpha."),
        # As a launcher that binds all ranks to the same core.
        (job(*[{"cores": (3,)}] * 2), LINKS, (0, 1), "2 ranks share 1 cores of alpha."),
        (
            job({"available": GIB}),
            LINKS,
            (0, 1),
            "alpha has 0.5 GiB of free memory for each rank.",
        ),
        (
            job(*[{"address_space": 8 * GIB}] * 4),
            LINKS,
            ALL,
            "The address space is limited to 8.0 GiB.",
        ),
        (
            job({"files": 512}),
            LINKS,
            (0,),
            "512 files may be open, and a job of this size may need 1024.",
        ),
        (
            job(),
            changed(WITHIN, transport="zmq"),
            (0, 1),
            "Ranks of alpha do not share memory: they use sockets.",
        ),
        (
            job(),
            changed(BETWEEN, seconds=(1e-3, 5.5)),
            (0, 2),
            "alpha and beta exchange 12 MB/s only.",
        ),
    ],
)
def test_a_problem_is_said_once_with_its_ranks(
    them: list[Facts], links: list[Link], ranks: tuple[int, ...], text: str
) -> None:
    [found] = find(them, links)
    assert (found.text, found.ranks, found.is_problem) == (text, ranks, True)
    assert found.advice.endswith(".")


@pytest.mark.parametrize(
    ("them", "links", "text"),
    [
        (job({"xla": "no header"}), LINKS, "XLA cannot call the ring: no header."),
        (
            job({"compiled": "/cache"}),
            LINKS,
            "Functions were compiled, since the cache lacked them.",
        ),
        (
            job({"load": 25.04}),
            LINKS,
            "alpha has a load of 25.0 on 4 cores, before these ranks ran.",
        ),
        (
            job(),
            changed(WITHIN, seconds=(1.3e-3, 5e-3)),
            "1 KiB takes 1300 us in shared memory, where 1 to 20 are usual.",
        ),
        (
            job(),
            changed(WITHIN, seconds=(2e-6, 28e-3)),
            "64 MiB take as long as 7 copies of them, where 1 to 3 are usual.",
        ),
    ],
)
def test_a_note_is_no_problem(them: list[Facts], links: list[Link], text: str) -> None:
    [found] = find(them, links)
    assert (found.text, found.is_problem) == (text, False)


def test_a_load_that_leaves_a_core_for_each_rank_is_fine() -> None:
    assert find(job({"load": 2.5}), LINKS) == []
    assert len(find(job({"load": 2.6}), LINKS)) == 1


def test_a_host_without_tensorflow_is_fine() -> None:
    assert find(job(*[WITHOUT_TENSORFLOW] * 4), LINKS) == []


def test_problems_come_first() -> None:
    found = find(job({"compiled": "/cache"}, {"files": 9}), LINKS)
    assert [each.is_problem for each in found] == [True, False]


@pytest.mark.parametrize("count", range(1, 8))
def test_each_link_is_measured_once_and_no_rank_is_in_two_at_a_time(count: int) -> None:
    of_hosts = [(2 * i, 2 * i + 1) for i in range(count)]
    planned = turns(of_hosts)
    for turn in planned:
        ranks = list(itertools.chain.from_iterable(turn))
        assert len(ranks) == len({*ranks})
    firsts = [host[0] for host in of_hosts]
    links = {frozenset(pair) for pair in zip(firsts, firsts[1:] + firsts[:1], strict=True)}
    expected = {frozenset(host) for host in of_hosts} | {link for link in links if len(link) > 1}
    groups = [frozenset(group) for group in itertools.chain.from_iterable(planned)]
    assert len(groups) == len(expected)
    assert {*groups} == expected


def test_hosts_are_measured_within_and_between() -> None:
    per_rank = ring_of_threads(3, examine, hosts=("alpha", "alpha", "beta"))
    assert per_rank[0] == per_rank[1] == per_rank[2]
    found = msgspec.convert(per_rank[0], list[Facts | Link])
    names = [each.host for each in found if isinstance(each, Facts)]
    within, between = (each for each in found if isinstance(each, Link))
    assert names == ["alpha", "alpha", "beta"]
    assert (within.ranks, within.transport) == ((0, 1), "shm")
    assert (between.ranks, between.transport) == ((0, 2), "zmq")
    for small, large in (within.seconds, between.seconds):
        assert 0 < small < large < 10


def test_differing_ranks_stand_apart_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    records = [*job({}, {"files": 512}), *LINKS]
    printed = "".join(f"[alpha:0] {msgspec.json.encode(each).decode()}\n" for each in records)
    assert show(f"[beta:1] a library greets\n{printed}", as_json=False) == 1
    said = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, said)) <= 80
    assert said.count("versions        ringreduce 0.1.0, TensorFlow 2.21.0, numpy 2.4.6") == 1
    for line in (
        "host            ranks 0, 1: alpha",
        "                ranks 2, 3: beta",
        "open files      ranks 0, 2, 3: up to 4096",
        "                rank 1: up to 512",
        "load            0.4 on alpha",
        "                0.4 on beta",
        "problem: rank 1: 512 files may be open, and a job of this size may need 1024.",
    ):
        assert line in said


def doctor(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "80", **environment})


def test_hosts_reached_by_an_agent_are_reported_as_json() -> None:
    done = doctor("-H", "localhost:2", "--json")
    report = json.loads(done.stdout)
    assert not [each for each in report["findings"] if each["is_problem"]]
    assert done.exit_code == 0, done.stderr
    [link] = msgspec.convert(report["links"], list[Link])
    assert (link.ranks, link.transport) == ((0, 1), "shm")
    ranks = msgspec.convert(report["ranks"], list[Facts])
    assert [own.rank for own in ranks] == [0, 1]
    assert {"ringreduce", "Python", "TensorFlow", "Keras", "numba", "libzmq"} <= {
        *ranks[0].versions
    }
    assert (ranks[0].native, ranks[0].xla) == ("", "")
    assert ranks[0].host_cores >= len(ranks[0].cores)
    assert ranks[0].load >= 0
    # What each wrote and read, at no more than a terabyte a second.
    assert ranks[0].copied_s > SIZES[-1] / 1e12


def test_a_missing_library_is_a_problem_that_fits_80_columns() -> None:
    done = doctor("-n", "1", RINGREDUCE_NATIVE="0")
    assert done.exit_code == 1, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "problem: The native library is hidden by RINGREDUCE_NATIVE=0.\n" in done.stdout
    assert "native library  missing " in done.stdout


def test_a_ring_that_does_not_form_is_a_failure_that_names_the_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ringreduce", "doctor", "-n", "2", "--json"],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ConfigError" in done.stderr
    assert "of 2 may open 64 files" in done.stderr
