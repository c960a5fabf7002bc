"""The native library: found, of the right ABI, and not needed."""

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


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (None, "cannot load"),
        ("int another(void) { return 1; }", "is not ringreduce's library"),
        ("unsigned rr_abi(void) { return 999; }", f"ABI 999; this ringreduce needs {native.ABI}"),
    ],
)
def test_another_file_or_library_is_refused(tmp_path: Path, source: str | None, why: str) -> None:
    path, text = tmp_path / "libringreduce_native.so", tmp_path / "foreign.c"
    path.write_bytes(b"\x7fELF but no more")
    if source is not None:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        text.write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, text], check=True, timeout=60)
    with pytest.raises(NativeError, match=why):
        native.load(path)


def test_a_checkout_without_a_library_says_so_and_blames_no_compiler(tmp_path, monkeypatch):
    (tmp_path / "native").mkdir()
    monkeypatch.setattr(native, "native_wanted", lambda: True)
    monkeypatch.setattr(sys.modules["ringreduce"], "__path__", [str(tmp_path / "ringreduce")])
    said = native.why_missing()
    assert f"imported from its sources in {tmp_path}, where the native library is not built" in said
    assert "compiler" not in said


def test_a_library_that_is_there_is_not_said_to_be_missing(tmp_path, monkeypatch):
    """Also in a checkout, whose sources are in another folder than what was built of them."""
    (tmp_path / "native").mkdir()
    built = tmp_path / "built"
    built.mkdir()
    (built / "libringreduce_native.so").touch()
    monkeypatch.setattr(native, "native_wanted", lambda: True)
    folders = [str(tmp_path / "ringreduce"), str(built)]
    monkeypatch.setattr(sys.modules["ringreduce"], "__path__", folders)
    assert native.why_missing() == ""


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
