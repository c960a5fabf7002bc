"""What the model is fitted to and compared with: calls of real rings, on links of a limited rate.

    sockets   2 ranks over loopback, encrypted as between hosts: what the cores do for a byte
    memory    2 ranks in shared memory
    rate      hosts on links of a rate; small calls hide in what the limiter passes at full speed
    distance  the same with a delay, where every message costs that
    fast      links of 10 Gbit/s: not fitted, but predicted as many ranks are, from sockets

All parameters come from 2 ranks. More ranks, two levels and all-to-all are predicted from them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from bench.namespaces import open_windows, shaped
from bench.simulate import fit, model
from bench.simulate.model import Link, Memory
from bench.simulate.rings import Ranks, started
from bench.systems import Host
from bench.turns import Turns

KIB, MIB = 1 << 10, 1 << 20
# A row counts as limited by links if the cores alone would take up to this share of its time.
CORES_SHARE_MAX = 0.25


@dataclass(frozen=True)
class Network:
    """Links that are checked.

    Attributes:
        latency_ms: each way.
        fitted: sizes of the all-reduces of 2 ranks that the link is fitted to; none if it is given.
        all_reduces, all_to_alls, of_levels: sizes that are compared.
    """

    name: str
    latency_ms: float
    fitted: tuple[int, ...]
    all_reduces: tuple[int, ...]
    all_to_alls: tuple[int, ...]
    of_levels: tuple[int, ...] = ()


RATE = Network(
    "rate",
    latency_ms=0,
    fitted=(64 * KIB, MIB, 4 * MIB),
    all_reduces=(16 * KIB, 256 * KIB, MIB, 4 * MIB),
    all_to_alls=(MIB,),
    of_levels=(MIB,),
)
DISTANCE = Network(
    "distance",
    latency_ms=10,
    fitted=(KIB, 4 * KIB, 64 * KIB, MIB),
    all_reduces=(KIB, 16 * KIB, 64 * KIB, MIB),
    all_to_alls=(256 * KIB,),
    of_levels=(64 * KIB, MIB),
)
FAST = Network(
    "fast",
    latency_ms=0,
    fitted=(),
    all_reduces=(KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    all_to_alls=(4 * MIB,),
)
FAST_GBIT = 10


@dataclass(frozen=True)
class Row:
    """A call that was measured and predicted; `cores_s` is what the cores alone would take."""

    network: str
    what: str
    ranks: int
    nbytes: int
    measured_s: float
    predicted_s: float
    cores_s: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_of_links(self) -> bool:
        """Whether links limit it, by the model: only there it must hold."""
        return self.cores_s <= CORES_SHARE_MAX * self.predicted_s


def fit_cores(turns: Turns, seconds: float) -> tuple[Link, Memory]:
    """The parameters of sockets and of shared memory, from 2 ranks here."""
    sizes = (KIB, 64 * KIB, MIB, 16 * MIB)
    # Different names: so they do not share memory, and encrypt.
    apart = [Host(name="simulated0"), Host(name="simulated1")]
    with started(turns, "sockets", apart, "zmq", seconds) as pair:
        sockets = fit.cores({size: pair.measure("all_reduce", size) for size in sizes})
    with started(turns, "memory", [Host()] * 2, "auto", seconds) as pair:
        memory = fit.memory({size: pair.measure("all_reduce", size) for size in sizes})
    return sockets, memory


class Check:
    """Measurements on one network.

    Args:
        cores: how many this machine has; ranks share them.
        seconds: about how long a size is measured.
        link: of the network, if it is not fitted.

    Attributes:
        link: the fitted one, once `run` has yielded.
    """

    def __init__(
        self,
        turns: Turns,
        network: Network,
        sockets: Link,
        memory: Memory,
        *,
        cores: int,
        seconds: float,
        link: Link | None = None,
    ) -> None:
        self._turns, self._network, self._sockets, self._memory = turns, network, sockets, memory
        self._cores, self._seconds = cores, seconds
        self.link = sockets if link is None else link

    def run(
        self, rate: str, sizes: Sequence[int], levels: Sequence[tuple[int, int]] = ()
    ) -> Iterator[Row]:
        """Fit, and compare rings of so many ranks and two levels of (hosts, ranks on each)."""
        network = self._network
        hosts_max = max(2, *sizes, *(hosts for hosts, _ in levels))
        with shaped(hosts_max, rate, network.latency_ms) as hosts:
            if network.latency_ms:
                open_windows(hosts)
            if network.fitted:
                with self._started(hosts[:2], "zmq") as pair:
                    fitted = {size: pair.measure("all_reduce", size) for size in network.fitted}
                self.link = fit.link(fitted, self._sockets.gamma)
            for size in sizes:
                with self._started(hosts[:size], "zmq") as ranks:
                    yield from self._rows(ranks)
            for count, each in levels:
                ordered = [host for host in hosts[:count] for _ in range(each)]
                with self._started(ordered, "auto") as ranks:
                    yield from self._rows_of_levels(ranks, count, each)

    def _started(
        self, hosts: Sequence[Host], transport: str
    ) -> contextlib.AbstractContextManager[Ranks]:
        label = f"{self._network.name}, {len(hosts)} ranks"
        return started(self._turns, label, hosts, transport, self._seconds)

    def _rows(self, ranks: Ranks) -> Iterator[Row]:
        for nbytes in self._network.all_reduces:
            what = "exchange" if model.is_exchanged(ranks.size, nbytes) else "all_reduce"
            yield self._row(
                ranks, "all_reduce", what, nbytes, partial(model.all_reduce, ranks.size, nbytes)
            )
        for nbytes in self._network.all_to_alls:
            predict = partial(model.all_to_all, ranks.size, nbytes)
            yield self._row(ranks, "all_to_all", "all_to_all", nbytes, predict)

    def _rows_of_levels(self, ranks: Ranks, hosts: int, each: int) -> Iterator[Row]:
        for nbytes in self._network.of_levels:
            predict = partial(model.two_levels, hosts, each, nbytes, memory=self._memory)
            yield self._row(ranks, "all_reduce", f"{hosts} hosts x {each}", nbytes, predict)

    def _row(
        self,
        ranks: Ranks,
        collective: str,
        what: str,
        nbytes: int,
        predict: Callable[[Link], float],
    ) -> Row:
        measured = ranks.measure(collective, nbytes)
        alone = predict(self._sockets) * max(1.0, ranks.size / self._cores)
        return Row(
            self._network.name, what, ranks.size, nbytes, measured, predict(self.link), alone
        )


def worst(rows: Iterable[Row]) -> float:
    """The largest error where links limit, 0 if there is no such row."""
    return max((abs(row.error) for row in rows if row.is_of_links), default=0.0)
