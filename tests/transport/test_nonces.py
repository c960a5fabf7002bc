"""No nonce is used twice with a key: every frame that real processes seal is recorded."""

import secrets
from collections import defaultdict

from ringreduce.transport import records, sodium
from tests.rings import Ring

PROGRAM = """
import ctypes
import llvmlite.binding
from concurrent.futures import ThreadPoolExecutor
from ringreduce.transport import libzmq, loop, records, zeromq

# What compiled loops call instead of libsodium's function, from the first on: they are not linked
# yet. It notes key, nonce and the kind in the header.
name = "crypto_aead_aegis128l_encrypt_detached"
library = libzmq.library()
seals = []

@ctypes.CFUNCTYPE(ctypes.c_int, *10 * [ctypes.c_size_t])
def seal(*arguments):
    header, nonce, key = arguments[5], arguments[8], arguments[9]
    parts = (ctypes.string_at(key, 16), ctypes.string_at(nonce, 16), ctypes.string_at(header, 6))
    seals.append((parts[0].hex(), parts[1].hex(), parts[2][5]))
    return library[name](*map(ctypes.c_size_t, arguments))

llvmlite.binding.add_symbol(name, ctypes.cast(seal, ctypes.c_void_p).value)

links = []
connect = zeromq.ZmqLink.connect
def connect_and_note(link, **where):
    connect(link, **where)
    links.append(link)
zeromq.ZmqLink.connect = connect_and_note

for config in CONFIGS:
    config["job_id"] = "the same"

def ends_of(ring):
    pairs = ring._session.collectives.pairs
    return [*pairs._sending.values(), *pairs._receiving.values()]

# Two rings of the same processes, at once.
overlapping = [join(0), join(1)]
def work(ring):
    for count in (10, 300_000, 2000):
        assert (ring.all_reduce(np.ones(count)) == SIZE).all()
    ring.broadcast(np.ones(5000))
    # Frames within one message and of their own, both ways at once.
    sent = ring.send(np.ones(300_000), 1 - RANK, async_op=True)
    ring.recv(np.ones(300_000), 1 - RANK)
    sent.wait()
    assert (ring.all_to_all(np.full((2, 5000), RANK)) == [[0], [1]]).all()
with ThreadPoolExecutor(2) as pool:
    list(pool.map(work, overlapping))
before = len(seals)
overlapping[0].barrier()
say("barrier", seals=len(seals) - before)

# One that fails while rank 0's frames are queued, and one that forms instead.
failing = join(2)
before = len(seals)
attempt("failed", failing.barrier if RANK else lambda: failing.all_reduce(np.ones(1 << 22)))
say("queued", seals=len(seals) - before, taken=sum(r.taken for r in links[2].records))
failing.close()
again = join(3)
work(again)

# A child that goes on as if it were its parent.
child = os.fork()
if child == 0:
    seals.clear()
    attempt("child", again.barrier)
    memory = np.zeros(100, np.uint8)
    sent = records.TransferRecord(memory=memory.ctypes.data, nbytes=memory.size)
    def post(link):
        link.started = 0
        return int(loop.transfer(ctypes.addressof(link), ctypes.addressof(sent), 0, 0, 0))
    channels, ends = links[3].records, ends_of(again)
    facts = {"status": post(links[3]._record), "pairs": post(ends[0].record)}
    channels = [*channels, *(end.channel for end in ends)]
    facts["keys"] = [bytes(key).hex() for r in channels for key in (r.seal_key, r.open_key)]
    say("forked", seals=len(seals), **facts)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
work(again)
for ring in (again, *overlapping):
    ring.close()
sent = [[record.sent for record in link.records] for link in links]
sent += [[end.channel.sent for end in ends_of(ring)] for ring in (again, *overlapping)]
say("done", seals=seals, sent=sent)
"""


def test_no_nonce_is_used_twice_with_a_key(tmp_path, monkeypatch):
    # Workers that are forked from a process that has linked the loops would not be recorded.
    monkeypatch.setenv("RINGREDUCE_TEST_FRESH", "1")
    settings = {"secret": secrets.token_hex(32), "encryption": "on"}
    with Ring(tmp_path, 2, PROGRAM, rings=4, streams=2, **settings) as ring:
        done = ring.wait("done")
        assert [fact["seals"] for fact in ring.wait("barrier")] == [1, 1]
        for fact in ring.wait("failed"):
            assert fact["kind"] == "MismatchError", fact
        # 16 segments of 1 MiB, of which rank 1 took none; both took a frame when the ring formed.
        queued = ring.wait("queued")
        assert 16 <= queued[0]["seals"] <= 18
        assert [fact["taken"] for fact in queued] == [1, 1]
        for fact in ring.wait("child"):
            assert fact["kind"] == "ClosedError", fact
            assert "child process" in fact["text"]
        for fact in ring.wait("forked"):
            assert {fact["status"], fact["pairs"]} == {records.KEY_ENDED}
            assert fact["seals"] == 0
            assert set(fact["keys"]) == {bytes(sodium.KEY_BYTES).hex()}
        ring.release()

    by_key: dict[str, list[int]] = defaultdict(list)
    for fact in done:
        assert len(fact["seals"]) == sum(map(sum, fact["sent"]))
        for key, nonce, _ in fact["seals"]:
            by_key[key].append(int.from_bytes(bytes.fromhex(nonce), "little"))
    # Of 4 rings, 2 ranks and 2 streams, each with a count that begins at 0; rank 1 may have sent
    # nothing on the second stream of the ring that fails. Three rings have two channels more.
    assert len(by_key) in (15 + 12, 16 + 12)
    assert all(sorted(nonces) == list(range(len(nonces))) for nonces in by_key.values())
