"""What this process runs, in words: a newcomer has to run the same as the job."""

import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

_PACKAGES = "site-packages", "dist-packages"
_VERSIONS = "numpy", "tensorflow", "keras"


def facts_of_program(before: Mapping[str, str] = {}) -> dict[str, str]:
    """Versions, arguments, and a hash of each file of the program's own, as they are now.

    Those are the script and the modules of its folder that are imported. What was known `before`
    stays: somebody may change a file while the program runs.
    """
    facts = {"the version of Python": platform.python_version(), "argv": repr(sys.argv[1:])}
    for name in _VERSIONS:
        if version := getattr(sys.modules.get(name), "__version__", ""):
            facts[f"the version of {name}"] = str(version)
    script = Path(sys.argv[0]) if sys.argv[0] else None
    if script is not None and script.is_file():
        folder = script.resolve().parent
        paths = {script.resolve(), *map(_path_of, list(sys.modules.values()))}
        for path in sorted(path for path in paths if path is not None):
            if path.is_relative_to(folder) and not {*_PACKAGES} & {*path.parts}:
                facts[str(path.relative_to(folder))] = _hash_of(path)
    return {**facts, **before}


def _path_of(module: object) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if isinstance(name, str) and name.endswith(".py") else None


def _hash_of(path: Path) -> str:
    try:
        return f"a file with hash {hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()}"
    except OSError as error:
        return f"unreadable ({error.strerror})"
