"""The processes of an elastic job that are to take the places of lost ranks.

A newcomer is none of the job's workers until the ring has it: whatever becomes of it ends nothing,
and it ends with the job. `Job` has the workers, and `comebacks` decides.
"""

import signal
import time
from collections.abc import Collection

from ringreduce.commands.launch import comebacks, conclusion
from ringreduce.commands.launch.comebacks import Place
from ringreduce.commands.launch.display import Display
from ringreduce.commands.launch.local import LocalHost
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.worker import Worker
from ringreduce.commands.launch.worker_records import Grows, Joined
from ringreduce.vocabulary.config import TIMES


class Newcomers:
    """Started on `host` while they can come back; None: lost ranks are not started again.

    What their programs raise is shown by `display`, and what is said of them on the `screen`.
    """

    def __init__(self, display: Display, screen: Screen, host: LocalHost | None = None) -> None:
        self._display, self._screen, self._host = display, screen, host
        # Whether a lost rank can come back, as it was said last; which of both the screen has had.
        self._can_come, self._reason, self._shown = False, "", set[bool]()
        self._places: dict[int, Place] = {}
        # Lost ranks, until their processes have ended.
        self._lost: list[Worker] = []
        # By rank; one that has ended stays for a while, since others may report that it had joined.
        self._workers: dict[int, Worker] = {}

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.alive]

    def find(self, rank: int, life: int) -> Worker | None:
        """The newcomer that is this process of the rank, unless it has joined; None if none is."""
        worker = self.last(rank)
        return worker if worker is not None and worker.life == life else None

    def last(self, rank: int) -> Worker | None:
        """The newcomer that is to be that rank; None if none is."""
        return self._workers.get(rank)

    def knows(self, worker: Worker) -> bool:
        """Whether the exception that has ended it has ended one before at that place."""
        failure, place = worker.failure(), self._places.get(worker.rank, Place())
        return failure is not None and comebacks.ending_of(failure) in place.endings

    def hear(self, grows: Grows) -> None:
        """Start lost ranks from now on, or no more; the first time, say so.

        That none is started any more matters only where one has not come back.
        """
        if self._host is None:
            return
        self._can_come, self._reason = not grows.reason, grows.reason
        is_due = any(place.due_s is not None for place in self._places.values())
        if self._can_come or not self._shown or self._lost or self.running or is_due:
            self._say_whether()

    def _say_whether(self) -> None:
        """Say, once, that lost ranks are started again, or that they are not, and why."""
        if self._can_come not in self._shown:
            self._shown.add(self._can_come)
            off = comebacks.OFF.format(reason=self._reason)
            self._screen.say(comebacks.ON if self._can_come else off)

    def lose(self, worker: Worker) -> None:
        """The others have gone on without this member: another is started once it has ended."""
        if self._host is not None:
            self._lost.append(worker)
            if self._reason:
                self._say_whether()

    def join(self, rank: int) -> Worker:
        """The newcomer of that rank has become a member, and is none of these any more."""
        self._places[rank] = self._places[rank].joined(time.monotonic())
        return self._workers.pop(rank)

    def follow(self) -> None:
        """While training goes on: show how newcomers failed, and start those that are due."""
        now_s = time.monotonic()
        for worker in [each for each in self._lost if not each.alive]:
            self._lost.remove(worker)
            self._end(worker, now_s)
        for worker in list(self._workers.values()):
            if worker.exit_s is not None and now_s - worker.exit_s >= TIMES.cause_s:
                del self._workers[worker.rank]
                self._show(worker)
                self._end(worker, now_s)
        for rank, place in self._places.items():
            if self._can_come and place.is_due(now_s):
                self._start(rank, place, now_s)

    def show_late(self, due_s: float) -> None:
        """Show tracebacks of those that have said so before `due_s`, and do not end."""
        for worker in self.running:
            if worker.raised is not None and worker.raised_s <= due_s:
                self._show_error(worker)

    def end(self) -> None:
        """End those that run, since the job has ended: by SIGTERM, and soon by SIGKILL."""
        now_s = time.monotonic()
        for worker in self.running:
            # Where SIGTERM tells it to go, it does so at a step, and none comes.
            stopped_s = worker.stopped_s
            is_late = stopped_s is not None and now_s - stopped_s >= TIMES.comeback_end_s
            if is_late or worker.notices:
                worker.stop(signal.SIGKILL)
            elif stopped_s is None:
                worker.stop(signal.SIGTERM)

    def say_back(self, joined: Joined, members: Collection[Worker]) -> None:
        """Say that a newcomer works, once; the ring may not be known to have it yet."""
        found = [w for w in members if (w.rank, w.life) == (joined.place, joined.life)]
        for worker in found or filter(None, [self.find(joined.place, joined.life)]):
            if worker.life and not worker.is_back:
                worker.is_back = True
                self._screen.say(conclusion.back(joined, time.monotonic() - worker.started_s))

    def _start(self, rank: int, place: Place, now_s: float) -> None:
        assert self._host is not None
        life = place.life + 1
        try:
            self._host.start_again(rank, life)
        except OSError as error:
            self._screen.say(f"rank {rank} cannot be started again: {error}")
            self._places[rank] = self._said(rank, place.ended(now_s), now_s)
            return
        self._places[rank] = place.started()
        self._workers[rank] = Worker(rank, self._host, life=life)
        self._display.start(rank, life)
        self._screen.say(f"rank {rank} was started again (life {life})")

    def _show(self, worker: Worker) -> None:
        failure = worker.loss()
        has_nothing_to_do = not self._can_come and worker.has_ended_well
        if failure is not None and not (worker.is_stopped or has_nothing_to_do):
            self._display.reveal(worker.rank)
            self._show_error(worker)
            self._screen.say(conclusion.not_back(failure))

    def _show_error(self, worker: Worker) -> None:
        """Show its traceback, if none of that place has had it."""
        if worker.raised is not None and not worker.is_shown and not self.knows(worker):
            self._display.show_error(worker.rank, worker.raised.traceback)
        worker.is_shown = True

    def _end(self, worker: Worker, now_s: float) -> None:
        """Decide what follows at the place of a worker that has ended."""
        failure, place = worker.loss(), self._places.get(worker.rank, Place())
        if failure is None or worker.was_told_to_end:
            return
        place = place.ended(now_s, comebacks.ending_of(failure))
        if place.due_s is None:
            why = failure.exception or failure.describe()
            self._screen.say(f"rank {worker.rank} is not started again, ended twice by: {why}")
        self._places[worker.rank] = self._said(worker.rank, place, now_s)

    def _said(self, rank: int, place: Place, now_s: float) -> Place:
        """Say when the next process of that place is started, if not at once."""
        if self._can_come and place.due_s is not None and place.due_s > now_s:
            self._screen.say(f"rank {rank} is started again in {place.due_s - now_s:g} s")
        return place
