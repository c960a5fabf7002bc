"""The base of each part of the public `Communicator`: its session, and this rank's place."""

from ringreduce.communicator.session import Session
from ringreduce.vocabulary.errors import ArrayError


class Handle:
    """The base of all parts of a `Communicator`."""

    def _use(self, session: Session) -> None:
        self._session, self._config = session, session.config
        self._rank, self._size = session.group_rank, session.size

    def _refused(self, problem: str, remedy: str) -> ArrayError:
        return ArrayError(problem, **self._config.who, remedy=remedy)

    @property
    def rank(self) -> int:
        """This process's number in this communicator, 0 to size - 1."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size
