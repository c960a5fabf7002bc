"""``ringreduce verify``: recorded trainings with planted faults, and what a user sees.

What is said of which records is tested in tests/pure/test_verification.py.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from ringreduce.commands.verify import read
from ringreduce.pure.verification import Recorded, compare
from ringreduce.pure.verification_words import reasons
from tests.jobs import facts_in, run_job
from tests.launching import command_line
from tests.processes import launcher
from tests.scope import in_full

pytestmark = pytest.mark.timeout(300)


# Trainings of tests/programs/verified.py that one job makes, and those that another one makes, for
# which only the full suite asks.
QUICK = (
    *("alike", "layers", "sums", "divided"),
    *("loop", "loop-sums", "loop-before", "loop-short"),
)
RARE = (
    *("clipping", "unseeded-0", "unseeded-1", "silent", "alone"),
    *("loop-accumulates", "loop-jit"),
)
Folders = Callable[[str], list[Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Those in which a case is, of one rank, and of two."""

    @cache
    def of(cases: tuple[str, ...]) -> list[Path]:
        found = [tmp_path_factory.mktemp(f"ranks-{size}") for size in (1, 2)]
        for size, folder in enumerate(found, 1):
            result = run_job(size, ["tests/programs/verified.py", str(folder), *cases])
            assert result.exit_code == 0, result.errors
            assert [fact["code"] for fact in facts_in(result.output)] == [None] * size
        return found

    return lambda case: of(QUICK if case in QUICK else RARE)


def recorded(folders: Folders, case: str) -> list[Recorded]:
    return [
        read(folder / case, "verified.py", size) for size, folder in enumerate(folders(case), 1)
    ]


@pytest.mark.tensorflow
def test_ranks_that_train_alike_agree(folders):
    one, two = recorded(folders, "alike")
    found = compare(one, two)
    assert found.agrees
    assert not found.is_open
    assert found.shown < 1e-4
    assert one.run.settings == two.run.settings
    assert (len(one.run.losses), one.run.rows, two.run.rows) == (7, 16, 16)
    assert [memory > 1 << 26 for memory in two.run.memory] == [True] * 2
    assert not [path.name for folder in folders("alike") for path in folder.glob("*.keras")]
    # All kinds were seen, and are no zeros.
    assert [part.what.split()[0] for part in found.parts] == [
        *("initial", "loss", "gradients", "gradients", "weights", "weights"),
        *("untrained", "untrained", "outputs"),
    ]
    for array in (two.arrays.changes, two.arrays.gradients, two.arrays.outputs):
        assert np.abs(array).reshape(len(array), -1).max(1).all()


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "first_step", "loss"), [in_full("silent", 1, ""), ("divided", 2, "loss")]
)
def test_gradients_are_seen_in_compiled_divided_and_accumulated_steps(
    folders, case, first_step, loss
):
    one, two = recorded(folders, case)
    found = compare(one, two)
    assert found.agrees
    assert not found.is_open
    assert one.run.loss == two.run.loss == loss
    seen = two.arrays.calls.any(1)
    assert seen.argmax() + 1 == first_step
    # Of a rank that has its share alone they are whole.
    assert np.abs(two.arrays.gradients[seen]).max(-1).all()
    # Half of them is a difference, though Adam makes nearly the same steps of it.
    half = Recorded(two.run, two.arrays._replace(gradients=two.arrays.gradients / 2))
    assert compare(one, half).factor == pytest.approx(0.5, rel=1e-3)


@pytest.mark.full
@pytest.mark.tensorflow
def test_a_variable_that_is_not_keras_s_is_seen(folders):
    one, two = recorded(folders, "silent")
    assert one.run.names[-1].endswith(".steps_made ()")
    assert two.arrays.changes[:, -1, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]


UNLIKE = "adam: learning_rate is 0.01 with 1 rank and 0.02 with 2 ranks."


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("layers", ["norm: each rank normalizes its", "drop: each rank draws other random"]),
        in_full(
            "clipping", ["Clips.train_step calls clip_by_global_norm, which clips each rank's"]
        ),
        in_full("unseeded-0", ["The initial weights differ in each run.", UNLIKE]),
        ("sums", ["Sums.train_step adds up over rows, and divides by a constant"]),
        in_full("alone", ["strategy=LocalSGD"]),
    ],
)
def test_the_reason_for_a_difference_is_found(folders, case, texts):
    one, two = recorded(folders, case)
    again = read(folders(case)[0] / "unseeded-1", "verified.py", 1) if "seed" in case else one
    found = compare(one, two)
    assert not found.agrees
    assert (found.factor is not None) == (case == "sums")
    assert ("gradients" in found.unseen) == (case == "alone")
    said = reasons(one.run, two.run, found, compare(one, again))
    assert [text[: len(start)] for text, start in zip(said, texts, strict=True)] == texts


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "found", "why"),
    [
        ("alike", "mean", ""),
        ("layers", "mean", ""),
        ("sums", "sum", ""),
        in_full("clipping", "neither", ""),
    ],
)
def test_what_the_trial_has_found_is_recorded(folders, case, found, why):
    one, two = recorded(folders, case)
    assert not one.run.tried.found
    assert (two.run.tried.found, two.run.tried.why) == (found, why)
    assert len(two.run.tried.findings) == (found in ("sum", "neither"))


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "steps"), [("loop", 7), in_full("loop-accumulates", 7), ("loop-short", 3)]
)
def test_a_loop_of_one_s_own_is_recorded(folders, case, steps):
    one, two = recorded(folders, case)
    found = compare(one, two)
    assert found.agrees
    assert not found.is_open
    assert (one.run.steps, two.run.steps) == (steps, steps)
    assert [part.what.split()[0] for part in found.parts] == [
        *("initial", "gradients", "gradients", "weights", "weights"),
    ]
    # All was seen, and is no zeros; that of a divided update is whole.
    assert two.arrays.calls.all()
    for array in (two.arrays.before[:1], *two.arrays.changes, *two.arrays.gradients):
        assert np.abs(array).max(1).all()
    assert two.arrays.own.shape[0] == len(two.run.memory) == 2
    assert (two.arrays.own > 0).all()


@pytest.mark.tensorflow
def test_a_sum_in_a_loop_of_one_s_own_is_named(folders):
    one, two = recorded(folders, "loop-sums")
    found = compare(one, two)
    assert found.factor == pytest.approx(0.5, rel=1e-3)
    [text] = reasons(one.run, two.run, found, compare(one, one))
    assert text.startswith("The step at verified.py:")
    assert 'Pass op="sum" to rr.DistributedGradientTape, or divide' in text


@pytest.mark.full
@pytest.mark.tensorflow
def test_layers_of_a_loop_s_model_are_named_and_what_steps_change_is_compared(folders):
    one, two = recorded(folders, "loop-jit")
    found = compare(one, two)
    said = list(reasons(one.run, two.run, found, compare(one, one)))
    assert [text for text in said if text.startswith("norm: each rank normalizes its rows")]
    far = [part.what.split()[0] for part in found.parts if part.step]
    assert {"gradients", "untrained"} <= set(far)


@pytest.mark.tensorflow
def test_rr_fit_that_follows_a_short_loop_is_what_is_recorded(folders):
    one, two = recorded(folders, "loop-before")
    assert compare(one, two).agrees
    assert (two.run.is_loop, two.run.steps, two.run.loss) == (False, 7, "loss")


@pytest.mark.tensorflow
def test_numbers_that_a_step_returns_are_those_of_all_ranks(folders):
    one, two = recorded(folders, "sums")
    # Without a metric behind it: half on each rank, of which the trial has found that it adds up.
    ratios = np.divide(two.run.losses[:1], one.run.losses[:1])
    assert ratios == pytest.approx(1, rel=1e-5)
    assert (len(one.run.losses), one.run.rows, two.run.rows) == (7, 16, 16)


PROGRAM = """
import sys
from pathlib import Path
import msgspec
import numpy as np
from ringreduce.pure.sketch import LENGTH
from ringreduce.pure.verification import Arrays, Run
from ringreduce.vocabulary.config import Config, recording_wanted

case, config = sys.argv[2], Config.from_environment()
ranks = config.size
print("printed")
if case == "fails" and config.rank == 1:
    raise ValueError("no such file")
if case == "leaves" and config.rank == 1:
    sys.exit(3)
if case != "other":
    steps, folder = recording_wanted()
    loss = {"differs": float(ranks), "infinite": np.nan}.get(case, 1.0)
    fields = {
        "ranks": ranks, "returned": {"loss": [loss] * steps}, "loss": "loss", "rows": 8,
        "step_s": 0.001, "threads": 1, "memory": [1 << 30] * ranks, "settings": {},
        "names": ["kernel"], "trained": [True], "gradient_names": ["sgd: kernel"],
        "is_half": False, "skips": False, "own_step": "", "clips": "", "of_gradients": [],
        "of_batches": ["dropout: each rank draws other random numbers " * 3], "steps": steps,
        "unseen": {"gradients": "a reason that is long " * 5} if case == "unseen" else {},
    }
    Path(folder, "run").write_bytes(msgspec.msgpack.encode(Run(**fields)))
    few = np.ones((steps, 1, LENGTH))
    arrays = Arrays(few[0], few, few, np.ones((steps, 1)), np.ones((ranks, steps, 1, 2)), few[0])
    np.savez(Path(folder, "arrays.npz"), **arrays._asdict())
"""


@pytest.mark.parametrize(
    ("case", "code", "said", "rows"),
    [
        ("agrees", 0, "The numbers agree in 3 steps", "ranks 1 2"),
        ("differs", 1, "first loss of step 1, which is 1 and 2", "ranks 1 2"),
        in_full("infinite", 3, "not finite: loss, from step 1 on", "ranks 1 2"),
        ("unseen", 3, "not seen: gradients: a reason", "ranks 1 2"),
        ("fails", 2, "ValueError: no such file", "ranks 1 [1]"),
        ("leaves", 2, "that was with -n 2", "ranks 1"),
        ("other", 2, "has not trained by rr.fit", ""),
    ],
)
def test_what_a_user_sees(tmp_path, case, code, said, rows):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = command_line("verify", str(script), "-n", "1,2", "--case", case, "--steps", "3")
    lines = done.stdout.splitlines()
    if case == "other":  # An error of ours, of which the command makes a line and its exit code.
        assert said in str(done.exception)
    else:
        assert (done.exit_code, said in done.output) == (code, True)
    assert max(map(len, lines), default=0) <= 80
    # Only of a rank that fails.
    assert ("printed" in done.stdout) == (case in ("fails", "leaves"))
    assert ("that was with -n 2" in done.stderr) == (case in ("fails", "leaves"))
    assert ("agree in" in done.stdout) == (case == "agrees")
    if case != "leaves":
        assert [line.split()[0] for line in lines[:3]] == rows.split()


@pytest.mark.full
@pytest.mark.tensorflow
def test_the_example_trains_alike(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "digits.py"
    with launcher(tmp_path, "verify", str(example), "-n", "1,3", "--json") as process:
        assert process.wait(120) == 0, process.stderr
        report = json.loads(process.stdout)
    assert report["agree"]
    assert report["differences"][0]["parts"][1]["what"] == "loss"
    found = [(run["ranks"], len(run["returned"]["loss"])) for run in report["runs"]]
    assert found == [(1, 20), (3, 20)]
