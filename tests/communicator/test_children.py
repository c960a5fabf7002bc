"""Processes that a rank starts: those that would be the same rank again are none."""

import json

import pytest

from tests.launching import run, script

# What pools and loaders start imports this file again, with the environment of its rank.
START = """
import json, multiprocessing, os, secrets, socket, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import ringreduce

comm = ringreduce.init()

def python(*arguments):
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().splitlines()
"""

CHILDREN = """
def refusal(call):
    try:
        call()
    except ringreduce.ClosedError as error:
        return str(error)

def child():
    again = ringreduce.init() is comm
    calls = comm.barrier, lambda: ringreduce.on_rank_zero(print, "called in a child")
    return again, comm.rank, comm.size, comm.local_rank, comm.local_size, [*map(refusal, calls)]

if sys.argv[1:]:
    print(json.dumps(child()))
elif __name__ == "__main__":
    context = multiprocessing.get_context(["spawn", "forkserver"][comm.rank])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        print(json.dumps(pool.submit(child).result()), flush=True)
    ringreduce.shutdown()
    if comm.rank == 0:
        print(*python(__file__, "child"), flush=True)
"""


def test_a_spawned_child_has_its_parents_rank_and_is_refused_collectives(tmp_path):
    done = run(tmp_path, "-n", "2", script(tmp_path, START + CHILDREN))
    assert done.returncode == 0, done.stderr
    assert "called in a child" not in done.stdout
    ranks = [int(line[1]) for line in done.stdout.splitlines()]
    assert sorted(ranks) == [0, 0, 1]  # Rank 0 starts one after its ring was closed, too.
    for rank, line in zip(ranks, done.stdout.splitlines(), strict=True):
        again, *place, refusals = json.loads(line[4:])
        assert (again, place) == (True, [rank, 2, rank, 2])
        assert len(refusals) == 2
        for text in refusals:
            assert f"rank {rank} of 2 made a call in a child process" in text


# Children that are ranks of other jobs, and the rank's own process with another program.
OTHERS = """
def other_rank(rank, settings):
    ringreduce.shutdown()
    own = ringreduce.init(rank=rank, local_rank=rank, size=2, local_size=2, **settings)
    say("own", own)

def say(what, comm):
    # One write a line: several processes share a rank's output, and print() writes word by word.
    os.write(1, f"{what} {comm.all_reduce(np.ones(1)).tolist()}\\n".encode())

if sys.argv[1:]:
    say(sys.argv[1], comm)
elif __name__ == "__main__":
    if comm.rank == 0:
        nested = python("-m", "ringreduce", "run", "-n", "2", __file__, "nested")
        os.write(1, "".join(f"{line}\\n" for line in nested).encode())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        settings = {"rendezvous": f"127.0.0.1:{port}", "job_id": secrets.token_hex(8)}
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=other_rank, args=(n, settings)) for n in range(2)]
        [each.start() for each in ranks]
        [each.join() for each in ranks]
    ringreduce.shutdown()
    os.execv(sys.executable, [sys.executable, __file__, "executed"])
"""


@pytest.mark.full
def test_a_child_that_is_a_rank_of_another_job_is_that_rank(tmp_path):
    done = run(tmp_path, "-n", "2", script(tmp_path, START + OTHERS))
    assert done.returncode == 0, done.stderr
    for what in ("own", "nested", "executed"):
        assert done.stdout.count(f"{what} [2.0]") == 2, done.stdout
