"""The ranks of one host as processes: started, read and ended."""

import errno
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial

from ringreduce.commands.launch import start
from ringreduce.commands.launch.exchange import Assignment, Ended, Event, Output, Told
from ringreduce.commands.launch.frames import Records
from ringreduce.commands.launch.processes import Guard, Pipe, Process
from ringreduce.commands.launch.standings import Standings
from ringreduce.commands.launch.worker_records import Notices, Stands, WorkerRecord
from ringreduce.pure.views import Standing
from ringreduce.vocabulary.config import Config, binding_wanted, elastic_minimum
from ringreduce.vocabulary.cores import (
    kernel_kills,
    memory_limit,
    shares_of_cores,
    usable_cores,
)
from ringreduce.vocabulary.endpoints import address, is_loopback
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.words import named
from ringreduce.vocabulary.worker_environment import (
    are_threads_chosen,
    life_variable,
    worker_environment,
)


class LocalHost:
    """Ranks that are children of this process; `selector` gets what reads their outputs."""

    def __init__(
        self, assignment: Assignment, selector: selectors.BaseSelector, guard: Guard
    ) -> None:
        self._assignment, self._selector, self._guard = assignment, selector, guard
        self._processes: dict[int, Process] = {}
        self._lives: dict[int, int] = {}  # by rank, which of its processes that is
        # The pipes of each: records first, which decide whether its failure is the cause.
        self._pipes: dict[tuple[int, int], list[Pipe]] = {}
        self._port = 0
        self._cores: list[set[int]] | None = None  # by place on this host; None: all have all
        self._notices: dict[int, int] = {}  # the signals that tell ranks to go, where one does
        self._kernel_kills = kernel_kills()
        # What became of the job's ranks, which those here can read; None where they have no use.
        self._standings: Standings | None = None

    @property
    def started(self) -> list[int]:
        """The ranks that were started: all of them unless `start` failed."""
        return list(self._processes)

    def start(
        self,
        port: int,
        listener: socket.socket | None,
        *,
        stdin_rank: int | None = None,
        inherited: Sequence[Sequence[int]] = (),
    ) -> None:
        """Start the ranks, which meet at the assignment's host and `port`.

        Rank 0 inherits the `listener` of that port. For `stdin_rank`, `inherited` see `JobPlan`.
        ConfigError as `cores_of`.
        """
        job, self._port = self._assignment, port
        if elastic_minimum(job.variables) and sys.platform == "linux":
            self._standings = Standings.create(job.placed.size)
        self._cores = cores_of(job)
        for rank in job.ranks:
            self._start_process(
                rank,
                meeting=(listener.fileno(),) if listener is not None and rank == 0 else (),
                files=inherited[rank] if inherited else (),
                stdin_rank=stdin_rank,
            )

    def start_again(self, rank: int, life: int) -> None:
        """Start a rank whose process has ended, as process `life` of it, at the same place.

        OSError if the system has none to give. Its number is larger than those before.
        """
        self._notices.pop(rank, None)
        self._start_process(rank, life)

    def _start_process(
        self,
        rank: int,
        life: int = 0,
        *,
        meeting: Sequence[int] = (),
        files: Sequence[int] = (),
        stdin_rank: int | None = None,
    ) -> None:
        job, placed, cores = self._assignment, self._assignment.placed, self._cores
        place = rank - placed.first_rank
        words = () if self._standings is None else (self._standings.descriptor,)
        config = Config(
            rank=rank,
            size=placed.size,
            local_rank=place,
            local_size=job.count,
            rendezvous=address(job.meeting_host, self._port),
            rendezvous_fd=meeting[0] if meeting else None,
            job_id=placed.job_id,
            restart=placed.restart,
            **job.choices,
        )
        ours, theirs = os.pipe()
        given = ",".join(map(str, (theirs, *words)))
        take = partial(_told, rank, life, Records[WorkerRecord](WorkerRecord))
        pipes = self._pipes[rank, life] = [Pipe(os.fdopen(ours, "rb", 0), self._selector, take)]
        try:
            process = Process(
                [sys.executable, start.__file__, given, *job.arguments, *map(str, files)],
                worker_environment(
                    config,
                    job.threads or default_threads(job.count),
                    decided=job.choices,
                    variables=job.variables | life_variable(life),
                    columns=job.columns,
                    cores=None if cores is None else sum(map(len, cores)),
                    skips_breakpoints=stdin_rank not in (None, rank),
                ),
                has_stdin=rank == stdin_rank,
                inherited=(*meeting, *files, theirs, *words),
                asking=(signal.SIGUSR1,) if "log_dir" in job.choices else (),
                cores=None if cores is None else cores[place],
            )
        finally:
            os.close(theirs)
        self._processes[rank], self._lives[rank] = process, life
        self._guard.add(process.pid)
        for is_error, file in zip((False, True), process.outputs, strict=True):
            pipes.append(Pipe(file, self._selector, partial(_written, rank, life, is_error)))

    def is_suspended(self, rank: int) -> bool:
        """Whether the rank's process is stopped; see `Process.is_suspended`."""
        return self._processes[rank].is_suspended

    def poll(self) -> list[Event]:
        """The ranks that have ended, after all that they wrote."""
        events: list[Event] = []
        for rank, process in self._processes.items():
            if process.returncode is None and process.reap():
                life = self._lives[rank]
                for pipe in self._pipes[rank, life]:
                    events += pipe.drain()
                assert process.returncode is not None
                how = self._how(process)
                events.append(Ended(rank, process.returncode, how, is_seen=True, life=life))
                self._guard.remove(process.pid)
        return events

    def _how(self, process: Process) -> str:
        """Whether the kernel has ended it, which tells nobody else."""
        if process.returncode != -signal.SIGKILL or kernel_kills() <= self._kernel_kills:
            return ""
        import psutil  # Takes a while to load, and is needed for this error alone.

        total = min(psutil.virtual_memory().total, memory_limit() or sys.maxsize)
        together = " together" if len(self._processes) > 1 else ""
        return (
            f"killed by the kernel, which lacked memory: {named('rank', self._processes)}"
            f"{together} may have {total / (1 << 30):.2f} GiB; "
            "take smaller batches, or start fewer ranks there"
        )

    def inform(self, event: Event) -> None:
        """Let the ranks here know, who may choose who goes on, how far one of the job has come.

        Events of one rank are to come in their order: what it said of itself before its end.
        """
        if isinstance(event, Told) and isinstance(event.record, Notices):
            self._notices[event.rank] = event.record.signal
        if self._standings is not None and (standing := standing_of(event)) is not None:
            self._standings.write(standing, event.rank, event.life)

    def send(self, rank: int, number: int) -> None:
        """Send a signal to a rank's processes.

        To its own alone, if the signal asks for its flight record, or tells it to go.
        """
        if rank in self._processes:
            self._processes[rank].send(number, is_notice=number == self._notices.get(rank))

    def close(self) -> None:
        for pipes in self._pipes.values():
            for pipe in pipes:
                pipe.close()


def standing_of(event: Event) -> Standing | None:
    """What an event says of how far its rank has come; None: nothing."""
    if isinstance(event, Ended):
        return Standing(is_gone=True) if event.is_seen else None
    if isinstance(event, Told) and isinstance(event.record, Stands):
        return Standing(event.record.ring, event.record.ended, event.record.is_gone)
    return None


def _told(rank: int, life: int, records: Records[WorkerRecord], data: bytes) -> list[Event]:
    return [Told(rank, record, life) for record in records.feed(data)]


def _written(rank: int, life: int, is_error: bool, data: bytes) -> list[Event]:
    return [Output(rank, is_error, data, life)]


def listen(
    host: str,
    port: int,
    count: int,
    *,
    is_reached_by_others: bool = False,
    remedy: str = "",
    ports: range | None = None,
) -> socket.socket:
    """A nonblocking socket that listens at `host` for `count` others; port 0: any free of `ports`.

    Raises ConfigError if the name has no address, another host's, or one that other hosts cannot
    reach though they must; or if the port is taken.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        ip = str(target[0])
        if is_reached_by_others and is_loopback(ip):
            raise ConfigError(
                f"{host}, where the ranks are to meet, is {ip} here, which other hosts cannot "
                "reach",
                remedy=remedy,
            )
        for tried in [port] if port or ports is None else ports:
            try:
                made = socket.create_server((ip, tried), family=family, backlog=max(128, count))
                made.setblocking(False)
                return made
            except OSError as error:
                if port or ports is None or error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(errno.EADDRINUSE, "no port of RINGREDUCE_PORTS is free there")
    except OSError as error:
        raise ConfigError(
            f"the ranks cannot meet at {address(host, port) if port else host}: "
            f"{error.strerror or error}",
            remedy=remedy,
        ) from None


def cores_of(job: Assignment) -> list[set[int]] | None:
    """The cores that each rank of this host has to itself; None: all have all.

    ConfigError as `shares_of_cores`.
    """
    wanted = binding_wanted(job.variables)
    if wanted is None and (job.threads or are_threads_chosen()):
        return None  # They may be other numbers than of the cores.
    return shares_of_cores(job.count, wanted=wanted)


def default_threads(size: int) -> int:
    """Compute threads for each of `size` workers: this process's cores shared out, at least 1."""
    return max(1, usable_cores() // size)
