"""What a task of a barrier stage does: it becomes a rank, and calls the user's function.

    tasks      all tell each other where they are            (allGather)
    rank 0     listens, chooses the secret, and tells it     (allGather)
    each       is a rank, as under ``ringreduce run``, until the function has returned

An exception of the function is a result like any other: were the task to fail, Spark would stop the
others before they can say that they have lost this one.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import BarrierTaskContext
from pyspark.serializers import CloudPickleSerializer

from ringreduce.commands.launch.handover import described
from ringreduce.communicator.hosted import Choices, enter, leaving, open_meeting
from ringreduce.spark.desk import Caller, Failed, Here
from ringreduce.spark.rows import given
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import host_and_port, is_loopback
from ringreduce.vocabulary.worker_environment import chosen_environment

RESULT = "rank int, result binary, raised binary"
_SCHEMA = pa.schema([("rank", pa.int32()), ("result", pa.binary()), ("raised", pa.binary())])


@dataclass(frozen=True)
class Job:
    """What all tasks are given. `desk` and `secret`: where the driver listens; see `desk`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    choices: Choices
    variables: Mapping[str, str]  # of the environment, for the function
    desk: str
    secret: str
    restart: int
    schema: bytes | None  # of the rows that tasks have; None: there are none to give


def call(job: Job, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run one task; one row of `RESULT`."""
    context = BarrierTaskContext.get()
    caller = Caller(job.desk, job.secret)
    try:
        config = _placed(context, job)
        size, rank = config.size, config.rank
        caller.tell(Here(rank, size, platform.node(), job.restart, context.partitionId()))
        result, raised = _called(job, config, context.cpus(), caller, batches)
    finally:
        caller.close()
    rows = {"rank": [rank], "result": [result], "raised": [raised]}
    yield pa.RecordBatch.from_pydict(rows, _SCHEMA)


def _placed(context: BarrierTaskContext, job: Job) -> Config:
    """This task's place in the ring: those of one host are beside each other."""
    own = context.partitionId()
    hosts = [str(host) for host in map(json.loads, context.allGather(json.dumps(_host_here())))]
    order = sorted(range(len(hosts)), key=lambda task: hosts.index(hosts[task]))
    rank, meeting, descriptor = order.index(own), "", None
    if rank == 0:
        address = _address_here(context, job, is_alone=len(set(hosts)) == 1)
        meeting, descriptor = open_meeting(address, job.choices.ports, len(hosts))
    told = [meeting, f"spark-{secrets.token_hex(8)}", secrets.token_hex(32)]
    of_first = json.loads(context.allGather(json.dumps(told if rank == 0 else []))[order[0]])
    return Config(
        rank=rank,
        size=len(hosts),
        host_id=hosts[own],
        rendezvous=of_first[0],
        rendezvous_fd=descriptor,
        job_id=of_first[1],
        secret=of_first[2],
        restart=job.restart,
        **job.choices.settings,
    )


def _host_here() -> str:
    """The name of this host: containers of one machine need not share memory."""
    with_memory = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else os.getppid()
    return f"{platform.node()[:128]}-{with_memory:x}"


def _address_here(context: BarrierTaskContext, job: Job, *, is_alone: bool) -> str:
    """The address of this host by which Spark's executors reach it, as a number."""
    host, _ = host_and_port(context.getTaskInfos()[context.partitionId()].address)
    numeric = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if is_loopback(numeric) and not is_alone:
        # Its own name means loopback here, as Debian has it. Nothing is sent.
        target = socket.getaddrinfo(*host_and_port(job.desk), type=socket.SOCK_DGRAM)[0]
        with socket.socket(target[0], socket.SOCK_DGRAM) as towards_driver:
            towards_driver.connect(target[4])
            numeric = str(towards_driver.getsockname()[0])
    return numeric


def _called(
    job: Job, config: Config, threads: int, caller: Caller, batches: Iterator[pa.RecordBatch]
) -> tuple[bytes | None, bytes | None]:
    """What the function has returned, pickled, or the exception that has ended it."""
    try:
        with ExitStack() as stack:
            stack.enter_context(chosen_environment(job.variables))
            if config.rank == 0:
                stack.enter_context(caller.passing_on(0))
            schema = None if job.schema is None else pa.ipc.read_schema(pa.py_buffer(job.schema))
            stack.enter_context(given(batches, schema))
            enter(config, threads, job.choices)
            with leaving():
                result = job.function(*job.args, **job.kwargs)
            return CloudPickleSerializer().dumps(result), None
    except (Exception, SystemExit) as error:
        raised = described(error)
        caller.tell(Failed(config.rank, job.restart, raised))
        return None, msgspec.msgpack.encode(raised)
