"""A test that ends its worker process fails, and all the others still run, once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Files before it that are finished, some after it, and files of a single test.
FILES = {0: 3, 1: 1, 2: 4, 3: 20, 4: 1, 5: 1, 6: 5, 7: 1}
DIES_IN = "test_3.py::test_it[10]"


def test_the_others_run_on_when_a_worker_dies(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for file, count in FILES.items():
        (tmp_path / f"test_{file}.py").write_text(
            "import os, pytest\n"
            f"@pytest.mark.parametrize('k', range({count}))\n"
            "def test_it(k, request):\n"
            f"    with open({str(ran)!r}, 'a') as file:\n"
            "        print(request.node.nodeid, file=file)\n"
            f"    if request.node.nodeid.endswith({DIES_IN!r}):\n"
            "        os._exit(1)\n"
        )
    (tmp_path / "conftest.py").write_text(
        "from tests.scheduling import Scheduling\n"
        "def pytest_xdist_make_scheduler(config, log):\n"
        "    return Scheduling(config, log)\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    total = sum(FILES.values())
    assert run.returncode == 1
    assert f"1 failed, {total - 1} passed" in run.stdout
    assert f"a worker died, or passed the time limit, in {DIES_IN}" in run.stderr
    assert len(ran.read_text().splitlines()) == total
