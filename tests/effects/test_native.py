"""The native library: found, of the right ABI, and not needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.effects import native
from ringreduce.vocabulary.config import native_wanted
from ringreduce.vocabulary.errors import NativeError
from tests.processes import clean_environment

HEADER = Path(__file__).parents[2] / "native" / "include" / "ringreduce.h"


@pytest.mark.skipif(not native_wanted(), reason="RINGREDUCE_NATIVE=0 hides it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_there_where_there_is_a_compiler() -> None:
    """All tests that need it are skipped without it, and an installation goes on without it."""
    assert native.library() is not None, native.why_missing()


def test_abi_is_the_headers() -> None:
    assert f"#define RR_ABI {native.ABI}\n" in HEADER.read_text()


def test_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    path = tmp_path / "libringreduce_native.so"
    path.write_bytes(b"\x7fELF but no more")
    with pytest.raises(NativeError, match="cannot load"):
        native.load(path)


def compiled(source: str, folder: Path) -> Path:
    """A shared library made from `source`; skips where there is no compiler."""
    path, text = folder / "foreign.so", folder / "foreign.c"
    text.write_text(source)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, text], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return path


def test_library_of_another_abi_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = compiled("unsigned rr_abi(void) { return 999; }", tmp_path)
    with pytest.raises(NativeError, match=f"ABI 999; this ringreduce needs {native.ABI}"):
        native.load(path)


def test_foreign_library_is_refused(tmp_path: Path) -> None:
    path = compiled("int another(void) { return 1; }", tmp_path)
    with pytest.raises(NativeError, match="is not ringreduce's library"):
        native.load(path)


def test_a_checkout_without_a_library_says_so_and_blames_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "native").mkdir()
    monkeypatch.setattr(native, "native_wanted", lambda: True)
    monkeypatch.setattr(sys.modules["ringreduce"], "__path__", [str(tmp_path / "ringreduce")])
    said = native.why_missing()
    assert f"imported from its sources in {tmp_path}, where the native library is not built" in said
    assert "compiler" not in said


def test_hidden_library_is_not_loaded() -> None:
    program = "from ringreduce.effects import native; print(native.library(), native.why_missing())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        env=clean_environment(RINGREDUCE_NATIVE="0"),
        check=True,
    )
    assert done.stdout == "None The native library is hidden by RINGREDUCE_NATIVE=0.\n"
