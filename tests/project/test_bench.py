"""The benchmarks run, agree with numpy, and write the rows that others read."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import __main__ as main
from bench import collectives, large, link, namespaces, peers, systems, train
from bench.turns import Process, System, SystemFailed, Turns
from ringreduce.effects import native
from tests.jobs import run_job
from tests.processes import run_python
from tests.scope import in_full

ROW = {"system", "transport", "collective", "world_size", "dtype", "op", "size_bytes", "wrong"}
ROW |= {"time_us", "time_us_p99", "algbw_gb_s", "busbw_gb_s"}


def bench(arguments):
    return CliRunner().invoke(main.app, shlex.split(arguments))


def rows_of(arguments, file):
    """The rows of a benchmark that ends well, by way of a file; it prints its table."""
    result = bench(f"{arguments} --json {file}")
    assert result.exit_code == 0, result.output
    out = json.loads(file.read_text())
    assert {"command", "cpu", "cores", "versions", "memcpy_gb_s"} <= set(out["header"])
    assert len(result.stdout.splitlines()) > len(out["rows"]) > 0
    return out["rows"]


def refusal(arguments):
    """The words with which a command line is refused."""
    result = bench(arguments)
    assert result.exit_code == 2
    return " ".join(word for word in result.output.split() if word != "│")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("all_reduce --begin=1X", "is no size"),
        ("all_reduce --begin=", "is no size"),
        ("sendrecv -n 3", "sendrecv needs an even number of ranks, not 3"),
        ("peers --collective sendrecv -n 3", "sendrecv needs an even number of ranks, not 3"),
        ("link --rate '1gbit;reboot'", "is no rate; 1gbit and 500mbit are"),
        ("link --rate 0mbit", "is no rate; 1gbit and 500mbit are"),
    ],
)
def test_bad_options_are_refused(arguments, said):
    assert said in refusal(arguments)


# --- Collectives -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("collective", "options", "transport"),
    [
        ("all_reduce", "-n 2 --transport shm --registered", "shm-registered"),
        *(in_full(name, "-n 2 --transport zmq", "zmq") for name in collectives.COLLECTIVES),
        in_full("all_reduce", "-n 2 --transport shm", "shm"),
        in_full("all_reduce", "-n 2 --transport zmq --registered", "zmq"),
        in_full("all_reduce", "-n 3 --transport zmq -d bfloat16 -o mean", "zmq"),
        in_full("all_reduce", "-n 3 --transport zmq -d int8 -o max", "zmq"),
        in_full("all_reduce", "-n 3 --transport zmq -d float64", "zmq"),
    ],
)
def test_a_collective_is_measured_and_right(collective, options, transport, tmp_path):
    if transport != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    rows = rows_of(f"{collective} -b 96 -e 96K -f 32 {options}", tmp_path / "out.json")
    assert [row["size_bytes"] for row in rows] == [96, 3072, 98304]
    for row in rows:
        assert set(row) == ROW
        assert (row["system"], row["transport"]) == ("ringreduce", transport)
        assert (row["collective"], row["wrong"]) == (collective, 0)
        assert 0 < row["time_us"] <= row["time_us_p99"]
        size = row["world_size"]
        factors = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1, "sendrecv": 2}
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factors.get(collective, 0.5))


def test_wrong_elements_are_counted_and_fail_the_run(tmp_path):
    """A worker whose expectation is off by one stands in for a ring that is."""
    program = """
        import dataclasses
        from bench import collectives, worker
        good = collectives.COLLECTIVES["broadcast"]
        collectives.COLLECTIVES["broadcast"] = dataclasses.replace(
            good, expected=lambda inputs, rank, op: inputs[0] + (rank == 0))
        worker.main()
        """
    options = f"broadcast --sizes 40 --dtype float32 --op sum --warmup 1 --rows {tmp_path}/rows"
    run_python(program, *options.split()).check_returncode()
    assert json.loads((tmp_path / "rows").read_text())["wrong"] == 10


# --- Other systems ---------------------------------------------------------------------------
def a_row(system, transport, time_us, size_bytes=1 << 20):
    entry = systems.Entry(system, transport, lambda: None, lambda hosts: [])
    measured = peers.Measured(times=[np.full(20, time_us / 1e6)])
    return peers.row(entry, 2, size_bytes // 4, measured)


def test_ratios_are_the_peers_times_over_ringreduces_in_a_table_of_100_columns():
    rows = [
        a_row("ringreduce", "shm-registered", 123456.7, 1 << 30),
        *(a_row(peer, None, 9876543.2, 1 << 30) for peer in peers.PEERS),
    ]
    assert peers.with_ratios(rows)[0]["ratio_to"] == dict.fromkeys(peers.PEERS, pytest.approx(80))
    lines = [peers.table_line(row) for row in rows]
    assert max(map(len, [peers.COLUMNS, *lines])) <= 100
    assert len(lines[0]) == len(peers.COLUMNS)
    assert lines[0].split()[:3] == ["1G", "ringreduce", "shm-registered"]


def test_a_peer_that_is_not_installed_is_listed_and_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    pace = peers.Pace(rounds=2, calls_min=4, warmup=1)
    code = peers.run(workers=2, size_range=[4096], pace=pace, labels=["gloo"], json_file=None)
    assert code == 0
    assert "# gloo: not installed: pip install torch" in capsys.readouterr().out


def test_a_system_that_dies_or_falls_silent_is_shown_and_does_not_stop_the_others(capsys):
    """Rank 1 of the first system ends in its turn, while its rank 0 hangs."""
    begin = "import sys, time; from bench.turns import Line; rank = int(sys.argv[1])\n"
    programs = {
        "dies": "for order in line.orders(): time.sleep(1000 * (rank == 0)); sys.exit('!')",
        "answers": "for order in line.orders(): line.answer(twice=2 * order['number'])",
        "silent": "print('mute', flush=True); time.sleep(1000)",
    }

    def system(name, program, lines):
        commands = [[sys.executable, "-c", program, str(rank)] for rank in range(lines)]
        return System(name, [Process(command) for command in commands], lines)

    begin += "line = Line(rank, note=5)\n"
    chosen = [system(n, begin + program, 1 + (n == "dies")) for n, program in programs.items()]
    with Turns() as turns:
        started = turns.start([*chosen, system("never", "print('no')", 1)], 30)
        assert [said["note"] for said in started["dies"]] == [5, 5]
        assert "ended with 0 before its first turn" in str(started["never"])
        with pytest.raises(SystemFailed, match="dies lost rank 1"):
            turns.ask("dies", {"number": 1}, timeout_s=30)
        assert turns.ask("answers", {"number": 4}, timeout_s=30) == [{"twice": 8}]
        with pytest.raises(SystemFailed, match=r"did not answer in 0.3 s: ranks \[0\]"):
            turns.ask("silent", {}, timeout_s=0.3)
    assert {"!", "mute"} <= {*capsys.readouterr().err.split()}


EVERY = [
    pytest.param(
        tuple(entry.label for entry in systems.ENTRIES if name in entry.collectives),
        name,
        id=f"all-{name}",
        marks=(pytest.mark.full, pytest.mark.tensorflow),
    )
    for name in systems.MEASURED
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("labels", "collective"), [(("ringreduce zmq",), "all_to_all"), *EVERY])
def test_peers_are_measured_in_turns_and_right(labels, collective, tmp_path):
    options = f"--collective {collective} -n 2 -b 4K -e 256K -f 64 --rounds 2"
    chosen = " ".join(f"--only '{label}'" for label in labels)
    rows = rows_of(f"peers {options} {chosen}", tmp_path / "out.json")
    entries = [entry for entry in systems.ENTRIES if entry.label in labels]
    there = {entry.system for entry in entries if entry.missing() is None}
    assert {row["system"] for row in rows} == there
    assert {row["size_bytes"] for row in rows} == {4096, 262144}
    for row in rows:
        assert row.keys() - {"ratio_to"} == {*ROW, "calls"}
        assert (row["collective"], row["wrong"]) == (collective, 0)
        assert row["calls"] >= 20
        if row["system"] == "ringreduce":
            assert set(row["ratio_to"]) == there - {"ringreduce"}


# --- Links -----------------------------------------------------------------------------------
def test_link_says_in_a_line_what_is_missing(monkeypatch):
    for missing, user, said in (
        *((tool, 0, f"program {tool}, which is not installed") for tool in ("ip", "tc", "iperf3")),
        ("", 1000, "bench: shaped links need root, to make network namespaces"),
    ):
        monkeypatch.setattr(namespaces.shutil, "which", lambda name, m=missing: name != m or None)
        monkeypatch.setattr(namespaces.os, "geteuid", lambda user=user: user)
        result = bench("link")
        assert (result.exit_code, said in result.output) == (2, True)
        assert result.output.count("\n") == 1


def test_the_share_of_a_link_is_busbw_in_bits_over_the_raw_stream():
    row = a_row("ringreduce", "zmq", time_us=2**23, size_bytes=2**30)
    shared = link.with_share(row, raw_gbit_s=1.28)
    assert shared["busbw_gbit_s"] == pytest.approx(1.024)  # with two ranks, what algbw is
    assert shared["share_of_raw"] == pytest.approx(0.8)
    assert len(link.table_line(shared)) == len(link.COLUMNS) <= 80
    assert namespaces.bits_per_second("2.5mbit") == 2500000


def shaped_links_are_possible():
    try:
        namespaces.require()
        with namespaces.shaped(1, "1gbit"):
            return True
    except namespaces.UnavailableError:
        return False


@pytest.fixture
def shaped_links():
    if not shaped_links_are_possible():
        pytest.skip("needs root, ip, tc and network namespaces")


def namespaces_of(pid):
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"rr{pid}")]


@pytest.mark.usefixtures("shaped_links")
def test_namespaces_have_their_addresses_and_go_when_something_fails():
    listen = "import socket, sys; socket.create_server((sys.argv[1], 0)).close()"
    with contextlib.suppress(ZeroDivisionError), namespaces.shaped(2, "1gbit") as hosts:
        assert len(namespaces_of(os.getpid())) == 3
        for host in hosts:
            command = [*host.prefix, sys.executable, "-c", listen, host.address]
            subprocess.run(command, check=True, timeout=30)
        raise ZeroDivisionError
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("shaped_links")
def test_packets_arrive_as_late_as_the_latency_says():
    """There and back takes it twice; what is dropped would take 200 ms more."""
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("needs tun devices")
    echo = "import socket, sys; server = socket.create_server((sys.argv[1], 0));"
    echo += "print(server.getsockname()[1], flush=True); peer, _ = server.accept();"
    echo += "[peer.sendall(bytes(1)) for _ in iter(lambda: peer.recv(1), b'')]"
    ask = "import socket, sys, time; peer = socket.create_connection((sys.argv[1], sys.argv[2]));\n"
    ask += "for _ in range(5):\n    began = time.perf_counter(); peer.sendall(bytes(1))\n"
    ask += "    peer.recv(1); print(time.perf_counter() - began)"
    with namespaces.shaped(2, "1gbit", latency_ms=30) as (near, far):
        command = [*far.prefix, sys.executable, "-c", echo, far.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            command = [*near.prefix, sys.executable, "-c", ask, far.address, port]
            asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    seconds = [float(line) for line in asked.stdout.split()]
    assert len(seconds) == 5
    assert 0.06 <= min(seconds) < 0.12


@pytest.mark.usefixtures("shaped_links")
def test_a_terminated_bench_removes_its_namespaces():
    result = run_python("""
        import os, signal
        from bench import namespaces, turns
        with turns.ended_by_signals(), namespaces.shaped(2, "1gbit") as hosts:
            print(os.getpid(), len(hosts), flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        """)
    assert result.returncode == 128 + 15
    pid, count = result.stdout.split()
    assert (count, namespaces_of(pid)) == ("2", [])


# --- Training --------------------------------------------------------------------------------
def test_hidden_is_what_the_step_did_not_wait_for_in_a_table_that_keeps_its_columns():
    measured = train.Measured()
    for turn in (1, 3, 2):
        answers = [
            {"seconds": [0.1, 0.3], "loss": 1.0, "waiting_s": 0.01 * turn},
            {"seconds": [0.3, 0.1], "loss": 2.0, "waiting_s": 0.03 * turn},
        ]
        measured.add([{**rank, "communication_s": 0.08, "pss_mb": 300.0} for rank in answers])
    row = train.row("ringreduce", "mlp", 2, None, measured)
    assert row["step_ms"] == pytest.approx(200)
    assert row["waiting_ms"] == pytest.approx(40)  # mean over ranks, median over turns
    assert row["compute_ms"] == pytest.approx(160)
    assert row["hidden_share"] == pytest.approx(0.5)
    assert (train.hidden_share(5, 4), train.hidden_share(0, 0)) == (0, None)
    alone = train.row("single", "mlp", 2, None, measured)
    assert (alone["workers"], alone["hidden_share"]) == (1, None)
    lines = [train.table_line(row, other=640.0) for row in (row, alone)]
    assert {len(line) for line in lines} == {len(train.COLUMNS)} == {90}


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "systems"),
    [
        ("embedding --tables recommender --ids zipf --optimizer sgd", large.EMBEDDING),
        ("parallel --widths 64", large.PARALLEL),
    ],
)
def test_what_is_large_is_measured_for_all_systems(options, systems, tmp_path):
    rows = rows_of(f"{options} --rounds 1 --steps 2", tmp_path / "out.json")
    assert [row["system"] for row in rows] == list(systems)
    for row in rows:
        assert row["samples_per_s"] > 0
        assert (row["bytes_sent"] > 0) == (not row["system"].startswith(("single", "mirrored")))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_training_is_measured_for_all_systems(tmp_path):
    linked = shaped_links_are_possible()
    options = "train --model mlp --workers 2 --rounds 1 --steps 2"
    found = rows_of(options + linked * " --link 1gbit --latency 1", tmp_path / "out.json")
    rows = {row["system"]: row for row in found}
    expected = {"single", "mirrored", "ringreduce", "rr.fit", *linked * ["multiworker"]}
    assert set(rows) == expected
    for name, row in rows.items():
        assert (row["model"], row["global_batch"]) == ("mlp", 128)
        assert row["samples_per_s"] > 0
        assert (row["hidden_share"] is None) == (not name.startswith(("ringreduce", "rr.fit")))
        assert row["workers"] == (1 if "single" in name else 2)
    ring = rows["ringreduce"]
    assert ring["communication_ms"] > 0
    assert ring["compute_ms"] + ring["waiting_ms"] == pytest.approx(ring["step_ms"])
    # The same weights, batches and steps: the losses differ by rounding alone.
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) - min(losses) < 1e-3


@pytest.mark.tensorflow
@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_start_is_measured_with_its_trial_and_without(tmp_path):
    on_hosts = " --link 1gbit" if shaped_links_are_possible() else ""
    [row] = rows_of(f"trial --models mlp --rounds 1{on_hosts}", tmp_path / "out.json")
    assert row["model"] == "mlp"
    assert min(row["model.fit"], row["without"], row["with"]) > 0
    assert row["trial"] == row["with"] - row["without"]


@pytest.mark.tensorflow
@pytest.mark.full
def test_collectives_beside_steps_are_counted():
    """A step has one bucket. What the rest is may change; it does not depend on time."""
    from bench import exchanges

    found = exchanges.row("dense")
    assert found["step"] == 1
    assert found["epoch"] == int(found["epoch"]) > 0
    assert found["around"] == int(found["around"]) > 0


@pytest.mark.full
def test_the_cost_of_encryption_is_measured():
    arguments = ["bench/encryption.py", "--mib", "1", "2", "--seconds", "0.1"]
    result = run_job(2, arguments, environment={"PYTHONPATH": "."})
    assert result.exit_code == 0, result.errors
    number = r"-?\d+\.\d+"
    assert re.search(rf"sealing {number} GB/s, opening {number}, memcpy {number}", result.output)
    for size in (1, 2):
        line = rf"{size} MiB, \d+ calls each: {number} ms plain, {number} ms encrypted"
        assert re.search(line, result.output), result.output
