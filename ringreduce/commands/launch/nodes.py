"""The launchers of one job, one on each host, that somebody starts with ``--nnodes``.

Node 0's launcher listens at the rendezvous address until the others have come, gives each its ranks
and, while the job runs, passes on what all ranks do. So a rank that fails before the ring has
formed ends all hosts too, and all launchers name the same cause.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ringreduce._version import __version__
from ringreduce.commands.launch.exchange import Join, Placed, Refused
from ringreduce.commands.launch.local import listen
from ringreduce.commands.launch.meeting import Meeting, Node, Peer
from ringreduce.commands.launch.signals import STOPPING
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import host_and_port, is_local
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import named
from ringreduce.vocabulary.worker_environment import join_timeout, ports_wanted, shared_secret

_REFUSALS_MAX = 3
# Connections that have not said who they are, which launchers do at once. Of more the oldest is
# ended: strangers that say nothing could take all of this process's descriptors.
_UNKNOWN_MAX = 64


def node_of(
    nodes: int | None,
    node: int | None,
    rendezvous: str | None,
    count: int,
    max_restarts: int,
    timeout_s: float | None,
    elastic: int | None = None,
) -> Node | None:
    """Make a `Node` of the options, the user's secret and time limit; None: there are no others.

    Raises ConfigError if only some of the first three are given, `node` is too large, `rendezvous`
    is not ``host:port``, or there is no secret.
    """
    if nodes is None and node is None and rendezvous is None:
        return None
    if nodes is None or node is None or rendezvous is None:
        raise ConfigError(
            "--nnodes, --node-rank and --rendezvous HOST:PORT are given together; or hosts by -H"
        )
    if node >= nodes:
        raise ConfigError(f"--node-rank is {node}; accepted: 0 to {nodes - 1}")
    host, port = host_and_port(rendezvous)
    join = Join(__version__, nodes, max_restarts, node, count, socket.gethostname(), elastic)
    secret = shared_secret(is_local=is_local(host))
    return Node(join, host, port, secret, join_timeout(timeout_s))


class Nodes:
    """This launcher's way to the others, for all attempts; ConfigError if node 0 cannot listen."""

    def __init__(
        self, node: Node, signals: deque[int], say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._node, self._signals, self._say = node, signals, say
        self._reminds_s = math.inf
        self._listener: socket.socket | None = None
        self._has_refused = False  # a connection, and said so
        if node.own.node == 0:
            self._listener = listen(
                node.host,
                node.port,
                node.own.nodes,
                # The user may mean several launchers on this host.
                is_reached_by_others=not is_local(node.host),
                remedy="Give all launchers --rendezvous with an address of node 0's host and a "
                "free port there. --node-rank 0 belongs on that host, once.",
            )

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def meet(self, restart: int) -> Meeting | None:
        """Wait until all launchers have come; None when a signal that ends the job came before.

        The job was started `restart` times before; node 0's count holds. Raises ConfigError, which
        says which launcher has other options or another's node rank, or has not come in time.
        """
        now = time.monotonic()
        deadline, self._reminds_s = now + self._node.join_timeout_s, now + TIMES.remind_s
        if self._listener is not None:
            return self._admit(self._listener, restart, deadline)
        return self._join(deadline)

    def _remind(self, waiting: str) -> None:
        """Say once, after a while, for whom it waits."""
        if time.monotonic() >= self._reminds_s:
            self._reminds_s = math.inf
            self._say(f"{waiting}; it gives up {self._node.join_timeout_s:g} s after its start")

    def _is_unwanted(self) -> bool:
        return any(number in STOPPING for number in self._signals)

    def _admit(self, listener: socket.socket, restart: int, deadline: float) -> Meeting | None:
        """Node 0's side."""
        node, peers = self._node, list[Peer]()
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
            stack.callback(_close_all, peers)
            selector.register(listener, selectors.EVENT_READ)
            while len(joined := _joined(peers)) < node.own.nodes - 1:
                if self._is_unwanted():
                    return None
                if time.monotonic() >= deadline:
                    raise self._refuse_all(joined, self._missing(joined))
                self._remind(f"waits at {node.address} for {self._named(joined)}")
                for key, _ in selector.select(TIMES.poll_s):
                    if key.fileobj is not listener:
                        self._receive(key.data, peers)
                        continue
                    with contextlib.suppress(OSError):  # It has left again.
                        end, _ = listener.accept()
                        peers.append(Peer(end, node.secret, is_first=True))
                        selector.register(end, selectors.EVENT_READ, peers[-1])
                for oldest in [peer for peer in peers if not peer.join][:-_UNKNOWN_MAX]:
                    oldest.is_gone = True
                for peer in list(peers):
                    # A launcher says at once who it is.
                    peer.keep_alive(TIMES.agent_silent_s if peer.join else TIMES.handshake_s)
                    if peer.is_gone:
                        selector.unregister(peer.end)
                        peer.end.close()
                        peers.remove(peer)
            peers[:] = [peer for peer in peers if peer.join is None]
        return self._place([joined[k] for k in sorted(joined)], restart)

    def _receive(self, peer: Peer, peers: Sequence[Peer]) -> None:
        """Take what a launcher, or a stranger, has sent to node 0."""
        records, joined = peer.read(), _joined(peers)
        if peer.stranger and not self._has_refused:
            self._has_refused = True
            self._say(f"refused a connection at {self._node.address}: {peer.stranger}")
        for record in records:
            if isinstance(record, Join) and peer.join is None:
                if record.node in joined or record.node == 0:
                    other = joined[record.node].join if record.node in joined else None
                    host = other.host if other else "this host"
                    peer.send(Refused(f"--node-rank {record.node} is that of {host} already"))
                elif (why := self._differs(record)) is not None:
                    peer.send(Refused(why))
                    raise self._refuse_all(joined, why)
                else:
                    peer.join = record

    def _differs(self, join: Join) -> str | None:
        own = self._node.own
        for what, theirs, ours in (
            ("ringreduce", join.version, own.version),
            ("--nnodes", join.nodes, own.nodes),
            ("--max-restarts", join.max_restarts, own.max_restarts),
            ("--elastic", join.elastic, own.elastic),
        ):
            if theirs != ours:
                return (
                    f"node {join.node} ({join.host}) has {what} {theirs}, node 0 has {ours}. Start "
                    "all launchers with the same options and the same ringreduce"
                )
        return None

    def _named(self, joined: dict[int, Peer]) -> str:
        """The nodes that have not come."""
        return named("node", (k for k in range(1, self._node.own.nodes) if k not in joined))

    def _missing(self, joined: dict[int, Peer]) -> str:
        node = self._node
        return (
            f"waited {node.join_timeout_s:g} s at {node.address}, and {self._named(joined)} did "
            "not come. Start `ringreduce run` there with the same --nnodes, --rendezvous and secret"
        )

    def _refuse_all(self, joined: dict[int, Peer], why: str) -> ConfigError:
        for peer in joined.values():
            peer.send(Refused(why))
        return ConfigError(why)

    def _place(self, peers: list[Peer], restart: int) -> Meeting:
        node = self._node
        joins = [node.own, *(peer.join for peer in peers if peer.join)]
        size = sum(join.count for join in joins)
        listener = listen(
            node.host, 0, size, remedy="Give RINGREDUCE_PORTS more ports.", ports=ports_wanted()
        )
        nodes = tuple((join.host, join.count) for join in joins)
        port = listener.getsockname()[1]
        placed = Placed(0, size, secrets.token_hex(8), restart, port, nodes)
        first = node.own.count
        for peer, join in zip(peers, joins[1:], strict=True):
            peer.ranks = range(first, first + join.count)
            peer.send(msgspec.structs.replace(placed, first_rank=first))
            first += join.count
        # With restarts those that come now may come for the next attempt, and wait for it.
        if not node.own.max_restarts:
            self.close()
        return Meeting(node, placed, peers, listener)

    def _join(self, deadline: float) -> Meeting | None:
        """The other nodes' side."""
        node, refusals = self._node, 0
        while not self._is_unwanted():
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"got no answer from node 0 at {node.address} in {node.join_timeout_s:g} s",
                    remedy="Start `ringreduce run --node-rank 0` there; --rendezvous must be its "
                    "address, which this host reaches. A job that has started takes no more nodes: "
                    "each host needs a --node-rank of its own, each job a --rendezvous of its own.",
                )
            peer = _connect(node)
            if peer is None:
                self._remind(f"finds nobody at {node.address}, where node 0 should be")
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(peer.end.close)
                placed = self._await_place(peer, deadline)
                if placed is not None:
                    stack.pop_all()
                    peer.ranks = range(placed.nodes[0][1])
                    return Meeting(node, placed, [peer])
            refusals += peer.is_gone
            # Once can mean that node 0's launcher has just ended.
            if refusals >= _REFUSALS_MAX:
                raise ConfigError(
                    f"what listens at {node.address} does not know this job's secret, or is no "
                    "launcher of ringreduce",
                    remedy="All launchers need the same RINGREDUCE_SECRET or "
                    "RINGREDUCE_SECRET_FILE.",
                )
        return None

    def _await_place(self, peer: Peer, deadline: float) -> Placed | None:
        """Node 0's answer; None if there is none."""
        peer.send(self._node.own)
        with selectors.DefaultSelector() as selector:
            selector.register(peer.end, selectors.EVENT_READ)
            while not (peer.is_gone or self._is_unwanted() or time.monotonic() >= deadline):
                peer.keep_alive()
                if not selector.select(TIMES.poll_s):
                    continue
                for record in peer.read():
                    if isinstance(record, Refused):
                        raise ConfigError(record.text)
                    if isinstance(record, Placed):
                        return record
        return None


def _connect(node: Node) -> Peer | None:
    """A connection with node 0; None after a moment in which there was none."""
    try:
        end = socket.create_connection((node.host, node.port), timeout=TIMES.agent_ping_s)
    except socket.gaierror as error:
        raise ConfigError(
            f"the rendezvous {node.address} has no address here: {error.strerror}",
            remedy="Give all launchers --rendezvous with a name or address of node 0's host.",
        ) from None
    except OSError:
        time.sleep(TIMES.reconnect_s)  # Its launcher may start later.
        return None
    return Peer(end, node.secret, is_first=False)


def _joined(peers: Sequence[Peer]) -> dict[int, Peer]:
    """The launchers that have come, by node."""
    return {peer.join.node: peer for peer in peers if peer.join is not None}


def _close_all(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.end.close()
