"""The benchmarks run, agree with numpy, and write the rows that others read."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import __main__ as main
from bench import collectives, large, link, namespaces, peers, sweep, systems, train
from bench.turns import Process, System, SystemFailed, Turns
from ringreduce.effects import native
from tests.jobs import run_job
from tests.scope import in_full

ROW = {
    "system",
    "transport",
    "collective",
    "world_size",
    "dtype",
    "op",
    "size_bytes",
    "time_us",
    "time_us_p99",
    "algbw_gb_s",
    "busbw_gb_s",
    "wrong",
}


def bench(arguments):
    return CliRunner().invoke(main.app, shlex.split(arguments))


QUICK = ("all_reduce",)


@pytest.mark.parametrize(
    "collective", [c if c in QUICK else in_full(c) for c in collectives.COLLECTIVES]
)
def test_a_collective_is_measured_and_right(collective, tmp_path):
    file = tmp_path / "out.json"
    options, transport = "--transport zmq", "zmq"
    if collective in QUICK and native.library() is not None:
        options, transport = "--transport shm --registered", "shm-registered"
    result = bench(f"{collective} -n 2 -b 96 -e 96K -f 32 {options} --json {file}")
    assert result.exit_code == 0, result.output
    out = json.loads(file.read_text())
    assert {"command", "cpu", "cores", "versions", "memcpy_gb_s"} <= set(out["header"])
    assert [row["size_bytes"] for row in out["rows"]] == [96, 3072, 98304]
    for row in out["rows"]:
        assert set(row) == ROW
        assert (row["system"], row["transport"]) == ("ringreduce", transport)
        assert (row["collective"], row["world_size"]) == (collective, 2)
        assert row["wrong"] == 0
        assert 0 < row["time_us"] <= row["time_us_p99"]
        factor = {"all_reduce": 1, "broadcast": 1, "sendrecv": 2}.get(collective, 0.5)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "transport"),
    [("--transport shm", "shm"), ("--transport zmq --registered", "zmq")],
)
def test_rows_name_the_transport_that_was_used(options, transport, tmp_path):
    if transport != "zmq" and native.library() is None:
        pytest.skip(native.why_missing())
    file = tmp_path / "out.json"
    result = bench(f"all_reduce -n 2 -b 40K -e 40K {options} --json {file}")
    assert result.exit_code == 0, result.output
    [row] = json.loads(file.read_text())["rows"]
    assert row["transport"] == transport
    assert row["wrong"] == 0


@pytest.mark.parametrize(
    "options", [in_full("-d bfloat16 -o mean"), in_full("-d int8 -o max"), in_full("-d float64")]
)
def test_other_dtypes_and_operators_are_right_too(options):
    result = bench(f"all_reduce -n 3 -b 60K -e 60K {options}")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split()[-1] == "0"


def test_wrong_elements_are_counted_and_fail_the_run(tmp_path):
    """A worker whose expectation is off by one stands in for a ring that is."""
    program = tmp_path / "broken.py"
    program.write_text(
        "import dataclasses, sys\n"
        "from bench import collectives, worker\n"
        "good = collectives.COLLECTIVES['broadcast']\n"
        "collectives.COLLECTIVES['broadcast'] = dataclasses.replace(\n"
        "    good, expected=lambda inputs, rank, op: inputs[0] + (rank == 0))\n"
        "worker.main()\n"
    )
    rows = tmp_path / "rows"
    options = f"broadcast --sizes 40 --dtype float32 --op sum --warmup 1 --rows {rows}"
    result = subprocess.run(
        [sys.executable, str(program), *shlex.split(options)],
        env={**os.environ, "PYTHONPATH": "."},
        timeout=60,
        check=False,
    )
    assert result.returncode == 0
    assert json.loads(rows.read_text())["wrong"] == 10


def test_sizes_are_a_geometric_range_with_both_ends():
    assert sweep.sizes(1024, 16384, 4) == [1024, 4096, 16384]
    assert sweep.sizes(1, 4, 1.01) == [1, 2, 3, 4]
    assert sweep.sizes(8, 4, 2) == []


@pytest.mark.parametrize("size", ["1X", "", "M", "-"])
def test_a_size_that_is_none_is_refused(size):
    result = CliRunner().invoke(main.app, ["all_reduce", f"--begin={size}"])
    assert result.exit_code == 2
    assert "is no size" in result.output


@pytest.mark.parametrize("command", ["sendrecv", "peers --collective sendrecv"])
def test_pairs_need_an_even_number_of_ranks(command):
    result = CliRunner().invoke(main.app, [*command.split(), "-n", "3"])
    assert result.exit_code == 2
    assert "sendrecv needs an even number of ranks, not 3" in " ".join(result.output.split())


def a_row(system, transport, time_us, size_bytes=1 << 20):
    entry = systems.Entry(system, transport, lambda: None, lambda hosts: [])
    measured = peers.Measured(times=[np.full(20, time_us / 1e6)])
    return peers.row(entry, 2, size_bytes // 4, measured)


def test_ratios_are_the_peers_times_over_ringreduces():
    rows = peers.with_ratios([a_row("ringreduce", "zmq", 200), a_row("gloo", None, 500)])
    assert rows[0]["ratio_to"] == {"gloo": pytest.approx(2.5)}
    assert "ratio_to" not in rows[1]
    by_bandwidth = rows[0]["algbw_gb_s"] / rows[1]["algbw_gb_s"]
    assert rows[0]["ratio_to"]["gloo"] == pytest.approx(by_bandwidth)


def test_the_peers_table_fits_in_100_columns_and_keeps_its_columns():
    rows = [
        a_row("ringreduce", "shm-registered", 123456.7, 1 << 30),
        *(a_row(peer, None, 9876543.2, 1 << 30) for peer in peers.PEERS),
    ]
    lines = [peers.table_line(row) for row in peers.with_ratios(rows)]
    assert max(map(len, [peers.COLUMNS, *lines])) <= 100
    assert len(lines[0]) == len(peers.COLUMNS)
    assert lines[0].split()[:3] == ["1G", "ringreduce", "shm-registered"]
    assert lines[0].split()[-3:] == ["80.00"] * 3


@pytest.mark.parametrize(
    ("nbytes", "text"), [(1024, "1K"), (1 << 30, "1G"), (100, "100"), (1536, "1536")]
)
def test_sizes_are_shown_short_only_where_that_is_exact(nbytes, text):
    assert peers.short_size(nbytes) == text


def test_a_peer_that_is_not_installed_is_listed_and_left_out(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    pace = peers.Pace(rounds=2, calls_min=4, warmup=1)
    code = peers.run(workers=2, size_range=[4096], pace=pace, labels=["gloo"], json_file=None)
    assert code == 0
    assert "# gloo: not installed: pip install torch" in capsys.readouterr().out


def test_ports_of_workers_are_free_and_none_that_linux_gives_to_others():
    """A worker listens seconds after its port was chosen."""
    ports = systems.free_ports(3)
    assert len(set(ports)) == 3
    assert max(ports) < 32768  # /proc/sys/net/ipv4/ip_local_port_range begins there.
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_system_that_dies_is_shown_and_does_not_stop_the_others(capsys):
    """Rank 1 of the first system ends in its turn, while its rank 0 hangs."""
    dies = (
        "import sys, time; from bench.turns import Line\n"
        "line = Line(int(sys.argv[1]), note='here')\n"
        "for order in line.orders():\n"
        "    if sys.argv[1] == '0': time.sleep(1000)\n"
        "    sys.exit('last words')\n"
    )
    answers = (
        "from bench.turns import Line\n"
        "line = Line(0)\n"
        "for order in line.orders():\n"
        "    line.answer(twice=2 * order['number'])\n"
    )
    never = "print('no')"

    def system(name, program, lines):
        commands = [[sys.executable, "-c", program, str(rank)] for rank in range(lines)]
        return System(name, [Process(command) for command in commands], lines)

    with Turns() as turns:
        started = turns.start(
            [system("dies", dies, 2), system("answers", answers, 1), system("never", never, 1)], 30
        )
        assert [said["note"] for said in started["dies"]] == ["here", "here"]
        assert "ended with 0 before its first turn" in str(started["never"])
        with pytest.raises(SystemFailed, match="dies lost rank 1"):
            turns.ask("dies", {"number": 1}, timeout_s=30)
        assert turns.ask("answers", {"number": 4}, timeout_s=30) == [{"twice": 8}]
    assert "last words" in capsys.readouterr().err


def test_a_system_that_falls_silent_has_a_deadline(capsys):
    program = (
        "import time; from bench.turns import Line; l = Line(0); print('mute'); time.sleep(1000)"
    )
    with Turns() as turns:
        turns.start([System("mute", [Process([sys.executable, "-uc", program])], 1)], 30)
        with pytest.raises(SystemFailed, match=r"did not answer in 0.3 s: ranks \[0\]"):
            turns.ask("mute", {}, timeout_s=0.3)
    assert "mute" in capsys.readouterr().err


@pytest.mark.parametrize(("rate", "bits"), [("1gbit", 10**9), ("2.5mbit", 2500000)])
def test_rates_are_those_of_tc(rate, bits):
    assert namespaces.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["1", "gbit", "1gbit;reboot", "0mbit", "-1gbit", "1GB"])
def test_a_rate_that_is_none_is_refused(rate):
    result = CliRunner().invoke(main.app, ["link", "--rate", rate])
    assert result.exit_code == 2
    assert "is no rate; 1gbit and 500mbit are" in " ".join(result.output.split())


@pytest.mark.parametrize("tool", ["ip", "tc", "iperf3"])
def test_link_says_which_tool_is_missing(monkeypatch, tool):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == tool else name)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    result = CliRunner().invoke(main.app, ["link"])
    assert result.exit_code == 2
    assert f"need the program {tool}, which is not installed" in result.output
    assert len(result.output.splitlines()) == 1


def test_link_says_that_it_needs_root(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: name)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    result = CliRunner().invoke(main.app, ["link"])
    assert result.exit_code == 2
    assert result.output == "bench: shaped links need root, to make network namespaces\n"


def test_the_share_of_a_link_is_busbw_in_bits_over_the_raw_stream():
    row = a_row("ringreduce", "zmq", time_us=2**23, size_bytes=2**30)
    shared = link.with_share(row, raw_gbit_s=1.28)
    assert shared["busbw_gbit_s"] == pytest.approx(1.024)  # with two ranks, what algbw is
    assert shared["share_of_raw"] == pytest.approx(0.8)
    assert len(link.table_line(shared)) == len(link.COLUMNS) <= 80


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


def namespaces_left():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"rr{os.getpid()}")]


@pytest.mark.usefixtures("shaped_links")
def test_namespaces_have_their_addresses_and_go_when_something_fails():
    def fail_inside():
        with namespaces.shaped(2, "1gbit") as hosts:
            assert len(namespaces_left()) == 3
            listen = "import socket, sys; socket.create_server((sys.argv[1], 0)).close()"
            for host in hosts:
                command = [*host.prefix, sys.executable, "-c", listen, host.address]
                subprocess.run(command, check=True, timeout=30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert namespaces_left() == []


@pytest.mark.usefixtures("shaped_links")
def test_packets_arrive_as_late_as_the_latency_says():
    """There and back takes it twice; what is dropped would take 200 ms more."""
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("needs tun devices")
    echo = (
        "import socket, sys; server = socket.create_server((sys.argv[1], 0));"
        "print(server.getsockname()[1], flush=True); peer, _ = server.accept();"
        "[peer.sendall(bytes(1)) for _ in iter(lambda: peer.recv(1), b'')]"
    )
    ask = (
        "import socket, sys, time; peer = socket.create_connection((sys.argv[1], sys.argv[2]));\n"
        "for _ in range(5):\n"
        "    began = time.perf_counter(); peer.sendall(bytes(1)); peer.recv(1)\n"
        "    print(time.perf_counter() - began)"
    )
    with namespaces.shaped(2, "1gbit", latency_ms=30) as (near, far):
        command = [*far.prefix, sys.executable, "-c", echo, far.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            port = server.stdout.readline().strip()
            command = [*near.prefix, sys.executable, "-c", ask, far.address, port]
            asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    seconds = [float(line) for line in asked.stdout.split()]
    assert len(seconds) == 5
    assert all(each >= 0.06 for each in seconds)
    assert min(seconds) < 0.12


@pytest.mark.usefixtures("shaped_links")
def test_a_terminated_bench_removes_its_namespaces():
    program = (
        "import os, signal\n"
        "from bench import namespaces, turns\n"
        "with turns.ended_by_signals(), namespaces.shaped(2, '1gbit') as hosts:\n"
        "    print(*(host.name for host in hosts), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 128 + 15
    names = result.stdout.split()
    assert len(names) == 2
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not set(names) & set(listed.stdout.split())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("labels", "collective"),
    [
        (("ringreduce zmq",), "all_to_all"),
        *(
            pytest.param(
                tuple(entry.label for entry in systems.ENTRIES if name in entry.collectives),
                name,
                id=f"all-{name}",
                marks=(pytest.mark.full, pytest.mark.tensorflow),
            )
            for name in systems.MEASURED
        ),
    ],
)
def test_peers_are_measured_in_turns_and_right(labels, collective, tmp_path):
    file = tmp_path / "out.json"
    options = f"--collective {collective} -n 2 -b 4K -e 256K -f 64 --rounds 2 --json {file}"
    chosen = " ".join(f"--only '{label}'" for label in labels)
    result = bench(f"peers {options} {chosen}")
    assert result.exit_code == 0, result.output
    out = json.loads(file.read_text())
    entries = [entry for entry in systems.ENTRIES if entry.label in labels]
    there = {entry.system for entry in entries if entry.missing() is None}
    assert {row["system"] for row in out["rows"]} == there
    assert {row["size_bytes"] for row in out["rows"]} == {4096, 262144}
    for row in out["rows"]:
        assert row.keys() - {"ratio_to"} == {*ROW, "calls"}
        assert (row["collective"], row["wrong"]) == (collective, 0)
        assert row["calls"] >= 20
        if row["system"] == "ringreduce":
            assert set(row["ratio_to"]) == there - {"ringreduce"}


@pytest.mark.parametrize(
    ("waiting", "communication", "share"),
    [(0, 4, 1), (1, 4, 0.75), (4, 4, 0), (5, 4, 0), (0, 0, None)],
)
def test_hidden_is_what_the_step_did_not_wait_for(waiting, communication, share):
    assert train.hidden_share(waiting, communication) == share


def test_the_training_table_keeps_its_columns():
    measured = train.Measured()
    for turn in (1, 3, 2):
        answers = [
            {"seconds": [0.1, 0.3], "loss": 1.0, "waiting_s": 0.01 * turn},
            {"seconds": [0.3, 0.1], "loss": 2.0, "waiting_s": 0.03 * turn},
        ]
        answers = [{**each, "communication_s": 0.08, "pss_mb": 300.0} for each in answers]
        measured.add(answers)
    row = train.row("ringreduce", "mlp", 2, None, measured)
    assert row["step_ms"] == pytest.approx(200)
    assert row["waiting_ms"] == pytest.approx(40)  # mean over ranks, median over turns
    assert row["compute_ms"] == pytest.approx(160)
    assert row["hidden_share"] == pytest.approx(0.5)
    alone = train.row("single", "mlp", 2, None, measured)
    assert alone["workers"] == 1
    assert alone["hidden_share"] is None
    lines = [train.table_line(each, other=640.0) for each in (row, alone)]
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
    file = tmp_path / "out.json"
    result = bench(f"{options} --rounds 1 --steps 2 --json {file}")
    assert result.exit_code == 0, result.output
    rows = {row["system"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == list(systems)
    for name, row in rows.items():
        assert row["samples_per_s"] > 0
        assert (row["bytes_sent"] > 0) == (not name.startswith(("single", "mirrored")))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_training_is_measured_for_all_systems(tmp_path):
    file = tmp_path / "out.json"
    options = f"train --model mlp --workers 2 --rounds 1 --steps 2 --json {file}"
    linked = ["multiworker"] if shaped_links_are_possible() else []
    if linked:
        options += " --link 1gbit --latency 1"
    result = bench(options)
    assert result.exit_code == 0, result.output
    rows = {row["system"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"single", "mirrored", "ringreduce", "rr.fit", *linked}
    for row in rows.values():
        assert row["model"] == "mlp"
        assert row["global_batch"] == 128
        assert row["samples_per_s"] > 0
        is_ring = row["system"].startswith(("ringreduce", "rr.fit"))
        assert (row["hidden_share"] is None) == (not is_ring)
    assert rows["ringreduce"]["communication_ms"] > 0
    assert rows["ringreduce"]["compute_ms"] + rows["ringreduce"]["waiting_ms"] == pytest.approx(
        rows["ringreduce"]["step_ms"]
    )
    for name, row in rows.items():
        assert row["workers"] == (1 if "single" in name else 2)
    # The same weights, batches and steps: the losses differ by rounding alone.
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) - min(losses) < 1e-3


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
