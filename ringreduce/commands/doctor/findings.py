"""Findings of ``ringreduce doctor``, from facts of ranks and measured links. Pure."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ringreduce.vocabulary.words import named

SIZES = (1 << 10, 64 << 20)  # bytes of the all-reduces that are timed
_MEMORY_MIN = 1 << 30  # TensorFlow alone takes half of it
_RATE_MIN = 80e6  # a link of 1 Gbit/s carries 117 MB/s
# In shared memory 1 KiB takes 1 to 20 us, also where four ranks share two cores; 64 MiB take as
# long as one to three copies of it. More shows that ranks do not run while others wait for them.
_SMALL_MAX_S = 2e-4
_COPIES_MAX = 6


class HostFacts(msgspec.Struct, tag=True, frozen=True):
    """Facts of a rank and its host; None stands for no limit."""

    rank: int
    host: str
    versions: Mapping[str, str]  # by name, of what is installed
    # native, xla: why there is no native library, and why XLA cannot call the ring; empty: it can.
    native: str
    xla: str
    compiled: str  # a folder of the cache that lacked functions, compiled anew; empty: none
    cores: tuple[int, ...]  # those that it may run on
    quota: float | None  # how much of their time it may have, in cores
    host_cores: int  # all that the host has
    load: float  # of the host: processes that ran or waited for a core, in the last minute
    memory: int  # bytes of the host or its container; `available` now
    available: int
    copied_s: float  # in which each rank copied the larger of `SIZES`, all at once
    address_space: int | None  # bytes
    files: int | None  # how many it may open; `files_needed`: a job of this size, at most
    files_needed: int
    addresses: str  # of its host that others may know, with the names of interfaces


class Link(msgspec.Struct, tag=True, frozen=True):
    """Times measured by ranks that share memory, or two of neighbouring hosts."""

    ranks: tuple[int, ...]
    transport: str
    seconds: tuple[float, ...]  # of an all-reduce of each of `SIZES`


class Finding(msgspec.Struct, frozen=True):
    """Something to change, and how; a problem stops jobs, slows them badly or alters results."""

    ranks: tuple[int, ...]
    text: str
    advice: str
    is_problem: bool = True


def find(facts: Sequence[HostFacts], links: Sequence[Link]) -> list[Finding]:
    """Find what facts and links mean for a job, problems first."""
    alike: dict[tuple[str, str, bool], list[int]] = {}
    for entry in facts:
        for problem in _of_rank(entry):
            alike.setdefault(problem, []).append(entry.rank)
    findings = list(_differences(facts))
    findings += [Finding(tuple(ranks), *text) for text, ranks in alike.items()]
    for host in dict.fromkeys(entry.host for entry in facts):
        findings += _of_host(host, [entry for entry in facts if entry.host == host], links)
    hosts = {entry.rank: entry.host for entry in facts}
    findings += [finding for link in links for finding in _of_link(link, hosts)]
    copied_s = {entry.rank: entry.copied_s for entry in facts}
    findings += [finding for link in links for finding in _of_memory(link, copied_s)]
    return sorted(findings, key=lambda finding: not finding.is_problem)


def turns(hosts: Sequence[Sequence[int]]) -> list[list[tuple[int, ...]]]:
    """Groups of ranks that measure, by turns; those of a turn share no rank.

    First the ranks of each of `hosts`, then the first ranks of two that follow on the ring.
    """
    ahead = [*hosts[1:], hosts[0]]
    both = zip(hosts, ahead, strict=True)
    pairs: list[tuple[int, ...]] = [(here[0], there[0]) for here, there in both]
    if len(pairs) <= 2:  # The way back is the same link.
        del pairs[-1]
    last = [pairs.pop()] if len(pairs) % 2 and len(pairs) > 1 else []
    within = [tuple(host) for host in hosts if len(host) > 1]
    return [turn for turn in (within, pairs[::2], pairs[1::2], last) if turn]


def by_ranks(texts: Mapping[int, str]) -> dict[str, str]:
    """Which ranks have each text; empty for one that all have."""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return {text: named("rank", who) if len(ranks) > 1 else "" for text, who in ranks.items()}


def in_gib(nbytes: int) -> str:
    """``7.6 GiB``."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def _differences(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    everybody = tuple(entry.rank for entry in facts)
    for name in dict.fromkeys(name for entry in facts for name in entry.versions):
        texts = by_ranks({entry.rank: entry.versions.get(name, "missing") for entry in facts})
        if len(texts) > 1:
            said = ", ".join(f"{version} on {ranks}" for version, ranks in texts.items())
            advice = "Install the same version on all hosts: results may differ."
            yield Finding(everybody, f"{name} differs: {said}.", advice)


def _of_rank(entry: HostFacts) -> Iterator[tuple[str, str, bool]]:
    """Text, advice, and whether it is a problem."""
    if entry.native:
        advice = "Build it, or unset RINGREDUCE_NATIVE: without it data passes sockets and Python."
        yield entry.native, advice, True
    elif entry.xla and "TensorFlow" in entry.versions:
        advice = "Reinstall TensorFlow: until then gradients leave what jit_compile=True compiles."
        yield f"XLA cannot call the ring: {entry.xla}.", advice, False
    if entry.compiled:
        advice = "If that is so each time, name a folder that lasts in NUMBA_CACHE_DIR."
        yield "Functions were compiled, since the cache lacked them.", advice, False
    if entry.address_space is not None:
        text = f"The address space is limited to {in_gib(entry.address_space)}."
        yield text, "Use `ulimit -v unlimited`: a rank maps the memory of its host's ranks.", True
    if entry.files is not None and entry.files < (needed := entry.files_needed):
        text = f"{entry.files} files may be open, and a job of this size may need {needed}."
        yield text, "Raise the hard limit (ulimit -Hn; --ulimit nofile= of containers).", True


def _of_host(host: str, facts: Sequence[HostFacts], links: Sequence[Link]) -> Iterator[Finding]:
    ranks = tuple(entry.rank for entry in facts)
    cores = float(len({core for entry in facts for core in entry.cores}))
    usable = min([cores, *(entry.quota for entry in facts if entry.quota is not None)])
    if len(ranks) > usable:
        text = f"{len(ranks)} ranks share {usable:g} cores of {host}."
        advice = f"Start at most {max(1, int(usable))} there, or let them use more cores."
        yield Finding(ranks, text, advice)
    all_cores = max(entry.host_cores for entry in facts)
    load = max(entry.load for entry in facts)
    # One may be what ended within that minute, such as the program before.
    if load > max(0, all_cores - len(ranks)) + 1:
        text = f"{host} has a load of {load:.1f} on {all_cores} cores, before these ranks ran."
        advice = "See what runs there (top): ranks that wait for a core hold up all others."
        yield Finding(ranks, text, advice, is_problem=False)
    share = min(entry.available for entry in facts) // len(ranks)
    if share < _MEMORY_MIN:
        text = f"{host} has {in_gib(share)} of free memory for each rank."
        advice = "Start fewer ranks there, or raise its limit: TensorFlow alone takes 0.5 GiB."
        yield Finding(ranks, text, advice)
    shared = [{*link.ranks} for link in links if link.transport == "shm"]
    if not any(entry.native for entry in facts) and len(ranks) > 1 and {*ranks} not in shared:
        text = f"Ranks of {host} do not share memory: they use sockets."
        advice = "Unset RINGREDUCE_TRANSPORT=zmq; start them as one user, in one container."
        yield Finding(ranks, text, advice)


def _of_link(link: Link, hosts: Mapping[int, str]) -> Iterator[Finding]:
    here, there = (hosts[rank] for rank in link.ranks[:2])
    rate = SIZES[-1] / link.seconds[-1]  # Of two ranks each sends the array once.
    if here != there and rate < _RATE_MIN:
        text = f"{here} and {there} exchange {rate / 1e6:.0f} MB/s only."
        advice = "Choose a faster network by RINGREDUCE_IFACE, or use compression= or strategy=."
        yield Finding(link.ranks, text, advice)


def _of_memory(link: Link, copied_s: Mapping[int, float]) -> Iterator[Finding]:
    """Whether ranks that share memory are far slower than the memory is."""
    if link.transport != "shm":
        return
    small, large = link.seconds
    copies = large / max(copied_s[rank] for rank in link.ranks)
    if small > _SMALL_MAX_S:
        text = f"1 KiB takes {small * 1e6:.0f} us in shared memory, where 1 to 20 are usual."
    elif copies > _COPIES_MAX:
        text = f"64 MiB take as long as {copies:.0f} copies of them, where 1 to 3 are usual."
    else:
        return
    advice = "Measure again when nothing else runs; start no more ranks than there are cores."
    yield Finding(link.ranks, text, advice, is_problem=False)
