"""Compiled functions are compiled anew when a file that they take constants from has changed.

They are kept where nobody else can put any, and where nothing can be kept they work too.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

FUNCTION = """\
from ringreduce.vocabulary.compiled import jit
from smallest.constants import NUMBER

@jit
def inner():
    return NUMBER

@jit
def outer():
    return inner() + 1

print(outer(), len(outer.stats.cache_hits), "from the cache")
"""


def run(folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import smallest.function"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    return subprocess.run(command, cwd=folder, **options, **more)


def output(folder: Path, **more: Any) -> str:
    return run(folder, **more).stdout.strip()


def test_a_constant_of_another_file_is_compiled_anew(tmp_path):
    package = tmp_path / "smallest"
    package.mkdir()
    # As of an editable installation: the first of its folders has no sources.
    (tmp_path / "built").mkdir()
    (package / "__init__.py").write_text("__path__.insert(0, __path__[0] + '/../built')")
    (package / ".#function.py").symlink_to("nobody@nowhere")
    (package / "function.py").write_text(FUNCTION)
    (package / "constants.py").write_text("NUMBER = 1\n")
    assert output(tmp_path) == "2 0 from the cache"
    assert output(tmp_path) == "2 1 from the cache"
    (package / "constants.py").write_text("NUMBER = 41\n")
    assert output(tmp_path) == "42 0 from the cache"


def test_without_a_home_functions_are_kept_apart_from_other_users_or_not_at_all(tmp_path):
    package, temporary = tmp_path / "smallest", tmp_path / "temporary"
    package.mkdir()
    temporary.mkdir()
    (package / "__init__.py").touch()
    (package / "__pycache__").touch()  # no folder: nothing can be written there, even by root
    (package / "constants.py").write_text("NUMBER = 1\n")
    (package / "function.py").write_text(FUNCTION)
    ours = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}
    environment = {name: text for name, text in os.environ.items() if name not in ours}
    environment["TMPDIR"] = str(temporary)

    # Folders can be made, and no file of more than 64 bytes; Python itself would leave parts of
    # compiled modules.
    full = run(
        tmp_path,
        env=environment | {"HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
    )
    assert full.stdout.strip() == "2 0 from the cache"
    assert not full.stderr
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not [*folder.rglob("*.nb*")]

    # Of a user whom the system does not know, Python names the home ~, which is a relative path.
    relative = environment | {"HOME": "~"}
    assert output(tmp_path, env=relative) == "2 0 from the cache"
    assert [*folder.rglob("*.nbc")]
    assert not (tmp_path / "~").exists()

    folder.chmod(0o755)
    unsafe = run(tmp_path, env=relative)
    assert unsafe.stdout.strip() == "2 0 from the cache"
    assert unsafe.stderr.count(f"other users may enter {folder}: its mode is 755, not 700") == 1
