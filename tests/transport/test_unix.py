"""Which processes are the ranks of a host. (Tests of shared memory form connections.)"""

from __future__ import annotations

import signal
import subprocess
import sys

from ringreduce.transport.unix import _identified, end_process


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
