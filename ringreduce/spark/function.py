"""`run`: a function on every rank of a job, in tasks of a Spark cluster."""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from pyspark import InheritableThread, SparkContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import SparkSession

from ringreduce.commands.launch.failure import Failure, find_cause, worker_error
from ringreduce.commands.launch.function import checked_size
from ringreduce.commands.launch.worker_records import Raised
from ringreduce.communicator.hosted import Choices
from ringreduce.spark.desk import Desk
from ringreduce.spark.task import RESULT, Job, call
from ringreduce.vocabulary.config import TIMES
from ringreduce.vocabulary.endpoints import address
from ringreduce.vocabulary.errors import ConfigError, WorkerError

_Result = TypeVar("_Result")

_LOOK_S = 0.5
# As Spark names the task that has failed first, by its partition; then the reason.
_FAILED_TASK = re.compile(r"barrier task \w+\(\d+, (\d+)\) finished unsuccessfully\.?\s*(.*)", re.S)


def run(
    function: Callable[..., _Result],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    spark_context: SparkContext | None = None,
    *,
    dataframe: Any = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    start_timeout_s: float = 120.0,
    **settings: Any,
) -> list[_Result]:
    """Call ``function(*args, **kwargs)`` in tasks of a Spark cluster that can form a ring.

    They are a barrier stage: all run at the same time, or none does. The function does what a
    script does under ``ringreduce run``: it imports what it needs and calls ``rr.init()``. Tasks of
    one host share memory, and are neighbours. Each computes with ``spark.task.cpus`` threads.

    What a rank writes is in its executor's log; rank 0's lines appear here too. Spark keeps the
    tasks' Python processes and uses them again, with what was imported there.

    Args:
        function: what each rank calls. It, `args`, `kwargs` and results travel by cloudpickle.
        num_proc: number of ranks; by default as many as the DataFrame has partitions, or else as
            Spark computes in parallel (``defaultParallelism``).
        spark_context: the cluster; by default the active one, or a new one.
        dataframe: of its partitions each rank has one, by `shard`. With `num_proc` it is divided
            anew (``DataFrame.repartition``); without, its parts are as they are.
        env: variables of the environment for the function.
        max_restarts: how often all tasks are started again after a failure; `backup_dir` of
            `rr.fit` goes on from what was saved.
        start_timeout_s: seconds in which the cluster must have room for all tasks.
        settings: what a user chooses of `Config`, such as ``timeout_s``; where absent, variables of
            this program, then of the executors.

    Returns:
        What the function returned, in rank order.

    Raises:
        ConfigError: an argument or setting is impossible, Spark does not start, or has no room for
            all tasks in time.
        WorkerError: a rank failed, or its task or executor was lost; `peer` is the one that failed
            first, `traceback` says how. All others were stopped.
    """
    if max_restarts < 0:
        raise ConfigError(f"max_restarts is {max_restarts!r}; accepted: 0 or more")
    if not isinstance(args, (list, tuple)):
        raise ConfigError(
            f"args is {args!r}; accepted: a list or tuple of what the function is called with",
            remedy="The number of ranks is num_proc: run(function, num_proc=4).",
        )
    choices = Choices(settings)
    session = _session(spark_context, dataframe)
    context = session.sparkContext
    if num_proc is None and dataframe is None:
        num_proc = context.defaultParallelism
    if num_proc is not None:
        num_proc = checked_size(num_proc, "run(function, args, kwargs, num_proc)")
    schema = None if dataframe is None else _schema_of(dataframe)
    rows = _rows(session, dataframe, num_proc)
    host = str(context.getConf().get("spark.driver.host"))
    with Desk(host, _show) as desk:
        for restart in range(max_restarts + 1):
            job = Job(
                *(function, tuple(args), dict(kwargs or {}), choices, dict(env or {})),
                *(address(host, desk.port), desk.secret, restart, schema),
            )
            stage = _Stage(context, rows, job, num_proc)
            try:
                return stage.results(desk, start_timeout_s)
            except WorkerError as error:
                if restart == max_restarts:
                    raise
                again = f"starting all again ({restart + 1} of {max_restarts})"
                print(f"ringreduce: {error}; {again}", file=sys.stderr, flush=True)
    raise AssertionError


class _Stage:
    """One attempt: Spark runs the tasks, while this program waits."""

    def __init__(self, context: SparkContext, rows: Any, job: Job, size: int | None) -> None:
        self._context, self._job, self._size = context, job, size
        self._group = f"ringreduce-{uuid.uuid4()}"
        # A function of its own: Spark looks at its signature.
        work = partial(call, job)
        self._ranks = rows.mapInArrow(lambda batches: work(batches), RESULT, barrier=True)
        self._collected: list[Any] = []
        self._error: Exception | None = None
        self._has_ended = threading.Event()

    def results(self, desk: Desk, start_timeout_s: float) -> list[Any]:
        """All results, in rank order; WorkerError as soon as a rank has failed."""
        thread = InheritableThread(target=self._collect, name="rr-spark-job")
        thread.daemon = True
        began = time.monotonic()
        thread.start()
        try:
            while not self._has_ended.wait(_LOOK_S):
                _, told = desk.of_attempt(self._job.restart)
                if (
                    told
                    and time.monotonic()
                    > min(when for when, _ in told.values()) + 2 * TIMES.cause_s
                ):
                    break  # Others may wait for it in `init`, for long.
                has_begun = desk.latest() == self._job.restart or self._is_running()
                if not has_begun and time.monotonic() > began + start_timeout_s:
                    raise ConfigError(
                        f"the cluster has had no room for {self._count} tasks at once for "
                        f"{start_timeout_s:g} s; Spark computes {self._context.defaultParallelism} "
                        "in parallel there",
                        remedy="Ask for fewer by num_proc, or pass a longer start_timeout_s.",
                    )
        finally:
            if not self._has_ended.is_set():
                self._context.cancelJobGroup(self._group)
            thread.join()
        if self._error is not None:  # Also that of a stage that was cancelled.
            self._refuse(desk, self._error)
        return self._of_ranks()

    @property
    def _count(self) -> str:
        return str(self._size) if self._size is not None else "all partitions as"

    def _collect(self) -> None:
        try:
            self._context.setJobGroup(self._group, "ringreduce.spark.run", interruptOnCancel=True)
            self._collected = self._ranks.collect()
        except Exception as error:
            self._error = error
        finally:
            self._has_ended.set()

    def _is_running(self) -> bool:
        """Whether Spark runs a task of it: then all of the stage."""
        tracker = self._context.statusTracker()
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                found = tracker.getStageInfo(stage)
                if found is not None and found.numActiveTasks:
                    return True
        return False

    def _of_ranks(self) -> list[Any]:
        rows = sorted(self._collected, key=lambda row: int(row.rank))
        size, now = len(rows), time.monotonic()
        raised = {
            row.rank: msgspec.msgpack.decode(row.raised, type=Raised)
            for row in rows
            if row.raised is not None
        }
        if not raised:
            return [CloudPickleSerializer().loads(bytes(row.result)) for row in rows]
        failures = [Failure(rank, 1, now, how, how=how.exception) for rank, how in raised.items()]
        cause = find_cause(failures, range(size))
        assert cause is not None
        raise worker_error(cause, size, cause.first.traceback)

    def _refuse(self, desk: Desk, error: Exception) -> None:
        """Raise what has ended the stage: the rank whose task Spark has lost, if that is known."""
        places, told = desk.of_attempt(self._job.restart)
        found = _FAILED_TASK.search(str(error))
        reason = _line_of(found[2] if found else str(error))
        if not places and "ModuleNotFoundError" in str(error):
            raise ConfigError(
                f"Spark's tasks cannot begin: {reason}",
                remedy="Their Python needs ringreduce[spark] too, in the same version: choose it "
                "by PYSPARK_PYTHON or spark.pyspark.python before Spark starts.",
            ) from error
        if not places and found is None:
            raise ConfigError(
                f"Spark has not started the tasks: {reason}",
                remedy="See its log; barrier stages need all tasks at once, and a fixed number of "
                "executors (no spark.dynamicAllocation).",
            ) from error
        ranks = {place.partition: place for place in places.values()}
        size = len(places) or self._size or 0
        lost = ranks.get(int(found[1])) if found else None
        failures = [
            Failure(rank, 1, when, how, how=how.exception) for rank, (when, how) in told.items()
        ]
        if lost is not None and lost.rank not in told:
            how = f"its task on {lost.host} was lost: {reason}"
            failures.append(Failure(lost.rank, 1, time.monotonic(), how=how))
        cause = find_cause(failures, range(size))
        if cause is not None:
            raise worker_error(cause, size, cause.first.traceback) from error
        which = f"task {found[1]}" if found else "a task"
        text = f"{which} of {size or 'several'} was lost ({reason}); all others were stopped"
        raise WorkerError(text, size=size) from error


def _session(context: SparkContext | None, dataframe: Any) -> SparkSession:
    if dataframe is not None:
        session = getattr(dataframe, "sparkSession", None)
        if not isinstance(session, SparkSession):
            raise ConfigError(
                f"dataframe is a {type(dataframe).__name__} of {type(dataframe).__module__}; "
                "accepted: a DataFrame of a SparkSession in this process, not of Spark Connect"
            )
        return session
    if isinstance(context, SparkSession):
        return context
    try:
        return SparkSession.builder.getOrCreate()
    except Exception as error:
        raise ConfigError(
            f"Spark does not start: {_line_of(str(error))}",
            remedy="It needs Java 17 or newer: install it, and set JAVA_HOME to its folder.",
        ) from error


def _rows(session: SparkSession, dataframe: Any, num_proc: int | None) -> Any:
    """What has as many partitions as there are ranks."""
    if dataframe is None:
        return session.range(0, num_proc, 1, num_proc)
    return dataframe if num_proc is None else dataframe.repartition(num_proc)


def _schema_of(dataframe: Any) -> bytes:
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        return to_arrow_schema(dataframe.schema).serialize().to_pybytes()  # type: ignore[no-any-return]
    except Exception as error:
        kinds = {field.name: field.dataType.typeName() for field in dataframe.schema.fields}
        vectors = [name for name, kind in kinds.items() if "vector" in kind.lower()]
        raise ConfigError(
            f"Arrow has no form for the DataFrame's columns: {_line_of(str(error))}",
            remedy=f"Turn {', '.join(vectors)} into lists: pyspark.ml.functions.vector_to_array."
            if vectors
            else "Select columns of numbers, texts and lists.",
        ) from error


def _line_of(text: str) -> str:
    """What a text of Spark's says first, or the exception of Python that it quotes."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    of_python = [line for line in lines if re.match(r"[A-Z]\w*(Error|Exception): ", line)]
    said = of_python[0] if of_python else next(iter(lines), "it gives no reason")
    said = re.sub(r"^(?:[\w.$]+\.\w+(?:Exception|Error): )+", "", said)
    return said.partition(". Consider")[0][:300]


def _show(line: str, is_error: bool) -> None:
    print(f"[0] {line}", file=sys.stderr if is_error else sys.stdout, flush=True)
