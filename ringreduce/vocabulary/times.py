"""Every time constant that somebody may have to wait for, in one place.

What a user sets (`timeout_s`, `join_timeout_s`) is in `ringreduce.vocabulary.config`, and so are
the constants that hold in this process: `TIMES`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Times", "milliseconds"]


@dataclass(frozen=True)
class Times:
    """Seconds. All are multiplied by one factor when tests ask for it (`scaled`)."""

    # Waits in Python end this often for the clock, lost peers and Python's signal handlers:
    # soon enough for Ctrl-C, seldom enough to cost nothing.
    poll_s: float = 0.05
    # The same in shared memory, where the peer cannot end a wait by closing a connection.
    shared_memory_poll_s: float = 0.02

    # Between two heartbeats of a rank: four a second cost about a thousandth of a core.
    heartbeat_s: float = 0.25
    # A heartbeat so late counts as missing: even a loaded machine would have sent it.
    silent_s: float = 1.0
    # A stopped rank is named in a warning after this long without progress ...
    silent_warning_s: float = 1.0
    # ... and one that is alive after this long.
    slow_warning_s: float = 5.0
    # Between two warnings that the same rank is always late.
    straggler_pause_s: float = 60.0
    # A neighbour silent for so long gets few heartbeats: what it does not read must not fill
    # its system's memory, or a long stop would look like a dead line.
    sparing_s: float = 5.0
    # A pause of this process explains errors that come no later than this after it.
    pause_memory_s: float = 5.0

    # A connection that carries nothing of what is due: TCP has sent a lost packet five times by
    # then. A switch may lose a few, and the error still comes within three seconds.
    link_timeout_s: float = 2.0
    # No setting of it may be shorter, since heartbeats must come in between.
    link_timeout_min_s: float = 0.5
    # A connection has ended, and the rank's own message that it leaves comes on another one.
    ended_s: float = 0.1
    # The same where only one of its two connections has ended.
    half_ended_s: float = 1.0
    # Then the watcher looks again this soon.
    ended_poll_s: float = 0.02
    # In an exchange neighbours may leave before we are done, and while the ring forms a
    # connection may be yet to come. After this silence one that has left counts as lost.
    quiet_s: float = 3.0
    # A thread that waits for a frame looks at the clock more often; else it waits for the GIL.
    looked_s: float = 0.5

    # A call that fails waits so long for the watcher to learn why.
    explain_s: float = 0.5
    # A mismatch waits so long for the rank that caused it to say what differs. It knows as soon
    # as it sees a frame; this is for one whose predecessor is still computing.
    explanation_s: float = 1.0

    # A goodbye, and the segments before it, get so long to leave this process.
    linger_s: float = 1.0
    # An abort gets less: the watcher sends it too, and the error should be raised soon.
    abort_linger_s: float = 0.5
    # A confirmation on the control channel gets so long to leave when the channel closes.
    flush_s: float = 0.05
    # A rank that leaves waits so long for its neighbours to confirm that they know.
    confirm_s: float = 1.0
    # A thread that has not ended by then is stuck: it writes to a dead disk, or to a terminal
    # that nobody reads.
    join_thread_s: float = 2.0

    # After a ring's first call ranks that are still connecting get so long.
    lock_s: float = 5.0
    # A handshake takes a few round trips; what takes longer is no rank.
    handshake_s: float = 10.0
    # Between two logged lines on refused strangers.
    refusal_pause_s: float = 10.0
    # A rank that connects to a Unix socket has its hello ready.
    hello_s: float = 2.0
    # Other ranks wait this much longer for rank 0 than it does: its answer names who is missing.
    answer_s: float = 0.5

    # The launcher: a failure that only reports another rank's gives that one so long to show.
    cause_s: float = 1.5
    # From SIGTERM to SIGKILL.
    grace_s: float = 3.0
    # Before SIGTERM, where flight records are kept: the other ranks write theirs.
    record_s: float = 1.5
    # Output that a dead worker's children still hold open is read so long.
    drain_s: float = 0.5

    def scaled(self, factor: float) -> Times:
        """The same with every value multiplied by `factor`."""
        return Times(**{each.name: factor * getattr(self, each.name) for each in fields(self)})


def milliseconds(seconds: float) -> int:
    """`seconds` for what takes whole milliseconds, at least 1: 0 often means "for ever"."""
    return max(1, round(1000 * seconds))
