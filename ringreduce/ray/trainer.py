"""Ray Train: a backend that forms the ring, and a trainer that uses it."""

from collections.abc import Callable
from typing import Any

from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ringreduce.communicator.hosted import Choices, leaving
from ringreduce.ray.job import form


class RingReduceConfig(BackendConfig):
    """Makes Ray Train's workers the ranks of a ring: ``rr.init()`` works in the training function.

    Each time that Ray starts the workers, also after a failure, they form a new ring with a secret
    of its own. When the training function returns or raises, the worker leaves the ring; an
    exception goes to the other ranks, which fail at once and quote it.

    Args:
        settings: what a user chooses of `Config`, such as ``timeout_s`` or ``transport``; where
            absent, variables of the program that makes this object, then of the workers
            (``RunConfig(worker_runtime_env=...)``).

    Raises:
        ConfigError: a setting is unknown or impossible.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.choices = Choices(settings)
        self.starts = 0

    @property
    def backend_cls(self) -> type[Backend]:
        """The class whose methods Ray Train calls when it has started the workers."""
        return _RingReduceBackend

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """The context in which Ray Train calls the training function."""
        return leaving

    def to_dict(self) -> dict[str, Any]:
        """The settings, for Ray's dashboard."""
        return dict(self.choices.settings)


class _RingReduceBackend(Backend):
    """Runs in Ray Train's controller, which keeps the config over all restarts."""

    def on_start(self, worker_group: Any, backend_config: RingReduceConfig) -> None:
        size, submit = len(worker_group), worker_group.execute_single_async
        form(size, submit, backend_config.choices, backend_config.starts)
        backend_config.starts += 1


class RingReduceTrainer(DataParallelTrainer):
    """Ray Train's `DataParallelTrainer`, whose workers are the ranks of a ring.

    ``ScalingConfig(num_workers=...)``, ``RunConfig`` with its ``FailureConfig`` and
    ``CheckpointConfig``, `ray.train.report`, `ray.train.get_checkpoint` and
    `ray.train.get_dataset_shard` work as with Ray's own trainers.

    Args:
        train_loop_per_worker: what each worker calls, with `train_loop_config` if it takes an
            argument; it calls ``rr.init()``.
        ringreduce_config: settings of the ring.
        options: those of `DataParallelTrainer`: ``scaling_config``, ``run_config``, ``datasets``,
            ``dataset_config`` and so on.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        ringreduce_config: RingReduceConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=ringreduce_config or RingReduceConfig(),
            **options,
        )
