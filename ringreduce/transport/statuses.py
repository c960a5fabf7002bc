"""What the compiled loops over sockets return."""

from __future__ import annotations

DONE = 0
WAITING = 1  # nothing arrived for one receive timeout, or a signal came
DRAINING = 2  # libzmq still holds borrowed segments, and nothing else can be done
FOREIGN = 3  # a frame without our magic, version or job
MISMATCH = 4  # a frame of ours that is not the one due
MISSHAPEN = 5  # the header due, but a payload of another size
UNSENDABLE = 6  # the next rank's connection is gone
FAILED = 7  # libzmq reported `errno`
CORRUPT = 8  # a sealed frame that does not open
KEY_ENDED = 9  # a channel's key has sealed as many frames as it may
