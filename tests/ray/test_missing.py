"""Where Ray is not installed."""

import importlib
import sys

import pytest


def test_the_error_has_the_command_that_installs_it(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ringreduce.ray", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "ringreduce\[ray\]"'):
        importlib.import_module("ringreduce.ray")
