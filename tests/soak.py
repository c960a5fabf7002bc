"""Whole jobs, one after the other, with random faults: none may hang, leak or blame wrongly.

    python -m tests.soak --minutes 2 [--seed N] [--only JOB]

Each job is 2 to 5 processes that check every sum they get. Its size, transport, way of
starting, fault and moment come from the seed and the job's number alone, so ``--seed N
--only JOB`` repeats one. After each job: it ended in time, with the right exit code and the
right rank named; no process, descriptor, socket or file is left. The first violation ends
the soak with exit code 1 and everything that was said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ringreduce.effects import native
from tests.figures import record, table
from tests.jobs import members
from tests.processes import Process, clean_environment, launcher, wait_gone, wait_until

TIMEOUT_S, JOIN_TIMEOUT_S = 2.0, 5.0
# From the fault to the end of the last process, whatever the fault.
ENDED_S = 10.0
# Of two seconds promised for orphans, three times that.
GONE_S = 6.0

# How often each is chosen.
FAULTS = {"none": 1, "short pauses": 3, "long pause": 3, "worker killed": 4}
FAULTS |= {"worker killed early": 2, "launcher killed": 2, "all killed": 2}

WORKER = """
import json, os, sys, time
import numpy as np
import ringreduce as rr
from ringreduce.pure.schedule import chunk_bounds

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

def check(array, expected, what):
    if not (array == expected).all():
        say(wrong=what)
        os._exit(90)

def work(ring, random, seconds):
    began, rank, size = time.monotonic(), ring.rank, ring.size
    number, total = 0, size * (size + 1) // 2
    while True:
        count = int(random.choice([1, 100, 3000, 50_000, 600_000]))
        array = ring.empty(count, np.float64) if random.random() < 0.5 else np.empty(count)
        pattern = np.arange(count) % 97 + number % 1000
        kind = random.integers(4)
        if kind == 0:
            root = int(random.integers(size))
            array[:] = pattern if rank == root else -1
            check(ring.broadcast(array, root=root), pattern, f"broadcast {number}")
        elif kind == 1:
            array[:] = pattern * (rank + 1)
            whole = pattern * total
            part = ring.reduce_scatter(array)
            start = chunk_bounds(count, size)[rank]
            check(part, whole[start : start + part.size], f"reduce_scatter {number}")
        else:
            array[:] = pattern * (rank + 1)
            check(ring.all_reduce(array), pattern * total, f"all_reduce {number}")
        over = np.array([time.monotonic() - began > seconds], np.int64)
        number += 1
        if number % 10 == 0:
            say(rounds=number)
        if ring.all_reduce(over, "max")[0]:
            return

seed, seconds = int(sys.argv[1]), float(sys.argv[2])
try:
    with rr.Communicator(rr.Config.from_environment()) as ring:
        say(joined=ring.rank, pid=os.getpid(), transport=ring.transport)
        work(ring, np.random.default_rng(seed), seconds)
except rr.RingReduceError as error:
    say(kind=type(error).__name__, peer=error.peer, at=time.monotonic(), text=str(error))
    raise
"""


class Violation(Exception):
    """Something that must not happen has."""


@dataclass(frozen=True)
class Plan:
    """What a job is, and what happens to it."""

    size: int
    transport: str
    hosts: int
    starter: str
    fault: str
    victim: int
    moment_s: float
    pauses_s: tuple[float, ...]
    seed: int

    @classmethod
    def of(cls, seed: int, number: int) -> Plan:
        """The plan of job `number`."""
        choose = random.Random(f"{seed}/{number}")
        # Every other job is the one before started anew, at once, without a fault.
        if number % 4 == 3:
            before = cls.of(seed, number - 1)
            return cls(**{**vars(before), "fault": "none"})
        size = choose.randint(2, 5)
        kinds = ["shm", "zmq", "hosts"] if native.library() is not None else ["zmq"]
        kind = choose.choice(kinds)
        fault = choose.choices(list(FAULTS), list(FAULTS.values()))[0]
        starters = ["launcher"] if fault == "launcher killed" or kind == "hosts" else []
        starter = choose.choice(starters or ["launcher", "bare"])
        if kind == "hosts":
            starter = "bare"  # The launcher's workers are of one host.
            fault = "all killed" if fault == "launcher killed" else fault
        return cls(
            size=size,
            transport="auto" if kind == "hosts" else kind,
            hosts=2 if kind == "hosts" else 1,
            starter=starter,
            fault=fault,
            victim=choose.randrange(size),
            moment_s=choose.uniform(0, 0.8),
            pauses_s=tuple(choose.uniform(0.02, 0.5) for _ in range(choose.randint(1, 3))),
            seed=choose.randrange(1 << 31),
        )

    def __str__(self) -> str:
        where = "shm+zmq" if self.hosts > 1 else self.transport
        whom = f" (rank {self.victim})" if "worker" in self.fault or "pause" in self.fault else ""
        return f"{self.size} x {where}, {self.starter}, {self.fault}{whom}"


class Job:
    """The processes of one plan: a launcher and its workers, or workers alone."""

    def __init__(self, plan: Plan, directory: Path, port: int) -> None:
        self.plan = plan
        self._stack = contextlib.ExitStack()
        self.port = port
        (directory / "worker.py").write_text(WORKER)
        temporary = directory / "temporary"
        temporary.mkdir()
        # A job that nothing ends runs until we have done to it what we want, and a while on.
        seconds = plan.moment_s + (30.0 if self.must_fail else sum(plan.pauses_s) + 0.5)
        arguments = ["worker.py", str(plan.seed), str(seconds)]
        variables = {
            **{"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
            "RINGREDUCE_TIMEOUT_S": str(TIMEOUT_S),
            "RINGREDUCE_JOIN_TIMEOUT_S": str(JOIN_TIMEOUT_S),
            "RINGREDUCE_TRANSPORT": plan.transport,
        }
        self.processes: list[Process] = []
        with self._stack:
            if plan.starter == "launcher":
                process = launcher(directory, "run", "-n", str(plan.size), *arguments, **variables)
                self.processes.append(self._stack.enter_context(process))
            else:
                self._start_workers(directory, arguments, variables)
            self._stack = self._stack.pop_all()

    def _start_workers(
        self, directory: Path, arguments: list[str], variables: dict[str, str]
    ) -> None:
        limits = {"timeout_s": TIMEOUT_S, "link_timeout_s": TIMEOUT_S}
        limits["join_timeout_s"] = JOIN_TIMEOUT_S
        # A job that is started anew comes to the port of the one before.
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            self.port = listener.getsockname()[1]
            transport = self.plan.transport
            for config in members(listener, self.plan.size, transport=transport, **limits):
                own = config.to_environment()
                if self.plan.hosts > 1:
                    own["RINGREDUCE_HOST_ID"] = f"host {config.rank % 2}"
                process = Process(
                    [sys.executable, *arguments],
                    directory,
                    name=f"rank{config.rank}",
                    environment=clean_environment(**(variables | own)),
                    pass_fds=() if config.rank else (listener.fileno(),),
                )
                self.processes.append(self._stack.enter_context(process))

    @property
    def must_fail(self) -> bool:
        return self.plan.fault not in ("none", "short pauses")

    def said(self, key: str) -> list[dict[str, Any]]:
        """What workers have said with this key; the launcher's marks are taken off."""
        lines = "".join(process.stdout for process in self.processes).splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                found.append(json.loads(re.sub(r"^\[\s*\d+\] ", "", line)))
        return [fact for fact in found if key in fact]

    def ended(self) -> bool:
        return all(process.has_ended() for process in self.processes)

    def workers(self) -> list[int]:
        """Process numbers by rank; under the launcher, known from its children."""
        if self.plan.starter == "bare":
            return [process.pid for process in self.processes]
        found = {}
        for child in psutil.Process(self.processes[0].pid).children():
            with contextlib.suppress(psutil.Error):
                rank = child.environ().get("RINGREDUCE_RANK")
                if rank is not None and "worker.py" in child.cmdline():
                    found[int(rank)] = child.pid
        return [found[rank] for rank in sorted(found)]

    def family(self) -> list[psutil.Process]:
        """Every process that there is now."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                known = psutil.Process(process.pid)
                found += [known, *known.children(recursive=True)]
        return found

    def words(self) -> str:
        return "\n".join(
            f"--- process {p.pid}, stdout\n{p.stdout}\n--- stderr\n{p.stderr}"
            for p in self.processes
        )

    def close(self) -> None:
        self._stack.close()


def sleep(seconds: float) -> None:
    """Let the job run: the moment of a fault is part of the plan, and waits for nothing."""
    time.sleep(seconds)


def strike(job: Job, family: list[psutil.Process]) -> float:
    """Do to the job what its plan says; return when, on the machine's clock.

    Who belongs to it is added to `family` before: afterwards nobody could tell.
    """
    plan, fault = job.plan, job.plan.fault
    if fault == "worker killed early":
        wait_until(lambda: len(job.workers()) == plan.size or job.ended(), "all to be started")
    else:
        wait_until(lambda: len(job.said("joined")) == plan.size or job.ended(), "all to join")
    sleep(plan.moment_s)
    family += job.family()
    workers = job.workers()
    if len(workers) < plan.size:
        if job.must_fail:
            raise Violation("it ended before the fault")
        return time.monotonic()
    struck_s = time.monotonic()
    if fault == "short pauses":
        for seconds in plan.pauses_s:
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[plan.victim], signal.SIGSTOP)
                sleep(seconds)
                os.kill(workers[plan.victim], signal.SIGCONT)
            sleep(seconds / 2)
    elif fault == "long pause":
        os.kill(workers[plan.victim], signal.SIGSTOP)
    elif fault.startswith("worker killed"):
        os.kill(workers[plan.victim], signal.SIGKILL)
    elif fault == "all killed":
        for number in workers:
            os.kill(number, signal.SIGKILL)
    elif fault == "launcher killed":
        job.processes[0].signal(signal.SIGKILL)
    return struck_s


def check_words(job: Job, struck_s: float) -> list[float]:
    """What was said is right; return how long after the fault each rank told it."""
    plan = job.plan
    if wrong := job.said("wrong"):
        raise Violation(f"a wrong result: {wrong}")
    errors = job.said("kind")
    if not job.must_fail:
        noise = [process.stderr for process in job.processes if process.stderr]
        if errors or noise:
            raise Violation(f"errors or warnings without a fault: {errors} {noise}")
        return []
    if plan.fault in ("all killed", "launcher killed"):
        return []
    kinds = {fact["kind"] for fact in errors}
    allowed = {
        "long pause": {"PeerTimeoutError"},
        "worker killed": {"PeerLostError"},
        "worker killed early": {"PeerLostError", "RendezvousError"},
    }[plan.fault]
    others = [fact for fact in errors if fact["at"] >= struck_s]
    if plan.fault == "long pause" and plan.starter == "bare":
        # The last to tell is the one that was woken: it finds that the others have gone.
        others = sorted(others, key=lambda fact: fact["at"])[: plan.size - 1]
        kinds = {fact["kind"] for fact in others}
    if not kinds <= allowed:
        raise Violation(f"other errors than {allowed}: {errors}")
    if plan.starter == "bare" and len(others) < plan.size - 1:
        raise Violation(f"only {len(others)} of {plan.size - 1} ranks told of it: {errors}")
    if plan.fault == "worker killed" and any(fact["peer"] != plan.victim for fact in others):
        raise Violation(f"another rank than {plan.victim} was blamed: {errors}")
    if plan.fault == "long pause" and not any(fact["peer"] == plan.victim for fact in others):
        raise Violation(f"nobody named rank {plan.victim}: {errors}")
    return [fact["at"] - struck_s for fact in others]


def check_ends(job: Job) -> None:
    """Exit codes, and the launcher's verdict, are right."""
    plan = job.plan
    codes = [process.wait(0.1) for process in job.processes]
    killed = 128 + signal.SIGKILL
    if plan.starter == "launcher":
        expected = dict.fromkeys(("worker killed", "worker killed early", "all killed"), killed)
        expected |= {"launcher killed": -signal.SIGKILL, "long pause": 1}
        if codes != [expected.get(plan.fault, 0)]:
            raise Violation(f"exit code {codes[0]} of the launcher")
        name = f"ringreduce: rank {plan.victim} failed first ("
        words = job.words()
        if "worker killed" in plan.fault and not (name in words and "SIGKILL" in words):
            raise Violation(f"the launcher did not name rank {plan.victim} first")
        return
    for rank, code in enumerate(codes):
        dead = plan.fault == "all killed" or ("worker killed" in plan.fault and rank == plan.victim)
        expected = -signal.SIGKILL if dead else 1 if job.must_fail else 0
        if code != expected:
            raise Violation(f"exit code {code} of rank {rank}, not {expected}")


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Within, whatever is opened here or made in /dev/shm must also go."""

    def descriptors() -> int:
        return len(os.listdir("/dev/fd"))

    def segments() -> set[str]:
        return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()

    open_before, segments_before = descriptors(), segments()
    yield
    if (left := descriptors()) != open_before:
        raise Violation(f"{left - open_before} descriptors of the soak's own are left")
    # Other programs' come and go.
    wait_until(lambda: not segments() - segments_before, "/dev/shm to be as it was", 10.0)
    if children := psutil.Process().children(recursive=True):
        raise Violation(f"left: {children}")


def run(plan: Plan, port: int) -> tuple[int, list[float], float]:
    """Run one job to its end; return its port, and the times to the news and to the end."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name, nothing_left():
        job = Job(plan, Path(name), port)
        family: list[psutil.Process] = []
        try:
            struck_s = strike(job, family)
            if plan.fault == "long pause" and plan.starter == "bare":
                victim = job.processes[plan.victim]
                survivors = [p for p in job.processes if p is not victim]
                limit_s = TIMEOUT_S + GONE_S
                wait_until(lambda: all(p.has_ended() for p in survivors), "them to end", limit_s)
                victim.signal(signal.SIGCONT)
            wait_until(job.ended, "the job to end", ENDED_S if job.must_fail else 40.0)
            ended_s = time.monotonic() - struck_s
            told = check_words(job, struck_s)
            check_ends(job)
            wait_gone([process.pid for process in family], GONE_S)
            if left := os.listdir(Path(name) / "temporary"):
                raise Violation(f"in the temporary folder: {left}")
            # The news of some faults are nobody's: then the end of the last process counts.
            told = told or ([time.monotonic() - struck_s] if job.must_fail else [])
            return job.port, told, ended_s
        except (AssertionError, Violation) as error:
            raise Violation(f"{error}\n{plan!r}\n{job.words()}") from error
        finally:
            job.close()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def main() -> int:
    """Run jobs for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(31))
    parser.add_argument("--only", type=int, help="the number of the one job to run")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} minutes", flush=True)
    began, number, port = time.monotonic(), options.only or 0, 0
    seconds: dict[str, list[float]] = defaultdict(list)
    while time.monotonic() - began < 60 * options.minutes:
        plan = Plan.of(options.seed, number)
        try:
            # Only a job that is started anew comes to a port that is known.
            port, told, ended_s = run(plan, port if number % 4 == 3 else 0)
        except Violation as violation:
            print(f"#{number} {plan}: VIOLATION: {violation}")
            print(f"again: python -m tests.soak --seed {options.seed} --only {number}")
            return 1
        if told:
            seconds[f"{plan.fault}: told"] += told
        seconds[f"{plan.fault}: ended"].append(ended_s)
        record(f"soak: {plan.fault}", *told)
        after = f", told after {min(told):.2f} to {max(told):.2f} s" if told else ""
        print(f"#{number} {plan}{after}, ended after {ended_s:.2f} s", flush=True)
        number += 1
        if options.only is not None:
            break
    print(f"\n{table(seconds)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
