"""The deliberate breakages of `tests/breakages.py`: mistakes that a careless change could make."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BREAKAGES", "Breakage"]


@dataclass(frozen=True)
class Breakage:
    """One mistake.

    Attributes:
        name: unique.
        file: which it is made in, from the root of the repository.
        text: occurs there exactly once.
        replacement: what it becomes.
        harm: what a user would suffer.
        tests: files that should catch it, the quickest first.
    """

    name: str
    file: str
    text: str
    replacement: str
    harm: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        """Whether it is in the C library."""
        return self.file.startswith("native/")

    @property
    def digest(self) -> str:
        """Changes with the mistake that is made."""
        parts = repr((self.file, self.text, self.replacement))
        return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()

    def applied(self, root: Path) -> str:
        """The file's text with the mistake; ValueError: there is no one place for it."""
        before = (root / self.file).read_text()
        if (found := before.count(self.text)) != 1:
            raise ValueError(f"the text of {self.name} occurs {found} times in {self.file}")
        return before.replace(self.text, self.replacement)


BREAKAGES = (
    Breakage(
        "schedule-rows-twice",
        "ringreduce/pure/schedule.py",
        "tuple(min(distance, size - distance) for distance in distances)",
        "distances",
        "With 3, 5 or 6 ranks a small all-reduce writes beyond its memory.",
        ("tests/pure/test_schedule.py",),
    ),
    Breakage(
        "wire-parts-run-together",
        "ringreduce/pure/wire.py",
        "hashlib.blake2b(repr(parts).encode(), digest_size=8)",
        'hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8)',
        "Ranks whose gradient plans differ slightly reduce them together, without an error.",
        ("tests/pure/test_wire.py",),
    ),
    Breakage(
        "buckets-optimizer-numbers",
        "ringreduce/pure/buckets.py",
        r'r"_\d+(?=[_/:]|$)"',
        r'r"_\d+(?=[/:]|$)"',
        "A rank that made another model before cannot share its optimizer's state.",
        ("tests/pure/test_buckets.py",),
    ),
    Breakage(
        "buckets-compiled-or-not",
        "ringreduce/pure/buckets.py",
        'signature_of("plan", essence, self.buckets, self.compiled)',
        'signature_of("plan", essence, self.buckets)',
        "A rank that compiles its step trains with others that do not, and rounds differently.",
        ("tests/pure/test_buckets.py",),
    ),
    Breakage(
        "liveness-what-was-said-before",
        "ringreduce/pure/liveness.py",
        "max(0.0, sent.quiet_s - self.unheard_s(sent.receiver, now_s))",
        "sent.quiet_s",
        "A healthy connection counts as dead when its receiver was stopped for a moment.",
        ("tests/pure/test_liveness.py",),
    ),
    Breakage(
        "stalls-time-not-looked",
        "ringreduce/transport/stalls.py",
        "min(now - self._looked_s, TIMES.looked_s)",
        "now - self._looked_s",
        "A rank that keeps Python's lock for long gives up on healthy ranks when it goes on.",
        ("tests/transport/test_stalls.py",),
    ),
    Breakage(
        "watching-old-bytes-are-life",
        "ringreduce/pure/watching.py",
        "self._arrived = dict(arrived)",
        "self._arrived.update(arrived)",
        "A rank that was late before counts as alive for a while after it was stopped.",
        ("tests/pure/test_watching.py",),
    ),
    Breakage(
        "blame-user-code-last",
        "ringreduce/pure/blame.py",
        "(f.calls, f.operation is not None, -f.stood_s, f.rank)",
        "(f.calls, -f.stood_s, f.rank)",
        "A rank that waits is named in place of the one in user code that it waits for.",
        ("tests/pure/test_blame.py",),
    ),
    Breakage(
        "watch-old-losses",
        "ringreduce/pure/watching.py",
        "{n: since for n, since in self._lost.items() if n in lost}",
        "dict(self._lost)",
        "After a connection was made anew, the next short gap ends the job at once.",
        ("tests/pure/test_watching.py",),
    ),
    Breakage(
        "loop-first-stream-alone",
        "ringreduce/transport/loop.py",
        "for stream in range(streams):",
        "for stream in range(1):",
        "With several streams a call returns while libzmq still sends from the user's array.",
        ("tests/collectives/test_collectives.py", "tests/transport/test_zeromq.py"),
    ),
    Breakage(
        "frames-length-not-compared",
        "ringreduce/transport/frames.py",
        "elif link.payload_bytes != nbytes:",
        "elif link.payload_bytes < 0:",
        "A frame with a payload of another length is taken as if nothing were wrong.",
        ("tests/transport/test_fuzz.py",),
    ),
    Breakage(
        "frames-tag-not-checked",
        "ringreduce/transport/frames.py",
        "return CORRUPT if failed != 0 else _look(link)",
        "return _look(link)",
        "A sealed frame that was changed on the way is used.",
        ("tests/transport/test_corruption.py",),
    ),
    Breakage(
        "frames-nonce-again",
        "ringreduce/transport/frames.py",
        "    channel.seal_nonce[0] += np.uint64(1)",
        "    channel.seal_nonce[0] += np.uint64(0)",
        "Every frame of a channel is sealed with the same nonce.",
        ("tests/transport/test_nonces.py",),
    ),
    Breakage(
        "frames-skipped-not-counted",
        "ringreduce/transport/frames.py",
        "        received[:] = 0\n        nonce[0] += np.uint64(1)",
        "        received[:] = 0",
        "After a message of another shape no abort of that rank opens any more.",
        ("tests/transport/test_fuzz.py",),
    ),
    Breakage(
        "frames-partial-sums-needed",
        "ringreduce/transport/loop.py",
        "is_spent = is_reduced and step.action & FINISH == 0",
        "is_spent = is_reduced",
        "A finished chunk is encrypted in the user's array, which then holds no sum.",
        ("tests/transport/test_corruption.py", "tests/collectives/test_collectives.py"),
    ),
    Breakage(
        "pairs-first-password",
        "ringreduce/transport/security.py",
        "return Admission(self._security, self.mechanism, channel)",
        "return Admission(self._security, self.mechanism)",
        "Who has seen a rank's password once can take its place at ports that open later.",
        ("tests/transport/test_pairs.py",),
    ),
    Breakage(
        "pairs-busy-with-each-other",
        "ringreduce/pure/liveness.py",
        "return Doing(text, not waits, waits)",
        "return Doing(text, True, waits)",
        "Two ranks that both send first wait for ten minutes instead of the time limit.",
        ("tests/pure/test_liveness.py",),
    ),
    Breakage(
        "messages-not-in-order",
        "ringreduce/communicator/messages.py",
        "            direction.executor.drain()",
        "            pass",
        "A message overtakes those that were given to the background before it.",
        ("tests/communicator/test_pairs.py",),
    ),
    Breakage(
        "messages-close-breaks-all",
        "ringreduce/communicator/session.py",
        "        if self._life.state >= State.LEAVING:\n            return error\n",
        "",
        "A rank that leaves while it waits for a message ends the job on all ranks.",
        ("tests/communicator/test_pairs.py",),
    ),
    Breakage(
        "pairs-reuse-while-sent",
        "ringreduce/transport/pairs.py",
        "self._connect(sending, wait)\n            self._drive(sending, None, 0, wait)",
        "self._connect(sending, wait)\n            self._drive(sending, None, 1 << 40, wait)",
        "A send returns while libzmq still sends from the user's array.",
        ("tests/communicator/test_pairs.py",),
    ),
    Breakage(
        "security-keys-of-all-groups",
        "ringreduce/transport/security.py",
        'message = struct.pack("<HHIII", group, epoch, sender, receiver, channel)',
        'message = struct.pack("<HHIII", 0, epoch, sender, receiver, channel)',
        "Groups of one material would have the same keys.",
        ("tests/transport/test_sealing.py",),
    ),
    Breakage(
        "membership-keys-ignored",
        "ringreduce/pure/membership.py",
        "key=lambda p: choices[p].key",
        "key=lambda p: p",
        "The ranks of a group are in another order than was asked for.",
        ("tests/pure/test_membership.py",),
    ),
    Breakage(
        "membership-epoch-kept",
        "ringreduce/pure/membership.py",
        "self.epoch + 1)",
        "self.epoch)",
        "A ring that is formed anew has the keys and the headers of the one that failed.",
        ("tests/pure/test_membership.py",),
    ),
    Breakage(
        "reforming-compares-no-members",
        "ringreduce/bootstrap/admission.py",
        '("members", hello.members, own.members, _ANEW),',
        "",
        "Ranks that leave out different ones form rings of different ranks.",
        ("tests/communicator/test_reforming.py",),
    ),
    Breakage(
        "reforming-keeps-the-port-open",
        "ringreduce/communicator/formation.py",
        "            self.job.standby.shut()\n",
        "",
        "After a ring was formed anew, strangers reach a port whose queue nobody reads.",
        ("tests/communicator/test_reforming.py",),
    ),
    Breakage(
        "groups-say-user-code",
        "ringreduce/pure/watching.py",
        "operation=(standing.operation or elsewhere)[:64],",
        'operation=(standing.operation or "")[:64],',
        "A rank that is in another group's call looks as if it were in user code for ten minutes.",
        ("tests/communicator/test_groups.py",),
    ),
    Breakage(
        "exchange-rows-sent-again",
        "ringreduce/transport/exchange.py",
        "if link.started == link.step:",
        "if link.started >= link.step:",
        "A rank that waits for a late one sends its rows twice, and the next call fails.",
        ("tests/communicator/test_communicator.py", "tests/collectives/test_collectives.py"),
    ),
    Breakage(
        "ring-mean-over-this-ring",
        "ringreduce/collectives/ring.py",
        "np.array([self._mean_over], computed)",
        "np.array([self._size], computed)",
        "On several hosts with several ranks each the mean of large arrays is too large.",
        ("tests/collectives/test_collectives.py",),
    ),
    Breakage(
        "hierarchical-last-barrier",
        "ringreduce/collectives/hierarchical.py",
        "            self._ring.barrier()\n        self._host.barrier()",
        "            self._ring.barrier()",
        "A barrier lets ranks pass before those of other hosts have come.",
        ("tests/collectives/test_collectives.py",),
    ),
    Breakage(
        "shm-nothing-lent",
        "native/src/shm_chunks.c",
        "if (rr_is_registered(group, group->index))\n            copy_in(group, call, data, 0);",
        "",
        "Where only some ranks' arrays are registered, the sum is of old memory.",
        ("tests/transport/test_shm.py",),
    ),
    Breakage(
        "shm-everybody-arrays",
        "native/src/shm_chunks.c",
        "call->action == RR_ALL_REDUCE ? arrays : &arrays[own]",
        "arrays",
        "A reduce-scatter of registered arrays writes into rank 0's.",
        ("tests/transport/test_shm.py",),
    ),
    Breakage(
        "all-to-all-leaves-early",
        "native/src/shm_all_to_all.c",
        "return lent > 0 ? RR_WAITING : RR_DONE;",
        "return lent > 0 ? RR_DONE : RR_DONE;",
        "A rank changes its registered array while others still read it.",
        ("tests/transport/test_shm.py",),
    ),
    Breakage(
        "all-to-all-old-half",
        "native/src/shm_all_to_all.c",
        "group->segments += end;",
        "group->segments += end > 1;",
        "The next call overwrites what a late rank has not copied yet.",
        ("tests/communicator/test_moving.py", "tests/transport/test_shm.py"),
    ),
    Breakage(
        "pairs-any-message",
        "native/src/pairs.c",
        "if (memcmp(expected, pair->theirs, sizeof expected) != 0)",
        "if (expected[3] != pair->theirs[3])",
        "A recv takes a message of another tag or length.",
        ("tests/transport/test_shm_pairs.py",),
    ),
    Breakage(
        "pairs-slots-overrun",
        "native/src/pairs.c",
        "pair->slots < SLOTS ? 0 : pair->slots - SLOTS + 1;",
        "pair->slots < SLOTS ? 0 : pair->slots - SLOTS;",
        "A message overwrites one that has not been received.",
        ("tests/transport/test_shm_pairs.py",),
    ),
    Breakage(
        "handoff-padding",
        "native/src/handoff.c",
        "memset(bucket->memory + filled, 0, bucket->nbytes - filled);",
        "(void)filled;",
        "Old memory travels behind the gradients, where it may be NaN and stop the training.",
        ("tests/effects/test_handoff.py",),
    ),
    Breakage(
        "handoff-last-one-leaves",
        "native/src/handoff.c",
        "if (--owner->inside == 0 && code == RR_HANDOFF_CLOSED)\n"
        "        pthread_cond_broadcast(&owner->changed);",
        "owner->inside--;",
        "Closing a communicator while a step waits never returns.",
        ("tests/effects/test_handoff.py",),
    ),
    Breakage(
        "tf-ops-error-of-a-wait",
        "native/src/tf_ops.c",
        "rr_handoff_wait(kernel->plan, (uint32_t)kernel->bucket, parts.parts,\n"
        "                        (uint32_t)kernel->gradients, why) != RR_DONE)",
        "rr_handoff_wait(kernel->plan, (uint32_t)kernel->bucket, parts.parts,\n"
        "                        (uint32_t)kernel->gradients, why) == RR_HANDOFF_MISUSED)",
        "When the ring fails in a step, that step applies gradients that were never averaged.",
        ("tests/tensorflow/test_bridge_failures.py",),
    ),
    Breakage(
        "xla-calls-moved-gradient",
        "native/src/xla_calls.c",
        "call.in_place && !shares_memory(frame)",
        "call.in_place && frame->rets.size < 2 && !shares_memory(frame)",
        "A gradient that XLA has moved is applied without being averaged.",
        ("tests/keras/test_jit.py",),
    ),
    Breakage(
        "xla-calls-table-of-2-18",
        "native/src/xla_calls.c",
        "{1, 88, 12},",
        "{1, 88, 11},",
        "jit_compile=True is refused with TensorFlow 2.18.",
        ("tests/tensorflow/test_tf_api.py",),
    ),
    Breakage(
        "engine-unanswered",
        "ringreduce/engine/engine.py",
        '_log.exception("the engine could not tell the other ranks")\n        finally:',
        '_log.exception("the engine could not tell the other ranks")\n        else:',
        "A step waits for ever, or applies what was not reduced, when an abort cannot be sent.",
        ("tests/engine/test_engine.py",),
    ),
    Breakage(
        "engine-failed-round",
        "ringreduce/engine/engine.py",
        "self._queue.finish(failed)",
        "self._queue.finish()",
        "A collective in a compiled step that was refused returns garbage and no error.",
        ("tests/engine/test_engine.py", "tests/keras/test_jit.py"),
    ),
    Breakage(
        "rendezvous-the-wrong-one",
        "ringreduce/bootstrap/rendezvous.py",
        "[*members.identities, *([identity] if identity else [])]",
        "members.identities",
        "A rank with another size or version waits until its time limit and blames rank 0.",
        ("tests/bootstrap/test_rendezvous.py",),
    ),
    Breakage(
        "rendezvous-taken-rank",
        "ringreduce/bootstrap/admission.py",
        "elif hello.rank in self._hellos and hello.size == own.size:",
        "elif hello.rank in self._hellos:",
        "A job started with two sizes is reported as one rank too many, and the rest wait.",
        ("tests/bootstrap/test_rendezvous.py",),
    ),
    Breakage(
        "security-nobody-to-ask",
        "ringreduce/transport/security.py",
        "socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)",
        "socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 0)",
        "Anybody may connect to a rank once its ring has formed.",
        ("tests/transport/test_security.py",),
    ),
    Breakage(
        "security-two-with-one-key",
        "ringreduce/transport/security.py",
        "            or len(set(found)) != self.size\n",
        "",
        "A rank accepts a table in which another one has its own key.",
        ("tests/transport/test_security.py",),
    ),
    Breakage(
        "security-encryption-by-default",
        "ringreduce/transport/security.py",
        '(config.encryption == "auto" and not is_local)',
        "False",
        "Between hosts gradients travel in plain text unless encryption is asked for.",
        ("tests/transport/test_security.py",),
    ),
    Breakage(
        "bridge-in-place-over-sockets",
        "ringreduce/tensorflow/bridge.py",
        '_IN_PLACE_BYTES if compiled_over == "shm" else None',
        "_IN_PLACE_BYTES if compiled_over else None",
        "After a failure XLA frees memory that libzmq is still sending.",
        ("tests/tensorflow/test_bridge.py",),
    ),
    Breakage(
        "order-functions-in-between",
        "ringreduce/tensorflow/order.py",
        "token is None or others:",
        "token is None:",
        "A collective behind a function with collectives runs before them, on some ranks.",
        ("tests/tensorflow/test_order.py",),
    ),
    Breakage(
        "sparse-padding-of-rows",
        "ringreduce/tensorflow/sparse.py",
        "at = end + -(end - middle) % INDEX_BYTES",
        "at = end",
        "Embeddings in float16 get other ranks' rows in the wrong places, or an error.",
        ("tests/tensorflow/test_sparse.py",),
    ),
    Breakage(
        "accumulation-weights-kept",
        "ringreduce/keras/strategies/accumulate.py",
        "            cycle.mean.assign(0.0)\n",
        "",
        "With accumulate_steps each update is smaller than the one before.",
        ("tests/keras/test_steps.py",),
    ),
    Breakage(
        "join-before-anybody-has-data",
        "ringreduce/keras/join.py",
        "with tf.control_dependencies([weight.mean]), weighting_module.using(weight):",
        "with weighting_module.using(weight):",
        "The step that ends an epoch counts: learning rate schedules drift.",
        ("tests/keras/test_uneven.py",),
    ),
    Breakage(
        "callbacks-all-want-to-stop",
        "ringreduce/keras/callbacks/together.py",
        "ring.all_reduce(wants, ReduceOp.MAX)",
        "ring.all_reduce(wants, ReduceOp.MIN)",
        "A rank that stops alone leaves the others waiting for it.",
        ("tests/keras/test_callbacks.py",),
    ),
    Breakage(
        "saving-optimizer-twice",
        "ringreduce/keras/wrapper.py",
        '{*dir(type(self))} - {"inner_optimizer"}',
        "{*dir(type(self))}",
        "Saved models hold the optimizer twice, and plain Keras cannot load them.",
        ("tests/keras/test_saving.py",),
    ),
    Breakage(
        "launcher-last-words",
        "ringreduce/commands/launch/job.py",
        "while self._read(stream):\n                        pass",
        "pass",
        "The launcher blames a rank that only reported the failure of another.",
        ("tests/commands/test_launch.py",),
    ),
    Breakage(
        "launcher-starts-again-after-a-signal",
        "ringreduce/commands/launch/job.py",
        "            and self.ended_by is None\n",
        "",
        "Ctrl-C does not end a job with restarts.",
        ("tests/commands/test_restarts.py",),
    ),
    Breakage(
        "launcher-bar-erased",
        "ringreduce/commands/launch/screen.py",
        "_write(self._stdout, _drawn(self._mark(source.rank, self._stdout), shown))",
        "pass",
        "Rank 0's progress bar is gone after another rank's line, until it moves.",
        ("tests/commands/test_display.py",),
    ),
    Breakage(
        "launcher-traceback-held-forever",
        "ringreduce/commands/launch/display.py",
        "now_s - since_s >= TIMES.hold_s",
        "False",
        "A traceback that a program logs is not seen until the program ends.",
        ("tests/commands/test_display.py",),
    ),
    Breakage(
        "launcher-keyboard-kept",
        "ringreduce/commands/launch/job.py",
        "if worker.rank == self._plan.stdin_rank:\n                    self._take_terminal_back()",
        "if False:\n                    self._take_terminal_back()",
        "Once the rank that had the keyboard has ended, Ctrl-C does nothing.",
        ("tests/commands/test_terminal.py",),
    ),
    Breakage(
        "launcher-killed-by-a-signal",
        "ringreduce/commands/launch/failure.py",
        "self.returncode > 0 and any(",
        "any(",
        "A rank that was killed is not named as the cause if it had logged a lost peer before.",
        ("tests/commands/test_launch_failure.py",),
    ),
    Breakage(
        "launchers-contradiction",
        "ringreduce/vocabulary/launchers.py",
        "if launcher.starts_others and other.size <= place.size:",
        "if launcher.starts_others:",
        "With a RANK of 0 and WORLD_SIZE of 1 left in the shell, each task of srun trains alone.",
        ("tests/vocabulary/test_launchers.py",),
    ),
    Breakage(
        "launchers-script-of-slurm",
        "ringreduce/vocabulary/launchers.py",
        '(("SLURM_STEP_ID", "SLURM_PROCID"),)',
        '(("SLURM_PROCID",),)',
        "A script that runs in a Slurm job without srun, such as a test, is an error.",
        ("tests/vocabulary/test_launchers.py",),
    ),
    Breakage(
        "launchers-one-port-for-all",
        "ringreduce/vocabulary/place.py",
        "return self.port or _PORTS[",
        "return self.port or _PORTS[0 *",
        "Two jobs on a host meet at the same port.",
        ("tests/vocabulary/test_launchers.py",),
    ),
    Breakage(
        "secret-of-the-user-overwritten",
        "ringreduce/vocabulary/secret.py",
        "os.link(draft, path)",
        "os.replace(draft, path); draft.touch()",
        "Ranks that start at once make different secrets, and refuse each other.",
        ("tests/vocabulary/test_launchers.py",),
    ),
    Breakage(
        "tensors-sent-back-elsewhere",
        "ringreduce/tensorflow/moving.py",
        "all_to_all_uneven(upstream, communicator, received, number)",
        "all_to_all_uneven(upstream, communicator, received[::-1], number)",
        "Gradients of an all_to_all with counts go to the wrong ranks.",
        ("tests/tensorflow/test_tensors.py",),
    ),
    Breakage(
        "gradients-of-messages-swapped",
        "ringreduce/tensorflow/pairs.py",
        "kept[found].append(",
        "kept[int(number)].append(",
        "Of two tensors between two ranks, each gets the gradient of the other.",
        ("tests/keras/test_groups.py",),
    ),
    Breakage(
        "optimizer-averages-over-all-groups",
        "ringreduce/keras/wrappable.py",
        "if averages and one.communicator is None:",
        "if averages and one.communicator is model:",
        "Groups that train different models average their gradients with each other.",
        ("tests/keras/test_groups.py",),
    ),
    Breakage(
        "process-set-of-others",
        "ringreduce/keras/process_sets.py",
        "ring.split(0 if ring.rank in one.ranks else None)",
        "ring.split(int(ring.rank in one.ranks))",
        "A rank that is not in a process set takes part in one of the others.",
        ("tests/keras/test_groups.py",),
    ),
    Breakage(
        "small-call-of-any-length",
        "native/src/small_calls.c",
        " && known->count == count;",
        ";",
        "An array of another length in the same slot is reduced in part, or beyond its end.",
        ("tests/transport/test_small_calls.py",),
    ),
    Breakage(
        "small-call-of-any-layout",
        "native/src/small_calls.c",
        " ||\n        (array->flags & RR_ARRAY_USUAL) != RR_ARRAY_USUAL)",
        ")",
        "A read-only array, or every second element of one, is written over from its start on.",
        ("tests/transport/test_small_calls.py",),
    ),
    Breakage(
        "small-call-not-continued",
        "ringreduce/communicator/session.py",
        "            if done is None:\n                return False\n",
        "            if done is not True:\n                return done is False\n",
        "A call whose other ranks are late returns before it is done.",
        ("tests/transport/test_small_calls.py", "tests/communicator/test_failures.py"),
    ),
    Breakage(
        "small-call-interrupted-in-silence",
        "ringreduce/communicator/session.py",
        "                if not isinstance(error, RingReduceError):\n"
        '                    self._break(interrupted(self.config, error, "a collective"))\n'
        "                else:\n"
        "                    self._break(error)\n",
        "                pass\n",
        "After Ctrl-C in a small call the next call goes on with its part.",
        ("tests/communicator/test_failures.py", "tests/communicator/test_leaving.py"),
    ),
    Breakage(
        "small-call-after-close",
        "ringreduce/transport/small_calls.py",
        "        self._calls.end = None\n",
        "        pass\n",
        "A call after close uses memory that is freed.",
        ("tests/transport/test_small_calls.py",),
    ),
)
