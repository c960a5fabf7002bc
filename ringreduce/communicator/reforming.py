"""Forms a job's ring anew, of the ranks that are left; internal, for elastic training.

The new ring is a session of its own: new links, keys, watcher and engine, in the next epoch. What
stays is the job: its number, the ranks' own numbers and key pairs, and each rank's standby port, at
which the lowest rank that is left meets the others. Arrays that were registered in the old ring are
ordinary memory from its failure on.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Collection
from dataclasses import replace

from ringreduce.communicator import formation
from ringreduce.communicator.communicator import Communicator
from ringreduce.communicator.opened_sockets import open_sockets
from ringreduce.communicator.session import Session
from ringreduce.pure.membership import EPOCHS_MAX, Membership
from ringreduce.transport.routes import Routes
from ringreduce.transport.stalls import Waiting
from ringreduce.vocabulary.config import TIMES, Config
from ringreduce.vocabulary.errors import ArrayError, ClosedError, ConfigError, RendezvousError

_log = logging.getLogger(__name__)


def reform(communicator: Communicator, without: Collection[int]) -> None:
    """Make `communicator`, that of the whole job, work again, or anew, without some of its ranks.

    All ranks that stay must call it, with the same `without`, whether or not the ring has failed on
    them; it returns when all have done so and passed a first barrier. Then `communicator` has ranks
    from 0 on again, in the order of before. Its groups are closed; form them anew with `split`.
    Errors and logs go on naming the ranks of the job. Those that have left before need not be
    named.

    Raises:
        ArrayError: `without` has this rank, or none of the ring; or `communicator` is a group.
        ClosedError: `communicator` was closed.
        ConfigError: this system cannot shut a port, so that no rank waits for others.
        RendezvousError: not all came within ``join_timeout_s``, or the lowest of them is lost too;
            it can be called again.
        MismatchError: ranks passed different `without`.
    """
    old = communicator._session
    membership = old.membership.without(without)
    _check(old, membership, without)
    old.leave("", gives_way=True)
    job, form = old.job, None
    if job is not None and membership.size > 1:
        form = functools.partial(_form, old.config, job, membership)
    communicator._use(Session(old.config, membership, job, form, old.lasting))


def _check(old: Session, membership: Membership, without: Collection[int]) -> None:
    rank, who = old.config.rank, old.config.who
    is_over = old.is_closed if old.job is None else old.job.standby.is_closed
    if is_over:
        raise ClosedError("cannot form the ring anew after close()", **who)
    problem, remedy = "", ""
    if old.membership.group:
        problem, remedy = "a group anew", "Form the job's ring anew, then split it."
    elif rank in without or not set(without) <= set(range(old.config.size)):
        problem = f"the ring anew without {sorted(without)}"
        remedy = "Pass ranks of the job that are lost."
    elif membership.epoch >= EPOCHS_MAX:
        problem = f"the ring anew more than {EPOCHS_MAX - 1} times"
    if problem:
        raise ArrayError(f"cannot form {problem}", **who, remedy=remedy)


def _form(
    config: Config, job: formation.Job, membership: Membership, waiting: Waiting
) -> formation.Formed:
    """Meet the members at the standby port of the first, and connect to this rank's peers."""
    first = membership.members[0]
    address = job.standbys[first]
    if not address:
        raise ConfigError(
            f"cannot form the ring anew: rank {first} has no port for that",
            **config.who,
            remedy="Rings are formed anew on Linux alone.",
        )
    security = job.security.for_group(membership)
    routes = Routes(config.rank, config.size, job.routes.networks)  # Nothing is chosen yet.
    with formation.undone_if_it_fails(config, membership, job.bind) as undo:
        transport = job.place(membership).transport
        opened = open_sockets(config, membership, security, job.bind, waiting, undo, transport)
        listeners = None
        if first == config.rank:
            listeners = job.standby.open()
            undo.callback(job.standby.shut)
        else:
            address = _led_to_first(config, routes, first, address)
        here = replace(config, rendezvous=address.removeprefix("tcp://"))
        own = tuple(routes.networks[config.rank]), job.standby.address
        rendezvous, table = formation.meet(here, membership, opened, *own, undo, listeners)
        security.renew(dict(zip(membership.members, table.keys, strict=True)), table.material)
        renewed = replace(job, security=security, routes=routes)
        formed = formation.connect(
            config, renewed, membership, opened, formation.announced_in(table), rendezvous
        )
        undo.pop_all()
    _log.info(
        "[%d/%d] ring formed anew, epoch %d, of ranks %s",
        *(config.rank, config.size, membership.epoch, list(membership.members)),
    )
    return formed


def _led_to_first(config: Config, routes: Routes, first: int, address: str) -> str:
    """The `address` of the standby port of rank `first`, as this rank reaches it once it opens."""
    deadline = time.monotonic() + config.join_timeout_s
    # What comes before the port is open gets no answer.
    while unreached := routes.find({first: address}, lambda: None, TIMES.reconnect_s, 0.0):
        if time.monotonic() >= deadline:
            tried = "; ".join(f"{each.address}: {each.why}" for each in unreached)
            raise RendezvousError(
                f"cannot reach rank {first}, where the ring is formed anew, in "
                f"{config.join_timeout_s:g} s ({tried})",
                **config.who,
                peer=first,
                remedy=f"Read rank {first}'s log first.",
            )
    return routes.lead(first, address)
