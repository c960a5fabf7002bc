"""What is said of a training, from what its ranks measured: each fault is planted as numbers."""

import re

import pytest

from ringreduce.pure.profile import Measurement, step_of, verdict

MB = 1_000_000


def ranks(*computing_ms, communicating=1.0, hidden=6.0, steps=100, links=(), **more):
    """An epoch of ranks that compute so long in a step; all wait for the slowest."""
    step_ms = max(computing_ms) + communicating
    return [
        Measurement(
            rank=rank,
            steps=steps,
            seconds=steps * step_ms / 1e3,
            stopped_s=steps * (step_ms - own) / 1e3,
            hidden_s=steps * hidden / 1e3,
            bytes_sent=steps * MB,
            link_bytes=links[rank][0] if links else 0,
            link_s=links[rank][1] if links else 0.0,
            next_rank=(rank + 1) % len(computing_ms),
            **{"cpu_s": steps * own / 1e3, "called_s": 0.0, "reading_s": 0.0, **more},
        )
        for rank, own in enumerate(computing_ms)
    ]


def of(*epochs, first=1):
    """The verdict: its lines, and the findings as one line each, without their numbers."""
    lines = verdict(dict(enumerate(epochs, first)))
    assert max(map(len, lines)) <= 75
    whole = " ".join(line.strip() for line in lines).partition("help most: ")[2]
    return lines, re.split(r" ?\b\d\. (?=[A-Z0-9])", whole)[1:] or [whole]


def test_what_stops_the_slowest_is_communication_and_the_rest_is_waiting():
    step = step_of(ranks(30, 48, 34, communicating=4, hidden=12))
    times = step.seconds, step.communicating_s, step.waiting_s
    assert times == pytest.approx((0.052, 0.004, (18 + 14) / 2 / 1e3))
    logs = {"step_ms": 52, "waiting_ms": 16, "slowest_rank": 1, "hidden": 0.75, "bytes": MB}
    assert step.logs() == {f"rr_{name}": value for name, value in logs.items()}
    assert step.slowest == 1


def test_nothing_is_waited_for_alone_and_no_part_is_negative():
    logs = step_of(ranks(20, communicating=0, hidden=0)).logs()
    assert (logs["rr_waiting_ms"], logs["rr_slowest_rank"], logs["rr_hidden"]) == (0, 0, 1)
    # What surrounds calls takes time too.
    step = step_of(ranks(30, 20, communicating=-0.1))
    assert (step.communicating_s, step.logs()["rr_hidden"]) == (0, 1)


def test_facts_are_of_the_steps_since_then():
    before, now, since = (
        Measurement(steps, *[value] * 9, rank=2, cores=4.0)
        for steps, value in ((3, 1.5), (8, 4.0), (5, 2.5))
    )
    assert now.since(before) == since


NOTHING = ["Nothing of this kind."]


def test_the_verdict_says_where_a_step_went_and_what_would_help():
    lines, _ = of(ranks(30, 48, 30, 30), ranks(30, 48, 30, 30))
    assert lines == [
        "profile of 4 ranks in 2 epochs: 200 steps of 49.0 ms",
        "  computing                      30.0 ms   61%   rank 1: 48.0 ms",
        "  waiting for rank 1             18.0 ms   37%",
        "  communicating                   1.0 ms    2%   and 6.0 ms hidden",
        "  They do the work of 2.8 ranks that only compute; if communication were",
        "  free, of 2.9 at most.",
        "  What would help most:",
        "  1. Rank 1 is slow: it computes for 48.0 ms in a step, and the others wait",
        "     18.0 ms for it. See what else runs there, and whether it has more or",
        '     longer rows. Where it is always slower, rr.fit(batch_share="measured")',
        "     gives it less.",
    ]


def test_ranks_that_hardly_compute_are_told_so():
    lines, _ = of(ranks(1, 2, communicating=20, hidden=0))
    assert lines[4:6] == [
        "  Of a step's 22.0 ms all ranks together compute for 3.0 ms:",
        "  one rank that only computes would be faster. The rest is what to look at.",
    ]


def test_ranks_that_only_compute_have_nothing_to_gain():
    lines, found = of(ranks(30, 31, 30))
    assert found == NOTHING
    assert "waiting for the slowest rank" in lines[2]
    lines, found = of(ranks(30, communicating=0, hidden=0))
    assert lines[:2] == [
        "profile of 1 rank in 1 epoch: 100 steps of 30.0 ms",
        "  no other rank to wait for",
    ]
    assert found == NOTHING


EVEN, LATE = ranks(30, 30), ranks(30, 50)


@pytest.mark.parametrize(
    ("epochs", "when"),
    [
        ([LATE] * 3, "Rank 1 is slow: "),
        ([EVEN, EVEN, LATE, LATE], "Rank 1 is slow from epoch 13 on: "),
        ([EVEN] * 9 + [LATE], "Rank 1 is slow from epoch 20 on: "),
        ([EVEN, LATE, EVEN, LATE, EVEN], "Rank 1 is slow in 2 of 5 epochs: "),
        # The one that costs most.
        ([ranks(40, 30), LATE, LATE], "Rank 1 is slow from epoch 12 on: "),
    ],
)
def test_a_slow_rank_is_named_with_its_epochs_and_its_own_numbers(epochs, when):
    _, [text] = of(*epochs, first=11)
    assert text.startswith(f"{when}it computes for 50.0 ms in a step, and the others wait 20.0 ms")


def test_steps_count_alike_in_epochs_of_unequal_length():
    lines, _ = of(ranks(30, 30, steps=300), ranks(30, 50, steps=100))
    assert lines[0].endswith("400 steps of 36.0 ms")
    assert "waiting for rank 1              5.0 ms   14%   from epoch 2 on" in lines[2]


@pytest.mark.parametrize("epoch", [ranks(30, 33), ranks(30, 50, steps=4)])
def test_a_little_waiting_is_chance(epoch):
    assert of(epoch)[1] == NOTHING


def test_a_batch_too_small_to_divide():
    _, [text] = of(ranks(2, 2, communicating=1.5, hidden=1.0))
    first, _, remedy = text.partition("communicates for 2.5 ms. ")
    assert first == "The batch is too small to divide so: a step computes for 2.0 ms and "
    assert remedy.startswith("Take larger batches or fewer ranks, or let ranks meet less often")


def test_communication_that_is_not_hidden():
    _, [text] = of(ranks(20, 20, communicating=8, hidden=2))
    assert text.startswith("Of 10.0 ms of communication in a step 8.0 ms are not hidden")
    assert text.endswith("smaller bucket_bytes.")
    _, [text] = of(ranks(20, 20, communicating=8, hidden=2, links=[(MB, 1.0)] * 2))
    assert text.endswith('bucket_bytes; send less than 1.00 MB a step, with compression="bf16".')
    assert of(ranks(20, 20, communicating=2, hidden=8))[1] == NOTHING


def test_an_update_that_each_rank_of_a_host_makes_whole():
    _, found = of(ranks(50, 50, updated=10_100_000, local_size=2))
    assert found[0].startswith("Each rank updates all 10.1 million weights, which takes about 35.4")
    for more in ({"updated": 1_000_000, "local_size": 2}, {"updated": 10_100_000}):
        _, found = of(ranks(50, 50, **more))
        assert "sharded" not in "".join(found)


def test_a_slow_link_is_named_if_ranks_wait_for_it():
    links = [(100 * MB, 1.0), (100 * MB, 5.0), (100 * MB, 1.25)]
    _, found = of(ranks(20, 20, 20, communicating=30, hidden=5, links=links))
    assert len(found) == 2
    [text] = [text for text in found if "link" in text]
    assert text == (
        "The link from rank 1 to rank 2 carries 20.0 MB/s while it has data, the others 90.0, and "
        "all ranks wait for it. See its network."
    )
    assert of(ranks(20, 20, 20, hidden=29, links=links))[1] == NOTHING


def on_cores(cores, local_size, threads, cpu_s):
    return {"cores": cores, "local_size": local_size, "threads": threads, "cpu_s": cpu_s}


@pytest.mark.parametrize(
    ("limits", "shared", "remedy"),
    [
        ((2.0, 4, 1, 1.5), "4 threads of 4 ranks share 2 cores", "2 ranks there, or more hosts."),
        ((8.0, 4, 8, 6.0), "32 threads of 4 ranks share 8 cores", "Use --threads-per-worker 2."),
        # A quota of each rank's own container.
        ((1.5, 4, 8, 4.65), "8 threads of 1 rank share 1.5 cores", "-per-worker 1."),
        ((1.0, 1, 4, 3.0), "4 threads of 1 rank share 1 core on", "-per-worker 1."),
    ],
)
def test_cores_that_too_many_threads_share(limits, shared, remedy):
    [text] = of(ranks(30, 30, 30, 30, **on_cores(*limits)))[1]
    assert f"on rank 0's host, {100 if limits[0] == 1.5 else 97}% busy" in text
    assert text.startswith(shared)
    assert text.endswith(remedy)


@pytest.mark.parametrize("limits", [(8.0, 4, 2, 6.0), (1.0, 4, 1, 3.0), (2.0, 4, 1, 0.9)])
def test_as_many_threads_as_cores_or_a_core_for_each_rank_or_idle_ones_are_enough(limits):
    assert of(ranks(30, 30, 30, 30, **on_cores(*limits)))[1] == NOTHING


def test_what_gains_most_comes_first_and_shared_cores_before_all():
    shared = on_cores(2.0, 4, 1, 2.75)
    _, found = of(ranks(20, 20, 30, 20, communicating=25, hidden=3, **shared))
    starts = ["4 threads of", "Of 28.0 ms of communication", "Rank 2 is slow"]
    assert [text[: len(start)] for text, start in zip(found, starts, strict=True)] == starts
