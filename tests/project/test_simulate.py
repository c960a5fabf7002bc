"""The model of the collectives, what it is fitted to, and what is simulated with it."""

import dataclasses
import json
import os
import xml.etree.ElementTree as xml

import numpy as np
import pytest

from bench.simulate import fit, model, run, scale, training
from bench.simulate.model import Link, Memory
from bench.simulate.training import Conditions, Model
from ringreduce.collectives.ring import Ring
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from tests.project.test_bench import bench, refusal, shaped_links_are_possible

MIB = 1 << 20
DISTANT = Link(alpha=1.0, beta=0.0)
MEMORY = Memory(1e-5, 1e-10)
STEADY = Conditions(jitter=0.0, slow_share=0.0)


@pytest.mark.parametrize("ranks", [1, 3, 64])
def test_a_ring_carries_its_share_of_the_bytes_over_each_link(ranks):
    """2 (n - 1) / n of them, at no latency, as `busbw` counts; headers are little beside them."""
    nbytes, link = 64 * MIB, Link(0.0, 1e-7)
    seconds = model.all_reduce(ranks, nbytes, link)
    assert seconds == pytest.approx(2 * (ranks - 1) / ranks * nbytes * 1e-7, rel=2e-4)
    # Over two levels, that of a ring of the hosts; a rank alone sends nothing.
    of_hosts = model.two_levels(ranks, 8 if ranks > 1 else 1, nbytes, link, Memory(0.0, 0.0))
    assert of_hosts == pytest.approx(model.ring(ranks, nbytes, link), rel=1e-3)
    assert (model.all_to_all(ranks, nbytes, link) == 0) == (ranks == 1)


@pytest.mark.parametrize(
    ("collective", "messages"),
    [
        (lambda ranks: model.all_reduce(ranks, 100, DISTANT), [1, 2, 2, 3, 4]),
        (lambda ranks: model.ring(ranks, MIB, DISTANT), [2, 4, 6, 14, 30]),
        # The comparison of the calls, then one message over each distance.
        (lambda ranks: model.all_to_all(ranks, MIB, DISTANT), [2, 4, 5, 10, 19]),
    ],
)
def test_where_only_latency_counts_the_time_is_the_number_of_messages(collective, messages):
    assert [collective(ranks) for ranks in (2, 3, 4, 8, 16)] == messages


def test_a_row_of_an_exchange_travels_to_every_rank_and_pays_below_a_size():
    sent = sum((1, 2, 2)) * 1000 + 3 * SEALED_OVERHEAD_BYTES
    assert model.exchange(6, 1000, Link(0.0, 1.0)) == pytest.approx(sent)
    link = Link(1e-4, 1e-9)
    pays = scale.exchange_pays_up_to(16, link)
    assert model.exchange(16, pays, link) <= model.ring(16, pays, link)
    assert model.exchange(16, 2 * pays, link) > model.ring(16, 2 * pays, link)


@pytest.mark.parametrize("ranks", [2, 3, 16, 100, 4096])
@pytest.mark.parametrize("nbytes", [1, 512, 513, 1 << 14, (1 << 14) + 1, 1 << 18, (1 << 18) + 1])
def test_the_model_exchanges_what_the_ring_does(ranks, nbytes):
    ring = Ring.__new__(Ring)
    ring._size, ring._most_rows = ranks, max(model.schedule.exchange(ranks).counts)
    assert model.is_exchanged(ranks, nbytes) == ring._is_small(nbytes)


def test_parameters_are_found_from_times_and_never_negative():
    def times(link, *sizes):
        return {size: model.all_reduce(2, size, link) for size in sizes}

    for link in (Link(1e-3, 1e-7), Link(2e-5, 1e-10)):
        found = fit.link(times(link, 1024, 65536, MIB, 4 * MIB))
        assert found.alpha == pytest.approx(link.alpha, rel=0.02)
        assert found.beta == pytest.approx(link.beta, rel=0.05)
    found = fit.cores(times(Link(1e-4, 0.0, 1e-9), 1024, MIB))
    assert (found.alpha, found.gamma) == pytest.approx((1e-4, 1e-9), rel=0.05)
    assert found.beta == 0
    memory = fit.memory({size: MEMORY.all_reduce(2, size) for size in (1024, MIB)})
    assert (memory.alpha, memory.gamma) == pytest.approx((MEMORY.alpha, MEMORY.gamma))
    assert fit.line({(1, 1000): 1.0, (1, 2000): 2.5}) == (0.0, pytest.approx(1.1e-3, rel=0.1))


def test_a_step_waits_for_what_cannot_be_hidden():
    """Buckets of 1 MiB are ready after 7, 8 and 9 s."""
    nine = Model("model", (MIB,) * 9, 0.1)
    assert nine.buckets() == [MIB, *[4 * MIB] * 2]
    assert nine.buckets(100 * MIB) == [MIB, 8 * MIB]
    trained, options = Model("model", (MIB,) * 3, 9.0), {"backward_share": 1 / 3}

    def step(seconds):
        buckets = [MIB] * 3
        return training.step_seconds(trained, buckets, lambda _: seconds, np.ones(1), **options)[0]

    assert step(0.0) == pytest.approx(9)
    assert step(0.5) == pytest.approx(9.5)  # the last one
    assert step(2.0) == pytest.approx(7 + 3 * 2)  # all, one behind the other

    def efficiency(seconds):
        return training.efficiency(trained, [MIB] * 3, lambda _: seconds, np.ones(5), STEADY)

    assert efficiency(0.0) == pytest.approx(1)
    assert efficiency(9.0) == pytest.approx(9 / (5 + 27))  # the first is ready after 5 s


@pytest.mark.parametrize("hosts", [16, 256])
def test_the_goodput_is_that_of_youngs_approximation(hosts):
    conditions = Conditions(failures_a_day=0.01, checkpoint_s=20.0, restart_s=60.0)
    mean = training.DAY_S / (hosts * 0.01)
    interval = training.checkpoint_interval(hosts, conditions)
    assert interval == pytest.approx((2 * 20 * mean) ** 0.5)
    generator = np.random.default_rng(1)
    found = training.goodput(hosts, interval, conditions, generator)
    assert found == pytest.approx(1 - 20 / interval - (interval / 2 + 60) / mean, abs=0.01)
    for other in (interval / 4, interval * 4):
        assert training.goodput(hosts, other, conditions, generator) < found


def test_without_a_check_or_root_the_stored_parameters_are_used(tmp_path, monkeypatch):
    header = {"command": "bench", "commit": "none", "cpu": "a core", "cores": 2}
    header |= {"memcpy_gb_s": 1.0, "loopback_stream_gb_s": 1.0}
    monkeypatch.setattr(run, "facts", lambda: header)
    monkeypatch.setattr("bench.namespaces.os.geteuid", lambda: 1000)
    monkeypatch.setattr("bench.namespaces.shutil.which", lambda name: name)
    result = bench("simulate")
    assert result.exit_code == 0
    assert "# not checked: shaped links need root" in result.output
    file, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    result = bench(f"simulate --no-check --json {file} --plot {plot}")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.replace(str(plot), "plot.svg").splitlines())) <= 80
    for text in ("goodput", "parameters are those of docs/scaling.md"):
        assert text in result.output
    xml.parse(plot)
    out = json.loads(file.read_text())
    assert out["rows"] == []
    assert out["header"]["parameters"] == dataclasses.asdict(run.STORED)


@pytest.mark.parametrize("workers", ["two", "1,2", "2,1000", "''"])
def test_numbers_of_ranks_that_no_ring_has_are_refused(workers):
    assert "ranks" in refusal(f"simulate -n {workers}")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_real_rings_are_measured_and_predicted(tmp_path):
    if not shaped_links_are_possible():
        pytest.skip("needs root, ip, tc and network namespaces")
    file = tmp_path / "out.json"
    result = bench(f"simulate -n 3 --rate 500mbit --seconds 0.1 --json {file}")
    # 1: the model is off, as it may be beside other work.
    assert result.exit_code in (0, 1), result.stderr
    assert result.stderr == ""
    out = json.loads(file.read_text())
    assert set(out["header"]["parameters"]) == {"sockets", "memory", "wire"}
    delayed = {"distance"} if os.path.exists("/dev/net/tun") else set()
    assert {row["network"] for row in out["rows"]} == {"rate", "fast"} | delayed
    large = [row for row in out["rows"] if row["network"] == "rate" and row["nbytes"] >= MIB]
    assert {row["what"] for row in large} == {"all_reduce", "all_to_all"}
    for row in large:
        # No link is faster, apart from what its limiter passes at once.
        crossed = row["nbytes"] * (4 / 3 if row["what"] == "all_reduce" else 2 / 3)
        assert min(row["measured_s"], row["predicted_s"]) > 0.7 * crossed * 8 / 500e6
