"""Completes settings by what another launcher than ours says, and logs what a user should know."""

import functools
import logging
import os
from collections.abc import Collection, Mapping

from ringreduce.vocabulary.launchers import LaunchedRank, find
from ringreduce.vocabulary.secret import users_secret

_log = logging.getLogger(__name__)

_PREFIX = "RINGREDUCE_"
_LIKENESS = 0.8  # TIMEOUT is like TIMEOUT_S, and PORT like PORTS


def find_launched_rank(variables: Mapping[str, str]) -> LaunchedRank | None:
    """Find the rank; warn of what looks like ranks that each train alone, and of idle cores."""
    place = find(variables)
    if place is not None and place.launcher.key == "openmpi" and place.rank == 0:
        _warn_of_binding(place.local_size or 1)
    if place is None and (why := _why_alone(variables)):
        _log_once(f"this process trains alone: {why}; RINGREDUCE_LAUNCHER=none hides this warning")
    return place


def warn_of_misspelt(variables: Collection[str], known: Collection[str]) -> None:
    """Warn, once, of variables that nothing reads, though they look like one of those `known`."""
    for name in sorted({*variables} - {*known}):
        if not name.startswith(_PREFIX):
            continue
        import difflib  # Rarely needed.

        ends = [each.removeprefix(_PREFIX) for each in known]
        if close := difflib.get_close_matches(name.removeprefix(_PREFIX), ends, 1, _LIKENESS):
            _log_once(f"nothing reads the variable {name}; is {_PREFIX}{close[0]} meant?")


def take_launched_rank(values: dict[str, object], place: LaunchedRank, home: str) -> None:
    """Complete `values`, settings by name, by a launcher's; those that are there stay.

    Without a secret, the one in the user's `home` counts. Raises ConfigError if nothing gives an
    address, or that secret cannot be used.
    """
    values["rank"], values["size"] = place.rank, place.size
    if place.local_size is not None and not {"local_rank", "local_size"} & set(values):
        values["local_rank"], values["local_size"] = place.local_rank, place.local_size
    text = f"this is {place}"
    if place.size > 1:
        values.setdefault("job_id", place.job or values.get("rendezvous", ""))
        if "rendezvous" not in values:
            values["rendezvous"] = place.rendezvous()
        text += f"; the ranks meet at {values['rendezvous']}"
        if not values["secret"]:
            makes_one = place.is_local or place.shares_home
            values["secret"] = users_secret(home, makes_one=makes_one)
            text += ", with the secret in ~/.ringreduce" if values["secret"] else ", without secret"
    _log_once(text, logging.INFO)


def _why_alone(variables: Mapping[str, str]) -> str:
    """Why a process that no launcher has started looks like one of several; empty: it does not."""
    if variables.get("RINGREDUCE_LAUNCHER"):
        return ""
    tasks = variables.get("SLURM_NTASKS", "")
    is_script = bool(variables.get("SLURM_JOB_ID")) and not variables.get("SLURM_STEP_ID")
    if is_script and tasks.isdecimal() and int(tasks) > 1:
        return (
            f"its Slurm job has {int(tasks)} tasks, and srun has not started it. `srun python ...` "
            "starts all"
        )
    rank, size = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
    # A rank other than 0 is one of several.
    is_meant = variables.get("MASTER_ADDR") or (rank.isdecimal() and int(rank) > 0)
    if not is_meant or bool(rank) == bool(size) or size == "1":
        return ""
    there, missing = ("RANK", "WORLD_SIZE") if rank else ("WORLD_SIZE", "RANK")
    return (
        f"{there}={(rank or size)[:20]} is set, and {missing} is not, PyTorch's variables. Unset "
        "what is left from before, or set both in each process"
    )


def _warn_of_binding(local_size: int) -> None:
    """Warn if mpirun, this process's parent, has left most cores to no rank of this host.

    By default it binds each of two ranks to one core, and more to a part of the host.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    try:
        bound, all_cores = (len(os.sched_getaffinity(process)) for process in (0, os.getppid()))
    except OSError:  # Another user's, or it has ended.
        return
    if bound * local_size * 2 <= all_cores:
        _log_once(
            f"mpirun has bound this process to {bound} of {all_cores} cores, and the host's other "
            "ranks alike; `mpirun --bind-to none` lets them use all",
        )


@functools.cache
def _log_once(text: str, level: int = logging.WARNING) -> None:
    _log.log(level, "%s", text)
