"""Settings: where they come from, what is refused, and in which words."""

import dataclasses
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.vocabulary import config as config_module
from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.endpoints import host_and_port
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.times import Times, milliseconds
from ringreduce.vocabulary.worker_environment import (
    door_name,
    door_variable,
    forwarded_environment,
    leave_job,
    life_variable,
    own_life,
    parents_ring,
    worker_environment,
)
from tests.vocabulary import launched_environments as seen

LAUNCH = {
    "RINGREDUCE_RANK": "1",
    "RINGREDUCE_SIZE": "4",
    "RINGREDUCE_RENDEZVOUS": "127.0.0.1:4000",
    "RINGREDUCE_JOB_ID": "nightly",
}
SECRET = "correct horse battery staple"


@pytest.mark.parametrize("variables", [{}, {"HOME": "/", "RINGREDUCE_OTHER": "x"}])
def test_process_without_variables_is_a_world_of_one(variables):
    assert Config.from_environment(variables) == Config(rank=0, size=1)
    assert Config.from_environment(variables, rank=0, size=1) == Config()
    assert Config.from_environment(Config().to_environment()) == Config()


def test_arguments_go_before_variables_unless_they_are_none(monkeypatch):
    assert Config.from_environment(LAUNCH, rank=2).rank == 2
    assert Config.from_environment(LAUNCH, rank=None).rank == 1
    # The variables are the process's own where none are given.
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    assert Config.from_environment().size == 4


def test_time_limit_holds_for_the_meeting_too_which_may_have_its_own():
    assert Config.from_environment({"RINGREDUCE_TIMEOUT_S": "3"}).join_timeout_s == 3
    limits = {"RINGREDUCE_TIMEOUT_S": "3", "RINGREDUCE_JOIN_TIMEOUT_S": "8"}
    assert Config.from_environment(limits).join_timeout_s == 8


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("rank", ["4", "-1", "first", "", "1.0"]),
        ("size", ["0", "-4", "four"]),
        ("local_rank", ["4", "-1", "x"]),
        ("local_size", ["0", "5", "x"]),
        ("rendezvous", ["localhost", ":4000", "localhost:", "localhost:0", "localhost:65536"]),
        ("rendezvous", ["localhost:http", "localhost:-1"]),
        ("rendezvous_fd", ["x"]),
        ("timeout_s", ["0", "-1", "nan", "soon"]),
        ("join_timeout_s", ["0", "-0.5", "nan", "soon"]),
        ("segment_bytes", ["0", "63", "100", "-64", "4194368", "1e6"]),
        ("iface", ["eth0,", "^", "10.0.0.0/33", "^fd00:::/8"]),
        ("ports", ["0-10", "20063-20000", "20000-65536", "20000-", "any"]),
    ],
)
def test_bad_value_is_refused_with_its_variable_and_the_accepted_ones(setting, values):
    variable = f"RINGREDUCE_{setting.upper()}"
    for value in values:
        with pytest.raises(ConfigError, match="accepted: ") as caught:
            Config.from_environment(LAUNCH | {variable: value})
        assert variable in str(caught.value)
        assert value in str(caught.value)


@pytest.mark.parametrize("name", LAUNCH)
def test_a_launch_with_one_variable_only_or_one_missing_is_refused_by_name(name):
    """A worker of a broken launch must not train alone as if it were a world of one."""
    with pytest.raises(ConfigError, match=f"{name} is set"):
        Config.from_environment({name: LAUNCH[name]})
    partial = {other: LAUNCH[other] for other in LAUNCH if other != name}
    with pytest.raises(ConfigError, match=f"{name} is not") as caught:
        Config.from_environment(partial)
    assert all(other in str(caught.value) for other in partial)


def test_arguments_complete_a_launch():
    partial = {name: LAUNCH[name] for name in ("RINGREDUCE_RENDEZVOUS", "RINGREDUCE_JOB_ID")}
    assert Config.from_environment(partial, rank=3, size=4).rank == 3
    with pytest.raises(ConfigError, match="RINGREDUCE_RENDEZVOUS"):
        Config.from_environment({}, rank=0, size=2)


def test_a_bad_or_unknown_argument_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="unknown setting ranks") as caught:
        Config.from_environment({}, ranks=2)
    assert "segment_bytes" in str(caught.value)
    with pytest.raises(ConfigError, match="size is 0, from the argument size or the variable"):
        Config(size=0)


members = st.integers(1, 1000).flatmap(
    lambda size: st.builds(
        Config,
        size=st.just(size),
        rank=st.integers(0, size - 1),
        local_size=st.none() | st.just(size),
        local_rank=st.none() | st.integers(0, size - 1),
        rendezvous=st.sampled_from(["127.0.0.1:4000", "[::1]:65535", "node-7.example:1"]),
        rendezvous_fd=st.none() | st.integers(0, 1000),
        job_id=st.text("abc-_0", min_size=1, max_size=20),
        timeout_s=st.floats(1e-3, 1e6),
        busy_timeout_s=st.floats(1e-3, 1e6),
        join_timeout_s=st.floats(1e-3, 1e6),
        segment_bytes=st.integers(1, 1 << 16).map(lambda lines: 64 * lines),
        streams=st.integers(1, 16),
        transport=st.sampled_from(config_module.SETTINGS["transport"].values),
        host_id=st.text("abc-_0", max_size=20),
        log_dir=st.text("abc-_0", max_size=20),
        iface=st.sampled_from(["", "eth0,^10.0.0.0/8"]),
        ports=st.sampled_from(["", "20000-20063"]),
        secret=st.just("") | st.text("abc-_0", min_size=16, max_size=64),
        encryption=st.sampled_from(config_module.SETTINGS["encryption"].values),
    )
)


@given(members)
def test_environment_makes_the_same_settings_again(config):
    assert Config.from_environment(config.to_environment()) == config


def test_host_and_port():
    assert host_and_port("10.0.0.4:65535") == ("10.0.0.4", 65535)
    assert host_and_port("[::1]:4000") == ("::1", 4000)
    # Python refuses to read numbers of so many digits, with an error of its own.
    with pytest.raises(ConfigError, match="RINGREDUCE_RENDEZVOUS"):
        host_and_port("localhost:" + "4" * 5000)


@pytest.fixture
def member(monkeypatch):
    """Rank 1 of 4, in an environment without any variable that would interfere."""
    for name in ("RINGREDUCE_TIMEOUT_S", "OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return Config.from_environment(LAUNCH, timeout_s=7.0)


def test_worker_finds_its_own_settings_and_the_users_unless_they_are_decided(member, monkeypatch):
    decided = ["timeout_s", "join_timeout_s"]
    assert Config.from_environment(worker_environment(member, 1, decided=decided)) == member
    monkeypatch.setenv("RINGREDUCE_LOCAL_RANK", "3")  # the launcher's own
    monkeypatch.setenv("RINGREDUCE_TIMEOUT_S", "99")
    environment = worker_environment(member, 1)
    assert "RINGREDUCE_LOCAL_RANK" not in environment
    assert environment["RINGREDUCE_TIMEOUT_S"] == "99"
    assert worker_environment(member, 1, decided=decided)["RINGREDUCE_TIMEOUT_S"] == "7.0"


def test_worker_gets_its_share_of_the_threads_unless_the_user_says_how_many(member, monkeypatch):
    assert worker_environment(member, 3)["OMP_NUM_THREADS"] == "3"
    # Between operations there are two at least.
    assert worker_environment(member, 1)["TF_NUM_INTEROP_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert worker_environment(member, 1)["OMP_NUM_THREADS"] == "5"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_secret_comes_from_a_file_without_its_line_end_unless_it_is_given_otherwise(secret_file):
    variables = LAUNCH | {"RINGREDUCE_SECRET_FILE": str(secret_file)}
    other = "0123456789abcdef"
    assert Config.from_environment(variables).secret == SECRET
    assert Config.from_environment(variables | {"RINGREDUCE_SECRET": ""}).secret == SECRET
    assert Config.from_environment(variables | {"RINGREDUCE_SECRET": other}).secret == other
    assert Config.from_environment(variables, secret=other).secret == other


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_secret_file_that_others_reach_is_refused_with_the_remedy(secret_file, mode):
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"its mode is {mode:o}\)\. chmod 600 {secret_file}"):
        config_module.configured_secret({"RINGREDUCE_SECRET_FILE": str(secret_file)})


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 characters"),
        (b"short", "has 5 characters"),
        (b"x" * 100_000, "characters"),
        (b"\xff" * 32, "is no text"),
        (os.mkfifo, "no regular file"),
        (os.mkdir, "no regular file|cannot"),
        (None, "cannot be read: No such file"),
    ],
)
def test_file_that_holds_no_secret_is_refused(secret_file, content, why):
    if isinstance(content, bytes):
        secret_file.write_bytes(content)
    else:
        secret_file.unlink()
        if content is not None:
            content(secret_file, 0o600)
    with pytest.raises(ConfigError, match=why):
        config_module.configured_secret({"RINGREDUCE_SECRET_FILE": str(secret_file)})


def test_secret_is_shown_nowhere():
    assert SECRET not in repr(Config(secret=SECRET))
    with pytest.raises(ConfigError) as caught:
        Config(secret="hush hush")
    assert "has 9 characters" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_secret_goes_to_the_worker_when_the_launcher_has_made_it(member, monkeypatch):
    monkeypatch.delenv("RINGREDUCE_SECRET", raising=False)
    made = dataclasses.replace(member, secret=SECRET)
    assert worker_environment(made, 1, decided=["secret"])["RINGREDUCE_SECRET"] == SECRET
    assert "RINGREDUCE_SECRET" not in worker_environment(member, 1)


def test_times_are_multiplied_by_the_scale_of_tests(monkeypatch):
    monkeypatch.setenv("RINGREDUCE_TIME_SCALE", "0.5")
    assert Times().scaled(config_module.time_scale()).heartbeat_s == Times().heartbeat_s / 2
    monkeypatch.delenv("RINGREDUCE_TIME_SCALE")
    assert config_module.time_scale() == 1
    assert Config().link_timeout_s == config_module.TIMES.link_timeout_s


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "fast"])
def test_scale_of_times_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("RINGREDUCE_TIME_SCALE", text)
    with pytest.raises(ConfigError, match="RINGREDUCE_TIME_SCALE is"):
        config_module.time_scale()


def test_milliseconds_are_never_none():
    assert [milliseconds(s) for s in (0.0, 0.0004, 0.05, 2)] == [1, 1, 50, 2000]


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("", True), ("1", False)])
def test_no_color_is_respected(monkeypatch, value, wanted):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert config_module.color_wanted() is wanted


@pytest.mark.parametrize(
    ("name", "meant"),
    [("ENCRYPTON", "ENCRYPTION"), ("TIMEOUT", "TIMEOUT_S"), ("SECRETFILE", "SECRET_FILE")],
)
@pytest.mark.parametrize("rank", [{}, {"RINGREDUCE_RANK": "0"}])  # alone; half a launch
def test_a_misspelt_variable_is_a_warning(name, meant, rank, warned):
    [text] = warned({f"RINGREDUCE_{name}": "on", **rank})
    assert f"RINGREDUCE_{name}; is RINGREDUCE_{meant} meant?" in text


TORCH = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        (LAUNCH | {"RINGREDUCE_RANK": "0"}, 1),
        (LAUNCH, 0),
        (LAUNCH | {"RINGREDUCE_LOCAL_RANK": "0", "RINGREDUCE_LOCAL_SIZE": "1"}, 1),
        (TORCH | {"RANK": "0"}, 1),
        (TORCH | {"RANK": "1"}, 0),
        (seen.SRUN, 0),
    ],
)
def test_a_misspelt_variable_is_a_warning_of_one_rank_of_each_host(variables, count, warned):
    texts = warned(variables | {"RINGREDUCE_TIMEOUT": "5", "RINGREDUCE_SECRET": SECRET})
    assert len([text for text in texts if "RINGREDUCE_TIMEOUT;" in text]) == count


@pytest.mark.parametrize("name", ["OTHER", "BENCH_LINE", "TEST_FRESH", "TEST_SLOW_S", "COMPLETE"])
def test_variables_of_others_are_theirs(name, warned):
    assert not warned({f"RINGREDUCE_{name}": "on"})


@pytest.mark.parametrize("text", ["mpi", "5", "[1, 2]", "[" * 100_000])
def test_a_ring_of_a_parent_that_cannot_be_read_is_named_with_what_to_do(text, monkeypatch):
    monkeypatch.setenv("RINGREDUCE_RING", text)
    with pytest.raises(ConfigError, match=r"cannot read RINGREDUCE_RING=.*Unset it"):
        parents_ring(Config())


def test_which_process_of_a_rank_this_one_is_is_none_of_what_it_starts(monkeypatch):
    """As a launcher that a worker runs."""
    monkeypatch.setenv("RINGREDUCE_LIFE", "3")
    monkeypatch.setenv("RINGREDUCE_DOOR", "door")
    assert (own_life(), door_name()) == (3, "door")
    ours = {"RINGREDUCE_LIFE", "RINGREDUCE_DOOR"}
    assert not ours & {*worker_environment(Config(), 1), *forwarded_environment()}
    variables = life_variable(1) | door_variable("a")
    environment = worker_environment(Config(), 1, variables=variables)
    assert [environment[name] for name in sorted(ours)] == ["a", "1"]
    leave_job()
    assert (own_life(), door_name()) == (0, "")
