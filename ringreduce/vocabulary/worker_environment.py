"""Reads a launcher's environment, and makes that of workers, here and on other hosts."""

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from ringreduce.vocabulary.config import SETTINGS, Config, configured_secret, variable_of
from ringreduce.vocabulary.cores import bound_cores
from ringreduce.vocabulary.endpoints import port_range
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.secret import users_secret

_SECRET = ("RINGREDUCE_SECRET", "RINGREDUCE_SECRET_FILE")
# Which rank of a job a process is: a launcher that is itself a worker must not pass it on.
_PLACE = {variable_of(name) for name, setting in SETTINGS.items() if not setting.is_choice}
_RING = "RINGREDUCE_RING"  # which ring this process, or the one that has started it, is a rank of
# Which process at its place a rank is, and where those that come back meet the others.
_LIFE, _DOOR = "RINGREDUCE_LIFE", "RINGREDUCE_DOOR"
# Variables of one process or host alone, and the secret, which travels apart.
_OWN = {*_PLACE, _RING, _LIFE, _DOOR, "RINGREDUCE_HOST_ID", *_SECRET}
# Numerical libraries read these when they load; the launcher sets them for each worker.
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("NUMBA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"),
)


def worker_environment(
    config: Config,
    threads: int,
    *,
    decided: Collection[str] = (),
    variables: Mapping[str, str] | None = None,
    columns: int | None = None,
    cores: int | None = None,
    skips_breakpoints: bool = False,
) -> dict[str, str]:
    """This process's environment, plus the variables of one worker.

    Thread variables that the user has set are kept. Of the user's choices those in `decided` come
    from `config`; the others stay as in the environment, to which `variables` are added before.
    `columns` is the width of the terminal that shows its lines, if there is one; `cores` how many
    the ranks of its host have together, if each has its own.
    """
    inherited = {k: value for k, value in os.environ.items() if k not in {_LIFE, _DOOR}}
    environment = {**inherited, **(variables or {})}
    environment = {k: value for k, value in environment.items() if k not in {*_PLACE, _RING}}
    ours = _PLACE | {variable_of(name) for name in decided}
    environment |= {name: text for name, text in config.to_environment().items() if name in ours}
    for name in _THREAD_VARIABLES:
        environment.setdefault(name, str(threads))
    # At least two: one may wait in a collective while the input pipeline uses the other.
    environment.setdefault("TF_NUM_INTEROP_THREADS", str(max(2, threads)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment.pop("RINGREDUCE_CORES", None)  # As a worker of another job has it.
    if cores is not None:
        environment["RINGREDUCE_CORES"] = str(cores)
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    if skips_breakpoints:
        environment["PYTHONBREAKPOINT"] = "0"
    return environment


def door_variable(door: str) -> dict[str, str]:
    """The variable from which all ranks of a job have the name of its door."""
    return {_DOOR: door}


def life_variable(life: int) -> dict[str, str]:
    """The variable of the process of that number at its place; none of the first, which is 0."""
    return {_LIFE: str(life)} if life else {}


def own_life() -> int:
    """Which process at its rank's place this one is: 0 for the first, 1 once that was lost."""
    return int(os.environ.get(_LIFE) or 0)


def door_name() -> str:
    """The name at which ranks that come back meet the others; empty: none can come back."""
    return os.environ.get(_DOOR, "")


def are_threads_chosen() -> bool:
    """Whether the user has set with how many threads TensorFlow computes."""
    return bool(os.environ.get("TF_NUM_INTRAOP_THREADS"))


def log_dir_wanted() -> str:
    """The folder for flight records in the user's environment; empty for none."""
    return os.environ.get("RINGREDUCE_LOG_DIR", "")


def ports_wanted(variables: Mapping[str, str] | None = None) -> range | None:
    """The ports of ``RINGREDUCE_PORTS``, in `variables` or else in this process's environment."""
    return port_range({**os.environ, **(variables or {})}.get("RINGREDUCE_PORTS", ""))


def join_timeout(timeout_s: float | None) -> float:
    """How long ranks wait for each other, by `timeout_s` or the user's variables."""
    config = Config.from_environment(rank=0, size=1, job_id="", rendezvous="", timeout_s=timeout_s)
    return config.join_timeout_s


def shared_secret(*, is_local: bool) -> str:
    """The secret of launchers that meet: as `configured_secret`, or the file in the user's home.

    If they meet within this host (`is_local`), that file may be made here. Raises ConfigError if
    there is none, or as `configured_secret`.
    """
    home = os.environ.get("HOME", "")
    if secret := configured_secret() or users_secret(home, makes_one=is_local):
        return secret
    raise ConfigError(
        "launchers on several hosts need a secret that all of them have, and there is none",
        remedy="Set RINGREDUCE_SECRET_FILE on each host to a file with the same text of 16 "
        "characters or more (`openssl rand -hex 32`), mode 0600; or make ~/.ringreduce/secret so.",
    )


def compute_threads() -> int:
    """With how many threads TensorFlow computes here, unless the program chooses."""
    return int(os.environ.get("TF_NUM_INTRAOP_THREADS") or 0) or len(bound_cores())


def enter_job(
    config: Config, threads: int, *, decided: Collection[str], variables: Mapping[str, str]
) -> None:
    """Make this process a worker: it gets the environment of `worker_environment`."""
    environment = worker_environment(config, threads, decided=decided, variables=variables)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def choose_hash_seed() -> bool:
    """Choose the order of sets of texts in the next Python, the same in all; False: it is."""
    is_chosen = "PYTHONHASHSEED" in os.environ
    os.environ.setdefault("PYTHONHASHSEED", "0")
    return not is_chosen


@contextlib.contextmanager
def chosen_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """In the block `variables` are set, in a process that does other things afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def leave_job() -> None:
    """Remove from the environment which rank of a job this process was, and the job's secret."""
    for name in _OWN:
        os.environ.pop(name, None)


def tell_children(config: Config, members: Sequence[int], rank: int, count: int) -> None:
    """Tell children that they are no ranks: this process is, one of `count` on its host."""
    if config.size > 1 and parents_ring(config) is None:
        local = {"local_rank": rank, "local_size": count}
        ring = os.getpid(), (config.job_id, config.rank), members, local
        os.environ[_RING] = json.dumps(ring)


def parents_ring(config: Config) -> tuple[Config, Sequence[int]] | None:
    """The settings and members of a ring in which a parent of this process is that rank; or None.

    None too where the rank's process has started another program (`os.execv`). ConfigError if the
    variable that says so is not ours.
    """
    text = os.environ.get(_RING, "[0, 0, 0, 0]")
    try:
        process, place, members, local = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"cannot read {_RING}={text!r:.80}",
            remedy="Unset it: by this variable ringreduce itself tells the children of a rank, "
            "such as workers of a data pipeline, which rank their parent is.",
        ) from None
    if process == os.getpid() or place != [config.job_id, config.rank]:
        return None
    # The files of its folders are the parent's.
    return replace(config, **local, log_dir="", trace_dir=""), members


def forwarded_environment() -> dict[str, str]:
    """This process's variables of ringreduce, for ranks on other hosts.

    Not the secret, which travels apart; nor what holds for this host or process alone.
    """
    prefix = "RINGREDUCE_"
    return {k: v for k, v in os.environ.items() if k.startswith(prefix) and k not in _OWN}


def chosen_variables(names: Collection[str]) -> dict[str, str]:
    """The variables of NAME or NAME=VALUE; ConfigError: one is not set here, or has no name."""
    variables = {}
    for entry in names:
        name, is_given, value = entry.partition("=")
        if not name or any(letter.isspace() for letter in name):
            raise ConfigError(
                f"--env {entry[:80]!r} names no variable; accepted: NAME or NAME=VALUE"
            )
        if not is_given and name not in os.environ:
            raise ConfigError(
                f"--env {name}: it is not set here", remedy=f"Give it a value: --env {name}=VALUE."
            )
        variables[name] = value if is_given else os.environ[name]
    return variables


def import_path() -> str:
    """Where Python looks for packages besides its own places."""
    return os.environ.get("PYTHONPATH", "")


def environment_without_secret() -> dict[str, str]:
    """This process's environment, for programs that need not know the job's secret."""
    return {name: value for name, value in os.environ.items() if name not in _SECRET}
