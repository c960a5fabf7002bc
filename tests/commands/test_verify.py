"""``ringreduce verify``: recorded trainings with planted faults, and what a user sees.

What is said of which records is tested in tests/pure/test_verification.py.
"""

import json
from pathlib import Path

import pytest

from ringreduce.commands.verify import read
from ringreduce.pure.verification import Recorded, compare, reasons
from tests.jobs import facts_in, run_job
from tests.launching import command_line
from tests.processes import launcher

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of one rank, and of two."""
    found = [tmp_path_factory.mktemp(f"ranks-{size}") for size in (1, 2)]
    for size, folder in enumerate(found, 1):
        result = run_job(size, ["tests/programs/verified.py", str(folder)])
        assert result.exit_code == 0, result.errors
        assert [fact["code"] for fact in facts_in(result.output)] == [None] * size
    return found


def recorded(folders: list[Path], case: str) -> list[Recorded]:
    return [read(folder / case, "verified.py", size) for size, folder in enumerate(folders, 1)]


@pytest.mark.tensorflow
def test_ranks_that_train_alike_agree(folders):
    one, two = recorded(folders, "alike")
    found = compare(one, two)
    assert found.agrees
    assert found.loss < 1e-4
    assert one.run.settings == two.run.settings
    assert (len(one.run.losses), one.run.rows, two.run.rows) == (7, 16, 16)
    assert [memory > 1 << 26 for memory in two.run.memory] == [True] * 2
    assert not [path.name for folder in folders for path in folder.glob("*.keras")]


UNLIKE = "adam: learning_rate is 0.01 with 1 rank and 0.02 with 2 ranks."


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("layers", ["norm: each rank normalizes its", "drop: each rank draws other random"]),
        ("clipping", ["Clips.train_step calls clip_by_global_norm, which clips each rank's"]),
        ("unseeded-0", ["The initial weights differ in each run.", UNLIKE]),
    ],
)
def test_the_reason_for_a_difference_is_found(folders, case, texts):
    one, two = recorded(folders, case)
    again = read(folders[0] / "unseeded-1", "verified.py", 1) if "seed" in case else one
    found = compare(one, two)
    assert not found.agrees
    assert found.weight.startswith("dense")
    said = reasons(one.run, two.run, found, compare(one, again))
    assert [text[: len(start)] for text, start in zip(said, texts, strict=True)] == texts


PROGRAM = """
import sys
from pathlib import Path
import msgspec
import numpy as np
from ringreduce.pure.verification import Run
from ringreduce.vocabulary.config import Config, recording_wanted

case, config = sys.argv[2], Config.from_environment()
ranks = config.size
print("printed")
if case == "fails" and config.rank == 1:
    raise ValueError("no such file")
if case != "other":
    steps, folder = recording_wanted()
    fields = {
        "ranks": ranks, "losses": [float(ranks)] * steps, "rows": 8, "step_s": 0.001,
        "threads": 1, "memory": [1 << 30] * ranks, "settings": {}, "names": ["kernel"],
        "trained": [True], "is_half": False, "of_gradients": [],
        "of_batches": ["dropout: each rank draws other random numbers " * 3],
    }
    Path(folder, "run").write_bytes(msgspec.msgpack.encode(Run(**fields)))
    np.savez(Path(folder, "before.npz"), np.zeros(2))
    np.savez(Path(folder, "after.npz"), np.ones(2))
"""


@pytest.mark.parametrize(
    ("case", "code", "said", "rows"),
    [
        ("differs", 1, "from step 1 on the loss, which is 1 and 2", "ranks 1 2"),
        ("fails", 2, "ValueError: no such file", "ranks 1 [1]"),
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
    assert ("printed" in done.stdout) == (case == "fails")
    assert ("that was with -n 2" in done.stderr) == (case == "fails")
    assert [line.split()[0] for line in lines[:3]] == rows.split()


@pytest.mark.full
@pytest.mark.tensorflow
def test_the_example_trains_alike(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "digits.py"
    with launcher(tmp_path, "verify", str(example), "-n", "1,3", "--json") as process:
        assert process.wait(120) == 0, process.stderr
        report = json.loads(process.stdout)
    assert report["agree"]
    assert [(run["ranks"], len(run["losses"])) for run in report["runs"]] == [(1, 20), (3, 20)]
