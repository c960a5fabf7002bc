"""Descriptors of sockets that somebody else owns."""

import os
import socket
import sys

import pytest

from ringreduce.transport.descriptors import borrowed


def test_the_owner_keeps_the_socket():
    with socket.create_server(("127.0.0.1", 0)) as owned:
        with borrowed(owned.fileno()) as found:
            assert found.getsockname() == owned.getsockname()
        assert owned.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_what_is_no_socket_leaves_no_descriptor():
    """As where a lost connection's number has become that of a file."""
    with open(os.devnull) as file:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="ocket"), borrowed(file.fileno()):
            pass
        assert len(os.listdir("/proc/self/fd")) == len(before)
