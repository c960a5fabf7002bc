"""Hears that this process is told to go, with some time left: by a signal, or by `leave`.

    SIGTERM -> faulthandler's handler, in C -> pipe -> thread: notes it, and limits the wait
    training: at a step at which all ranks are, it asks `Notice.reason`, and acts

A main thread that is in TensorFlow would run no handler of Python's. So the handler is that of
`faulthandler`, which writes at once: here into a pipe. It is there while a training hears, and not
in forked children. A program that handles the signal itself keeps its handler, and may call `leave`
in it.

The thread lives as long as a training hears. It ends the process, as the signal would have, if that
is told to go once more after a while; or if no step comes at which it could leave, within a limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

from ringreduce.commands.launch import handover
from ringreduce.commands.launch.worker_records import Notices
from ringreduce.vocabulary.config import TIMES, leave_code, leave_limit_s, leave_signal

_log = logging.getLogger(__name__)

# What faulthandler writes for each signal; and `leave`.
_OF_SIGNAL, _OF_CALL, _OF_END = b"most recent call first", b"leave()\n", b"no training hears\n"
_OF_ASK = b"a training ends\n"
CALL = "rr.leave()"


class EndsInOrder(SystemExit):
    """The program ends since ranks were told to go, all of which know."""


class Notice:
    """Whether this process was told to go, for one training.

    `doing` says what the training waits for; `is_lost`, whether it comes to no further step. Both
    are called in a thread.
    """

    def __init__(self, who: str, doing: Callable[[], str], is_lost: Callable[[], bool]) -> None:
        self.who, self.doing, self.is_lost = who, doing, is_lost
        self.reason = ""  # what has told it to go, such as ``SIGTERM``; empty: nothing
        self.is_met = False  # whether a step has come at which ranks act on it
        self.is_over = False  # whether the training has ended by it


class _Listener:
    """The process's handler, and the thread that reads what it writes, while trainings hear."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for trainings in several threads
        self._heard: list[Notice] = []  # those of trainings, the innermost last
        self._source = self._target = -1  # the ends of the pipe
        self._thread: threading.Thread | None = None
        self._is_over = False  # whether the thread is to end
        self._has_read = threading.Event()
        self._handles = False  # whether the handler is ours
        self._name, self._number, self._limit_s = "", 0, math.inf
        self._first_s = -math.inf  # when the process was told first
        self._has_said = False  # what a call waits for

    @contextlib.contextmanager
    def hearing(self, notice: Notice) -> Iterator[None]:
        for before in [each for each in self._heard if each.is_over]:
            if not before.is_met:
                notice.reason = before.reason  # It came too late for that training.
            self._leave(before)  # The program has gone on.
        with self._lock:
            if not self._heard:
                self._begin()
            self._heard.append(notice)
        try:
            yield
        except EndsInOrder:
            notice.is_over = True  # The program ends, which may be told so once more.
            raise
        except BaseException:
            self._leave(notice)
            raise
        if self._read_out() and notice.reason == self._name and not notice.is_met:
            # Too late for a look: the program may save what was trained, until the limit is over.
            notice.is_over, notice.doing = True, lambda: "training has ended, and the program not"
            return
        self._leave(notice)

    def _begin(self) -> None:
        self._name, self._limit_s = leave_signal(), leave_limit_s()
        leave_code()  # Which is read when the rank leaves.
        self._number = signal.Signals[self._name].value
        self._source, self._target = os.pipe()
        os.set_blocking(self._target, False)
        self._is_over = self._has_said = False
        # The program's own handler stays, and so does one that ignores the signal.
        self._handles = signal.getsignal(self._number) is signal.SIG_DFL
        if self._handles:
            if threading.current_thread() is threading.main_thread():
                # Where somebody puts back what `signal.signal` has returned, it is this.
                signal.signal(self._number, _write_signal)
            # Of all threads, since one that is not Python's may get the signal.
            faulthandler.register(self._number, self._target, all_threads=True)
            handover.tell(Notices(self._number))
        name = "ringreduce notice"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._thread.start()

    def _read_out(self) -> bool:
        """Wait until the thread has read what has come; True."""
        self._has_read.clear()
        self.write(_OF_ASK)
        return self._has_read.wait(TIMES.join_thread_s)

    def _leave(self, notice: Notice) -> None:
        with self._lock:
            if notice not in self._heard:
                return
            self._heard.remove(notice)
            if self._heard:
                return
            if self._handles:
                handover.tell(Notices(0))
            self._unregister()
            self._is_over = True
            self.write(_OF_END)
            assert self._thread is not None
            self._thread.join()
            self._close()

    def _unregister(self) -> None:
        """Undo the handler, unless the program has set one since, which is Python's."""
        if self._handles and self._is_ours():
            faulthandler.unregister(self._number)
            if signal.getsignal(self._number) is _write_signal:
                signal.signal(self._number, signal.SIG_DFL)
        self._handles = False

    def look(self) -> None:
        """Tell the launcher if the program has set a handler since, for which it waits then."""
        if self._handles and not self._is_ours():
            self._handles = False
            handover.tell(Notices(0))

    def _is_ours(self) -> bool:
        return signal.getsignal(self._number) in (signal.SIG_DFL, _write_signal)

    def _close(self) -> None:
        os.close(self._source)
        os.close(self._target)
        self._thread = None

    def write(self, what: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # It is full of others, and read.
            os.write(self._target, what)

    def call(self) -> bool:
        if not self._heard:
            return False
        self._hear(CALL)  # At once: the last look may come now.
        self.write(_OF_CALL)
        return True

    def _read(self) -> None:
        """The thread: note each signal or call, and end the process where it has to."""
        while True:
            waiting = [each for each in list(self._heard) if each.reason and not each.is_met]
            wait_s = TIMES.heartbeat_s if waiting else None
            if not select.select([self._source], [], [], wait_s)[0]:
                self._limit(waiting)
                continue
            written = os.read(self._source, 1 << 16)
            if _OF_SIGNAL in written:
                self._hear(self._name)
            if _OF_ASK in written:
                self._has_read.set()
            if self._is_over and _OF_END in written:
                return

    def _hear(self, reason: str) -> None:
        now, told = time.monotonic(), list(self._heard)
        is_signal = reason == self._name
        if any(notice.reason == self._name for notice in told):
            # A call after a signal changes nothing: its limit goes on.
            if is_signal and now - self._first_s >= TIMES.notice_s:
                self._end_process(told[-1], f"{reason} came once more")
            return
        self._first_s = now
        for notice in told:
            notice.reason = reason
        if is_signal:
            self._limit(told)

    def _limit(self, told: list[Notice]) -> None:
        """End the process if no step can come at which it leaves, or none has come for long.

        What has called `leave` goes on as long as it likes; it is said what that waits for.
        """
        passed_s = time.monotonic() - self._first_s
        for notice in told:
            is_signal = notice.reason == self._name
            if notice.is_met or not (is_signal or not self._has_said):
                continue
            if is_signal and notice.is_lost():
                self._end_process(notice, "")
            if passed_s < self._limit_s:
                continue
            why = f"{notice.reason} {self._limit_s:g} s ago, and no step has come since at which "
            why += f"it could leave: {notice.doing()}"
            if is_signal:
                self._end_process(notice, f"{why} (RINGREDUCE_LEAVE_S)")
            self._has_said = True
            _log.warning("%s is told to go: %s", notice.who, why)

    def _end_process(self, notice: Notice, why: str) -> None:
        """End it as the signal would have without a handler."""
        if why:
            _log.warning("%s is told to go: %s. It ends now", notice.who, why)
        # Python lets its main thread alone set a handler, which may be in TensorFlow.
        ctypes.CDLL(None).signal(ctypes.c_int(self._number), ctypes.c_void_p(0))
        os.kill(os.getpid(), self._number)

    def forget(self) -> None:
        """In a forked child: a signal to it is not the parent's, whose the thread is."""
        if self._thread is not None:
            self._unregister()
            self._close()
        self.__init__()  # type: ignore[misc]


def _write_signal(number: int, frame: object) -> None:
    """Python's handler, where that of `faulthandler` is gone."""
    _listener.write(_OF_SIGNAL)


_listener = _Listener()


def hearing(notice: Notice) -> contextlib.AbstractContextManager[None]:
    """Within the block `notice` hears what tells this process to go.

    If a signal came, and no step after it, the process has until the limit to end after the block.
    ConfigError for a variable that is none.
    """
    return _listener.hearing(notice)


def reason_of(notice: Notice) -> str:
    """What has told the process to go; empty: nothing. Asked at a look."""
    _listener.look()
    return notice.reason


def leave() -> bool:
    """Have this rank leave the training that it is in, as a signal that tells it to go does.

    From any thread, or a signal handler; it does not wait. `rr.fit` with a `backup_dir`, or in an
    elastic job, and loops of `rr.elastic.run` can be left: at a step at which all ranks are, within
    about a second. In an elastic job the others go on; else the whole job stops there, is backed
    up, and goes on from there when it is started again. On this rank the training then raises a
    SystemExit.

    Returns:
        Whether there is such a training. If not, nothing happens.
    """
    is_heard = _listener.call()
    if not is_heard:
        _log.warning("leave() does nothing: no training that can be left is under way")
    return is_heard


os.register_at_fork(after_in_child=_listener.forget)
