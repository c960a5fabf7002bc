"""One attempt at a job: its workers, from their start to their end, and how it failed.

One loop in one thread waits for output, signals and exits, of ranks here or agents elsewhere.
"""

import secrets
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from ringreduce.commands.launch import comebacks, conclusion
from ringreduce.commands.launch.display import Display, Logs
from ringreduce.commands.launch.exchange import Assignment, Ended, Event, Output, Placed
from ringreduce.commands.launch.failure import Cause, Failure, find_cause, find_repeated
from ringreduce.commands.launch.local import LocalHost, listen
from ringreduce.commands.launch.meeting import Meeting
from ringreduce.commands.launch.newcomers import Newcomers
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.processes import Guard
from ringreduce.commands.launch.program import is_unchanged
from ringreduce.commands.launch.remote import LOST_CODE, RemoteHost
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.signals import STOPPING
from ringreduce.commands.launch.spread import Spread
from ringreduce.commands.launch.worker import Host, Worker
from ringreduce.commands.launch.worker_records import (
    Goes,
    Grows,
    Joined,
    Killed,
    Reformed,
    Stands,
)
from ringreduce.vocabulary.config import TIMES, comeback_wanted, configured_secret
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import named
from ringreduce.vocabulary.worker_environment import door_variable


class Job:
    """All workers of one attempt, from 0 on; `signals` are those that have arrived here."""

    def __init__(
        self,
        plan: JobPlan,
        attempt: int,
        screen: Screen,
        logs: Logs | None,
        guard: Guard,
        signals: deque[int],
    ) -> None:
        self._plan, self._attempt = plan, attempt
        self._screen, self._guard, self._signals = screen, guard, signals
        self._display = Display(screen, logs, plan)
        self._hosts: list[Host] = []
        self._agents: list[RemoteHost] = []
        # By rank, its process that is, or was, in the ring; those that are to follow lost ones; and
        # how those failed that others have followed.
        self._workers: dict[int, Worker] = {}
        self._newcomers = Newcomers(self._display, screen)
        self._followed: list[Failure] = []
        # Whether it was said that workers have not joined, and for which the launcher waits.
        self._has_warned = self._has_said = False
        # The last ring of an elastic job, and when it became known. Other ranks end nothing.
        self._ring, self._ring_s = Reformed(-1, tuple(range(plan.size)), "", 0.0), 0.0
        # Rings of which nothing was said yet, with what was lost before; what was said.
        self._unsaid: deque[tuple[Reformed, list[Worker]]] = deque()
        self._lost: list[str] = []
        # How many elastic trainings have ended; whether one has since the last ring was formed.
        self._trainings, self._is_trained = 0, False
        self._selector = selectors.DefaultSelector()
        self.ended_by: int | None = None
        # When that signal came; whether it has told all ranks to go.
        self._told_s, self._has_told = 0.0, False
        # When workers that were told to end and have not are killed.
        self._stop_s: float | None = None
        # Whether a further signal to the launcher has cut their grace short.
        self._is_hurried = self._is_killed = False
        self._asked_s: float | None = None

    def run(self) -> None:
        """Run the workers to their end; the traceback is left for `conclude` or `consequences`."""
        # Before there is anything to stop.
        self.ended_by = next((number for number in self._signals if number in STOPPING), None)
        if self.ended_by is not None:
            return
        try:
            self._start()
            self._watch()
        finally:
            self._stop(grace_s=0.0)
            for agent in self._agents:
                agent.leave()
            for host in self._hosts:
                host.close()
            self._selector.close()
        self._display.end_lines()
        self._forget(self._workers)
        self._follow_ring()
        if self.ended_by is None and (cause := self.cause) is not None:
            self._display.reveal(cause.first.rank)
        elif self.ended_by is None:
            self._warn_of_ranks_apart(conclusion.APART)

    @property
    def cause(self) -> Cause | None:
        """Why the job failed; None if it did not, or may go on without the ranks that failed."""
        return find_cause(self._failures(), self._ring.members)

    @property
    def left(self) -> dict[int, Goes]:
        """The ranks that have ended in order, since some were told to go, and what each said."""
        every = self._workers.values()
        return {w.rank: w.goes for w in every if w.goes is not None and w.goes_in_order}

    @property
    def stopped(self) -> str:
        """How the whole job has ended in order; empty if it has not."""
        stops = {rank: goes for rank, goes in self.left.items() if goes.stops}
        return conclusion.stopped(stops) if stops and self.cause is None else ""

    @property
    def may_start_again(self) -> bool:
        """Whether a worker failed, and nobody asked for the end."""
        cause = self.cause
        # Ctrl-C may have reached a worker alone.
        return (
            cause is not None
            and self.ended_by is None
            and not self._is_hurried
            and not any(number in STOPPING for number in self._signals)
            and cause.first.returncode != -signal.SIGINT
            and not cause.first.is_final
        )

    def _start(self) -> None:
        plan = self._plan
        if plan.elastic is not None and plan.elastic > plan.size:
            raise ConfigError(f"--elastic is {plan.elastic}; accepted: 1 to {plan.size}, all ranks")
        choices, variables = dict(plan.choices), dict(plan.variables)
        if are_comebacks_on := self._are_comebacks_on():
            variables |= door_variable(secrets.token_hex(16))
        # Workers read the user's own secret from the environment, on other hosts from here.
        secret = configured_secret()
        if plan.meeting is not None:
            choices["secret"] = plan.meeting.node.secret
        elif not secret or plan.spread is not None:
            choices["secret"] = secret or secrets.token_hex(32)
        alone = Placed(0, plan.count, secrets.token_hex(8), self._attempt, port=0)
        placed = alone if plan.meeting is None else plan.meeting.placed
        assignment = Assignment(
            placed,
            plan.count,
            list(plan.arguments),
            choices,
            variables,
            plan.threads,
            self._screen.columns,
        )
        if plan.spread is not None:
            self._reach(assignment, plan.spread)
        elif plan.meeting is not None:
            plan.meeting.register(self._selector)
            for rank, host in enumerate(plan.meeting.hosts):
                self._workers[rank] = Worker(rank, None, host)
            with_host = msgspec.structs.replace(assignment, meeting_host=plan.meeting.node.host)
            self._start_ranks(with_host, placed.port, plan.meeting.listener)
        else:
            # Rank 0 inherits the listening socket, so that no other program can take the port, and
            # a rank that connects early waits instead of being refused.
            with listen("127.0.0.1", 0, plan.count) as listener:
                here = self._start_ranks(assignment, listener.getsockname()[1], listener)
            if are_comebacks_on:
                self._newcomers = Newcomers(self._display, self._screen, here)

    def _are_comebacks_on(self) -> bool:
        """Whether the launcher may start lost ranks again; says if it was asked to and cannot."""
        plan, wanted = self._plan, comeback_wanted(self._plan.variables)
        if plan.elastic is None or plan.size == 1 or wanted is False:
            return False
        is_here = plan.spread is None and plan.meeting is None
        if wanted and not is_here and self._attempt == 0:
            self._screen.say(comebacks.ELSEWHERE)
        return is_here

    def _start_ranks(
        self, assignment: Assignment, port: int, listener: socket.socket | None
    ) -> LocalHost:
        plan = self._plan
        host = LocalHost(assignment, self._selector, self._guard)
        self._hosts.append(host)
        try:
            host.start(port, listener, stdin_rank=plan.stdin_rank, inherited=plan.inherited)
        finally:
            name = "" if plan.meeting is None else plan.meeting.node.own.host
            self._workers |= {rank: Worker(rank, host, name) for rank in host.started}
        return host

    def _reach(self, assignment: Assignment, spread: Spread) -> None:
        """Connect with an agent on each host; `_start_agents` goes on once all are ready."""
        for share in spread.shares:
            first, port = share.first_rank, spread.meeting_port
            part = msgspec.structs.replace(
                assignment,
                placed=msgspec.structs.replace(assignment.placed, first_rank=first, port=port),
                count=share.count,
                meeting_host=spread.meeting_host,
                is_reached_by_others=spread.is_wide,
            )
            host = RemoteHost(share.host, part, spread, self._selector, self._guard, self._screen)
            self._hosts.append(host)
            self._agents.append(host)
            self._workers |= {rank: Worker(rank, host, host.name) for rank in host.ranks}

    def _start_agents(self) -> None:
        """Start all ranks, if that has not been done, once every agent is ready."""
        ports = [agent.port for agent in self._agents if not agent.has_started]
        if ports and None not in ports:
            for agent in self._agents:
                agent.start(ports[0] or 0)

    def _await_others(self) -> bool:
        """Whether ranks of other launchers decide how the job ends, and it is not known yet."""
        return bool(self._alive()) and self.ended_by is None and not self._is_doomed()

    def _watch(self) -> None:
        """Until every worker has ended: show output, pass on signals, stop after a failure."""
        while self._processes() or self._await_others():
            self._read_all()
            self._start_agents()
            while self._signals:
                self._pass_on(self._signals.popleft())
            self._poll()
            self._follow_ring()
            self._display.tick()
            self._show_late()
            self._warn_of_ranks_apart(conclusion.APART_SO_FAR, TIMES.remind_s)
            if self._stop_s is not None:
                self._limit_grace(self._stop_s)
            elif self._is_doomed() and self._have_recorded():
                self._stop(self._plan.grace_s)
            if not any(self._workers[rank].alive for rank in self._ring.members):
                self._newcomers.end()
            elif self._goes_on():
                self._newcomers.follow()
        deadline = time.monotonic() + TIMES.drain_s
        while self._selector.get_map() and time.monotonic() < deadline:
            self._read_all()

    def _alive(self) -> list[Worker]:
        """Ranks of all launchers that have not ended."""
        return [worker for worker in self._workers.values() if worker.alive]

    def _running(self) -> list[Worker]:
        """The living ranks of this launcher."""
        return [worker for worker in self._alive() if worker.is_ours]

    def _processes(self) -> list[Worker]:
        """These, and those that are to follow lost ones."""
        return [*self._running(), *self._newcomers.running]

    def _goes_on(self) -> bool:
        """Whether an elastic training goes on, which a lost rank can come back to."""
        members = [self._workers[rank] for rank in self._ring.members]
        is_ending = self.ended_by is not None or self._stop_s is not None or self._is_trained
        return not is_ending and all(worker.is_working for worker in members)

    def _read_all(self) -> None:
        for key, _ in self._selector.select(TIMES.poll_s):
            for event in key.data() or ():
                self._take(event)

    def _poll(self) -> None:
        for host in self._hosts:
            for event in host.poll():
                self._take(event)
        for agent in self._agents:
            if agent.refusal and self._stop_s is None:
                raise ConfigError(agent.refusal)
        if self._plan.meeting is not None and (gone := self._plan.meeting.poll()):
            self._miss(self._plan.meeting, gone)

    def _miss(self, meeting: Meeting, ranks: Collection[int]) -> None:
        """Note that the launcher of `ranks` is gone; one that knows of a failure may leave."""
        how = "its launcher is gone, or the network to it"
        for rank in ranks:
            if self._workers[rank].alive and self.cause is None:
                self._take(Ended(rank, LOST_CODE, how))
                meeting.tell(Ended(rank, LOST_CODE, how))
        # Only node 0 tells of the other nodes' ranks.
        self._forget(ranks if meeting.node.own.node == 0 else self._workers)

    def _forget(self, ranks: Iterable[int]) -> None:
        """Wait no longer for those of `ranks` that are other launchers'."""
        for worker in [self._workers[rank] for rank in ranks]:
            if worker.alive and not worker.is_ours:
                worker.stop(signal.SIGKILL)
                worker.end(0)

    def _take(self, event: Event) -> None:
        if isinstance(event, Output):
            self._display.take(event)
            return
        # A rank's next process is started after all that its last one has said.
        newcomer = self._newcomers.find(event.rank, event.life)
        worker, meeting = newcomer or self._workers[event.rank], self._plan.meeting
        for host in self._hosts:
            host.inform(event)
        # What follows from a signal, or from the end of others, is no news to other launchers.
        is_own_doing = self.ended_by is None or worker.notices or worker.goes is not None
        if meeting and worker.is_ours and not worker.is_stopped and is_own_doing:
            meeting.tell(event)
        if isinstance(event, Ended):
            worker.end(event.returncode, event.how, is_final=event.is_final)
        elif isinstance(event.record, Stands):
            # Else it is for ranks.
            self._is_trained |= event.record.ended > self._trainings
            self._trainings = max(self._trainings, event.record.ended)
        elif isinstance(event.record, Reformed):
            self._note_ring(event.record, (event.rank, event.life))
        elif isinstance(event.record, Joined):
            self._newcomers.say_back(event.record, self._workers.values())
        elif isinstance(event.record, Grows):
            # One that is not in the ring cannot know whether others can come in.
            if event.record.reason or (event.rank, event.life) in self._ring.processes:
                self._newcomers.hear(event.record)
        elif isinstance(event.record, Killed):
            text = f"killed by rank {event.rank}, which it did not answer"
            killed = event.record.rank
            (self._newcomers.last(killed) or self._workers[killed]).how = text
        else:
            worker.note(event.record)
            if worker.raised is event.record:
                lines = worker.raised.whole or worker.raised.traceback
                self._display.keep(worker.rank, lines, worker.life)

    def _note_ring(self, ring: Reformed, teller: tuple[int, int]) -> None:
        """Take a ring that was formed anew for the present one, once, though several tell of it.

        It comes after the present one if its number is higher, and all its ranks are of that or
        newcomers. The first of a ring's ranks is never new.
        """
        # Ranks that are told to end do not do so at one moment.
        is_over = self._plan.elastic is None or self._stop_s is not None
        before, now = self._ring.processes, ring.processes
        are_known = all(self._newcomers.find(*process) for process in now - before)
        follows = ring.number > self._ring.number and now & before and are_known
        if is_over or not follows or teller not in now:
            return
        lost = [self._workers[rank] for rank, _ in sorted(before - now)]
        if lost:
            self._unsaid.append((ring, lost))
        for rank, _ in now - before:
            if (failed := self._workers[rank].failure()) is not None:
                self._followed.append(failed)
            self._workers[rank] = self._newcomers.join(rank)
            self._workers[rank].rings[self._plan.size] = "formed"
        self._ring, self._ring_s = ring, time.monotonic()
        self._is_trained = False
        self._display.follow(ring.members)
        for worker in lost:
            # When it goes on, it could still write what the others have written since.
            if worker.alive and worker.is_suspended:
                worker.how = "stopped, and killed since the others went on without it"
                worker.send(signal.SIGKILL)

    def _follow_ring(self) -> None:
        """Say which ranks were lost, once it is known why; they end with the last of the others."""
        running = {worker.rank for worker in self._alive()}
        # Time for that to show, and for them to end by themselves.
        has_settled = time.monotonic() - self._ring_s >= TIMES.cause_s
        if has_settled and not running & {*self._ring.members}:
            self._end(self._running(), signal.SIGKILL)
            self._forget(self._workers)
        while self._unsaid:
            ring, lost = self._unsaid[0]
            if not has_settled and any(worker.alive for worker in lost):
                return
            self._unsaid.popleft()
            went_on = f"{named('rank', ring.members)} went on after {ring.seconds:.1f} s"
            if went := {worker.rank: worker.goes for worker in lost if worker.goes}:
                self._screen.say(f"{conclusion.left(went)}; {went_on}")
                lost = [worker for worker in lost if worker.goes is None]
            for worker in lost:
                self._display.reveal(worker.rank)
                self._show_error(worker)
                self._newcomers.lose(worker)
            if lost:
                losses = [loss for worker in lost if (loss := worker.loss())]
                ranks = [worker.rank for worker in lost]
                self._lost.append(conclusion.lost(ranks, losses, ring.where))
                self._screen.say(f"{self._lost[-1]}: {went_on}")

    def _pass_on(self, number: int) -> None:
        if number in STOPPING and self._stop_s is not None:
            # systemd and Slurm deliver one SIGTERM twice.
            is_same = number == self.ended_by == signal.SIGTERM
            if not (is_same and time.monotonic() - self._told_s < TIMES.notice_s):
                self._stop_s, self._is_hurried = time.monotonic(), True
            return
        for worker in self._processes():
            worker.send(number)
        if number in STOPPING:
            self.ended_by = number
            self._told_s = time.monotonic()
            self._stop_s = self._told_s + self._plan.grace_s
            # Ranks that leave, or stop with all others, tell the others themselves.
            running = self._running()
            self._has_told = bool(running) and all(worker.notices for worker in running)
            if self._plan.meeting is not None and not self._has_told:
                how = f"its launcher was stopped by {signal.Signals(number).name}"
                first = self._plan.ranks[0]
                self._plan.meeting.tell(Ended(first, 128 + number, how, is_final=True))

    def _limit_grace(self, end_s: float) -> None:
        """Kill workers that have not ended by `end_s`; say so, and before that which those are."""
        left_s, grace_s = end_s - time.monotonic(), self._plan.grace_s
        running = [worker.rank for worker in self._processes()]
        fields = {"ranks": named("rank", running), "grace_s": grace_s}
        if left_s <= 0:
            if running and not self._is_hurried and not self._is_killed:
                name = signal.Signals(self.ended_by or signal.SIGTERM).name
                self._screen.say(conclusion.KILLED.format(**fields, signal=name))
            self._is_killed = True
            self._end(self._processes(), signal.SIGKILL)
        elif running and not self._has_said and grace_s - left_s >= TIMES.grace_said_s:
            self._has_said = True
            self._screen.say(conclusion.WAITING.format(**fields))

    def _failures(self) -> list[Failure]:
        """Find failures that end the job: none while the ranks that are left may go on."""
        plan, meeting, workers = self._plan, self._plan.meeting, self._workers.values()
        ring_of = plan.size if any(plan.size in worker.rings for worker in workers) else 0
        failures = [failed for worker in workers if (failed := worker.failure(ring_of))]
        states = {worker.rings.get(plan.size) for worker in workers}
        if plan.elastic is None or not (states == {"formed"} or self._ring.number > 0):
            return failures
        if repeated := find_repeated([*self._followed, *failures], by_text=meeting is None):
            return repeated
        # Those that are stopped go on with nobody: without them too few may be left to do so.
        may_go_on = any(not worker.is_suspended for worker in self._alive())
        if may_go_on and not any(failure.is_final for failure in failures):
            return []
        return [f for f in failures if f.is_final or f.rank in self._ring.members]

    def _is_doomed(self) -> bool:
        """Whether a worker has failed and the cause is known, or has had time to show."""
        cause = self.cause
        ended = [failure.time_s for failure in self._failures() if failure.has_ended]
        if cause is None or not ended:
            return False
        if cause.is_certain and cause.first.has_ended:
            return True
        return time.monotonic() - min(ended) >= TIMES.cause_s

    def _show_late(self) -> None:
        """Show tracebacks of programs that do not end though an exception has ended them."""
        if not any(failure.has_ended for failure in self._failures()):
            due_s = time.monotonic() - TIMES.hold_s
            for worker in self._running():
                if worker.raised_s <= due_s:
                    self._show_error(worker)
            self._newcomers.show_late(due_s)

    def _show_error(self, worker: Worker) -> None:
        """Show its traceback, once for all ranks that have the same."""
        if worker.raised is None or worker.is_shown or self._newcomers.knows(worker):
            return
        lines, alike = worker.raised.traceback, []
        for other in self._workers.values():
            if other.raised is not None and other.raised.traceback == lines:
                other.is_shown = True
                alike.append(other.rank)
        more = [f"(the same on {named('rank', alike)})"] if lines and len(alike) > 1 else []
        self._display.show_error(worker.rank, [*lines, *more])

    def _warn_of_ranks_apart(self, text: str, after_s: float = 0.0) -> None:
        """Say `text` of the workers that have imported Keras so long ago, if no rank has joined."""
        workers, now_s = self._workers.values(), time.monotonic()
        # An unchanged program joins when it calls `fit`, and says at its end if it never has.
        is_apart = not (any(w.rings for w in workers) or is_unchanged(self._plan.arguments))
        if self._plan.size == 1 or not is_apart:
            return
        apart = [w.rank for w in workers if w.keras_s is not None and now_s - w.keras_s >= after_s]
        if apart and (not after_s or not self._has_warned):
            self._has_warned = True
            self._screen.say(text.format(named("rank", apart)))

    def _have_recorded(self) -> bool:
        """Whether the running workers have had time to write flight records."""
        if self._plan.log_dir is None:
            return True
        now = time.monotonic()
        if self._asked_s is None:
            self._asked_s = now
            # One in user code may not notice the failure, but its stack may explain it.
            for worker in self._running():
                worker.send(signal.SIGUSR1)
        return now - self._asked_s >= TIMES.record_s

    def _stop(self, grace_s: float) -> None:
        """Ask the workers that still run to end; `_watch` kills them after `grace_s`."""
        self._stop_s = time.monotonic() + grace_s
        self._poll()  # Workers that have ended were not stopped by the launcher.
        for worker in self._processes():
            # Where SIGTERM tells it to go, nothing else would end it, as it ends other programs.
            worker.stop(signal.SIGKILL if worker.notices else signal.SIGTERM)
        if grace_s == 0:
            self._end(self._processes(), signal.SIGKILL)
            while self._processes():
                self._read_all()
                self._poll()

    def _end(self, workers: Iterable[Worker], number: int) -> None:
        for worker in workers:
            worker.stop(number)

    def consequences(self) -> list[str]:
        """A line for each rank but the cause that failed."""
        cause = self.cause
        return [] if cause is None else conclusion.others(cause.first, self._failures())

    def conclude(self) -> int:
        """Print what failed, the cause first; return the exit code."""
        if self.stopped:
            self._screen.say(self.stopped)
            return next(goes.code for goes in self.left.values() if goes.stops)
        own = {worker.rank for worker in self._workers.values() if worker.is_ours}
        left = {rank: goes for rank, goes in self.left.items() if rank in own}
        if self.ended_by is not None and left and left.keys() == own:
            self._screen.say(conclusion.left(left))
            return next(iter(left.values())).code
        if self._has_told and all(w.has_ended_well for w in self._workers.values() if w.is_ours):
            name = signal.Signals(self.ended_by or 0).name
            self._screen.say(f"ended well, though told to go ({name}): training was over")
            return 0
        if self.ended_by is not None:
            name = signal.Signals(self.ended_by).name
            raised = {w.rank: w.raised for w in self._workers.values() if not w.is_shown}
            self._screen.say(*conclusion.interrupted(name, raised))
            return 128 + self.ended_by
        cause = self.cause
        if cause is None:
            lost = [rank for rank in range(self._plan.size) if rank not in self._ring.members]
            if lost:
                self._screen.say(f"ended well without {named('rank', lost)}")
            return 0
        workers = sorted(self._workers.items())
        ended = {rank: worker.ending for rank, worker in workers if worker.has_ended_well}
        folder, failures = self._plan.log_dir, self._failures()
        was_shown = self._plan.output == "all" and self._workers[cause.first.rank].is_shown
        lines = conclusion.conclude(cause, failures, ended, folder, was_shown=was_shown)
        self._screen.say(*lines, *(f"before, {text}" for text in self._lost))
        if folder is not None and (self._agents or self._plan.meeting is not None):
            self._screen.say(f"each host has its flight records in {folder}: copy them together")
        rank = cause.first.rank
        if conclusion.wanted_keyboard(cause) and self._plan.stdin_rank is None:
            self._screen.say(f"--stdin {rank} gives rank {rank} the keyboard")
        return cause.first.exit_code
