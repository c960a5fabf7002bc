"""Which rank a launcher has made of this process, and where its ranks can meet.

Few launchers give an address where ranks can meet. What is used instead:

- One host: 127.0.0.1 and a port made from the job's name.
- Several hosts: the host that the launcher names as its first, with a port of its own if nobody
  else listens on that, else with one made from the job's name. torchrun listens on MASTER_PORT, and
  Horovod's launcher on its port, so those two are never used.
- RINGREDUCE_RENDEZVOUS comes before all that.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from ringreduce.vocabulary.endpoints import address, is_local
from ringreduce.vocabulary.errors import ConfigError

# Below what Linux gives to outgoing connections (32768), above what services use.
_PORTS = range(20000, 29000)


@dataclass(frozen=True)
class LaunchedRank:
    """What a launcher says of this process; empty and None: it does not say.

    Attributes:
        key, name: the launcher's.
        source: the variables with rank and size.
        job: text that is equal on all ranks, and differs between jobs.
        host, port: where rank 0 can listen; 0: any port.
        shares_home: whether hosts of the job usually share the user's home.
    """

    key: str
    name: str
    source: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    job: str
    host: str
    port: int
    shares_home: bool

    def __str__(self) -> str:
        """Which rank, and according to whom."""
        return f"rank {self.rank} of {self.size} by {self.source} ({self.name})"

    @property
    def is_local(self) -> bool:
        """Whether the ranks are known to meet within this host."""
        return self.local_size == self.size or is_local(self.host)

    def rendezvous(self) -> str:
        """``host:port`` for the ranks to meet. Raises ConfigError where nothing gives one."""
        host = "127.0.0.1" if self.local_size == self.size else self.host
        if not host or not (self.job or self.port):
            raise ConfigError(
                f"this is {self}, which gives no address where the ranks can meet",
                remedy="Set RINGREDUCE_RENDEZVOUS=HOST:PORT for all ranks, with the host of rank 0 "
                "and a free port there.",
            )
        return address(host, self._port())

    def _port(self) -> int:
        digest = hashlib.blake2b(self.job.encode(errors="surrogatepass"), digest_size=8).digest()
        return self.port or _PORTS[int.from_bytes(digest, "big") % len(_PORTS)]
