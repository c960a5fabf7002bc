"""Where what an extra installs is not installed."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("package", "module", "extra"),
    [
        ("ray", "ringreduce.ray", "ray"),
        ("pyarrow", "ringreduce.spark", "spark"),
        ("wrapt", "ringreduce.unchanged.start", "tensorflow"),
    ],
)
def test_the_error_has_the_command_that_installs_it(package, module, extra, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "ringreduce\[{extra}\]"'):
        importlib.import_module(module)
