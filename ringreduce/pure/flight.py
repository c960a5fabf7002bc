"""The format of a flight record on disk: one JSON file for each rank.

A reader may find a truncated file, one of another program or one made to harm: it is decoded into
typed records with limits, or refused.
"""

from typing import Annotated

import msgspec

from ringreduce.vocabulary.errors import ErrorRecord

FORMAT = 2  # incremented by every change that an older reader would misunderstand

FILE_BYTES_MAX = 1 << 24  # a dump with every list at its limit stays below this
GROUPS_MAX = 16  # those that broke, and those used last
TEXT_MAX = 4096
NAME_MAX = 512
FRAMES_MAX = 48
THREADS_MAX = 256

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_MAX)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Time = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


class CallRecord(msgspec.Struct):
    """One collective; `started` is in seconds since the epoch, `seconds` is None while it runs."""

    number: _Count
    operation: _Name
    nbytes: _Count
    started: _Time
    seconds: _Time | None = None
    thread: _Name = ""
    error: _Text | None = None


class Frame(msgspec.Struct):
    """One line of a stack; `library`: it belongs to Python, a package or ringreduce."""

    file: _Text
    line: _Count
    function: _Name
    text: _Name = ""
    library: bool = False


_Frames = Annotated[list[Frame], msgspec.Meta(max_length=FRAMES_MAX)]


class Failure(ErrorRecord, frozen=True, kw_only=True):
    """The error that broke the communicator."""

    text: _Text
    when: _Time  # in seconds since the epoch
    in_call: _Name | None = None  # the collective that this rank was in; None in user code
    # The frames that the error has passed, innermost last.
    trace: _Frames = msgspec.field(default_factory=list)


class Stack(msgspec.Struct):
    """Where one thread is, innermost frame last."""

    thread: _Name
    main: bool
    frames: _Frames


class _Communicator(msgspec.Struct, kw_only=True):
    """The record of one communicator. Times are in seconds since the epoch."""

    transport: _Name
    # calls, operation, nbytes, since: as in `Present`; in user code, `since` is when the last
    # call of any group ended.
    calls: _Count
    operation: _Name | None
    nbytes: _Count
    since: _Time
    # The send or recv that it waits in, or the call of a group, beside its collectives.
    pending: _Name | None = None
    failure: Failure | None = None  # None while the communicator works
    # The last calls, oldest first.
    entries: Annotated[list[CallRecord], msgspec.Meta(max_length=1 << 12)] = []


class Group(_Communicator):
    """A rank's part in one group; `number`, `epoch` and `members` are as in `Membership`."""

    number: _Count
    epoch: _Count
    members: Annotated[list[_Rank], msgspec.Meta(min_length=1, max_length=1 << 20)]


class Dump(_Communicator):
    """One rank's flight record, with what the whole job's communicator did."""

    format: int
    why: _Text  # what it was written for
    # when, iso: when, the latter for people.
    when: _Time
    iso: _Name
    rank: _Rank
    size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    host: _Name
    pid: _Count
    job: _Name  # the job's id, which tells records of several jobs apart
    stacks: Annotated[list[Stack], msgspec.Meta(max_length=THREADS_MAX)] = []
    # The communicators of groups.
    groups: Annotated[list[Group], msgspec.Meta(max_length=GROUPS_MAX)] = []


def cut(text: str, length: int = TEXT_MAX) -> str:
    """`text` as a flight record, or a message, can hold it."""
    # File names may contain bytes that are not text, which JSON cannot hold.
    line = text.encode(errors="replace").decode()
    return line if len(line) <= length else line[: length - 3] + "..."


def file_name(rank: int) -> str:
    """Name of a rank's file in the folder of the job's logs."""
    return f"flight-rank{rank}.json"


def encode_dump(dump: Dump) -> bytes:
    """Encode `dump` as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(dump), indent=1) + b"\n"


def decode_dump(data: bytes) -> Dump:
    """Decode a flight record; ValueError says what is wrong with one that cannot be read."""
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
    try:
        version = msgspec.json.decode(data, type=_Format).format
        if version != FORMAT:
            raise ValueError(f"format {version}, and this is ringreduce for format {FORMAT}")
        dump = msgspec.json.decode(data, type=Dump)
    except msgspec.ValidationError as error:
        raise ValueError(f"no flight record: {error}") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"truncated or not JSON: {error}") from error
    if dump.rank >= dump.size:
        raise ValueError(f"rank {dump.rank} of {dump.size}")
    for group in dump.groups:
        if dump.rank not in group.members or max(group.members) >= dump.size:
            raise ValueError(f"rank {dump.rank} of {dump.size} in a group without it, or too large")
    return dump


class _Format(msgspec.Struct):
    format: int
