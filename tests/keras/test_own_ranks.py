"""Which programs know of ranks, by the text of their own modules."""

import sys
import types

import pytest

from ringreduce.keras.model.own_ranks import names_of_ranks


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Makes the text of a file of a program that runs as train.py of a folder."""
    folder = tmp_path / "job"

    def add(text, name="train.py", package=None):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        module = types.ModuleType("__main__" if name == "train.py" else path.stem)
        module.__file__, module.__package__ = str(path), package
        is_main = package is not None or name == "train.py"
        monkeypatch.setitem(sys.modules, "__main__" if is_main else f"own_{path.stem}", module)

    return add


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("size = os.environ.get('WORLD_SIZE', 1)", "train.py:2 names WORLD_SIZE"),
        ("rank = json.loads(os.environ['TF_CONFIG'])", "train.py:2 names TF_CONFIG"),
        ("rank = os.environ[f'OMPI_COMM_WORLD_{what}']", "train.py:2 names OMPI_COMM_WORLD_"),
        ("rank = os.getenv('RINGREDUCE_RANK')", "train.py:2 names RINGREDUCE_RANK"),
        ("if 'SLURM_NTASKS' in os.environ: pass", "train.py:2 names SLURM_NTASKS"),
        ("import ringreduce.keras as rr", "train.py:2 imports ringreduce.keras"),
        ("from torch import distributed", "train.py:2 imports torch.distributed"),
        ("from mpi4py import MPI", "train.py:2 imports mpi4py"),
        ("# WORLD_SIZE: see ringreduce run", ""),
        ('"Run it with RINGREDUCE_RANK set to 1."', ""),
        ("from torch import nn; import ringreduced; job = os.environ['SLURM_JOB_ID']", ""),
        ("from .ringreduce import mean", ""),
    ],
)
def test_what_shows_it(program, line, said):
    program(f"import os\n{line}\n")
    assert names_of_ranks() == said


def test_modules_beside_and_below_the_program_are_its_own(program):
    program("import os")
    program("import ringreduce", "venv/lib/site-packages/installed.py")
    program("import ringreduce", "../other/elsewhere.py")
    assert names_of_ranks() == ""
    program("size = 'PMI_SIZE'", "parts/losses.py")
    assert names_of_ranks() == "losses.py:1 names PMI_SIZE"


def test_of_a_module_of_a_package_all_of_that(program):
    program("size = 'PMI_SIZE'", "pack/parts/losses.py")
    program("", "pack/jobs/train.py", "pack.jobs")
    assert names_of_ranks() == "losses.py:1 names PMI_SIZE"


def test_a_program_whose_text_is_not_there_may_know_anything(program, tmp_path):
    program("")
    (tmp_path / "job" / "train.py").unlink()
    assert names_of_ranks() == "the text of train.py cannot be read"
