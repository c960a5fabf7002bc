"""Appends what a communicator records to a file, while its job is traced."""

import logging
import socket
import sys
import threading
import time
from pathlib import Path

import msgspec

from ringreduce.effects.recorder import Recorder
from ringreduce.pure import trace
from ringreduce.pure.spans import RECORDS, SPAN, SPAN_BYTES, SpanKind
from ringreduce.vocabulary.config import Config

_log = logging.getLogger(__name__)

# Until then the recorder holds the calls of 5 ms at 50,000 a second, of 50 ms at 5,000.
_EVERY_S = 0.05


class Trace:
    """The file of what `recorder` records from now on; without a `trace_dir` nothing is written.

    A thread of its own copies the records as they are: what makes or watches calls never does.
    Nothing raises: a failure to write is logged, and ends it.
    """

    def __init__(self, config: Config, recorder: Recorder) -> None:
        self._events, self._is_over = recorder.events, threading.Event()
        self._thread: threading.Thread | None = None
        if not config.trace_dir:
            return
        head = trace.Head(
            job=config.job_id,
            when=time.time(),
            rank=config.rank,
            size=config.size,
            host=socket.gethostname(),
            clock=_clock(),
            membership=recorder.membership,
            first=self._events.current_call().number,
        )
        # How many records of each ring were there before.
        self._seen = [self._events.added(ring, sys.maxsize)[0] for ring in range(len(RECORDS))]
        self._events.is_traced = True
        name = f"ringreduce trace {config.rank}/{config.size}"
        arguments = Path(config.trace_dir).absolute(), head
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copy what is left, and end; calling it again does nothing."""
        if self._thread is not None:
            self._events.is_traced = False
            self._is_over.set()
            self._thread.join()

    def _run(self, folder: Path, head: trace.Head) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / trace.file_name(head)).open("wb", buffering=0) as file:
                file.write(msgspec.json.encode(head) + b"\n")
                is_over = False
                while not is_over:
                    is_over = self._is_over.wait(_EVERY_S)
                    file.write(self._copied())
        except OSError as error:
            _log.warning("[%d/%d] cannot trace: %s", head.rank, head.size, error)

    def _copied(self) -> bytes:
        copied = b""
        for ring, before in enumerate(self._seen):
            self._seen[ring], records = self._events.added(ring, before)
            copied += records
            if lost := self._seen[ring] - before - len(records) // SPAN_BYTES:
                copied += SPAN.pack(1, SpanKind.LOST, 0, 0, lost, 0, 0, 0.0, 0.0)
        return copied


def _clock() -> str:
    """Equal for processes that share the clock of `time.monotonic`: those of one boot of a host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
