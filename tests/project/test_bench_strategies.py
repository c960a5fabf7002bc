"""`python -m bench strategies`: its arithmetic, its tables, its refusals, and that it runs."""

import numpy as np
import pytest

from bench.strategies import accuracy, meter, seeds, speed
from bench.strategies.fleet import Turn
from bench.strategies.ways import EVERY_STEP, NAMED, NEVER, SYNCHRONOUS
from tests.project.test_bench import refusal, rows_of, shaped_links_are_possible


def test_a_link_is_full_while_either_direction_is():
    """Two links for four seconds: the first sends for one and receives for another."""
    times = np.array([0.0, 1, 2, 3, 4])
    first = np.array([[0.0, 0], [100, 0], [100, 90], [100, 90], [170, 90]])
    counts = np.hstack((first, [[0, 0], *[[50, 0]] * 4]))
    first, second = meter.use(times, counts, 0.0, 4.0, bytes_per_s=100.0)
    assert first == {"sent": 170, "received": 90, "full": 0.5}
    assert second == {"sent": 50, "received": 0, "full": 0}
    # Between two samples counts grow evenly.
    part, _ = meter.use(times, counts, 0.5, 1.5, bytes_per_s=100.0)
    assert part == {"sent": 50, "received": 45, "full": 1.0}


def test_speed_is_the_median_of_turns():
    turns = [Turn(step, 1e6 * step, 2e6, 0.1, 0.2, 0.3) for step in (0.3, 0.1, 0.2)]
    row = speed.row(NAMED["int8"], "mlp", 3, "1gbit", turns)
    # 42 samples on each of the three.
    assert (row["global_batch"], row["samples_per_s"]) == (126, pytest.approx(630))
    assert (row["sent_bytes"], row["full_share"]) == (pytest.approx(2e5), 0.3)
    alone = speed.row(NAMED["single"], "mlp", 3, "1gbit", [Turn(0.1)])
    assert (alone["global_batch"], alone["workers"], alone["link"]) == (128, 1, None)
    assert alone["sent_bytes"] is None
    for one in (row, alone):
        one |= {"x_never": 0.5, "x_every": None}
        assert len(speed.table_line(one)) == len(speed.COLUMNS) == len(speed.UNITS) <= 80


def test_the_first_test_that_is_good_enough_counts():
    curve = accuracy.joined([[[5, 1.0, 0.4], [10, 2.0, 0.9]], [[5, 3.0, 0.6], [10, 4.0, 0.9]]])
    assert curve == [(5, 2.0, 0.5), (10, 3.0, 0.9)]
    assert accuracy.reached(curve, 0.5) == (5, 2.0)
    assert accuracy.reached(curve, 0.6) == (10, 3.0)
    assert accuracy.reached(curve, 0.95) is None
    row = accuracy.row("int8", "digits", [curve, [(5, 1.0, 0.5), (10, 2.0, 0.98)]])
    assert (row["seconds"], row["steps"]) == (None, None)  # One of two did not.
    lines = [accuracy.table_line(row | {"seconds": seconds}, 4.0) for seconds in (None, 2.0)]
    assert {len(line) for line in lines} == {len(accuracy.COLUMNS)} == {len(accuracy.UNITS)}
    assert lines[1].split()[1:3] == ["2.00", "2.00"]


def test_the_interval_is_that_of_a_paired_t_test():
    row = seeds.row("int8", [0.91, 0.92, 0.93], [0.90, 0.90, 0.90])
    assert row["difference_points"] == pytest.approx(2)
    # The 0.975 quantile for two degrees of freedom is 4.3027.
    half = 4.3027 / 3**0.5
    assert row["interval_points"] == pytest.approx((2 - half, 2 + half), abs=1e-3)
    assert row["worst_points"] == pytest.approx(1)
    assert len(seeds.table_line(row)) == len(seeds.COLUMNS) == len(seeds.UNITS) <= 80


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--model vgg", "'vgg' is no model"),
        ("--only int4", "'int4' is no system; single,"),
        ("--seeds 1", "1 seeds have no spread; 2 and more have"),
        ("--seeds 3 --only int8", "seeds are compared with every-step: add it to --only"),
        ("--seeds 3 --only every-step --only single", "'single' takes no part in --seeds"),
        ("--link 1", "'1' is no rate"),
        ("--plot drawings", "speed is drawn with --link, every-step and a server"),
        ("--seeds 3 --plot drawings", "--seeds has nothing to draw"),
    ],
)
def test_bad_options_are_refused(options, said):
    assert said in refusal(f"strategies {options}")


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.full
def test_speed_is_measured_for_a_system_of_each_kind(tmp_path):
    linked = shaped_links_are_possible()
    systems = ["single", NEVER, EVERY_STEP, "int8", "local", SYNCHRONOUS]
    options = "strategies --rounds 1 --steps 2 --every 2"
    options += "".join(f" --only {name}" for name in systems)
    options += linked * f" --link 1gbit --plot {tmp_path}"
    rows = {row["system"]: row for row in rows_of(options, tmp_path / "out.json")}
    assert set(rows) == set(systems)
    assert all(row["samples_per_s"] > 0 for row in rows.values())
    assert rows[NEVER]["x_never"] == rows[EVERY_STEP]["x_every"] == 1
    if linked:
        # Weights have 40.2 MB: those of each worker go to and fro; those who meet every two steps
        # send half.
        shares = {EVERY_STEP: 1, "int8": 1 / 4, "local": 1 / 2, SYNCHRONOUS: 2}
        for name, share in shares.items():
            assert rows[name]["sent_bytes"] == pytest.approx(share * 40.2e6, rel=0.05)
        assert rows["single"]["sent_bytes"] is None
        assert (tmp_path / "strategies-links.svg").exists()


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.full
def test_accuracies_are_compared_seed_by_seed(tmp_path):
    options = f"strategies --seeds 2 --only {EVERY_STEP} --only int8"
    base, encoded = rows_of(options, tmp_path / "out.json")
    assert min(base["accuracies"] + encoded["accuracies"]) > 0.95
    assert abs(encoded["difference_points"]) < 2
