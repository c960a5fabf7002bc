"""Which processes are the ranks of a host. (Tests of shared memory form connections.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from ringreduce.transport.unix import Mesh, _identified, end_process


def test_a_process_is_ended_only_if_it_began_when_that_rank_did() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = _identified(child.pid)
        assert process is not None
        assert process[0] == child.pid
        assert not end_process((child.pid, process[1] - 1))
        assert child.poll() is None
        assert end_process(process)
        assert child.wait(10) == -signal.SIGKILL
    assert _identified(child.pid) is None
    assert not end_process(process)


def test_a_rank_that_waits_for_an_answer_goes_on_checking() -> None:
    meshes, checked = (Mesh(), Mesh()), threading.Event()
    names = {rank: mesh.name for rank, mesh in enumerate(meshes)}

    def connect(rank: int) -> None:
        descriptor = os.memfd_create("segment")
        try:
            found = meshes[rank].connect(
                names,
                rank=rank,
                size=2,
                job=7,
                descriptor=descriptor,
                timeout_s=10.0,
                check=checked.set if rank else lambda: None,
            )
        finally:
            os.close(descriptor)
            meshes[rank].close()
        for each in found.values():
            os.close(each)

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(connect, 1)
        assert checked.wait(5)
        connect(0)
        second.result(10)
