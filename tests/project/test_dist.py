"""What is published: the files in it, the platform tag, and training from it."""

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_wheel_runs_without_a_compiler_and_holds_no_more_than_it_should(tmp_path):
    dist = tmp_path / "dist"
    command = ["make", "dist", f"DIST={dist}", f"BUILD={tmp_path / 'build'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    of_two = re.findall(r'"([0-9a-f]{64})"', done.stdout)
    assert len(of_two) == 2
    assert len(set(of_two)) == 1

    wheel, source = sorted(dist.iterdir(), key=lambda file: file.suffix == ".gz")
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheel.name)
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split())
    ours = {name for name in tracked if name.startswith("ringreduce/")}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name[-1] != "/"}
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == ours | {"ringreduce/libringreduce_native.so"}
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - {"", "PKG-INFO"} == tracked
