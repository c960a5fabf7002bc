"""Ends the workers when the launcher was killed and cannot. Runs as a script, stdlib only.

Standard input is a pipe that only the launcher holds open. It sends ``+pid`` for each
worker it starts (a process group of that number) and ``-pid`` when it has ended. When the
pipe closes, whatever is left is killed: after a normal end nothing is.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the launcher is gone, then kill what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change, group = line[0], int(line[1:])
        if change == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
