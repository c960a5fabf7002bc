"""What a rank says when it comes to the rendezvous, made by hand."""

from typing import Any

import msgspec

from ringreduce._version import __version__
from ringreduce.pure.wire import WIRE_VERSION
from ringreduce.vocabulary.config import Config

__all__ = ["hello"]


def hello(**fields: Any) -> bytes:
    """A Hello as rank 1 of 2 with the default settings would say it, but for `fields`."""
    usual = {
        "type": "Hello",
        "version": __version__,
        "wire_version": WIRE_VERSION,
        "job_id": "ours",
        "rank": 1,
        "size": 2,
        "address": "tcp://127.0.0.1:9",
        "control": "tcp://127.0.0.1:1,2",
        "standby": "",
        "host": "elsewhere",
        "memory": "",
        "settings": Config().agreed(),
        "encryption": "none",
        "key": "",
    }
    return msgspec.msgpack.encode({**usual, **fields})
