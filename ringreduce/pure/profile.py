"""Where the time of training steps went, and what would help, from what all ranks measured. Pure.

Ranks that reduce gradients together end a step at about the same time. So what stops the rank that
computes longest, the slowest, is communication alone, and others wait as much longer as they
compute shorter:

    rank 0   | computing        | waiting   | communicating |
    rank 1   | computing                    | communicating |     the slowest
                     | hidden |                                   communication while it computes

Ranks that are slow in turn, step by step, look like communication. What a rank does by itself is
computing, but where `rr.fit` tells what is not: reading data, and what passes between its calls of
TensorFlow, Python and callbacks.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ringreduce.pure.slowness import slow_link
from ringreduce.pure.watcher_messages import SentToNext
from ringreduce.vocabulary.words import for_rr

_WIDTH = 75  # behind a launcher's ``[0] `` it fits 80 columns
_OF_RR = re.compile(r"\brr\.|DistributedOptimizer|bucket_bytes|compression=")
_NEEDS_RR = "These options need a program with rr.fit, started without --unchanged."
_WAITED_S_MIN = 0.1  # less is chance
_PART_MIN = 0.1  # of a step: less is not worth a change
# To update a weight with Adam on each of two ranks of a host: half of 10 million take 17.7 ms less
# (docs/performance.md, "A sharded update").
_UPDATE_S = 3.5e-9
_BUSY_MIN, _BUSY_MAX = 0.85, 1.1  # the use of cores that are all busy


class Measurement(NamedTuple):
    """A rank's measurements: totals at some moment, or of some steps."""

    steps: int
    seconds: float  # on a monotonic clock
    stopped_s: float  # communication that stopped this rank's own work ...
    hidden_s: float  # ... and that did not
    bytes_sent: int  # in shared memory too
    cpu_s: float  # processor time of its process
    link_bytes: int  # to rank `next_rank`, over sockets ...
    link_s: float  # ... and for how long data was under way
    called_s: float  # in calls of TensorFlow that make steps; 0: not known ...
    reading_s: float  # ... and of that for data
    rank: int
    next_rank: int = 0
    cores: float = 1.0  # that it may use, and that its host's `local_size` ranks may share
    local_size: int = 1
    threads: int = 1  # that compute in its process
    updated: int = 0  # weights whose update would be shorter if it was sharded

    def since(self, before: Measurement) -> Measurement:
        """Measurements of the steps after `before`."""
        counted = Measurement._fields.index("rank")
        pairs = zip(self[:counted], before, strict=False)
        return Measurement._make([*(now - then for now, then in pairs), *self[counted:]])


class MeanStep(NamedTuple):
    """The mean of `steps` steps of all ranks."""

    slowest: int  # the rank that computes longest
    steps: float
    seconds: float
    waiting_s: float  # for how long the other ranks wait for it
    communicating_s: float  # communication that stops it ...
    hidden_s: float  # ... and that does not
    bytes_sent: float  # by a rank
    reading_s: float  # for how long the other ranks, or the only one, wait for data ...
    loop_s: float  # ... and do something else than steps

    @property
    def computing_s(self) -> float:
        """For how long the slowest rank computes."""
        return self.seconds - self.communicating_s

    def logs(self) -> dict[str, float]:
        """The numbers for the logs of an epoch."""
        total_s = self.communicating_s + self.hidden_s
        return {
            "rr_step_ms": round(self.seconds * 1e3, 3),
            "rr_waiting_ms": round(self.waiting_s * 1e3, 3),
            "rr_slowest_rank": float(self.slowest),
            "rr_hidden": round(self.hidden_s / total_s, 3) if total_s else 1.0,
            "rr_bytes": float(round(self.bytes_sent)),
        }


def step_of(ranks: Sequence[Measurement]) -> MeanStep:
    """The mean step, from what all ranks have measured in the same steps."""
    computing_s = {rank.rank: (rank.seconds - rank.stopped_s) / rank.steps for rank in ranks}
    slowest = max(ranks, key=lambda rank: (computing_s[rank.rank], -rank.rank))
    most_s = computing_s[slowest.rank]
    others = [rank for rank in ranks if rank is not slowest] or ranks
    # Between calls a rank may wait too.
    outside_s = [
        min(other.seconds - other.called_s, other.seconds - other.stopped_s) / other.steps
        for other in others
        if other.called_s
    ]
    return MeanStep(
        slowest=slowest.rank,
        steps=slowest.steps,
        seconds=slowest.seconds / slowest.steps,
        waiting_s=sum(most_s - s for s in computing_s.values()) / max(1, len(ranks) - 1),
        # What surrounds calls counts as hidden too, and may be more than all that was not.
        communicating_s=max(0.0, slowest.stopped_s / slowest.steps),
        hidden_s=max(0.0, slowest.hidden_s / slowest.steps),
        bytes_sent=fmean(rank.bytes_sent / rank.steps for rank in ranks),
        reading_s=fmean(rank.reading_s / rank.steps for rank in others),
        loop_s=max(0.0, fmean(outside_s)) if outside_s else 0.0,
    )


def verdict(epochs: Mapping[int, Sequence[Measurement]], looking: Sequence[str] = ()) -> list[str]:
    """Lines of text: where the time went, and what would help most.

    `epochs` are what all ranks have measured in each, by its number; `looking` the callbacks that
    `rr.fit` calls for each batch.
    """
    steps, latest = {n: step_of(ranks) for n, ranks in epochs.items()}, [*epochs.values()][-1]
    mean, size, slow = _mean([*steps.values()]), len(latest), _straggler(steps)
    candidates = [
        _shared_cores(latest),
        None if slow is None else _waiting(slow, steps),
        _slow_link(latest, mean),
        _communication(mean, latest[0].link_bytes > 0),
        _update(latest, mean),
        _reading(mean),
        _loop(mean, looking),
    ]
    findings = sorted(filter(None, candidates), key=lambda finding: -finding[0])
    texts = [f"{n}. {text}" for n, (_, text) in enumerate(findings, 1)] or ["Nothing of this kind."]
    wrapped = textwrap.TextWrapper(_WIDTH, initial_indent="  ", subsequent_indent="     ")
    count = f"{_counted(round(mean.steps), 'step')} of {_ms(mean.seconds)}"
    return [
        f"profile of {_counted(size, 'rank')} in {_counted(len(epochs), 'epoch')}: {count}",
        *_table(mean, latest, slow),
        "  What would help most:",
        *(line for text in texts for line in wrapped.wrap(text)),
        *wrapped.wrap(for_rr("", _NEEDS_RR) if any(map(_OF_RR.search, texts)) else ""),
    ]


def _table(mean: MeanStep, latest: Sequence[Measurement], slow: _Straggler | None) -> list[str]:
    size, name, own_s = len(latest), "the slowest rank", mean.computing_s
    beside_s = mean.reading_s + mean.loop_s
    beside = [
        ("reading data", mean.reading_s, ""),
        ("between steps", mean.loop_s, "Python, callbacks"),
    ] * any(rank.called_s for rank in latest)
    if size == 1:
        parts = [("computing", own_s - beside_s, ""), *beside] if beside else []
        return [*_rows(parts, mean), "  no other rank to wait for"]
    computing = waiting = ""
    if slow is not None:
        name, waiting = f"rank {slow.rank}", slow.when
        computing = "" if slow.when else f"{name}: {_ms(own_s)}"
    rows = [
        ("computing", max(0.0, own_s - mean.waiting_s - beside_s), computing),
        *beside,
        (f"waiting for {name}", mean.waiting_s, waiting),
        ("communicating", mean.communicating_s, f"and {_ms(mean.hidden_s)} hidden"),
    ]
    computed_s = max(0.0, size * (own_s - beside_s) - (size - 1) * mean.waiting_s)
    is_one_host = latest[0].local_size == size
    work = [
        f"  They do the work of {computed_s / mean.seconds:.1f} ranks that only compute; if "
        "communication were",
        f"  free, of {computed_s / own_s:.1f} at most.",
    ]
    if computed_s < mean.seconds:
        work = [
            f"  Of a step's {_ms(mean.seconds)} all ranks together compute for {_ms(computed_s)}:",
            "  one rank that only computes would be faster. The rest is what to look at.",
        ]
    return [
        *_rows(rows, mean),
        *work,
        *["  One process may be faster: ringreduce verify -n 1,2 PROGRAM compares."] * is_one_host,
    ]


def _rows(parts: Sequence[tuple[str, float, str]], mean: MeanStep) -> list[str]:
    return [
        f"  {what:<28}{_ms(s):>10}{s / mean.seconds:>6.0%}   {note}".rstrip()
        for what, s, note in parts
    ]


# --- Rules: what is gained in a step at most, in seconds, and a text; or None. ---------------

_Finding = tuple[float, str]


class _Straggler(NamedTuple):
    """The rank that the others wait for, in these epochs; `when` is empty for all."""

    rank: int
    epochs: Sequence[int]
    when: str


def _straggler(steps: Mapping[int, MeanStep]) -> _Straggler | None:
    slow: dict[int, list[int]] = {}
    for number, step in steps.items():
        if step.waiting_s >= _PART_MIN * step.seconds:
            slow.setdefault(step.slowest, []).append(number)
    waited_s = {r: sum(steps[n].waiting_s * steps[n].steps for n in slow[r]) for r in slow}
    rank = max(slow, key=lambda rank: waited_s[rank], default=-1)
    if waited_s.get(rank, 0.0) < _WAITED_S_MIN:
        return None
    epochs, numbers = slow[rank], list(steps)
    when = f"in {len(epochs)} of {len(numbers)} epochs"
    if epochs == numbers[-len(epochs) :]:
        when = "" if epochs == numbers else f"from epoch {epochs[0]} on"
    return _Straggler(rank, epochs, when)


def _waiting(slow: _Straggler, steps: Mapping[int, MeanStep]) -> _Finding:
    mean = _mean([steps[number] for number in slow.epochs])
    gain_s = mean.waiting_s * mean.steps / sum(step.steps for step in steps.values())
    return gain_s, (
        f"Rank {slow.rank} is slow{slow.when and ' '}{slow.when}: it computes for "
        f"{_ms(mean.computing_s)} in a step, and the others wait {_ms(mean.waiting_s)} for it. See "
        "what else runs there, and whether it has more or longer rows. Where it is always slower, "
        'rr.fit(batch_share="measured") gives it less.'
    )


def _slow_link(latest: Sequence[Measurement], mean: MeanStep) -> _Finding | None:
    link = slow_link({r.rank: SentToNext(r.next_rank, r.link_bytes, r.link_s) for r in latest})
    if link is None or mean.communicating_s < _PART_MIN * mean.seconds:
        return None
    return min(mean.communicating_s, link.waited_s / latest[0].steps), (
        f"The link from rank {link.sender} to rank {link.receiver} carries "
        f"{link.bytes_per_s / 1e6:.1f} MB/s while it has data, the others "
        f"{link.others_bytes_per_s / 1e6:.1f}, and all ranks wait for it. See its network."
    )


def _communication(mean: MeanStep, between_hosts: bool) -> _Finding | None:
    shown_s, total_s = mean.communicating_s, mean.communicating_s + mean.hidden_s
    if shown_s < _PART_MIN * mean.seconds:
        return None
    if total_s > mean.computing_s:
        return shown_s, (
            f"The batch is too small to divide so: a step computes for {_ms(mean.computing_s)} and "
            f"communicates for {_ms(total_s)}. Take larger batches or fewer ranks, or let ranks "
            "meet less often (strategy=rr.LocalSGD(...))."
        )
    fewer = f'; send less than {mean.bytes_sent / 1e6:.2f} MB a step, with compression="bf16"'
    return shown_s, (
        f"Of {_ms(total_s)} of communication in a step {_ms(shown_s)} are not hidden behind "
        f"computing. Begin earlier, with a smaller bucket_bytes{fewer if between_hosts else ''}."
    )


def _update(latest: Sequence[Measurement], mean: MeanStep) -> _Finding | None:
    """Between hosts the weights that ranks then exchange may take longer than the update."""
    size, count = len(latest), latest[0].updated
    gain_s = count * _UPDATE_S * (1 - 1 / size)
    if latest[0].local_size < size or gain_s < _PART_MIN * mean.seconds:
        return None
    return gain_s, (
        f"Each rank updates all {count / 1e6:.1f} million weights, which takes about "
        f"{_ms(count * _UPDATE_S)} of a step. DistributedOptimizer(shard_state=True) divides that."
    )


def _reading(mean: MeanStep) -> _Finding | None:
    if mean.reading_s < _PART_MIN * mean.seconds:
        return None
    return mean.reading_s, (
        f"Steps wait {_ms(mean.reading_s)} for data. Let it be made ahead and in parallel: "
        "dataset.cache(), map(..., num_parallel_calls=tf.data.AUTOTUNE), a PyDataset with workers; "
        "or read less on each rank, with rr.shard or rr.fit(per_rank_data=True)."
    )


def _loop(mean: MeanStep, looking: Sequence[str]) -> _Finding | None:
    if mean.loop_s < _PART_MIN * mean.seconds:
        return None
    verb = "looks" if len(looking) == 1 else "look"
    why = f": {', '.join(looking)} {verb} at each batch, so each step is a call of its own"
    return mean.loop_s, (
        f"{_ms(mean.loop_s)} of a step pass between steps, in Python and callbacks"
        f"{why if looking else ''}. Take larger batches"
        f"{', or a callback that looks at epochs' if looking else ''}."
    )


def _shared_cores(latest: Sequence[Measurement]) -> _Finding | None:
    """Comes first: what shares cores computes, waits and communicates longer."""
    # A host's ranks share its cores, or each has some.
    for rank, count in ((r, n) for r in latest for n in (r.local_size, 1)):
        busy = rank.cpu_s / rank.seconds * count / rank.cores
        if count * rank.threads > rank.cores and _BUSY_MIN <= busy <= _BUSY_MAX:
            most = max(1, int(rank.cores))
            remedy = f"--threads-per-worker {max(1, most // count)}"
            if count > most:
                remedy = f"{_counted(most, 'rank')} there, or more hosts"
            return math.inf, (
                f"{_counted(count * rank.threads, 'thread')} of {_counted(count, 'rank')} share "
                f"{_counted(rank.cores, 'core')} on rank {rank.rank}'s host, {min(1, busy):.0%} "
                f"busy, where more of them compute no faster. Use {remedy}."
            )
    return None


# --- Numbers and words -----------------------------------------------------------------------


def _mean(steps: Sequence[MeanStep]) -> MeanStep:
    """The mean of all steps, and how many they are."""
    count = sum(step.steps for step in steps)
    rows = [[number * step.steps / count for number in step[2:]] for step in steps]
    return MeanStep(steps[0].slowest, count, *map(sum, zip(*rows, strict=True)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 1 else 0}f} ms"


def _counted(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'s' * (count != 1)}"
