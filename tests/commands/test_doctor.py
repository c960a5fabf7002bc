"""``ringreduce doctor``: what follows from facts, what is measured, and what a user sees."""

import itertools
import json
import sys
from typing import Any

import msgspec
import pytest

from ringreduce.commands.doctor.findings import SIZES, HostFacts, Link, find, turns
from ringreduce.commands.doctor.view import show
from ringreduce.commands.doctor.worker import examine
from ringreduce.testing import ring_of_threads
from tests.launching import command_line
from tests.processes import Process

GIB = 1 << 30
WITHIN = Link((0, 1), "shm", (2e-6, 5e-3))
BETWEEN = Link((0, 2), "zmq", (80e-6, 60e-3))


def facts(rank: int, host: str = "alpha", **changes: Any) -> HostFacts:
    """A rank on one of two hosts with two ranks and four cores each, where all is well."""
    usual: dict[str, Any] = {
        "versions": {"ringreduce": "0.1.0", "TensorFlow": "2.21.0", "numpy": "2.4.6"},
        **{"native": "", "xla": "", "compiled": "", "cores": (0, 1, 2, 3), "quota": None},
        **{"host_cores": 4, "load": 0.4, "address_space": None, "files": 4096, "copied_s": 4e-3},
        **{"memory": 16 * GIB, "available": 12 * GIB, "addresses": "eth0 10.0.0.4/24"},
        "files_needed": 1024,
    }
    return HostFacts(rank=rank, host=host, **(usual | changes))


def job(*changes: dict[str, Any]) -> list[HostFacts]:
    """Two ranks on alpha, two on beta; `changes` are of the first ranks."""
    own = [*changes, {}, {}, {}, {}]
    return [facts(rank, ("alpha", "beta")[rank // 2], **own[rank]) for rank in range(4)]


LINKS = [WITHIN, msgspec.structs.replace(WITHIN, ranks=(2, 3)), BETWEEN]


def changed(link: Link, **fields: Any) -> list[Link]:
    return [msgspec.structs.replace(each, **fields) if each is link else each for each in LINKS]


ALL = (0, 1, 2, 3)
OTHER_NUMPY = {"versions": {**facts(0).versions, "numpy": "1.26.4"}}
NO_TENSORFLOW = {"versions": {"ringreduce": "0.1.0", "numpy": "2.4.6"}}
SLOW = changed(BETWEEN, seconds=(1e-3, 5.5))
WAITING = changed(WITHIN, seconds=(1.3e-3, 5e-3))
COPYING = changed(WITHIN, seconds=(2e-6, 28e-3))
FEW_FILES = "512 files may be open, and a job of this size may need 1024."


def test_nothing_is_found_where_all_is_well():
    assert find(job(), LINKS) == []
    assert find([facts(0)], []) == []
    # A load that leaves a core for each rank is fine, and one process that has just ended.
    assert find(job({"load": 3.0}), LINKS) == []
    assert len(find(job({"load": 3.1}), LINKS)) == 1
    without = {**NO_TENSORFLOW, "xla": "TensorFlow is not installed"}
    assert find(job(*[without] * 4), LINKS) == []


@pytest.mark.parametrize(
    ("them", "links", "ranks", "text"),
    [
        (job(OTHER_NUMPY), LINKS, ALL, "numpy differs: 1.26.4 on rank 0, 2.4.6 on ranks 1, 2, 3."),
        (job(*[NO_TENSORFLOW] * 3), LINKS, ALL, "TensorFlow differs: missing on ranks 0, 1, 2, "),
        (job({}, {"native": "It was not built."}), LINKS, (1,), "It was not built."),
        (job(*[{"quota": 1.5}] * 2), LINKS, (0, 1), "2 ranks share 1.5 cores of alpha."),
        # As a launcher that binds all ranks to the same core.
        (job(*[{"cores": (3,)}] * 2), LINKS, (0, 1), "2 ranks share 1 cores of alpha."),
        (job({"available": GIB}), LINKS, (0, 1), "alpha has 0.5 GiB of free memory for each rank."),
        (job(*[{"address_space": 8 * GIB}] * 4), LINKS, ALL, "The address space is limited to 8.0"),
        (job({"files": 512}), LINKS, (0,), FEW_FILES),
        (job(), changed(WITHIN, transport="zmq"), (0, 1), "Ranks of alpha do not share memory: "),
        (job(), SLOW, (0, 2), "alpha and beta exchange 12 MB/s only."),
        # Notes, which are no problems.
        (job({"xla": "no header"}), LINKS, None, "XLA cannot call the ring: no header."),
        (job({"compiled": "/cache"}), LINKS, None, "Functions were compiled, since the cache "),
        (job({"load": 25.04}), LINKS, None, "alpha has a load of 25.0 on 4 cores, before these "),
        (job(), WAITING, None, "1 KiB takes 1300 us in shared memory, where 1 to 20 are usual."),
        (job(), COPYING, None, "64 MiB take as long as 7 copies of them, where 1 to 3 are usual."),
    ],
)
def test_a_problem_is_said_once_with_its_ranks(them, links, ranks, text):
    [found] = find(them, links)
    assert found.text.startswith(text)
    assert found.is_problem == (ranks is not None)
    assert found.ranks == ranks or not found.is_problem
    assert found.advice.endswith(".")


def test_problems_come_first():
    found = find(job({"compiled": "/cache"}, {"files": 9}), LINKS)
    assert [each.is_problem for each in found] == [True, False]


@pytest.mark.parametrize("count", range(1, 8))
def test_each_link_is_measured_once_and_no_rank_is_in_two_at_a_time(count):
    of_hosts = [(2 * i, 2 * i + 1) for i in range(count)]
    planned = turns(of_hosts)
    for turn in planned:
        assert len({*itertools.chain(*turn)}) == sum(map(len, turn))
    links = {
        tuple(sorted((2 * i, 2 * ((i + 1) % count)))) for i in range(count if count > 1 else 0)
    }
    groups = sorted(tuple(sorted(group)) for turn in planned for group in turn)
    assert groups == sorted([*of_hosts, *links])


def test_hosts_are_measured_within_and_between():
    per_rank = ring_of_threads(3, examine, hosts=("alpha", "alpha", "beta"))
    assert per_rank[0] == per_rank[1] == per_rank[2]
    found = msgspec.convert(per_rank[0], list[HostFacts | Link])
    assert [each.host for each in found if isinstance(each, HostFacts)] == ["alpha"] * 2 + ["beta"]
    links = [each for each in found if isinstance(each, Link)]
    assert [(link.ranks, link.transport) for link in links] == [((0, 1), "shm"), ((0, 2), "zmq")]
    for small, large in (link.seconds for link in links):
        assert 0 < small < large < 10


def test_differing_ranks_stand_apart_in_80_columns(capsys, monkeypatch, check_page):
    monkeypatch.setenv("COLUMNS", "80")
    records = [*job({}, {"files": 512}), *LINKS]
    printed = "".join(f"[alpha:0] {msgspec.json.encode(each).decode()}\n" for each in records)
    assert show(f"[beta:1] a library greets\n{printed}", as_json=False) == 1
    page = capsys.readouterr().out
    assert f"problem: rank 1: {FEW_FILES}\n" in page
    check_page("doctor.txt", page)


def test_hosts_reached_by_an_agent_are_reported_as_json():
    done = command_line("doctor", "-H", "localhost:2", "--json")
    report = json.loads(done.stdout)
    assert not [each for each in report["findings"] if each["is_problem"]]
    assert done.exit_code == 0, done.stderr
    [link] = msgspec.convert(report["links"], list[Link])
    assert (link.ranks, link.transport) == ((0, 1), "shm")
    first, second = msgspec.convert(report["ranks"], list[HostFacts])
    assert (first.rank, second.rank, first.native, first.xla) == (0, 1, "", "")
    assert {"ringreduce", "Python", "TensorFlow", "Keras", "numba", "libzmq"} <= {*first.versions}
    assert first.host_cores >= len(first.cores)
    assert first.load >= 0
    # What each wrote and read, at no more than a terabyte a second.
    assert first.copied_s > SIZES[-1] / 1e12


def test_a_missing_library_is_a_problem_that_fits_80_columns():
    done = command_line("doctor", "-n", "1", RINGREDUCE_NATIVE="0")
    assert done.exit_code == 1, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "problem: The native library is hidden by RINGREDUCE_NATIVE=0.\n" in done.stdout
    assert "native library  missing " in done.stdout


def test_a_ring_that_does_not_form_is_a_failure_that_names_the_rank(tmp_path):
    command = 'ulimit -n 64; exec "$0" -m ringreduce doctor -n 2 --json'
    with Process(["sh", "-c", command, sys.executable], tmp_path) as done:
        assert (done.wait(), done.stdout) == (1, "")
        assert "ConfigError" in done.stderr
        assert "of 2 may open 64 files" in done.stderr
