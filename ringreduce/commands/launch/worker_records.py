"""Messages from a worker to its launcher: rings it forms, imports, why it ends. Pure.

In frames, over a pipe that only the two have (`handover`); an agent passes them on, and Ray carries
`Raised` as a result.
"""

import msgspec

from ringreduce.vocabulary.errors import ErrorRecord


class Joins(msgspec.Struct, tag=True, frozen=True):
    """The rank ``waits`` for a ring of `size` ranks, then has ``formed`` it, or ``failed`` to."""

    size: int
    state: str = "waits"


class Reformed(msgspec.Struct, tag=True, frozen=True):
    """The ring was formed anew, after a failure or with newcomers; each of its ranks says so."""

    number: int  # of this ring; later ones have larger ones
    members: tuple[int, ...]  # its ranks, by their numbers in the job
    where: str  # the ring before it failed: ``in step 7``; empty if unknown
    seconds: float  # from the failure to the next step
    lives: tuple[int, ...] = ()  # by rank, which of its processes was last: `pure.views.View`

    @property
    def processes(self) -> frozenset[tuple[int, int]]:
        """Its members, each with which of its processes that is."""
        lives = dict(enumerate(self.lives))
        return frozenset((rank, lives.get(rank, 0)) for rank in self.members)


class Joined(msgspec.Struct, tag=True, frozen=True):
    """A lost rank is back in training; any rank may say so, the first report counts."""

    place: int  # its rank
    life: int  # which of its processes
    step: int  # the first that it takes part in
    stopped_s: float  # for how long all others waited for it


class Grows(msgspec.Struct, tag=True, frozen=True):
    """A lost rank can come back to the job from now on; with a `reason`: it cannot, or no more.

    Any rank may say so, several times; what was said last holds.
    """

    reason: str = ""


class Killed(msgspec.Struct, tag=True, frozen=True):
    """The rank has ended another one's process, which did not answer."""

    rank: int


class Stands(msgspec.Struct, tag=True, frozen=True):
    """How far the rank has come, as `pure.views.Standing`; said before it goes on from there."""

    ring: int
    ended: int
    is_gone: bool


class Notices(msgspec.Struct, tag=True, frozen=True):
    """The signal of that number tells the rank to go in order, from now on; 0: none does."""

    signal: int


class Goes(msgspec.Struct, tag=True, frozen=True):
    """The rank ends in order, since ranks were told to go: alone, or with the whole job."""

    reasons: dict[int, str]  # by rank, what has told it to go: ``SIGTERM``
    where: str  # ``after step 410``
    code: int  # the exit code that follows
    stops: bool = False  # whether all ranks end there
    said: str = ""  # where the job goes on, if all do


class ImportedKeras(msgspec.Struct, tag=True, frozen=True):
    """The program has imported Keras, as TensorFlow does too."""


class Exits(msgspec.Struct, tag=True, frozen=True):
    """The program ends by a SystemExit with exit code 0."""

    place: str  # ``train.py:12``, or empty


class Raised(ErrorRecord, tag=True, frozen=True):
    """The exception that ends a rank's program, or the ringreduce error that it follows from."""

    exception: str = ""  # what names it, in one line
    # Its lines; of an error of ringreduce, without ringreduce's own frames.
    traceback: list[str] = msgspec.field(default_factory=list)
    # With them, for the logs; empty if `traceback` has all.
    whole: list[str] = msgspec.field(default_factory=list)
    code: int = 1  # the exit code that follows


WorkerRecord = (
    Joins
    | Reformed
    | Joined
    | Grows
    | Killed
    | Stands
    | Notices
    | Goes
    | ImportedKeras
    | Exits
    | Raised
)
