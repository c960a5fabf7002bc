"""Which micro-batch a stage of a pipeline computes when: pure index arithmetic.

One forward, one backward (1F1B): a stage begins with as many forward passes as there are stages
after it, then alternates, then ends with the backward passes that are left:

    3 stages, 4 micro-batches, a backward pass as long as a forward pass
    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    stage 1   .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    stage 2   .  .  F0 B0 F1 B1 F2 B2 F3 B3

It takes no longer than all forward passes followed by all backward passes, (micro-batches +
stages - 1) times both, and stage s keeps what at most stages - s forward passes need for their
gradients, however many micro-batches there are.

Before a step its array must have come from a neighbour; afterwards one goes to the other. Both
neighbours go through micro-batches in one order, so each direction is a queue. Sends must not wait
for the receiver: after F3 of stage 0 and B1 of stage 1, say, each has an array for the other.

See: Narayanan and others, "PipeDream: generalized pipeline parallelism for DNN training", SOSP
2019; "Memory-efficient pipeline-parallel DNN training", ICML 2021.
"""

from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of one micro-batch, forward or backward."""

    is_forward: bool
    micro_batch: int


def schedule(stage: int, stages: int, micro_batches: int) -> tuple[Pass, ...]:
    """The steps of a stage, in order; each micro-batch goes forward and backward once."""
    ahead = min(stages - 1 - stage, micro_batches)
    steps = [Pass(True, number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            steps.append(Pass(True, number + ahead))
        steps.append(Pass(False, number))
    return tuple(steps)
