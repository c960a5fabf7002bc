"""How tests are shared out to worker processes: whole files, and on when a worker has died.

pytest-xdist 3.8 gives a dead worker's files out again with those that were finished, and a worker
that is given nothing but such a file waits for ever, and the run with it. It also runs the test
that the worker died in again and again.
"""

import sys
from typing import Any

from xdist.scheduler import LoadFileScheduling

__all__ = ["Scheduling"]

# Some of their tests take minutes in `make test-full`: begun last, all would wait for one.
_FIRST = [f"tests/project/test_{name}.py" for name in ("dist", "bench_strategies", "bench")]


class Scheduling(LoadFileScheduling):
    """`--dist loadfile`, where a test that ends its worker fails once and the others go on."""

    def remove_node(self, node: Any) -> str | None:
        """Take the files of a worker that has ended back; return the test that it died in."""
        died_in = None
        for file, tests in self.assigned_work.pop(node).items():
            left = [test for test, done in tests.items() if not done]
            if left and died_in is None:
                died_in = left.pop(0)
                tests[died_in] = True
            if left:
                self.workqueue[file] = tests
        if died_in is not None:
            # Now, and not in the summary only: the run may be ended before that.
            print(f"\na worker died, or passed the time limit, in {died_in}", file=sys.stderr)
            for other in self.assigned_work:
                self._reschedule(other)
        return died_in

    def _assign_work_unit(self, node: Any) -> None:
        first = next((file for file in _FIRST if file in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
        # A worker runs a test once it knows of the next, or that there is none.
        if self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)
