"""``ringreduce run -H`` through a real sshd, which runs as this user on loopback addresses."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from bench import namespaces
from tests.commands.test_nodes import free_port
from tests.launching import WAITS, numbers, script
from tests.processes import Process, clean_environment, launcher, wait_gone, wait_until
from tests.project.test_bench import shaped_links_are_possible

# Where it is not in PATH, and sshd wants to be started by its full path.
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
MISSING = [name for name, found in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if found is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

ADDRESSES = ("127.0.0.2", "127.0.0.3")
HOSTS = ("-H", ",".join(f"{address}:2" for address in ADDRESSES))


class Server(NamedTuple):
    """A running sshd; its keys, and the user's, are in `folder`."""

    folder: Path
    port: int
    daemon: Process

    def ssh(self, key: str = "user", known: str = "known", port: str = "") -> str:
        """The command for ``--ssh``, which uses nothing of this user's own."""
        keys = f"-i {self.folder / key} -o IdentitiesOnly=yes -o IdentityAgent=none"
        files = f"-F none -o UserKnownHostsFile={self.folder / known}"
        return f"ssh -p {port or self.port} {keys} {files}"

    def sessions(self) -> list[int]:
        """The processes that serve connections."""
        children = psutil.Process(self.daemon.pid).children()
        return [child.pid for child in children if child.is_running()]


def write_keys(folder: Path, addresses: tuple[str, ...], port: int) -> None:
    for name in ("host", "user", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
        )
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"[{each}]:{port} {key}\n" for each in addresses))
    (folder / "empty").touch()


@contextlib.contextmanager
def serving(
    folder: Path, addresses: tuple[str, ...], port: int, prefix: tuple[str, ...] = ()
) -> Iterator[Server]:
    """An sshd, with the keys in `folder`; `prefix` starts it in a namespace."""
    if os.geteuid() == 0:
        # As the system's own start of sshd does.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    settings = [f"Port {port}", *(f"ListenAddress {address}" for address in addresses)]
    settings += [f"HostKey {folder / 'host'}", f"AuthorizedKeysFile {folder / 'user.pub'}"]
    settings += ["PidFile none", "PermitRootLogin yes"]
    refused = ("StrictModes", "UsePAM", "PasswordAuthentication", "KbdInteractiveAuthentication")
    settings += [f"{name} no" for name in (*refused, "PrintMotd")]
    file = folder / f"sshd_config-{addresses[0]}"
    file.write_text("\n".join(settings) + "\n")
    command = [*prefix, str(SSHD), "-D", "-e", "-f", str(file)]
    with Process(command, folder, name=f"sshd-{addresses[0]}") as daemon:
        wait_until(lambda: daemon.has_ended() or "listening" in daemon.stderr, "sshd to listen")
        if daemon.has_ended():
            assert os.geteuid() != 0, daemon.stderr  # Root has all the rights that it needs.
            pytest.skip(f"sshd does not run here: {daemon.stderr.strip()[-200:]}")
        yield Server(folder, port, daemon)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (folder := tmp_path / "sshd").mkdir()
    write_keys(folder, ADDRESSES, port := free_port())
    with serving(folder, ADDRESSES, port) as server:
        yield server


def job(directory: Path, ssh: str, *arguments: str) -> Process:
    return launcher(directory, "run", "--ssh", ssh, *arguments, HOME=str(directory))


def test_a_ring_forms_between_hosts(tmp_path, server):
    text = """
        import json, os, sys, ringreduce, numpy
        ring = ringreduce.init()
        total = ring.all_reduce(numpy.full(3, ring.rank + 1.0))
        print("total", int(total[0]), json.dumps([os.getcwd(), sys.argv[1:]]))
        """
    (folder := tmp_path / "it's a $HOME").mkdir()
    words = ["two words", "", "*", "'\"`id`\\"]
    with job(folder, server.ssh(), *HOSTS, script(folder, text), *words) as run:
        assert run.wait() == 0, run.stderr
    assert run.stdout.count(f"total 10 {json.dumps([str(folder), words])}\n") == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"known": "empty"}, "Host key verification failed."),
        ({"key": "stranger"}, "Permission denied (publickey)"),
        ({}, "Connection refused"),
    ],
    ids=["host key", "user key", "no sshd"],
)
def test_what_ssh_refuses_is_said_with_the_host_within_seconds(tmp_path, server, options, said):
    ssh = server.ssh(**(options or {"port": str(free_port())}))
    with job(tmp_path, ssh, *HOSTS, script(tmp_path, "pass")) as run:
        assert run.wait(20) == 2
        assert (run.stdout, run.stderr[:20]) == ("", "ringreduce: 127.0.0.")
        assert said in run.stderr
        assert "ringreduce: cannot start on 127.0.0." in run.stderr


@pytest.mark.parametrize("what", ["a connection", signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_launcher_or_a_connection(tmp_path, server, what):
    with job(tmp_path, server.ssh(), *HOSTS, script(tmp_path, WAITS)) as run:
        run.wait_shown("pid", times=4)
        ranks = numbers(run.stdout)
        if isinstance(what, str):
            os.kill(max(server.sessions()), signal.SIGKILL)
            assert run.wait() == 255
            assert "failed first (its host was lost: " in run.stderr
        else:
            run.signal(what)
            run.wait()
        wait_gone(ranks)
        wait_until(lambda: not server.sessions(), "the connections to end")


@pytest.mark.timeout(240)
def test_four_hosts_train_the_digits_to_equal_weights(tmp_path):
    """Each host is a network namespace with an sshd of its own."""
    if not shaped_links_are_possible():
        pytest.skip("needs root, ip, tc and network namespaces")
    port = 2222
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(namespaces.shaped(4, "1gbit"))
        addresses = tuple(host.address for host in hosts)
        write_keys(tmp_path, addresses, port)
        for host in hosts:
            server = stack.enter_context(serving(tmp_path, (host.address,), port, host.prefix))
        command = [*hosts[0].prefix, sys.executable, "-m", "ringreduce", "run"]
        command += ["-H", ",".join(addresses), "--ssh", server.ssh()]
        command.append(str(Path(__file__).parents[2] / "examples" / "digits.py"))
        command += ["--epochs", "1", "--json", "result"]
        with Process(command, tmp_path, environment=clean_environment(HOME=str(tmp_path))) as run:
            assert run.wait(200) == 0, run.stderr
    digests = json.loads((tmp_path / "result").read_text())["weights_sha256"]
    assert digests == digests[:1] * 4
