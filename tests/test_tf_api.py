"""Our declarations of TensorFlow's C API are those of the TensorFlow that is installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parent.parent / "native" / "src"

SOURCE = """
#include <type_traits>
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"
namespace values {{
#include "{values}"
}}
#define RR_TF_API_OF_TENSORFLOW
#include "{declarations}"
#define SAME(result, name, parameters) \\
    static_assert(std::is_same<decltype(&::name), result (*) parameters>::value, #name);
RR_TF_FUNCTIONS(SAME)
static_assert(sizeof(TF_Code) == sizeof(int) && sizeof(TF_DataType) == sizeof(int), "enum");
"""


def compiles(source: str, folder: Path) -> str:
    """What the compiler says to `source` with TensorFlow's headers at hand; empty: nothing."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    # Found without importing TensorFlow, which takes seconds.
    package = importlib.util.find_spec("tensorflow")
    assert package is not None
    assert package.origin is not None
    include = Path(package.origin).parent / "include"
    file = folder / "check.cc"
    file.write_text(source)
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100).stderr


def source(declarations: str, folder: Path) -> str:
    """The check, with our enumerations compared by value as well as our functions by type."""
    header = folder / "tf_api.h"
    header.write_text(declarations)
    enumerations = re.findall(r"typedef enum \{[^}]*\} \w+;", declarations)
    assert len(enumerations) == 2
    names = folder / "values.h"
    names.write_text("\n".join(enumerations))
    checks = [
        f'static_assert((int)values::{name} == (int)::{name}, "{name}");'
        for enumeration in enumerations
        for name in re.findall(r"(TF_\w+) =", enumeration)
    ]
    assert len(checks) == 8
    return SOURCE.format(values=names, declarations=header) + "\n".join(checks)


def test_our_declarations_are_tensorflows(tmp_path: Path) -> None:
    declarations = (NATIVE / "tf_api.h").read_text()
    assert compiles(source(declarations, tmp_path), tmp_path) == ""


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        ("(TF_Status *, TF_Code, const char *)", "(TF_Status *, TF_Code, char *)"),
        ("X(int64_t, TF_Dim,", "X(int, TF_Dim,"),
        ("TF_HALF = 19", "TF_HALF = 20"),
    ],
)
def test_a_difference_would_be_found(tmp_path: Path, ours: str, other: str) -> None:
    declarations = (NATIVE / "tf_api.h").read_text()
    assert ours in declarations
    assert "static assertion failed" in compiles(
        source(declarations.replace(ours, other), tmp_path), tmp_path
    )
