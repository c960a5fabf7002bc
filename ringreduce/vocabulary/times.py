"""All time constants. `ringreduce.vocabulary.config` has those of this process and the settings."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Times:
    """Seconds. Tests multiply all by one factor (`scaled`)."""

    # Interval at which waits in Python check the clock, lost peers and signal handlers: short
    # enough for Ctrl-C, long enough to cost nothing.
    poll_s: float = 0.05
    # The same in shared memory, where no closing connection ends a wait.
    shared_memory_poll_s: float = 0.02

    # Between two heartbeats: four a second cost about a thousandth of a core.
    heartbeat_s: float = 0.25
    # A heartbeat this late counts as missing: even a loaded machine would have sent it.
    silent_s: float = 1.0
    # Between two pings of libzmq's own threads, which need no Python. Two fit into `silent_s`.
    ping_s: float = 0.5
    # Without progress for this long, a warning names a stopped rank ...
    silent_warning_s: float = 1.0
    slow_warning_s: float = 5.0  # ... and after this long one that is alive.
    # A neighbour silent for this long gets few heartbeats: unread ones must not fill its system's
    # buffers, or a long stop would look like a dead connection.
    sparing_s: float = 5.0
    pause_memory_s: float = 5.0  # a pause of this process explains errors up to this long after it

    # A connection carries nothing of what was sent: TCP has sent a lost packet five times by then,
    # and a warning names the two ranks ...
    link_warning_s: float = 2.0
    # ... and the job ends. Virtual machines that move and spanning trees pause for several seconds.
    link_timeout_s: float = 15.0
    # The least setting of it, since heartbeats must arrive in between.
    link_timeout_min_s: float = 0.5
    # After a connection has ended, wait for the news that its rank leaves, which comes on another.
    ended_s: float = 0.1
    half_ended_s: float = 1.0  # the same if only one of its two connections has ended
    ended_poll_s: float = 0.02  # meanwhile the watcher checks this often
    # In an exchange neighbours may leave before this rank is done, and while the ring forms they
    # may not have connected yet. After this silence one that has left counts as lost.
    quiet_s: float = 3.0
    # A thread that waits for a frame reads the clock more often; else it waits for the GIL.
    looked_s: float = 0.5

    # A failed call waits this long for the watcher to find the cause, which comes by way of other
    # ranks' watchers: on a loaded machine each may take a tenth of a second.
    explain_s: float = 2.0
    # A rank with a mismatch waits this long for the rank that caused it to send what differs. That
    # one knows as soon as it gets a frame; its predecessor may still be computing.
    explanation_s: float = 1.0

    linger_s: float = 1.0  # to send what is still to be written when a rank leaves
    flush_s: float = 0.05  # to send confirmations when the control channel closes
    # A rank that leaves waits this long for its neighbours to confirm that they know.
    confirm_s: float = 1.0
    # A thread that takes longer to end is stuck, writing to a dead disk or an unread terminal.
    join_thread_s: float = 2.0

    lock_s: float = 5.0  # after a ring's first call, for ranks that are still connecting
    # A handshake takes a few round trips and the answer of a thread that needs Python's lock, which
    # others may keep for seconds while a ring forms. One that takes longer is not from a rank.
    handshake_s: float = 30.0
    refusal_pause_s: float = 10.0  # between two logged lines on refused connections
    # For the handshake of a rank at a standby port, where it tries again; it begins it at once.
    hello_s: float = 2.0
    # After an elastic training the standby port tells ranks that have missed its end. They ask at
    # once, unless they were stopped.
    told_s: float = 60.0
    # To connect to a rank whose port opens at about then: the system retries only after a second.
    # Within a host `poll_s` is enough.
    reconnect_s: float = 0.25
    # Ranks that wait for others at the start say so after this long: most have imported by then.
    remind_s: float = 15.0
    # Between two questions for a name that does not lead to its host yet: many ranks ask.
    name_s: float = 1.0
    # To find out at which address a rank can be reached: TCP repeats a lost first packet after one
    # second, and again after two more.
    reach_s: float = 5.0
    lead_s: float = 0.25  # meanwhile each of a rank's addresses has this start before the next
    # Other ranks wait this much longer than rank 0, whose answer names the missing ranks.
    answer_s: float = 0.5

    # From one look of a training to the next, in which ranks learn who was told to go; and to the
    # one that acts, so that those that were told at about the same time go together.
    look_s: float = 0.6
    look_again_s: float = 0.15
    # systemd, Slurm, and a launcher that passes it on may deliver one notice twice; a second one
    # this long after the first ends the process at once.
    notice_s: float = 2.0

    # The launcher: a failure that reports another rank's waits this long for that one.
    cause_s: float = 1.5
    # By default, from the signal that is to end workers to SIGKILL: as torchrun, Slurm and
    # Kubernetes have it, enough for a handler that saves a model ...
    grace_s: float = 30.0
    grace_said_s: float = 3.0  # ... and after this much of it the launcher says for whom it waits.
    # Before SIGTERM, for the other ranks to write their flight records, where these are kept.
    record_s: float = 1.5
    # A lost rank of an elastic job is started again at once. The next time it waits this long, then
    # twice as long ...
    comeback_wait_s: float = 10.0
    comeback_wait_max_s: float = (
        600.0  # ... up to this; a host that fails for good costs little ...
    )
    # ... until it has worked for this long in the ring: what was before is forgotten.
    comeback_worked_s: float = 3600.0
    # A newcomer that waits to be taken in looks this often whether the first rank is there, and if
    # it is not this long whether the others have taken it in all the same.
    door_look_s: float = 0.1
    door_lost_s: float = 2.0
    # When the job has ended, for one that is coming back to end by SIGTERM: nobody needs its work.
    comeback_end_s: float = 5.0
    # The traceback of a program that an exception has ended is shown after this, if its process
    # has not ended: threads of its own may go on, and a loaded machine takes long.
    hold_s: float = 30.0
    partial_line_s: float = 10.0  # into a file, between two states of a line that is redrawn
    drain_s: float = 0.5  # to read output that a dead worker's children still hold open
    # For ssh to connect, and Python to start there from a slow file system.
    agent_start_s: float = 60.0
    agent_ping_s: float = 5.0  # between two messages that show an agent that its launcher lives ...
    # ... and without any for this long it ends its ranks; longer than a moment's stop (Ctrl-Z).
    agent_silent_s: float = 60.0
    agent_end_s: float = 5.0  # for an agent, and ssh, to end after their ranks were killed

    def scaled(self, factor: float) -> Times:
        return Times(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


def milliseconds(seconds: float) -> int:
    """`seconds` in whole milliseconds, at least 1, since 0 often means "forever"."""
    return max(1, round(1000 * seconds))
