"""Ends the workers if the launcher was killed. Runs as a script, stdlib only.

Standard input is a pipe that only the launcher holds open. It sends ``+pid`` for each worker
(leader of a process group of that number) and ``-pid`` when that has ended. When the pipe closes,
the remaining groups are killed; after a normal end there are none.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the launcher has ended, then kill the workers that it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
