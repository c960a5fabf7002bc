"""Our declarations of the C APIs are those of the TensorFlow that is installed, and of its XLA."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native" / "src"

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


def include() -> Path:
    """TensorFlow's headers, found without importing it, which takes seconds."""
    package = importlib.util.find_spec("tensorflow")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "include"


def compiles(source: str, folder: Path) -> str:
    """What the compiler says to `source` with TensorFlow's headers at hand; empty: nothing."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    file = folder / "check.cc"
    file.write_text(source)
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{include()}", str(file)]
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


XLA_SOURCE = """
#include <cstddef>
#include <cstdint>
#include "xla/ffi/api/c_api.h"
namespace ours {{
#include "{declarations}"
}}
static_assert(ours::RR_XLA_MAJOR == XLA_FFI_API_MAJOR, "major");
static_assert(ours::RR_XLA_MINOR >= XLA_FFI_API_MINOR, "minor");
"""
# What some of the versions that are known do not have; nothing uses it.
NOT_IN_ALL = {"XLA_FFI_Type_Register", "XLA_FFI_ThreadPool_NumThreads", "state_type_id"}
# How it was called before 0.4.
BEFORE = {
    "XLA_FFI_InternalExtension": "XLA_FFI_Extension_Base",
    "XLA_FFI_InternalExtension_Type": "XLA_FFI_Extension_Type",
    "XLA_FFI_Error_GetDetails": "XLA_FFI_Error_GetMessage",
    "XLA_FFI_Error_GetDetails_Args": "XLA_FFI_Error_GetMessage_Args",
    "XLA_FFI_InvokeContext_Get": "XLA_FFI_ExecutionContext_Get",
}
SINCE = (
    "    XLA_FFI_Handler *record;\n",
    "    XLA_FFI_Error_Code errc;\n} XLA_FFI_Error_GetMessage_Args;",
)
# NULL there, which we leave: no traits.
NO_TRAITS = """
static_assert(offsetof(ours::XLA_FFI_Handler_Register_Args, bundle) +
              sizeof(ours::XLA_FFI_Handler_Bundle) ==
              offsetof(::XLA_FFI_Handler_Register_Args, traits), "record");
"""


def as_before(declarations: str) -> str:
    """Our declarations with the names of versions before 0.4, without what was not there."""
    for name, before in BEFORE.items():
        declarations = re.sub(rf"\b{name}\b", before, declarations)
    for text in SINCE:
        assert text in declarations
        declarations = declarations.replace(text, text.partition("\n")[2])
    return declarations


def xla_source(declarations: str, folder: Path) -> str:
    """The check of XLA's structures, field by field, and of its values."""
    header = folder / "xla_api.h"
    theirs = (include() / "xla/ffi/api/c_api.h").read_text()
    is_old = "XLA_FFI_InternalExtension" not in theirs
    declarations = as_before(declarations) if is_old else declarations
    # In C++ "struct X" would mean XLA's, which has been declared outside of the namespace.
    ahead = "typedef struct XLA_FFI_Api XLA_FFI_Api;"
    assert ahead in declarations
    header.write_text(declarations.replace(ahead, "struct XLA_FFI_Api;"))
    functions = re.findall(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\);", theirs)
    # How much earlier than in our table the futures are: registering reads it in the header too.
    moved = 8 * (13 - functions.index("XLA_FFI_Future_Create"))
    checks = []
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\}", declarations, re.DOTALL):
        fields = re.findall(r"(?:\(\*)?(\w+)(?:\)\([^)]*\))?;", body)
        shared = [field for field in fields if re.search(rf"\b{field}\b", theirs)]
        assert {*fields} - {*shared} <= NOT_IN_ALL
        if shared == fields and name != "XLA_FFI_Api":  # which may have more at the end
            checks.append(f'static_assert(sizeof(ours::{name}) == sizeof(::{name}), "{name}");')
        checks += [
            f"static_assert(offsetof(ours::{name}, {field}) == offsetof(::{name}, {field})"
            f"{f' + {moved}' if field.startswith('XLA_FFI_Future_') else ''} && "
            f"sizeof(ours::{name}::{field}) == sizeof(::{name}::{field}), "
            f'"{name}.{field}");'
            for field in shared
        ]
    assert len(checks) > 100
    values = re.findall(
        r"(XLA_FFI_(?:Error_Code|DataType|AttrType|Ext\w+|Exec\w+)_\w+) = ", declarations
    )
    assert len(values) == 17
    checks += [f'static_assert((int)ours::{v} == (int)::{v}, "{v}");' for v in values]
    checks += [NO_TRAITS] * is_old
    return XLA_SOURCE.format(declarations=header) + "\n".join(checks)


CHECKS = {"tf_api.h": source, "xla_api.h": xla_source}


@pytest.mark.parametrize("name", CHECKS)
def test_our_declarations_are_theirs(tmp_path: Path, name: str) -> None:
    check = CHECKS[name]((NATIVE / name).read_text(), tmp_path)
    assert compiles(check, tmp_path) == ""


@pytest.mark.parametrize(
    ("name", "ours", "other"),
    [
        ("tf_api.h", "(TF_Status *, TF_Code, const char *)", "(TF_Status *, TF_Code, char *)"),
        ("tf_api.h", "X(size_t, TF_DataTypeSize,", "X(int, TF_DataTypeSize,"),
        ("tf_api.h", "TF_HALF = 19", "TF_HALF = 20"),
        ("xla_api.h", "XLA_FFI_DataType_BF16 = 16", "XLA_FFI_DataType_BF16 = 17"),
        ("xla_api.h", "    int64_t rank;\n", "    int32_t rank;\n"),
        (
            "xla_api.h",
            "    rr_xla_not_used *XLA_FFI_Stream_Get;\n",
            "    int XLA_FFI_Stream_Get[5];\n",
        ),
    ],
)
def test_a_difference_would_be_found(tmp_path: Path, name: str, ours: str, other: str) -> None:
    check = CHECKS[name]((NATIVE / name).read_text(), tmp_path)
    assert ours in (tmp_path / name).read_text()
    for header in tmp_path.glob("*.h"):
        header.write_text(header.read_text().replace(ours, other))
    assert "static assertion failed" in compiles(check, tmp_path)
