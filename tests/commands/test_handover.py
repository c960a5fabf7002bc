"""What a worker says of the exception that ends it, and how it reaches the launcher."""

import argparse
import importlib
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ringreduce.commands.launch import handover, start
from ringreduce.commands.launch.frames import Records, encode
from ringreduce.commands.launch.handover import described
from ringreduce.commands.launch.worker_records import Joins, WorkerRecord
from ringreduce.communicator import rank_zero
from ringreduce.communicator.rank_zero import on_rank_zero
from ringreduce.testing import ring_of_threads
from ringreduce.vocabulary.errors import ConfigError, PeerLostError, PeerTimeoutError

LOST = PeerLostError("lost the connection with rank 1", rank=0, size=2, peer=1, origin=2)


def raised_by(error, cause=None):
    """What is said of an exception that is raised, or that a function raises, after another."""
    try:
        try:
            if cause is not None:
                raise cause
        finally:
            if callable(error):
                error()
            raise error
    except BaseException as raised:
        return described(raised)


def test_an_exception_is_described_with_its_lines():
    raised = raised_by(ValueError("bad data"))
    assert (raised.kind, raised.peer, raised.origin) == ("ValueError", None, None)
    assert raised.exception == raised.traceback[-1] == "ValueError: bad data"
    assert raised.traceback[0] == "Traceback (most recent call last):"
    assert "    raise error" in raised.traceback
    assert raised.whole == []


def test_what_follows_from_an_error_of_the_ring_is_about_its_peer():
    for error in (ValueError("bad"), SystemExit(1)):
        raised = raised_by(error, LOST)
        assert (raised.kind, raised.peer, raised.origin) == ("PeerLostError", 1, 2)
    assert raised_by(LOST).kind == "PeerLostError"
    assert raised_by(ConfigError("no such host")).kind == "ConfigError"


def test_an_exception_that_quotes_what_broke_a_ring_is_about_that():
    """As TensorFlow's do; a mere name, or another rank's traceback, is none."""
    broke = PeerTimeoutError("waited 1 s for rank 5", rank=0, size=9, peer=5)
    text = f"Graph execution error:\n\nPeerTimeoutError: {broke}\n\t [[{{node wait}}]]"
    assert raised_by(RuntimeError(text)).kind == "RuntimeError"
    handover.note_failure(broke)
    assert raised_by(RuntimeError(text)).peer == 5
    quoted = "PeerLostError: rank 1\nTraceback (most recent call last):\n  x\nKeyError: 1"
    assert raised_by(RuntimeError(quoted)).peer is None


def test_what_breaks_a_ring_is_noted():
    def fail(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            raise ZeroDivisionError

    with pytest.raises((ZeroDivisionError, PeerLostError)):
        ring_of_threads(2, fail)
    assert any("ZeroDivisionError" in str(error) for error in handover._failures)


def test_our_frames_are_left_out_where_the_error_is_ours():
    ours = raised_by(lambda: ring_of_threads(1, print, timeout_s=-1))
    assert ours.kind == "ConfigError"
    files = f'  File "{os.path.dirname(handover.__file__).removesuffix("commands/launch")}'
    assert not [line for line in ours.traceback if line.startswith(files)]
    assert [line for line in ours.whole if line.startswith(files)]
    assert [line for line in ours.traceback if line.startswith(f'  File "{__file__}')]


def test_between_two_frames_of_the_program_are_none_of_ours_or_of_keras(monkeypatch, tmp_path):
    def fails():
        raise ValueError("bad width")

    (tmp_path / "layers.py").write_text("def call(function):\n    function()\n")
    monkeypatch.syspath_prepend(tmp_path)
    layers = importlib.import_module("layers")
    keras = SimpleNamespace(__file__=f"{tmp_path}/keras.py", config=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "keras", keras)
    alone = SimpleNamespace(size=1)
    for is_filtering in (True, False):
        keras.config.is_traceback_filtering_enabled = lambda is_on=is_filtering: is_on
        raised = raised_by(lambda: on_rank_zero(layers.call, fails, communicator=alone))
        files = [line.split('"')[1] for line in raised.traceback if line.startswith("  File")]
        theirs = [] if is_filtering else [f"{tmp_path}/layers.py"]
        assert files == [__file__, __file__, *theirs, __file__]
        whole = [line for line in raised.whole if line.startswith("  File")]
        assert len(whole) == 5
    # What has raised it is not left out.
    raised = raised_by(lambda: on_rank_zero(sys.intern, 3, communicator=alone))
    files = [line.split('"')[1] for line in raised.traceback if line.startswith("  File")]
    assert files[-1] == rank_zero.__file__


GRAPH_ERROR = "Graph execution error:\n\nDetected at (most recent):\nKeyError: no file\n x"


def test_the_exception_is_one_line():
    lines, first = inspect.getsourcelines(raised_by)
    line = first + lines.index("            raise error\n")
    for error, exception in (
        (SystemExit("no data"), "SystemExit: no data"),
        (SystemExit(3), f"SystemExit: 3 in test_handover.py:{line}"),
        (ValueError("in user code:\n\n  here"), "ValueError: in user code: here"),
        (RuntimeError(GRAPH_ERROR), "RuntimeError: Graph execution error: KeyError: no file"),
        (ValueError("In Dense.call().\n\nbad width"), "ValueError: In Dense.call()."),
        (ValueError("\udcff"), "ValueError: \\udcff"),
        (SyntaxError("bad", ("a.py", 1, 2, "x = (")), "SyntaxError: bad"),
    ):
        raised = raised_by(error)
        assert raised.exception == exception
        assert bool(raised.traceback) != isinstance(error, SystemExit)
        assert Records[WorkerRecord](WorkerRecord).feed(encode(raised)) == [raised]


def test_an_exit_within_a_library_is_named_at_the_programs_line():
    with pytest.raises(SystemExit) as caught:
        argparse.ArgumentParser().parse_args(["--unknown"])
    line = inspect.getsourcelines(test_an_exit_within_a_library_is_named_at_the_programs_line)[1]
    assert handover.place_of(caught.value) == f"test_handover.py:{line + 2}"
    assert handover.place_of(SystemExit(0)) == ""


def test_a_huge_text_is_cut_in_the_middle():
    raised = raised_by(ValueError("a" * (1 << 22) + "end"))
    assert len(encode(raised)) < 1 << 20
    assert raised.traceback[-1].endswith("aend")


def test_a_forked_child_and_a_lone_process_tell_nothing(monkeypatch):
    assert not handover.tell(Joins(2))
    reading, writing = os.pipe()
    for pid in (os.getpid() + 1, os.getpid()):
        monkeypatch.setattr(handover, "_pipe", (writing, pid))
        assert handover.tell(Joins(2)) == (pid == os.getpid())
    assert Records[WorkerRecord](WorkerRecord).feed(os.read(reading, 1000)) == [Joins(2)]
    os.close(reading)
    assert not handover.tell(Joins(2))
    os.close(writing)


def test_python_itself_is_as_without_our_script(tmp_path):
    """`__main__`, its search path and arguments are those that Python gives a program."""
    text = "import json, sys, __main__ as m\nprint(json.dumps([sys.argv, sys.path, __name__, "
    text += "m.__file__, m.__spec__ and m.__spec__.name, sorted(vars(m)), __package__]))\n"
    (tmp_path / "inner").mkdir()
    for name in ("main.py", "inner/__main__.py", "inner/more.py", "inner/__init__.py"):
        (tmp_path / name).write_text(text if "init" not in name else "")
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "more.py")

    def shown(*command: str) -> str:
        options = {"cwd": tmp_path, "pass_fds": [nowhere.fileno()], "text": True}
        done = subprocess.check_output([sys.executable, *command], **options)
        return done.replace('"__annotations__", ', "")

    programs = "main.py -x", "-m inner y", "-m inner.more", "inner", "link.py"
    with open(os.devnull, "wb") as nowhere:
        for program in map(str.split, programs):
            assert shown(start.__file__, str(nowhere.fileno()), *program) == shown(*program)
