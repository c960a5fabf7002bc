"""``ringreduce run --max-restarts``: after a failure all ranks start anew."""

import os
import re
import signal

from ringreduce.pure.flight import decode_dump
from tests.launching import RANK, WAITS, numbers, run, script
from tests.processes import launcher

AGAIN = RANK + "restart = int(os.environ['RINGREDUCE_RESTART'])\n"


def test_a_killed_worker_starts_all_again_in_another_ring(tmp_path):
    text = """
        import numpy, ringreduce
        comm = ringreduce.init()
        total = comm.all_reduce(numpy.full(2, comm.rank + 1.0))
        if restart == 0:
            if rank == 1:
                print("pid", os.getpid(), flush=True)
                signal.pause()
            comm.barrier()
        print("total", int(total[0]), "restart", comm.config.restart, comm.config.job_id)
        """
    options = ("-n", "2", "--max-restarts", "2", "--log-dir", "logs")
    with launcher(tmp_path, "run", *options, script(tmp_path, AGAIN, text)) as job:
        job.wait_shown("pid")
        [victim] = numbers(job.stdout)
        os.kill(victim, signal.SIGKILL)
        assert job.wait() == 0
        assert "rank 1 failed first (killed by signal 9 (SIGKILL))" in job.stderr
        assert "ringreduce: starting again, 1 of 2\n" in job.stderr
        assert "2 of 2" not in job.stderr
        done = [line.split() for line in job.stdout.splitlines() if "total" in line]
    assert [words[1:5] for words in sorted(done)] == [["total", "3", "restart", "1"]] * 2
    [job_id] = {words[5] for words in done}
    # Each attempt has a folder: its lines, and the records of the ring that broke.
    assert "pid" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert "total 3" in (tmp_path / "logs" / "restart-1" / "rank-1.log").read_text()
    record = decode_dump((tmp_path / "logs" / "flight-rank0.json").read_bytes())
    assert record.job != job_id
    assert not list((tmp_path / "logs" / "restart-1").glob("flight-*"))


def test_each_attempt_has_a_secret_of_its_own_and_the_last_ones_exit_code_is_the_jobs(tmp_path):
    text = "print(os.environ['RINGREDUCE_SECRET'], os.environ['RINGREDUCE_JOB_ID'])\n"
    name = script(tmp_path, AGAIN, text, "raise SystemExit(3 + restart)")
    done = run(tmp_path, "-n", "1", "--max-restarts", "2", name)
    assert done.returncode == 5
    assert len({*done.stdout.split()} - {"[0]"}) == 6
    said = re.findall(r"^ringreduce: .*(exit code \d|starting.*)", done.stderr, re.MULTILINE)
    again = ["starting again, 1 of 2", "starting again, 2 of 2"]
    assert said == ["exit code 3", again[0], "exit code 4", again[1], "exit code 5"]


def test_a_signal_to_the_launcher_starts_nothing_again(tmp_path):
    fails = "signal.signal(signal.SIGTERM, lambda *_: exit(3))\n"
    name = script(tmp_path, RANK, fails, WAITS)
    with launcher(tmp_path, "run", "-n", "2", "--max-restarts", "5", name) as job:
        job.wait_shown("pid", times=2)
        job.signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
        assert "starting again" not in job.stderr


def test_a_worker_that_ctrl_c_ended_is_not_started_again(tmp_path):
    name = script(tmp_path, "import os\nos.kill(os.getpid(), 2)\nwhile True: pass")
    done = run(tmp_path, "-n", "1", "--max-restarts", "5", name)
    assert done.returncode == 128 + signal.SIGINT
    assert "starting again" not in done.stderr
