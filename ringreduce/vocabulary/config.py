"""Settings of one communicator, and the only reader of the environment.

Explicit arguments come first, then the variables below, then the defaults. With none of
the launch variables set a process is a world of one; with some set and others missing it
is a broken launch, and `ConfigError` says so rather than letting it train alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.times import Times

__all__ = [
    "ENCRYPTIONS",
    "INTEGRITIES",
    "TIMES",
    "TRANSPORTS",
    "Config",
    "color_wanted",
    "configured_secret",
    "log_dir_wanted",
    "native_wanted",
    "time_scale",
    "worker_environment",
]


# Without these four a rank does not know its place.
_LAUNCH = ("RINGREDUCE_RANK", "RINGREDUCE_SIZE", "RINGREDUCE_RENDEZVOUS", "RINGREDUCE_JOB_ID")

# Limits and choices: no place in the ring, so the user's own pass on to the workers.
_CHOICES = (
    "RINGREDUCE_TIMEOUT_S",
    "RINGREDUCE_JOIN_TIMEOUT_S",
    "RINGREDUCE_LINK_TIMEOUT_S",
    "RINGREDUCE_SEGMENT_BYTES",
    "RINGREDUCE_STREAMS",
    "RINGREDUCE_TRANSPORT",
    "RINGREDUCE_INTEGRITY",
    "RINGREDUCE_HOST_ID",
    "RINGREDUCE_LOG_DIR",
    "RINGREDUCE_SECRET",
    "RINGREDUCE_ENCRYPTION",
)

# How ranks reach each other: `auto` takes shared memory within a host where it can be had and
# ZeroMQ between hosts; `shm` insists on it; `zmq` is ZeroMQ everywhere.
TRANSPORTS = ("auto", "shm", "zmq")

# What crosses a network: `auto` is encrypted between hosts and not on loopback addresses; `on`
# encrypts everywhere; `off` nowhere, for networks that are trusted. Ranks prove who they are
# in each of them (`ringreduce.transport.security`).
ENCRYPTIONS = ("auto", "on", "off")
# Whether frames over ZeroMQ carry a checksum of their payload: `auto` where they leave the host
# and nothing else guards them (`ringreduce.pure.checksum.is_wanted`).
INTEGRITIES = ("auto", "crc32", "off")

# 16 characters of base64 are 96 bits. What is longer than 4096 is no secret but a wrong file.
_SECRET_CHARACTERS_MIN, _SECRET_CHARACTERS_MAX = 16, 4096

# A job that is merely slow should survive a long validation or checkpoint on one rank; a job
# that hangs should not burn money for minutes.
TIMEOUT_S = 30.0
# Ranks import TensorFlow before they meet: on a cold, crowded machine that takes a minute.
JOIN_TIMEOUT_S = 120.0
# Fewer, longer segments wake fewer threads: with four ranks on two cores 1 MiB is 12 % faster
# than 512 KiB, and 2 MiB is slower again (docs/performance.md).
SEGMENT_BYTES = 1 << 20
# More make no difference beyond noise on the machine and the links that were measured
# (docs/performance.md); a single connection that cannot fill a fast, long line is what they
# are for.
STREAMS = 1


def time_scale(environment: Mapping[str, str] | None = None) -> float:
    """What `Times` is multiplied by: ``RINGREDUCE_TIME_SCALE``, for tests alone; default 1.

    Raises:
        ConfigError: it is not a number from 0.01 to 100.
    """
    text = (os.environ if environment is None else environment).get("RINGREDUCE_TIME_SCALE", "1")
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0.01 <= scale <= 100:
        raise ConfigError(f"RINGREDUCE_TIME_SCALE is {text[:80]!r}; accepted: 0.01 to 100")
    return scale


# The time constants of this process.
TIMES = Times().scaled(time_scale())

# Read by the numerical libraries when they load; set for each worker by the launcher.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)


@dataclass(frozen=True)
class Config:
    """Settings of one communicator; see each field. Checked when made.

    Attributes:
        rank: this process's number, 0 <= rank < size.
        size: number of processes in the job.
        local_rank: this process's number among those on its host; None: counted when the
            ring forms.
        local_size: number of processes on this host; None: counted when the ring forms.
        rendezvous: ``host:port`` that rank 0 listens on while the ring forms.
        rendezvous_fd: a listening socket that rank 0 inherited for it; the launcher opens it
            so that the port is taken before anyone needs it.
        job_id: equal on all ranks of a job, different from any other job's.
        timeout_s: seconds without progress after which a call gives up.
        join_timeout_s: seconds for all ranks to meet.
        link_timeout_s: seconds that a connection may carry nothing of what is due before it
            counts as dead, while both its ends are alive.
        segment_bytes: payload of a full frame; equal on all ranks.
        streams: connections to the next rank that large messages are spread over, each with
            an I/O thread of its own; equal on all ranks.
        transport: one of `TRANSPORTS`; equal on all ranks.
        integrity: one of `INTEGRITIES`; equal on all ranks.
        host_id: name of this host, equal for the ranks that share its memory; empty: the
            system's own. Different names make processes of one host act as if they were on
            several, which is how tests form rings of hosts.
        log_dir: folder for flight records (`ringreduce report`), written when the ring breaks
            and on SIGUSR1; made when it is not there; empty: none are written.
        secret: what only ranks of this job know; needed off the loopback interface. It is never
            shown, logged or passed as an argument of a program.
        encryption: one of `ENCRYPTIONS`; equal on all ranks.

    Raises:
        ConfigError: a value is out of range; the text says which and where it came from.
    """

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    rendezvous: str = ""
    rendezvous_fd: int | None = None
    job_id: str = ""
    timeout_s: float = TIMEOUT_S
    join_timeout_s: float = JOIN_TIMEOUT_S
    link_timeout_s: float = TIMES.link_timeout_s
    segment_bytes: int = SEGMENT_BYTES
    streams: int = STREAMS
    transport: str = "auto"
    integrity: str = "auto"
    host_id: str = ""
    log_dir: str = ""
    secret: str = field(default="", repr=False)
    encryption: str = "auto"

    def __post_init__(self) -> None:
        self._require("size", self.size >= 1, "at least 1")
        self._require("rank", 0 <= self.rank < self.size, f"0 to {self.size - 1}, below size")
        if self.local_size is not None:
            limit = self.size
            self._require("local_size", 1 <= self.local_size <= limit, f"1 to {limit}")
        if self.local_rank is not None:
            limit = (self.local_size or self.size) - 1
            self._require("local_rank", 0 <= self.local_rank <= limit, f"0 to {limit}")
        self._require("timeout_s", self.timeout_s > 0, "more than 0 seconds")
        self._require("join_timeout_s", self.join_timeout_s > 0, "more than 0 seconds")
        least_s = TIMES.link_timeout_min_s
        self._require(
            "link_timeout_s", self.link_timeout_s >= least_s, f"at least {least_s:g} seconds"
        )
        # Multiples of 64 keep every element whole and every segment aligned.
        aligned = self.segment_bytes % 64 == 0 and 64 <= self.segment_bytes <= 1 << 22
        self._require("segment_bytes", aligned, "a multiple of 64 up to 4194304")
        self._require("streams", 1 <= self.streams <= 16, "1 to 16")
        self._require("transport", self.transport in TRANSPORTS, ", ".join(TRANSPORTS))
        self._require("integrity", self.integrity in INTEGRITIES, ", ".join(INTEGRITIES))
        self._require("host_id", len(self.host_id) <= 255, "at most 255 characters")
        self._require("encryption", self.encryption in ENCRYPTIONS, ", ".join(ENCRYPTIONS))
        _check_secret(self.secret, "the argument secret or the variable RINGREDUCE_SECRET")
        if self.size > 1:
            host_and_port(self.rendezvous)

    def _require(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise ConfigError(
                f"{name} is {getattr(self, name)!r}, from the argument {name} or the variable "
                f"{_variable(name)}; accepted: {accepted}"
            )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **arguments: object
    ) -> Config:
        """Settings from `arguments` and, where one is absent or None, from the variables.

        Args:
            environment: variables to read instead of the process's own.
            arguments: fields of Config by name.

        Raises:
            ConfigError: an unknown argument, a variable that cannot be read or is out of
                range, or launch variables of which only some are set.
        """
        variables = os.environ if environment is None else environment
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(arguments) - names):
            raise ConfigError(
                f"got the unknown setting {', '.join(unknown)}",
                remedy=f"Known are {', '.join(sorted(names))}.",
            )
        values = {name: value for name, value in arguments.items() if value is not None}
        given = {_variable(name) for name in values}
        present = [name for name in _LAUNCH if name in variables or name in given]
        missing = [name for name in _LAUNCH if name not in present]
        alone = values.get("size", 1) == 1 and not any(name in variables for name in _LAUNCH)
        if present and missing and not alone:
            raise ConfigError(
                f"{', '.join(present)} {'is' if len(present) == 1 else 'are'} set, "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
                remedy="Start the workers with `ringreduce run -n N script.py`, or set all of "
                f"{', '.join(_LAUNCH)}; set none of them for a single process.",
            )
        for setting in fields(cls):
            text = variables.get(_variable(setting.name))
            if setting.name not in values and text is not None:
                values[setting.name] = _parse(_variable(setting.name), text, str(setting.type))
        if not values.get("secret"):
            values["secret"] = configured_secret(variables)
        if "timeout_s" in values and "join_timeout_s" not in values:
            # Who sets one limit means it for the meeting too.
            values["join_timeout_s"] = values["timeout_s"]
        return cls(**values)  # type: ignore[arg-type]

    def to_environment(self) -> dict[str, str]:
        """The variables from which `from_environment` makes this Config again."""
        return {
            _variable(setting.name): str(value)
            for setting in fields(self)
            if (value := getattr(self, setting.name)) is not None
        }


def configured_secret(environment: Mapping[str, str] | None = None) -> str:
    """The secret that the user's variables give, themselves or by a file; empty for none.

    Raises:
        ConfigError: it is too short, or the file is not one that its owner alone may read.
    """
    variables = os.environ if environment is None else environment
    path = variables.get("RINGREDUCE_SECRET_FILE")
    if (secret := variables.get("RINGREDUCE_SECRET")) or not path:
        _check_secret(secret or "", "the variable RINGREDUCE_SECRET")
        return secret or ""
    secret = _read_secret(path)
    _check_secret(secret, f"the file {path} of RINGREDUCE_SECRET_FILE", is_required=True)
    return secret


def _read_secret(path: str) -> str:
    """What the file at `path` holds, without white space around it."""
    named = f"the file {path} of RINGREDUCE_SECRET_FILE"
    try:
        # Neither a pipe nor a device must hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            # Of what was opened, since the name may stand for another file by now.
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{named} is no regular file")
            # Root's files are fine: root can read everything, and mounted secrets are root's.
            if status.st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{named} belongs to another user", remedy="Make a copy.")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{named} may be read or changed by other users "
                    f"(its mode is {stat.S_IMODE(status.st_mode):o})",
                    remedy=f"chmod 600 {path}",
                )
            data = file.read(_SECRET_CHARACTERS_MAX * 4 + 1)
        return data.decode().strip()
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        # Without the cause, whose text would hold what was read.
        raise ConfigError(f"{named} is no text") from None


def _check_secret(secret: str, source: str, *, is_required: bool = False) -> None:
    """Refuse what is too short to be kept secret; the error does not show it."""
    if (secret or is_required) and not (
        _SECRET_CHARACTERS_MIN <= len(secret) <= _SECRET_CHARACTERS_MAX
    ):
        raise ConfigError(
            f"the secret has {len(secret)} characters, from {source}; "
            f"accepted: {_SECRET_CHARACTERS_MIN} to {_SECRET_CHARACTERS_MAX}",
            remedy="`openssl rand -hex 32` makes a good one.",
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[ipv6]:port``.

    Raises:
        ConfigError: it is not of that form, or the port is not 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not host or len(host) > 255 or not digits or not 1 <= int(port) <= 65535:
        raise ConfigError(
            f"rendezvous is {address[:80]!r}, from the argument rendezvous or the variable "
            "RINGREDUCE_RENDEZVOUS; accepted: host:port with a port of 1 to 65535, "
            "such as 127.0.0.1:4000"
        )
    return host, int(port)


def worker_environment(
    config: Config, threads: int, *, decided: Collection[str] = ()
) -> dict[str, str]:
    """This process's environment, with what one worker needs to find its place added.

    Args:
        config: the worker's settings.
        threads: compute threads it may use. Thread variables the user has set are kept.
        decided: names of limits and choices (`timeout_s`, `transport`) that `config` decides;
            the others stay as the user's variables have them, if they do.
    """
    # A launcher that is itself a worker must not hand on its own place.
    places = {_variable(setting.name) for setting in fields(Config)} - set(_CHOICES)
    environment = {name: value for name, value in os.environ.items() if name not in places}
    ours = places | {_variable(name) for name in decided}
    environment |= {name: text for name, text in config.to_environment().items() if name in ours}
    for name in _THREAD_VARIABLES:
        environment.setdefault(name, str(threads))
    # Two at least: one may sit in a collective while the input pipeline runs on the other.
    environment.setdefault("TF_NUM_INTEROP_THREADS", str(max(2, threads)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return environment


def color_wanted() -> bool:
    """Whether the user's environment allows coloured output (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def log_dir_wanted() -> str:
    """The folder for flight records that the user's environment names; empty for none."""
    return os.environ.get("RINGREDUCE_LOG_DIR", "")


def native_wanted() -> bool:
    """Whether the native library may be used: ``RINGREDUCE_NATIVE=0`` hides it."""
    return os.environ.get("RINGREDUCE_NATIVE", "1") != "0"


def _variable(setting: str) -> str:
    return f"RINGREDUCE_{setting.upper()}"


def _parse(variable: str, text: str, kind: str) -> object:
    convert = float if "float" in kind else int if "int" in kind else str
    try:
        return convert(text)
    except ValueError:
        noun = "a number" if convert is float else "a whole number"
        raise ConfigError(f"{variable} is {text[:80]!r}; accepted: {noun}") from None
