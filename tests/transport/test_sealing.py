"""AEGIS-128L as compiled code calls it, and the keys of frames, against known answers."""

import threading
from typing import Any

import numba
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.pure.membership import Membership
from ringreduce.testing import ring_of_threads
from ringreduce.transport import sodium
from ringreduce.transport.frames import FRAMES_PER_KEY_MAX
from ringreduce.transport.security import Security
from ringreduce.transport.zeromq import ZmqLink
from tests import sealing
from tests.rings import outcome

KEY, NONCE = "10010000000000000000000000000000", "10000200000000000000000000000000"

# (associated data, text, ciphertext, tag of 256 bits): draft-irtf-cfrg-aegis-aead, "AEGIS-128L Test
# Vectors" 1 to 5, all with the key and the nonce above.
VECTORS = [
    (
        *("", "00000000000000000000000000000000", "c1c0e58bd913006feba00f4b3cc3594e"),
        "25835bfbb21632176cf03840687cb968cace4617af1bd0f7d064c639a5c79ee4",
    ),
    ("", "", "", "1360dc9db8ae42455f6e5b6a9d488ea4f2184c4e12120249335c4ee84bafe25d"),
    (
        "0001020304050607",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
        "79d94593d8c2119d7e8fd9b8fc77845c5c077a05b2528b6ac54b563aed8efe84",
        "022cb796fe7e0ae1197525ff67e309484cfbab6528ddef89f17d74ef8ecd82b3",
    ),
    (
        *("0001020304050607", "000102030405060708090a0b0c0d", "79d94593d8c2119d7e8fd9b8fc77"),
        "86f1b80bfb463aba711d15405d094baf4a55a15dbfec81a76f35ed0b9c8b04ac",
    ),
    (
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20212223242526272829",
        "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334353637",
        "b31052ad1cca4e291abcf2df3502e6bdb1bfd6db36798be3607b1f94d34478aa7ede7f7a990fec10",
        "b91e2947a33da8bee89b6794e647baf0fc835ff574aca3fc27c33be0db2aff98",
    ),
]

sodium.load()


@numba.njit
def _encrypt(cipher: Any, tag: Any, text: Any, header: Any, nonce: Any, key: Any) -> Any:
    return sodium.encrypt(
        cipher.ctypes.data, tag.ctypes.data, 0, text.ctypes.data, np.uint64(text.size),
        header.ctypes.data, np.uint64(header.size), 0, nonce.ctypes.data, key.ctypes.data,
    )  # fmt: skip


@numba.njit
def _decrypt(text: Any, cipher: Any, tag: Any, header: Any, nonce: Any, key: Any) -> Any:
    return sodium.decrypt(
        text.ctypes.data, 0, cipher.ctypes.data, np.uint64(cipher.size), tag.ctypes.data,
        header.ctypes.data, np.uint64(header.size), nonce.ctypes.data, key.ctypes.data,
    )  # fmt: skip


def array(data: str) -> np.ndarray:
    return np.frombuffer(bytearray.fromhex(data), np.uint8)


@pytest.mark.parametrize(("header", "text", "cipher", "tag"), VECTORS)
def test_compiled_code_and_the_tests_encrypt_as_the_draft_does(header, text, cipher, tag):
    found = np.empty(len(text) // 2, np.uint8), np.empty(sodium.TAG_BYTES, np.uint8)
    assert _encrypt(*found, *map(array, (text, header, NONCE, KEY))) == 0
    assert tuple(each.tobytes().hex() for each in found) == (cipher, tag)
    again = sealing.encrypt(*map(bytes.fromhex, (KEY, NONCE, text, header)))
    assert tuple(each.hex() for each in again) == (cipher, tag)

    opened = np.empty_like(found[0])
    assert _decrypt(opened, *map(array, (cipher, tag, header, NONCE, KEY))) == 0
    assert opened.tobytes().hex() == text


@pytest.mark.parametrize("part", ["cipher", "tag", "header", "nonce", "key"])
def test_what_was_changed_by_one_bit_does_not_decrypt_and_leaves_no_text(part):
    header, _, cipher, tag = VECTORS[4]
    parts = {"cipher": cipher, "tag": tag, "header": header, "nonce": NONCE, "key": KEY}
    right = {name: array(data) for name, data in parts.items()}
    opened = np.empty_like(right["cipher"])
    for bit in range(8 * right[part].size):
        right[part][bit // 8] ^= 1 << bit % 8
        opened[:] = 0xA5
        assert _decrypt(opened, *right.values()) != 0
        assert not opened.any()
        right[part][bit // 8] ^= 1 << bit % 8
    assert _decrypt(opened, *right.values()) == 0


# --- Keys -----------------------------------------------------------------------------------


# What the key of a frame is made of; public keys of ranks 0 to 3.
LINK = {
    "secret": "correct horse battery staple",
    "job_id": "ours",
    "material": bytes(range(32)),
    "job": 77,
    "route": (1, 2, 3),  # sender, receiver, channel
    "group": 4,
    "epoch": 5,
    "keys": tuple("0" * 39 + digit for digit in "0123"),
}


def keys_of(**changes: Any) -> tuple[bytes, bytes]:
    """The key as `Security` makes it, and as the tests do."""
    link: dict[str, Any] = {**LINK, **changes}
    keys, route, job = link.pop("keys"), link["route"], link["job"]
    security = Security(secret=link["secret"], job_id=link["job_id"], size=4, is_encrypted=True)
    # Its own key is fresh each time; a rank of this number is no part of the links here.
    keys = security.public, *keys[1:]
    security.learn(keys, bytes(32), job=job)
    group = security.for_group(Membership(tuple(range(4)), link["group"], link["epoch"]))
    group.start_session(link["material"])
    ends = tuple(keys[rank].encode() for rank in route[:2])
    return group.frame_key(*route), sealing.frame_key(keys=ends, **link)


def test_the_key_of_a_frame_changes_with_all_that_it_is_made_of():
    keys = LINK["keys"]
    changes = [
        {},
        {"secret": LINK["secret"] + "s"},
        {"job_id": "theirs"},
        *({"material": material} for material in (bytes(32), bytes(range(31)) + b"!")),
        {"job": 78},
        *({"route": route} for route in ((2, 1, 3), (3, 2, 3), (1, 3, 3), (1, 2, 1 << 15))),
        *({name: 1 << 15} for name in ("group", "epoch")),
        # Numbers that stand beside each other in the message.
        {"group": 5, "epoch": 4},
        {"route": (1, 3, 2)},
        *({"keys": (*keys[:rank], "9" * 40, *keys[rank + 1 :])} for rank in (1, 2)),
    ]
    found = [keys_of(**each) for each in changes]
    assert all(ours == again for ours, again in found)
    assert all(len(ours) == sodium.KEY_BYTES for ours, _ in found)
    assert len({ours for ours, _ in found}) == len(found)


@pytest.mark.parametrize(
    ("size", "settings"),
    [(2, {"streams": 3, "transport": "zmq"}), (5, {"transport": "zmq"}), (4, {"hosts": "aabb"})],
)
def test_each_direction_of_each_channel_has_a_key_of_its_own(monkeypatch, size, settings):
    """Of streams, of exchanges over longer distances, of lanes between hosts, and of pairs."""
    seals: list[bytes] = []
    opens: list[bytes] = []
    connect = ZmqLink.connect

    def connect_and_note(link, **options):
        connect(link, **options)
        used = link.records[: len(link.sockets.outgoing)]
        seals.extend(bytes(record.seal_key) for record in used)
        opens.extend(bytes(record.open_key) for record in used)

    def work(comm):
        for ring in (comm, comm.split(0)):
            sent = ring.send(np.ones(3), (ring.rank + 1) % size, async_op=True)
            ring.recv(np.ones(3), (ring.rank - 1) % size)
            sent.wait()
            if settings.get("transport") == "zmq":
                pairs = ring._session.collectives.pairs
                seals.extend(bytes(end.channel.seal_key) for end in pairs._sending.values())
                opens.extend(bytes(end.channel.open_key) for end in pairs._receiving.values())
        return float(comm.all_reduce(np.ones(300_000)).max())

    monkeypatch.setattr(ZmqLink, "connect", connect_and_note)
    for _ in range(2):
        assert ring_of_threads(size, work, encryption="on", **settings) == [float(size)] * size
    assert len(set(seals)) == len(seals) >= 8
    assert sorted(opens) == sorted(seals)
    assert bytes(sodium.KEY_BYTES) not in seals


def test_a_key_seals_no_more_frames_than_it_may():
    """Here two more from rank 0 to rank 1, in place of 2^48."""
    records: dict[int, Any] = {}
    both = threading.Barrier(2)

    def work(comm):
        [records[comm.rank]] = comm._session.collectives._link.records
        both.wait(20)
        records[0].seal_nonce[0] = records[1].open_nonce[0] = FRAMES_PER_KEY_MAX - 2
        both.wait(20)
        for _ in range(2):
            assert (comm.all_reduce(np.ones(3)) == 2).all()
        return outcome(comm.barrier)

    ended, told = ring_of_threads(2, work, transport="zmq", encryption="on")
    assert isinstance(ended, rr.ClosedError)
    assert "may seal no more frames with the key of this connection" in str(ended)
    # The control channel has keys of its own.
    assert isinstance(told, rr.ClosedError)
    assert "was told by rank 0" in str(told)
