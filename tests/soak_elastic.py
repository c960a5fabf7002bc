"""Elastic jobs, one after the other, of which random ranks are lost at random moments.

    python -m tests.soak_elastic --minutes 2 [--seed N] [--timeout-s 2]
        [--kinds kill,stop,exit,leave,reset,write,halt,back,late,suspended,cut]

Each trains 10 MB of weights on 4 ranks; up to 3 are killed, stopped, exit, or are told to go, at
random moments or at once. In some, ranks also end their connections at random moments, or one
writes a file in a callback, for longer than a lost rank is waited for. After each: exit code 0,
every step made once, the ranks that are left all those that nothing was done to, with equal
weights, and these those of a job that nothing has disturbed, but for rounding; of what was written,
each epoch, the bytes of one rank.

`halt`: in some jobs all stop, once or more, as the launcher or a rank is told to go, and go on in
the next, on 4, 3, 2 or 1 ranks. Each step is made once, whatever job makes it.

`back`: in some jobs lost ranks come back, as often as the time of the job allows, and some of them
are killed on their way, or once they train. Those that end with the others have their weights.

In every third job some ranks stand still and go on again: before the others have left them out,
while those train on, or after they have ended. `late`: a rank is stopped, under no launcher;
`suspended`: one of two launchers, with its ranks; `cut`: a host is cut off, and joined
again (root only). One ring comes to the end; what has written is that ring, or one of all its
ranks; the ranks that it has left out end with an error that says so, or are killed.

Beside busy processes a rank may be late for the limit of 2 s: give them more.

The first violation ends the soak with exit code 1, its name and all that was said. At the end:
seconds from a kill, or from the time limit of a stopped rank, to the end of the next step, in jobs
in which nothing else happens.
"""

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import hosts
from tests.jobs import facts_in
from tests.processes import Process, clean_environment, launcher, wait_until

SIZE, EPOCHS, STEPS = 4, 16, 40
PROGRAM = str(Path(__file__).parent / "programs" / "soaked.py")
DEADLINE_S = 240.0

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGUSR2}
KINDS |= {"leave": signal.SIGTERM}
STANDING = ("late", "suspended", "cut")
# Of jobs in which ranks stand still.
SHORT_EPOCHS, SHORT_WRITES_S = 3, 0.1
VARIABLES = {
    **{"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    "RINGREDUCE_JOIN_TIMEOUT_S": "60",
}


class ViolationError(AssertionError):
    """What a job did that none may do."""


def timeout_s() -> float:
    return float(VARIABLES["RINGREDUCE_TIMEOUT_S"])


def demand(holds: object, name: str) -> None:
    if not holds:
        raise ViolationError(name)


def run(
    folder: Path, chosen: random.Random, count: int, kinds: Collection[str]
) -> tuple[list[tuple[int, float]], list[str], Any]:
    """One job that loses `count` ranks: which, when; what else happens.

    And by rank what the others say in the end.
    """
    victims = chosen.sample(range(SIZE), count)
    at_once = chosen.random() < 0.3
    writes = "write" in kinds and chosen.random() < 0.5
    resets = chosen.choices(range(SIZE), k=2) if "reset" in kinds and chosen.random() < 0.5 else []
    hows = {}
    for victim in victims:
        how = "stop" if chosen.random() < 0.1 else chosen.choice(["kill", "exit", "leave"])
        hows[victim] = how if how in kinds else "kill"
    # Over sockets nobody kills a stopped rank, and half of the ranks may not go on without it.
    transport = "auto" if "stop" in hows.values() else chosen.choice(["auto", "zmq"])
    done = ["writes"] * writes + [f"reset of {rank}" for rank in resets]
    comes_back = "back" in kinds and chosen.random() < 0.6
    done += ["back"] * comes_back
    options = ("-n", str(SIZE), "--elastic", *(() if comes_back else ("--no-comeback",)))
    variables = {**VARIABLES, "RINGREDUCE_TRANSPORT": transport}
    struck: list[tuple[int, float]] = []
    command = ("run", *options, PROGRAM, str(EPOCHS), str(1.25 * timeout_s() * writes), str(folder))
    with launcher(folder, *command, **variables) as job:

        def processes() -> dict[int, int]:
            said = facts_in(job.stdout)
            return {fact["rank"]: fact["pid"] for fact in said if "pid" in fact and "rank" in fact}

        def kill_newcomers() -> None:
            """Kill some of those that come back, at random moments."""
            known: set[int] = set()
            while not job.has_ended() and len(known) < 2:
                came = [fact["pid"] for fact in facts_in(job.stdout) if "newcomer" in fact]
                for pid in sorted({*came} - known):
                    known.add(pid)
                    until = time.monotonic() + moments.uniform(0.0, 12.0)
                    while time.monotonic() < until and not job.has_ended():
                        time.sleep(0.05)
                    # The failure of one that has trained to the end is the job's.
                    if not any("digest" in fact for fact in facts_in(job.stdout)):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)

        moments, killer = random.Random(chosen.random()), None
        if comes_back and chosen.random() < 0.5:
            done.append("killed again")
            killer = threading.Thread(target=kill_newcomers)
            killer.start()
        try:
            wait_until(lambda: len(processes()) == SIZE, "the beginning", DEADLINE_S)
            events = [*hows.items(), *((rank, "reset") for rank in resets)]
            if resets:
                chosen.shuffle(events)
            for place, (rank, how) in enumerate(events):
                if not (at_once and place):
                    time.sleep(chosen.uniform(0.0, 2.0 + 2 * timeout_s() * writes))
                if how == "reset":
                    (folder / f"reset{rank}").touch()
                    continue
                done += [how] * (how != "kill")
                struck.append((rank, time.monotonic() + timeout_s() * (how == "stop")))
                os.kill(processes()[rank], KINDS[how])
                if how == "exit":
                    # Python ignores what a handler raises within the callback of a weak reference.
                    time.sleep(1.0)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(processes()[rank], KINDS[how])
            code = job.wait(DEADLINE_S)
            if killer is not None:
                killer.join()
            demand(code == 0, "the job has failed")
            found = {fact["rank"]: fact for fact in facts_in(job.stdout) if "digest" in fact}
            left = sorted({*range(SIZE)} - {*victims})
            stayed = {rank: fact for rank, fact in found.items() if not fact["life"]}
            demand(sorted(stayed) == left, f"at the end {sorted(stayed)}, not {left}")
            demand_once(stayed, EPOCHS)
            back = {rank: fact for rank, fact in found.items() if fact["life"]}
            demand(comes_back or not back, f"{sorted(back)} came back")
            for rank, fact in back.items():
                demand(hows.get(rank) != "leave", f"rank {rank} has left, and came back")
                demand(fact["iterations"] == EPOCHS * STEPS, f"steps: {fact['iterations']}")
                demand(fact["digest"] == stayed[left[0]]["digest"], f"weights of rank {rank}")
            for rank in [rank for rank in victims if hows[rank] == "leave"]:
                told = re.findall(r"ranks? ([\d, ]+) left after (?:step|epoch)", job.stderr)
                is_said = any(str(rank) in each.split(", ") for each in told)
                demand(is_said, f"rank {rank} has not left in order")
            if {*hows.values()} <= {"leave"}:
                demand("Traceback" not in job.stderr, "a traceback of one that leaves")
            written = [fact for fact in facts_in(job.stdout) if "writes" in fact]
            is_whole = all(fact["found"] == [fact["writes"]] for fact in written)
            demand(is_whole, "two ranks have written one file")
            epochs = {fact["epoch"] for fact in written}
            demand(epochs == set(range(EPOCHS * writes)), f"epochs {epochs} were written")
        except (AssertionError, ProcessLookupError):
            what = f"lost {victims}, at once: {at_once}; {done}; {transport}"
            print(what, job.stdout, job.stderr, sep="\n")
            raise
    return struck, done, found


def run_halted(folder: Path, chosen: random.Random) -> tuple[str, Any]:
    """A job that is told to stop, and started again; what happened, and what its ranks say."""
    happened: list[str] = []
    halts = chosen.choice([1, 2, 3])
    while True:
        size, is_elastic = chosen.choice([4, 3, 2, 1]), chosen.random() < 0.3
        options = ("-n", str(size), *(["--elastic"] * is_elastic))
        command = ("run", *options, PROGRAM, str(EPOCHS), "0", str(folder), "backs up")
        with launcher(folder, *command, **VARIABLES) as job:
            try:

                def begun(job: Process = job) -> list[int]:
                    return [fact["pid"] for fact in facts_in(job.stdout) if "pid" in fact]

                def is_due(job: Process = job, size: int = size) -> bool:
                    return job.has_ended() or len(begun(job)) == size

                wait_until(is_due, "the beginning", DEADLINE_S)
                if len(happened) < halts and not job.has_ended():
                    time.sleep(chosen.uniform(0.0, 3.0))
                    one = None if is_elastic or chosen.random() < 0.5 else chosen.choice(begun())
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one or job.pid, signal.SIGTERM)
                    happened.append(f"{'elastic ' * is_elastic}{size} by {'one' * bool(one)}")
                code = job.wait(DEADLINE_S)
                demand("Traceback" not in job.stderr, "a traceback of one that is told to go")
                found = {fact["rank"]: fact for fact in facts_in(job.stdout) if "digest" in fact}
                if len(found) == size:  # Told after the last look.
                    break
                demand(code == 143, f"ended with {code}")
                demand("it goes on from this step" in job.stderr, "it does not say how it goes on")
            except AssertionError:
                print(happened, job.stdout, job.stderr, sep="\n")
                raise
    for fact in found.values():
        counts = fact["iterations"]
        demand(counts == EPOCHS * STEPS, f"steps lost or made twice: {counts}")
        demand(fact["digest"] == found[0]["digest"], "weights differ between ranks")
    return f"halted: {', '.join(happened)}; ended on {size}", found


def demand_once(found: dict[int, Any], epochs: int) -> None:
    for fact in found.values():
        counts = fact["iterations"], len(fact["ended"])
        demand(counts == (epochs * STEPS,) * 2, f"steps lost or made twice: {counts}")
        demand(fact["digest"] == found[min(found)]["digest"], "weights differ between ranks")


@contextlib.contextmanager
def standing_job(
    folder: Path, chosen: random.Random, kind: str
) -> Iterator[tuple[list[Process], list[int], Any, Any, str]]:
    """A job's processes; the ranks to strike; how to strike them, and to let them go on; a name."""
    arguments = (PROGRAM, str(SHORT_EPOCHS), str(SHORT_WRITES_S), str(folder))
    variables = {**VARIABLES, "RINGREDUCE_SECRET": secrets.token_hex(32)}
    port = str(chosen.randrange(20_000, 30_000))

    def send(number: int) -> None:
        # The launcher last when it stops, first when it goes on.
        for each in (*ranks_of(processes, struck), *launchers)[:: -1 if number == 18 else 1]:
            os.kill(each, number)

    launchers: list[int] = []
    with contextlib.ExitStack() as stack:
        if kind == "suspended":
            counts, node = chosen.choice([((3, 1), 1), ((1, 3), 0), ((2, 2), 1)])
            meets = ("--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--elastic")
            processes = []
            for number, count in enumerate(counts):
                own = {**variables, "RINGREDUCE_HOST_ID": str(number)}
                (inner := folder / f"node{number}").mkdir()
                command = ("run", *meets, "--node-rank", str(number), "-n", str(count), *arguments)
                processes.append(stack.enter_context(launcher(inner, *command, **own)))
            first = counts[0] * node
            struck, launchers = list(range(first, first + counts[node])), [processes[node].pid]
            strike, go_on = (lambda: send(signal.SIGSTOP)), (lambda: send(signal.SIGCONT))
            yield processes, struck, strike, go_on, f"launchers of {counts}, node {node}"
            return
        variables |= {"RINGREDUCE_ELASTIC": "1", "RINGREDUCE_SIZE": str(SIZE)}
        variables |= {"RINGREDUCE_JOB_ID": secrets.token_hex(8)}
        placed = chosen.choice(
            ["aaab", "abbb", "aabb", "abcd", "aaba", "aaaa"][: 6 - (kind == "cut")]
        )
        struck = [chosen.randrange(SIZE)]
        where = [""] * SIZE
        address = "127.0.0.1"
        strike, go_on = (lambda: send(signal.SIGSTOP)), (lambda: send(signal.SIGCONT))
        if kind == "cut":
            # What is left has more than half, or half with the lowest.
            host = {"aaab": "b", "abbb": "a", "aabb": "b", "aaba": "b"}.get(
                placed, placed[struck[0]]
            )
            struck = [rank for rank in range(SIZE) if placed[rank] == host]
            layout = {each: {"one": [f"10.1.0.{ord(each) - 96}/24"]} for each in sorted({*placed})}
            network = stack.enter_context(hosts.connected(layout))
            where, address = [network.names[each] for each in placed], "10.1.0.1"
            link = f"-n {network.switch} link set one-{host}"
            strike = lambda: hosts.run_ip(f"{link} nomaster")  # noqa: E731
            go_on = lambda: hosts.run_ip(f"{link} master one")  # noqa: E731
            variables |= {"RINGREDUCE_LINK_TIMEOUT_S": "2", "RINGREDUCE_JOIN_TIMEOUT_S": "30"}
        processes = []
        for rank, name in enumerate(where):
            inside = ("ip", "netns", "exec", name) if name else ()
            own = {"RINGREDUCE_RANK": str(rank), "RINGREDUCE_HOST_ID": placed[rank]}
            environment = clean_environment(
                **variables, **own, RINGREDUCE_RENDEZVOUS=f"{address}:{port}"
            )
            command = (*inside, sys.executable, *arguments)
            process = Process(command, folder, name=f"rank{rank}", environment=environment)
            processes.append(stack.enter_context(process))
        yield processes, struck, strike, go_on, f"{placed}, ranks {struck}"


def said_by(processes: list[Process]) -> list[dict[str, Any]]:
    """The facts of all ranks, whose lines a launcher has marked, or nobody."""
    lines = [line for process in processes for line in process.stdout.splitlines()]
    texts = [re.sub(r"^\[\d+\] ", "", line) for line in lines]
    return [json.loads(text) for text in texts if text.startswith("{")]


def ranks_of(processes: list[Process], ranks: Collection[int]) -> list[int]:
    said = said_by(processes)
    return [fact["pid"] for fact in said if "pid" in fact and fact["rank"] in ranks]


def run_standing(folder: Path, chosen: random.Random, kind: str) -> str:
    """One job in which some ranks stand still, and go on again; what happened."""
    when = chosen.choice(["before", "while", "after", "after"])
    with standing_job(folder, chosen, kind) as (processes, struck, strike, go_on, name):
        what = f"{kind}: {name}, {when} the others' end"
        try:
            begun = range(SIZE)

            def has_begun() -> bool:
                demand(not any(each.has_ended() for each in processes), "it ended at its beginning")
                return len(ranks_of(processes, begun)) == SIZE

            wait_until(has_begun, "the beginning", DEADLINE_S)
            time.sleep(chosen.uniform(0.0, 1.5))
            pids = ranks_of(processes, struck)
            still = [each for each in processes if each.pid in pids]
            if kind == "suspended":
                still = [processes["node 1" in name]]
            others = [each for each in processes if each not in still]
            strike()
            if when == "after":
                codes = [each.wait(DEADLINE_S) for each in others]
            else:
                time.sleep(chosen.uniform(0, timeout_s()) + (timeout_s() + 1.0) * (when == "while"))
            with contextlib.suppress(ProcessLookupError):  # It was killed.
                go_on()
            codes = [each.wait(DEADLINE_S) for each in others]
            ends = [each.wait(DEADLINE_S) for each in still]
            said = said_by(processes)
            found = {fact["rank"]: fact for fact in said if "digest" in fact}
            demand(found, "no rank has come to the end")
            rings = {tuple(fact["ended"][-1][1]) for fact in found.values()}
            demand(len(rings) == 1, f"two jobs: the rings {sorted(rings)} have come to the end")
            (ring,) = rings
            demand(sorted(found) == sorted(ring), f"of {ring}, {sorted(found)} came to the end")
            demand_once(found, SHORT_EPOCHS)
            for fact in said:
                if "writes" in fact and not {*fact["members"]} >= {*ring}:
                    demand(False, f"a second job has written: {fact}")
            demand(not any(codes), f"those that went on ended with {codes}")
            out = {*range(SIZE)} - {*ring}
            for process, code in zip(still, ends, strict=True):
                if kind == "suspended" or not out:
                    continue
                demand(code != 0, "what was left out ended with 0")
                is_named = code == -signal.SIGKILL or "RendezvousError" in process.stderr
                demand(is_named, f"what was left out ended with {code} and no name")
        except AssertionError:
            print(what, *(f"{each.stdout}\n{each.stderr}" for each in processes), sep="\n")
            raise
    return f"{what}: {len(ring)} went on, the others ended with {ends}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument(
        "--kinds", default=",".join(["kill,stop,exit,leave,reset,write,halt,back", *STANDING])
    )
    given = parser.parse_args()
    VARIABLES["RINGREDUCE_TIMEOUT_S"] = str(given.timeout_s)
    kinds = given.kinds.split(",")
    try:
        hosts.require()
    except pytest.skip.Exception as why:
        kinds = [kind for kind in kinds if kind != "cut"]
        print(f"without cuts: {why}", flush=True)
    standing = [kind for kind in STANDING if kind in kinds]
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    chosen, until = random.Random(seed), time.monotonic() + 60 * given.minutes
    print(f"seed {seed}, {given.minutes:g} minutes", flush=True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    expected = None
    number = 0
    while time.monotonic() < until:
        number += 1
        if standing and (number % 3 == 0 or {*kinds} <= {*standing}):
            with tempfile.TemporaryDirectory() as folder:
                text = run_standing(Path(folder), chosen, chosen.choice(standing))
            print(f"#{number} {text}", flush=True)
            continue
        if expected is not None and "halt" in kinds and chosen.random() < 0.4:
            with tempfile.TemporaryDirectory() as folder:
                text, found = run_halted(Path(folder), chosen)
            is_close = np.allclose(found[0]["weights"], expected, rtol=0, atol=1e-5)
            demand(is_close, "other weights")
            print(f"#{number} {text}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            count = 0 if expected is None else chosen.choice([1, 2, 3])
            struck, done, found = run(Path(folder), chosen, count, kinds)
        first = found[min(found)]
        expected = first["weights"] if expected is None else expected
        demand(np.allclose(first["weights"], expected, rtol=0, atol=1e-5), "other weights")
        # A step is by those left once the victim is no member of its ring.
        each = [
            min(end for end, members in first["ended"] if victim not in members) - began
            for victim, began in struck
            if any(victim not in members for _, members in first["ended"])
        ]
        if {*done} <= {"stop"}:
            taken["stop" in done] += each
        left = ", ".join(map(str, sorted(found)))
        seconds = " ".join(f"{each_s:.2f} s" for each_s in each)
        back = [f"{rank} (life {fact['life']})" for rank, fact in found.items() if fact["life"]]
        done += [f"back: {', '.join(back)}"] * bool(back)
        print(f"#{number} left: {left}; {seconds}; {', '.join(done)}", flush=True)
    print(f"{number} jobs, 0 violations")
    for stops, all_s in taken.items():
        if all_s:
            which = "of jobs that also stop one" if stops else "all killed"
            at = [float(np.percentile(all_s, share)) for share in (50, 99, 100)]
            text = "{} losses, {}: median {:.2f} s, 99 % {:.2f} s, max {:.2f} s"
            print(text.format(len(all_s), which, *at))


if __name__ == "__main__":
    try:
        main()
    except ViolationError as violation:
        sys.exit(f"violation: {violation}")
