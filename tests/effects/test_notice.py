"""A process that is told to go hears it whatever it does, and is never kept by it."""

import os
import signal
import sys
import textwrap
import threading

import pytest

from ringreduce.effects import notice
from ringreduce.effects.notice import EndsInOrder, Notice, hearing, leave
from ringreduce.vocabulary.config import leave_code, leave_limit_s, leave_signal
from ringreduce.vocabulary.errors import ConfigError
from tests.processes import Process, clean_environment, wait_until

HEARS = """
import os, signal, sys, threading, time
from ringreduce.effects.notice import EndsInOrder, Notice, hearing, leave
is_lost = False
mine = Notice("[1/2]", lambda: "it is in validation", lambda: is_lost)

def wait_for_it():
    while not mine.reason:
        time.sleep(0.001)

def hear_for_ever():
    print("ready", flush=True)
    while True:
        time.sleep(0.001)
"""


def hears(folder, *texts, **variables):
    """A process that hears, which has these further lines."""
    (folder / "program.py").write_text(HEARS + "".join(map(textwrap.dedent, texts)))
    environment = clean_environment(**variables)
    return Process([sys.executable, "program.py"], folder, environment=environment)


def test_a_signal_is_heard_while_the_main_thread_is_in_c_and_ends_nothing(tmp_path):
    text = """
    import ctypes
    with hearing(mine):
        threading.Thread(target=lambda: (wait_for_it(), os.write(1, b"heard"), os._exit(5))).start()
        print("ready", flush=True)
        for _ in range(100):
            ctypes.CDLL(None).sleep(100)  # No handler of Python's runs in between.
    """
    with hears(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGTERM)
        assert process.wait() == 5
        assert process.stdout.endswith("heard")


def test_one_that_comes_twice_at_once_is_one_and_a_later_one_ends_the_process(tmp_path):
    text = """
    with hearing(mine):
        threading.Thread(target=lambda: (wait_for_it(), print("heard", flush=True))).start()
        hear_for_ever()
    """
    with hears(tmp_path, text, RINGREDUCE_TIME_SCALE="0.1") as process:
        process.wait_shown("ready")
        process.signal(signal.SIGTERM)
        process.wait_shown("heard")
        process.signal(signal.SIGTERM)
        again = threading.Event()
        assert not again.wait(0.05)
        assert not process.has_ended()
        assert not again.wait(0.3)
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert "[1/2] is told to go: SIGTERM came once more. It ends now" in process.stderr


@pytest.mark.parametrize("name", ["TERM", "SIGUSR2"])
def test_if_no_step_comes_it_ends_as_without_us_and_says_what_it_waited_for(tmp_path, name):
    text = "with hearing(mine):\n    hear_for_ever()\n"
    variables = {"RINGREDUCE_LEAVE_S": "0.3", "RINGREDUCE_LEAVE_SIGNAL": name}
    number = signal.Signals[f"SIG{name.removeprefix('SIG')}"]
    with hears(tmp_path, text, **variables) as process:
        process.wait_shown("ready")
        process.signal(number)
        assert process.wait() == -number
        said = "0.3 s ago, and no step has come since at which it could leave: it is in validation "
        said += "(RINGREDUCE_LEAVE_S). It ends now"
        assert f"{number.name} {said}" in process.stderr


def test_one_whose_training_comes_to_no_step_any_more_ends_at_once(tmp_path):
    text = "is_lost = True\nwith hearing(mine):\n    hear_for_ever()\n"
    with hears(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGTERM)
        assert process.wait(5) == -signal.SIGTERM


def test_a_signal_that_a_thread_of_c_gets_is_heard(tmp_path):
    """Of all threads one alone takes it, which is none of Python's."""
    text = """
    import ctypes
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    pause = ctypes.cast(libc.pause, ctypes.c_void_p)
    libc.pthread_create(ctypes.byref(thread), None, pause, None)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with hearing(mine):
        print("ready", flush=True)
        wait_for_it()
        os._exit(5)
    """
    with hears(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGTERM)
        assert process.wait() == 5


def test_a_section_that_ignores_the_signal_and_puts_back_its_handler_leaves_ours(tmp_path):
    text = """
    with hearing(mine):
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_it()
        mine.is_met = True
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == -signal.SIGTERM


def test_a_program_that_ends_in_order_may_be_told_twice(tmp_path):
    text = """
    import atexit
    atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), print("saved", flush=True)))
    with hearing(mine):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_it()
        mine.is_met = True
        raise EndsInOrder(7)
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == 7
        assert process.stdout == "saved\n"


def test_one_that_goes_on_though_it_was_to_end_hears_anew():
    before = threading.active_count()
    for _ in range(2):
        mine = Notice("", str, lambda: False)

        def train(mine=mine):
            with hearing(mine):
                assert leave()
                mine.is_met = True
                raise EndsInOrder(143)

        with pytest.raises(EndsInOrder):
            train()
        assert threading.active_count() == before + 1
    with hearing(Notice("", str, bool)):
        pass
    assert threading.active_count() == before


def test_a_signal_at_the_very_end_of_a_training_is_heard(tmp_path):
    text = """
    for _ in range(20):
        if (child := os.fork()) == 0:
            mine = Notice("", str, lambda: False)
            with hearing(mine):
                os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3 if mine.reason else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == 0, process.stderr


def test_one_that_has_called_leave_is_not_ended_when_no_step_comes(tmp_path):
    text = """
    with hearing(mine):
        assert leave()
        assert mine.reason == "rr.leave()"  # At once.
        hear_for_ever()
    """
    with hears(tmp_path, text, RINGREDUCE_LEAVE_S="0.1") as process:
        process.wait_error("[1/2] is told to go: rr.leave() 0.1 s ago, and no step has come since")
        assert not process.has_ended()


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("mine.is_met = True", 3),
        ("raise ValueError('of the training')", 1),
        ("raise EndsInOrder(7)", 7),
    ],
)
def test_what_is_heard_and_met_ends_nothing_when_the_training_is_over(tmp_path, what, code):
    text = f"""
    with hearing(mine):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_it()
        {what}
    sys.exit(3)
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == code


def test_one_that_is_told_too_late_may_save_and_is_then_ended(tmp_path):
    text = """
    with hearing(mine):
        os.kill(os.getpid(), signal.SIGTERM)
    assert mine.reason == "SIGTERM"
    print("saved", flush=True)
    if len(sys.argv) == 1:
        hear_for_ever()
    """
    with hears(tmp_path, text, RINGREDUCE_LEAVE_S="0.5") as process:
        assert process.wait() == -signal.SIGTERM
        assert process.stdout.startswith("saved")
        assert "could leave: training has ended, and the program not" in process.stderr


def test_one_that_is_told_too_late_leaves_the_next_training(tmp_path):
    text = """
    for _ in range(2):
        mine = Notice("", str, lambda: False)
        with hearing(mine):
            before = mine.reason
            os.kill(os.getpid(), signal.SIGTERM)
    assert before == "SIGTERM"
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == 0, process.stderr


def test_outside_of_a_training_and_in_a_forked_child_the_signal_ends_as_ever(tmp_path):
    text = """
    with hearing(Notice("", str, bool)):
        pass
    with hearing(mine):
        if (child := os.fork()) == 0:
            hear_for_ever()
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not mine.reason
    hear_for_ever()
    """
    with hears(tmp_path, text) as process:
        process.wait_shown("ready", 2)
        process.signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_a_handler_of_the_program_stays_and_may_call_leave(tmp_path):
    text = """
    signal.signal(signal.SIGTERM, lambda *_: print("handled", leave(), flush=True))
    with hearing(mine):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_it()
        assert mine.reason == "rr.leave()", mine.reason
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    """
    with hears(tmp_path, text) as process:
        assert process.wait() == 0
        assert process.stdout == "handled True\nhandled False\n"
        assert "leave() does nothing: no training that can be left is under way" in process.stderr


def test_a_handler_that_is_set_later_takes_the_place_of_ours_and_stays(tmp_path):
    text = """
    with hearing(mine):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
    print("ready", flush=True)
    signal.pause()
    """
    with hears(tmp_path, text) as process:
        process.wait_shown("ready")
        process.signal(signal.SIGTERM)
        assert process.wait() == 6


def test_a_call_after_a_signal_lifts_no_limit(tmp_path):
    text = """
    with hearing(mine):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_it()
        assert leave()
        hear_for_ever()
    """
    with hears(tmp_path, text, RINGREDUCE_LEAVE_S="0.3") as process:
        assert process.wait() == -signal.SIGTERM


def test_a_code_that_is_none_is_refused_when_training_begins(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_LEAVE_CODE", "300")
    with pytest.raises(ConfigError, match="RINGREDUCE_LEAVE_CODE"), hearing(Notice("", str, bool)):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_all_trainings_of_a_process_hear_and_nothing_of_it_is_left():
    before = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    notices = [Notice("", str, lambda: False) for _ in range(2)]
    with hearing(notices[0]), hearing(notices[1]):
        assert leave()
        wait_until(lambda: all(each.reason == notice.CALL for each in notices), "both to hear")
        for each in notices:
            each.is_met = True
    assert not leave()
    assert threading.active_count() == before
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    ("name", "text", "reads", "message"),
    [
        ("SIGNAL", "USR1", leave_signal, "flight records.*Take USR2"),
        ("SIGNAL", "INT", leave_signal, "'INT'; accepted: TERM or USR2"),
        ("S", "soon", leave_limit_s, "'soon'; accepted: seconds, above 0"),
        ("S", "0", leave_limit_s, "above 0"),
        ("S", "inf", leave_limit_s, "above 0"),
        ("CODE", "256", leave_code, "'256'; accepted: 0 to 255"),
        ("CODE", "-1", leave_code, "accepted: 0 to 255"),
    ],
)
def test_a_variable_that_is_none_is_refused_by_name(monkeypatch, name, text, reads, message):
    monkeypatch.setenv(f"RINGREDUCE_LEAVE_{name}", text)
    with pytest.raises(ConfigError, match=f"RINGREDUCE_LEAVE_{name} is .*{message}"):
        reads()
    monkeypatch.setenv(f"RINGREDUCE_LEAVE_{name}", "")
    reads()
