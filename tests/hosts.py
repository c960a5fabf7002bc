"""Rings across hosts with networks of their own: threads, each in a network namespace.

    host "a": eth0 10.1.0.1 ---+  bridge of the network "one", in a namespace too
    host "b": eth0 10.1.0.2 ---+
              eth1 10.2.0.2 ---   the network "two" is cut: it swallows what is sent

A namespace belongs to a thread and those that it starts, so no process has to be started.
"""

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.vocabulary.config import Config

_CLONE_NEWNET = 0x40000000
# Locally administered, of no interface.
_NOBODY = "02:00:00:00:00:99"


class Hosts:
    """Namespaces by host: `ip` changes one, `ring` forms a ring of all; `switch` has bridges."""

    def __init__(self, names: Mapping[str, str], switch: str) -> None:
        self.names, self.switch = names, switch

    def ip(self, host: str, command: str) -> None:
        run_ip(f"-n {self.names[host]} {command}")

    @contextlib.contextmanager
    def entered(self, host: str) -> Iterator[None]:
        """In this thread, which must end afterwards: sockets are that host's."""
        assert threading.current_thread() is not threading.main_thread()
        descriptor = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)
        yield

    def ring(
        self,
        rendezvous: str,
        work: Callable[[Communicator], Any],
        *changes: Mapping[str, Any],
        ranks_on: Sequence[str] = (),
        **settings: Any,
    ) -> list[Any]:
        """What `work` returned on each rank, one a host, or the error that it raised.

        `changes` are settings of single ranks.
        """
        hosts = ranks_on or list(self.names)
        common = {
            "size": len(hosts),
            "rendezvous": rendezvous,
            "job_id": secrets.token_hex(8),
            "secret": secrets.token_hex(32),
            "timeout_s": 10.0,
            "join_timeout_s": 20.0,
            **settings,
        }
        everybody = threading.Barrier(len(hosts))

        def run(rank: int) -> Any:
            own = changes[rank] if changes else {}
            with self.entered(hosts[rank]):
                try:
                    config = Config(rank=rank, host_id=hosts[rank], **common | own)
                    with Communicator(config) as communicator:
                        return work(communicator)
                except Exception as error:
                    return error
                finally:
                    everybody.wait(60)

        with ThreadPoolExecutor(len(hosts)) as threads:
            return list(threads.map(run, range(len(hosts))))


@contextlib.contextmanager
def connected(
    layout: Mapping[str, Mapping[str, Sequence[str]]], cut: Collection[str] = ()
) -> Iterator[Hosts]:
    """Hosts with these addresses in these networks; those in `cut` lead nowhere."""
    names = {host: f"rrt{os.getpid()}{host}" for host in layout}
    switch = f"rrt{os.getpid()}-switch"
    with contextlib.ExitStack() as stack:
        for namespace in (switch, *names.values()):
            stack.callback(run_ip, f"netns delete {namespace}", check=False)
            run_ip(f"netns add {namespace}")
        networks = sorted({network for has in layout.values() for network in has})
        for network in networks:
            run_ip(f"-n {switch} link add {network} type bridge")
            run_ip(f"-n {switch} link set {network} up")
        for host, has in layout.items():
            there = names[host]
            run_ip(f"-n {there} link set lo up")
            for number, (network, addresses) in enumerate(has.items()):
                port, device = f"{network}-{host}", f"eth{number}"
                run_ip(f"-n {switch} link add {port} type veth peer name {device} netns {there}")
                if network not in cut:
                    run_ip(f"-n {switch} link set {port} master {network}")
                run_ip(f"-n {switch} link set {port} up")
                run_ip(f"-n {there} link set {device} up")
                for address in addresses:
                    nodad = " nodad" if ":" in address else ""
                    run_ip(f"-n {there} address add {address} dev {device}{nodad}")
                if network in cut:
                    for other in layout:
                        for address in set(layout[other].get(network, ())) - set(addresses):
                            run_ip(
                                f"-n {there} neighbour add {address.partition('/')[0]} "
                                f"lladdr {_NOBODY} dev {device} nud permanent"
                            )
        yield Hosts(names, switch)


def run_ip(command: str, check: bool = True) -> None:
    """Run the program ip with these arguments."""
    subprocess.run(["ip", *command.split()], check=check, capture_output=True, timeout=20)


def require() -> None:
    """Skip the test where namespaces cannot be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the program ip, to make network namespaces")
    try:
        with connected({"a": {}}):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot make network namespaces: {error.stderr.decode().strip()}")
