"""Faults that training on several ranks has: each is planted, named, and in the guide.

They are planted where what names them is tested; this says where.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/guides/debugging.md").read_text(encoding="utf-8")
# A fault, the tool that names it, and its words, which both the guide and the test have; below, the
# test that plants it.
FAULTS = """
unseeded shuffle: rr.shard: read different data
    test_a_dataset_that_differs_between_ranks_ends_the_job
Other data on a rank: rr.fit: rank 1 has other values than rank 0
    test_different_arrays_end_the_job
same shard twice: rr.callbacks.Together: ranks 0, 1 have trained on the same rows
    test_ranks_that_train_on_the_same_rows_are_told_so
Another learning rate: rr.callbacks.Together: weights have gone apart: the learning rate is 0.01 on
    test_what_one_rank_has_changed_is_told_at_the_end
Clipping per rank: ringreduce verify: Clips.train_step calls clip_by_global_norm
    test_the_reason_for_a_difference_is_found
A sum over rows, divided by a constant: ringreduce verify: Sums.train_step adds up over rows
    test_the_reason_for_a_difference_is_found
Unequal frozen weights: ParityWarning: rr.broadcast_variables(model.variables)
    test_what_is_likely_a_mistake_gets_one_warning_at_the_users_line
BatchNormalization, unsynchronised: ParityWarning: norm: each rank normalizes
    test_what_is_likely_a_mistake_gets_one_warning_at_the_users_line
NaN on one rank: check_numerics: rank 2 of 3 has nan at [
    test_a_poisoned_gradient_comes_out_of_fit_as_our_error_on_all_ranks
A rank slow from the start: --profile: Rank 1 is slow: it computes
    test_rank_0_says_at_the_end_of_each_training_which_rank_is_slow
A rank that becomes slow late: --profile: Rank 1 is slow from epoch 2 on
    test_rank_0_says_at_the_end_of_each_training_which_rank_is_slow
A slow link: --profile: from rank 1 to rank 2 carries 20.0 MB/s while it has data, the others 90.0
    test_a_slow_link_is_named_if_ranks_wait_for_it
Out of memory: ringreduce run: killed by the kernel, which lacked memory: ranks 0, 1 together
    test_what_the_kernel_kills_for_lack_of_memory_is_said_with_its_memory
A quota of one core for four threads: --profile: 4 threads of 1 rank share 1 core on
    test_cores_that_too_many_threads_share
A batch too small to divide: --profile: The batch is too small to divide so: a step computes for 2.0
    test_a_batch_too_small_to_divide
"""


def source_of(name):
    """The function of a test, with what parametrizes it."""
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("*/test_*.py")]
    [text] = [text for text in texts if f"def {name}(" in text]
    [test] = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
    first = min(node.lineno for node in (test, *test.decorator_list))
    return "\n".join(text.splitlines()[first - 1 : test.end_lineno])


def test_a_test_plants_each_fault_and_a_row_of_the_guide_says_what_one_sees():
    rows = [line for line in GUIDE.splitlines() if line.startswith("| ") and "**" in line]
    lines = FAULTS.strip().splitlines()
    for line, test, row in zip(lines[::2], lines[1::2], rows, strict=True):
        fault, tool, words = line.split(": ", 2)
        _, seen, named_by, said, _ = row.split("|")
        assert f"**{fault}**" in seen
        assert words in source_of(test.strip()).replace("\\", ""), fault
        assert (tool in named_by, words in said) == (True, True), fault
        assert len(seen) > len(fault) + 10
