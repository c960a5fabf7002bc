"""Settings of one communicator, and what the environment says of them.

Arguments come before our variables, these before those of other launchers
(`ringreduce.vocabulary.launchers`), and defaults last. Without a launcher a process is a world of
one; with only some of the variables it raises `ConfigError` rather than train alone.

Each setting is listed once, as a field of `Config`, from which its variable, the launcher's
option, its check and the comparison between ranks follow.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from ringreduce.vocabulary import launched
from ringreduce.vocabulary.endpoints import are_patterns, host_and_port, port_range
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.secret import check_secret, read_secret
from ringreduce.vocabulary.times import Times

# A rank needs all four to find the others.
_LAUNCH = ("RINGREDUCE_RANK", "RINGREDUCE_SIZE", "RINGREDUCE_RENDEZVOUS", "RINGREDUCE_JOB_ID")
# Further variables that are read, besides the settings.
_FURTHER = (
    *("RINGREDUCE_LAUNCHER", "RINGREDUCE_SECRET_FILE"),
    *("RINGREDUCE_NATIVE", "RINGREDUCE_TIME_SCALE", "RINGREDUCE_PROFILE", "RINGREDUCE_VERIFY"),
    *("RINGREDUCE_ELASTIC", "RINGREDUCE_RING"),
    *("RINGREDUCE_COMEBACK", "RINGREDUCE_LIFE", "RINGREDUCE_DOOR"),
    *("RINGREDUCE_BIND", "RINGREDUCE_CORES"),
    *("RINGREDUCE_LEAVE_SIGNAL", "RINGREDUCE_LEAVE_S", "RINGREDUCE_LEAVE_CODE"),
)


def time_scale() -> float:
    """The factor of `Times`: ``RINGREDUCE_TIME_SCALE``, for tests. ConfigError unless 0.01..100."""
    text = os.environ.get("RINGREDUCE_TIME_SCALE", "1")
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 100:
        raise ConfigError(f"RINGREDUCE_TIME_SCALE is {text[:80]!r}; accepted: 0.01 to 100")
    return scale


TIMES = Times().scaled(time_scale())


class Setting(NamedTuple):
    """Metadata of a field of `Config`."""

    help: str  # its meaning, in a clause
    reads: type = str  # makes a value from a variable's text
    # Whether a value is possible, independently of other settings.
    accepts: Callable[[Any], bool] = lambda value: True
    accepted: str = ""  # the possible values, in words
    values: tuple[str, ...] = ()  # all of them, if they are few
    is_choice: bool = True  # whether the user chooses it; else the launcher sets it for each rank
    is_agreed: bool = False  # whether it must be equal on all ranks


def _setting(
    default: Any,
    help: str,
    accepted: str = "",
    accepts: Any = lambda value: True,
    *,
    repr: bool = True,
    **more: Any,
) -> Any:
    """A field of `Config`, of the type of its default; None stands for a whole number."""
    setting = Setting(help, int if default is None else type(default), accepts, accepted, **more)
    return field(default=default, repr=repr, metadata={"setting": setting})


# A field that says which rank this is, and how it meets the others.
_place = partial(_setting, is_choice=False)


def _one_of(values: tuple[str, ...], help: str) -> Any:
    """A field of `Config` that is one of `values`, by default the first; equal on all ranks."""
    return _setting(
        values[0], help, ", ".join(values), values.__contains__, values=values, is_agreed=True
    )


def _seconds(default: float, help: str) -> Any:
    """A field of `Config` that is a time limit."""
    return _setting(default, help, "more than 0 seconds", lambda value: value > 0)


@dataclass(frozen=True)
class Config:
    """Settings of one communicator, checked when made.

    Raises:
        ConfigError: a value is out of range; the text says which and where it came from.
    """

    rank: int = _place(0, "this process's number, 0 <= rank < size")
    size: int = _place(1, "number of processes in the job")
    local_rank: int | None = _place(
        None, "this process's number on its host; None: counted when the ring forms"
    )
    local_size: int | None = _place(
        None, "number of processes on this host; None: counted when the ring forms"
    )
    rendezvous: str = _place("", "`host:port` that rank 0 listens on while the ring forms")
    # The launcher opens it, so that the port is taken before any rank connects.
    rendezvous_fd: int | None = _place(None, "a listening socket that rank 0 inherited for it")
    job_id: str = _place("", "any text, equal on all ranks of a job and different between jobs")
    restart: int = _place(0, "how often the launcher has started all workers again")
    # Short enough that a job with a stopped or hanging rank does not cost money for minutes.
    timeout_s: float = _seconds(30.0, "seconds without progress before a collective gives up")
    # Long enough for a validation or checkpoint on one rank.
    busy_timeout_s: float = _seconds(
        600.0,
        "seconds to wait for a rank that is alive and in user code (it saves, evaluates, uploads); "
        "`timeout_s` counts where that is larger",
    )
    # Ranks import TensorFlow before they meet: a minute on a cold, crowded machine.
    join_timeout_s: float = _seconds(
        120.0, "seconds for all ranks to meet; `timeout_s` where only that is given"
    )
    link_timeout_s: float = _setting(
        TIMES.link_timeout_s,
        "seconds that a connection may carry nothing of what is due, while both its ends are "
        "alive, before it counts as dead",
        f"at least {TIMES.link_timeout_min_s:g} seconds",
        lambda value: value >= TIMES.link_timeout_min_s,
    )
    # Longer segments wake fewer threads: with four ranks on two cores 1 MiB is 12 % faster than
    # 512 KiB, and 2 MiB is slower (docs/performance.md). Multiples of 64 keep elements whole and
    # segments aligned.
    segment_bytes: int = _setting(
        1 << 20,
        "payload of a full frame, equal on all ranks",
        "a multiple of 64 up to 4194304",
        lambda value: value % 64 == 0 and 64 <= value <= 1 << 22,
        is_agreed=True,
    )
    # More made no difference beyond noise on short links (docs/performance.md); they are for
    # a fast, long line that a single connection cannot fill.
    streams: int = _setting(
        1,
        "connections to the next rank that large messages are spread over, equal on all ranks",
        "1 to 16",
        lambda value: 1 <= value <= 16,
        is_agreed=True,
    )
    transport: str = _one_of(
        ("auto", "shm", "zmq"),
        "how ranks reach each other: auto (shared memory within a host, ZeroMQ between hosts), "
        "shm or zmq (that alone); equal on all ranks",
    )
    # Different names make processes of one host act as several hosts.
    host_id: str = _setting(
        "",
        "name of this host, where the system's own does not tell hosts apart",
        "at most 255 characters",
        lambda value: len(value) <= 255,
    )
    iface: str = _setting(
        "",
        "which addresses of this host ranks of other hosts may use: interfaces (`eth0`, `ib*`), "
        "CIDR blocks, or exclusions (`^docker0`), separated by commas; empty: all but loopback, "
        "link-local ones and virtual bridges",
        "names of interfaces and CIDR blocks, each excluded by a ^ before it, separated by commas",
        are_patterns,
    )
    ports: str = _setting(
        "",
        "ports to listen on, as first-last; empty: any free ones",
        "first-last with ports of 1 to 65535, such as 20000-20063",
        lambda value: not value or port_range(value) is not None,
    )
    log_dir: str = _setting(
        "", "folder for flight records (`ringreduce report`), made if needed; empty: none"
    )
    trace_dir: str = _setting(
        "", "folder for what each rank does when (`ringreduce trace`), made if needed; empty: none"
    )
    # Never shown, logged or passed as an argument of a program.
    secret: str = _setting(
        "",
        "text of 16 characters or more that only ranks of this job know; needed off the loopback "
        "interface. Leave it to RINGREDUCE_SECRET_FILE rather than write it into a program",
        repr=False,
    )
    # Ranks authenticate each other in every case (`ringreduce.transport.security`).
    encryption: str = _one_of(
        ("auto", "on", "off"),
        "whether data between ranks is encrypted and authenticated: auto (between hosts), on or "
        "off (for networks that are trusted, and known to change nothing); equal on all ranks",
    )

    @property
    def who(self) -> dict[str, Any]:
        """This process as errors name it: its `rank` in the job, and the job's `size`."""
        return {"rank": self.rank, "size": self.size}

    def __post_init__(self) -> None:
        self._require("size", self.size >= 1, "at least 1")
        self._require("rank", 0 <= self.rank < self.size, f"0 to {self.size - 1}, below size")
        if self.local_size is not None:
            self._require("local_size", 1 <= self.local_size <= self.size, f"1 to {self.size}")
        if self.local_rank is not None:
            limit = (self.local_size or self.size) - 1
            self._require("local_rank", 0 <= self.local_rank <= limit, f"0 to {limit}")
        for name, setting in SETTINGS.items():
            self._require(name, setting.accepts(getattr(self, name)), setting.accepted)
        if self.secret:
            check_secret(self.secret, "the argument secret or the variable RINGREDUCE_SECRET")
        if self.size > 1:
            host_and_port(self.rendezvous)

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, from the argument {name} or the variable "
                f"{variable_of(name)}; accepted: {accepted}"
            )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **arguments: object
    ) -> Config:
        """Settings from `arguments` and, where one is absent or None, from the variables.

        The variables are the process's own, or `environment`. Raises ConfigError if an argument is
        unknown, a variable cannot be read or is out of range, only some launch variables are set,
        or two launchers contradict each other.
        """
        variables = os.environ if environment is None else environment
        check_names(arguments, SETTINGS)
        values = {name: value for name, value in arguments.items() if value is not None}
        is_ours = any(name in values or variable_of(name) in variables for name in ("rank", "size"))
        place = None if is_ours else launched.find_launched_rank(variables)
        for name, setting in SETTINGS.items():
            text = variables.get(variable_of(name))
            if name not in values and text is not None:
                values[name] = _read(variable_of(name), text, setting)
        # Once for each host, where ranks know which of its ranks they are.
        rank, local = values.get("rank", 0), values.get("local_rank")
        if place is not None:
            rank, local = place.rank, place.local_rank
        if (rank if local is None else local) == 0:
            launched.warn_of_misspelt(variables, {*map(variable_of, SETTINGS), *_FURTHER})
        if place is None:
            _refuse_half_a_launch(values, variables)
        if not values.get("secret"):
            values["secret"] = configured_secret(variables)
        if place is not None:
            launched.take_launched_rank(values, place, variables.get("HOME", ""))
        if "timeout_s" in values:
            # A user who sets one limit means it for the rendezvous too.
            values.setdefault("join_timeout_s", values["timeout_s"])
        return cls(**values)  # type: ignore[arg-type]

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes this Config again."""
        values = {variable_of(name): getattr(self, name) for name in SETTINGS}
        return {name: str(value) for name, value in values.items() if value is not None}

    def agreed(self) -> dict[str, int]:
        """The settings that must be equal on all ranks, as numbers; of names, the index."""
        return {
            name: setting.values.index(value) if setting.values else value
            for name, setting in SETTINGS.items()
            if setting.is_agreed
            for value in (getattr(self, name),)
        }


SETTINGS: Mapping[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Config)}


def describe(names: Collection[str]) -> str:
    """The settings `names` as text for a docstring."""
    lines = []
    for name in names:
        default = getattr(Config, name)
        shown = f" ({default})" if isinstance(default, float | int) else ""
        text = f"{name}: {SETTINGS[name].help}{shown}."
        lines.append(textwrap.fill(text, 96, initial_indent=" " * 8, subsequent_indent=" " * 12))
    return "\n".join(lines)


Config.__doc__ = f"{Config.__doc__}\n    Attributes:\n{describe(SETTINGS)}\n    "


def check_names(names: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError if one of `names` is no setting that is `known`."""
    if unknown := sorted({*names} - {*known}):
        raise ConfigError(
            f"got the unknown setting {', '.join(unknown)}",
            remedy=f"Known are {', '.join(sorted(known))}.",
        )


def variable_of(setting: str) -> str:
    """The variable of a setting."""
    return f"RINGREDUCE_{setting.upper()}"


def _refuse_half_a_launch(values: Mapping[str, object], variables: Mapping[str, str]) -> None:
    passed = {variable_of(name) for name in values}
    present = [name for name in _LAUNCH if name in variables or name in passed]
    missing = [name for name in _LAUNCH if name not in present]
    alone = values.get("size", 1) == 1 and not any(name in variables for name in _LAUNCH)
    if present and missing and not alone:
        raise ConfigError(
            f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            remedy="Start the workers with `ringreduce run -n N script.py` or another launcher, or "
            f"set all of {', '.join(_LAUNCH)}; set none of them for a single process.",
        )


def configured_secret(environment: Mapping[str, str] | None = None) -> str:
    """The secret in the user's variables or the file they name; empty for none. Or ConfigError."""
    variables = os.environ if environment is None else environment
    if secret := variables.get("RINGREDUCE_SECRET"):
        check_secret(secret, "the variable RINGREDUCE_SECRET")
        return secret
    path = variables.get("RINGREDUCE_SECRET_FILE")
    return read_secret(path) if path else ""


def color_wanted() -> bool:
    """Whether the user's environment allows coloured output (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def native_wanted() -> bool:
    """Whether the native library may be used: ``RINGREDUCE_NATIVE=0`` hides it."""
    return os.environ.get("RINGREDUCE_NATIVE", "1") != "0"


def profile_wanted() -> bool:
    """Whether to profile training: ``RINGREDUCE_PROFILE``; ``ringreduce run --profile`` sets it."""
    return os.environ.get("RINGREDUCE_PROFILE", "0") not in ("", "0")


def binding_wanted(variables: Mapping[str, str] | None = None) -> bool | None:
    """Whether a launcher gives each rank cores of its own; None: where that is plain to pay.

    ``RINGREDUCE_BIND``, in `variables` or this process's environment; ConfigError unless 0 or 1.
    """
    text = {**os.environ, **(variables or {})}.get("RINGREDUCE_BIND", "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"RINGREDUCE_BIND is {text[:80]!r}; accepted: 0 or 1")
    return text == "1" if text else None


def cores_of_ranks() -> int | None:
    """How many cores the ranks of this host have together, where each has its own.

    ``RINGREDUCE_CORES``, which the launcher sets; None: each may use those that this process may.
    """
    return int(os.environ.get("RINGREDUCE_CORES") or 0) or None


def elastic_minimum(variables: Mapping[str, str] | None = None) -> int | None:
    """How many ranks must be left to go on when others are lost; None: the job ends with the first.

    ``RINGREDUCE_ELASTIC``, in `variables` or this process's environment; ConfigError if below 1.
    """
    text = {**os.environ, **(variables or {})}.get("RINGREDUCE_ELASTIC", "")
    if text and not (text.isdecimal() and int(text)):
        raise ConfigError(f"RINGREDUCE_ELASTIC is {text[:80]!r}; accepted: 1 or more")
    return int(text) if text else None


def comeback_wanted(variables: Mapping[str, str] | None = None) -> bool | None:
    """Whether a lost rank is to be started again; None: nobody has chosen.

    ``RINGREDUCE_COMEBACK``, in `variables` or this process's environment.
    """
    text = {**os.environ, **(variables or {})}.get("RINGREDUCE_COMEBACK", "")
    return text != "0" if text else None


def leave_signal() -> str:
    """The name of the signal by which a rank is told to go: ``RINGREDUCE_LEAVE_SIGNAL``, or TERM.

    ConfigError unless that is TERM or USR2.
    """
    text = os.environ.get("RINGREDUCE_LEAVE_SIGNAL", "") or "TERM"
    name = text.upper().removeprefix("SIG")
    if name == "USR1":
        raise ConfigError(
            f"RINGREDUCE_LEAVE_SIGNAL is {text[:80]!r}, by which ranks write their flight records",
            remedy="Take USR2: for Slurm, --signal=USR2@60.",
        )
    if name not in ("TERM", "USR2"):
        raise ConfigError(f"RINGREDUCE_LEAVE_SIGNAL is {text[:80]!r}; accepted: TERM or USR2")
    return f"SIG{name}"


def leave_limit_s() -> float:
    """How long a rank that is told to go waits for a step at which it can: ``RINGREDUCE_LEAVE_S``.

    10 s; ConfigError unless above 0.
    """
    text = os.environ.get("RINGREDUCE_LEAVE_S", "") or "10"
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < float("inf"):
        raise ConfigError(f"RINGREDUCE_LEAVE_S is {text[:80]!r}; accepted: seconds, above 0")
    return limit_s


def leave_code() -> int:
    """The exit code of a rank that has left with notice: ``RINGREDUCE_LEAVE_CODE``, or 0.

    ConfigError unless 0 to 255.
    """
    text = os.environ.get("RINGREDUCE_LEAVE_CODE", "") or "0"
    if not (text.isdecimal() and int(text) <= 255):
        raise ConfigError(f"RINGREDUCE_LEAVE_CODE is {text[:80]!r}; accepted: 0 to 255")
    return int(text)


def recording_wanted(*, takes: bool = False) -> tuple[int, str] | None:
    """How many steps of `rr.fit` to record, and into which folder; ``ringreduce verify`` says so.

    ``RINGREDUCE_VERIFY`` has both, separated by a space; once taken, it is gone.
    """
    text = os.environ.pop("RINGREDUCE_VERIFY", "") if takes else os.environ.get("RINGREDUCE_VERIFY")
    steps, _, folder = (text or "").partition(" ")
    return (int(steps), folder) if folder else None


def _read(variable: str, text: str, setting: Setting) -> object:
    try:
        return setting.reads(text)
    except ValueError:
        noun = "a number" if setting.reads is float else "a whole number"
        raise ConfigError(f"{variable} is {text[:80]!r}; accepted: {noun}") from None
