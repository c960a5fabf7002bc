"""The benchmarks run, agree with numpy, and write the rows that others read."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from bench import collectives, sweep

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


def bench(arguments, timeout=100):
    return subprocess.run(
        [sys.executable, "-m", "bench", *shlex.split(arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("collective", collectives.COLLECTIVES)
def test_a_collective_is_measured_and_right(collective, tmp_path):
    file = tmp_path / "out.json"
    result = bench(f"{collective} -n 2 -b 100 -e 100K -f 32 --json {file}")
    assert result.returncode == 0, result.stderr
    out = json.loads(file.read_text())
    assert {"command", "cpu", "cores", "versions", "memcpy_gb_s"} <= set(out["header"])
    assert [row["size_bytes"] for row in out["rows"]] == [100, 3200, 102400]
    for row in out["rows"]:
        assert set(row) == ROW
        assert (row["system"], row["transport"]) == ("ringreduce", "zmq")
        assert (row["collective"], row["world_size"]) == (collective, 2)
        assert row["wrong"] == 0
        assert 0 < row["time_us"] <= row["time_us_p99"]
        factor = {"all_reduce": 1, "broadcast": 1}.get(collective, 0.5)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * factor)


@pytest.mark.parametrize("options", ["-d bfloat16 -o mean", "-d int8 -o max", "-d float64"])
def test_other_dtypes_and_operators_are_right_too(options):
    result = bench(f"all_reduce -n 3 -b 60K -e 60K {options}")
    assert result.returncode == 0, result.stderr
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
    result = bench(f"all_reduce -b {shlex.quote(size)}")
    assert result.returncode == 2
    assert "is no size" in result.stderr


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_training_is_measured_for_all_three_systems(tmp_path):
    file = tmp_path / "out.json"
    options = f"train --model cnn --workers 2 --rounds 1 --steps 2 --json {file}"
    result = bench(options, timeout=280)
    assert result.returncode == 0, result.stderr
    rows = {row["system"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == {"single", "mirrored", "ringreduce"}
    for row in rows.values():
        assert row["model"] == "cnn"
        assert row["global_batch"] == 128
        assert row["samples_per_s"] > 0
    assert {name: row["workers"] for name, row in rows.items()} == {
        "single": 1,
        "mirrored": 2,
        "ringreduce": 2,
    }
    # The same weights, batches and steps: the losses differ by rounding alone.
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) - min(losses) < 1e-3
