"""Imports point down, and some things appear in one place or nowhere: checked on the source."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import ringreduce
from tests.processes import clean_environment

PACKAGE = Path(ringreduce.__file__).parent
SOURCES = {
    ".".join(("ringreduce", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# From the bottom up. A module may import from its own layer and from those before it; a
# name stands for the module and everything below it.
LAYERS = {
    "vocabulary": ("vocabulary", "_version"),
    "pure": ("pure",),
    "launcher": ("commands.launch",),
    "effects": ("effects",),
    "transport": ("transport",),
    "bootstrap": ("bootstrap",),
    "collectives": ("collectives",),
    "engine": ("engine",),
    "communicator": ("communicator",),
    "tensorflow": ("tensorflow",),
    "keras": ("keras",),
    "ray": ("ray",),
    "unchanged programs": ("unchanged",),
    "entry points": ("commands", "__main__", "testing"),
}
DECIDES = [
    "ringreduce.commands.doctor.findings",
    "ringreduce.commands.launch.conclusion",
    "ringreduce.commands.launch.exchange",
    "ringreduce.commands.launch.failure",
    "ringreduce.commands.launch.frames",
    "ringreduce.commands.launch.hosts",
    "ringreduce.commands.launch.node_messages",
    "ringreduce.commands.launch.output",
    "ringreduce.commands.launch.worker_records",
    "ringreduce.commands.report.verdict",
]
MODULES = [name for name in SOURCES if name != "ringreduce"]  # the facade, tested apart


def layer_of(module: str) -> str:
    """The layer of `module`; fails for one that nobody has placed."""
    for layer, members in LAYERS.items():
        for member in members:
            if f"{module}.".startswith(f"ringreduce.{member}."):
                return layer
    raise AssertionError(f"{module} belongs to no layer: give it a place in LAYERS")


def in_layer(layer: str) -> list[str]:
    return [name for name in MODULES if layer_of(name) == layer]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> frozenset[str]:
    """Full names of all modules that `module` imports, in functions and for typing too."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in SOURCES else str(node.module))
    return frozenset(found)


def top_level_imports_of(module: str) -> set[str]:
    """First parts of the names of what `module` imports."""
    return {name.partition(".")[0] for name in imports_of(module)}


def importers_of(*libraries: str) -> set[str]:
    return {module for module in SOURCES if top_level_imports_of(module) & set(libraries)}


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    order = list(LAYERS)
    ours = order.index(layer_of(module))
    upward = [
        name
        for name in imports_of(module)
        if name in MODULES and order.index(layer_of(name)) > ours
    ]
    assert not upward


@pytest.mark.parametrize("module", MODULES)
def test_a_module_does_not_import_the_facade(module: str) -> None:
    assert "ringreduce" not in imports_of(module)


def imported_for_types_alone(module: str) -> set[str]:
    """Modules that only annotations need: a session's parts name its class."""
    blocks = [each for each in tree_of(module).body if isinstance(each, ast.If)]
    typed = [block for block in blocks if "TYPE_CHECKING" in ast.dump(block.test)]
    nodes = [node for block in typed for node in block.body]
    return {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def test_modules_of_one_layer_do_not_import_each_other_in_circles() -> None:
    open_, done = [], set()

    def visit(module: str) -> None:
        assert module not in open_, " -> ".join([*open_, module])
        if module in done:
            return
        open_.append(module)
        needed = imports_of(module) - imported_for_types_alone(module)
        for name in sorted(needed & set(MODULES)):
            visit(name)
        done.add(open_.pop())

    for module in MODULES:
        visit(module)


def test_the_facade_imports_only_the_vocabulary_at_once() -> None:
    direct = [node for node in tree_of("ringreduce").body if isinstance(node, ast.ImportFrom)]
    ours = {str(node.module) for node in direct} & set(MODULES)
    assert {layer_of(module) for module in ours} == {"vocabulary"}


@pytest.mark.parametrize("module", in_layer("pure"))
def test_the_pure_layer_does_no_input_or_output(module: str) -> None:
    effects = {"zmq", "os", "time", "threading", "socket", "subprocess", "sys", "io", "logging"}
    assert not top_level_imports_of(module) & effects


@pytest.mark.parametrize("module", DECIDES)
def test_what_the_launcher_and_the_report_decide_is_pure(module: str) -> None:
    effects = {"os", "time", "threading", "socket", "subprocess", "sys", "psutil"}
    assert not top_level_imports_of(module) & effects


def test_only_two_modules_read_the_environment() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    readers = set()
    for module in SOURCES:
        for node in ast.walk(tree_of(module)):
            as_attribute = isinstance(node, ast.Attribute) and node.attr in names
            by_import = isinstance(node, ast.ImportFrom) and node.module == "os"
            if as_attribute or (by_import and names & {alias.name for alias in node.names}):
                readers.add(module)
    assert readers == {
        "ringreduce.vocabulary.config",
        "ringreduce.vocabulary.worker_environment",
    }


def test_only_the_transport_and_the_bootstrap_import_zmq() -> None:
    assert importers_of("zmq") == {
        "ringreduce.bootstrap.rendezvous",
        "ringreduce.transport.authenticator",
        "ringreduce.transport.channel",
        "ringreduce.transport.control",
        "ringreduce.transport.diagnosis",
        "ringreduce.transport.libzmq",
        "ringreduce.transport.security",
        "ringreduce.transport.sockets",
        "ringreduce.transport.visits",
    }


def test_only_the_integrations_import_tensorflow_or_keras() -> None:
    integrations = {*in_layer("tensorflow"), *in_layer("keras"), *in_layer("unchanged programs")}
    integrations.add("ringreduce.ray.checkpoints")
    importers = importers_of("tensorflow", "keras")
    assert importers
    assert importers <= integrations


def test_only_one_layer_imports_ray() -> None:
    assert importers_of("ray")
    assert importers_of("ray") <= set(in_layer("ray"))


def test_only_the_launcher_starts_processes() -> None:
    launch = "ringreduce.commands.launch"
    assert importers_of("subprocess", "multiprocessing") == {
        f"{launch}.processes",
        f"{launch}.remote",
    }


def test_only_functions_and_results_of_own_children_are_pickled() -> None:
    modules = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    launch = "ringreduce.commands.launch"
    assert importers_of(*modules) == {f"{launch}.call", f"{launch}.function"}


@pytest.mark.parametrize("module", list(SOURCES))
def test_no_text_is_run_as_code(module: str) -> None:
    called = {
        node.func.id
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    # A worker's program is what that module is for.
    allowed = {"exec", "compile"} if module == "ringreduce.commands.launch.start" else set()
    assert not called & {"eval", "exec", "compile", "__import__"} - allowed


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not drawers & {part for name in SOURCES for part in name.split(".")}


@cache
def fresh_import(module: str) -> tuple[dict[str, object], str]:
    """What importing `module` in a new process brings with it, and what it prints."""
    program = (
        f"import sys, {module}; kept = list(sys.modules)\n"
        "import json, psutil, os\n"
        "threads = psutil.Process().num_threads()\n"
        "os.write(3, json.dumps({'modules': kept, 'threads': threads}).encode())"
    )
    # Descriptor 3 carries the answer, so that any output at all is the import's own.
    shell = ["sh", "-c", 'exec 3>&1 1>&2; exec "$0" "$@"', sys.executable, "-c", program]
    done = subprocess.run(
        shell, capture_output=True, text=True, timeout=30, env=clean_environment(), check=True
    )
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("library", ["tensorflow", "keras", "numba", "numpy", "zmq"])
@pytest.mark.parametrize("module", ["ringreduce", "ringreduce.commands.cli"])
def test_a_fresh_import_stays_light(module: str, library: str) -> None:
    facts, _ = fresh_import(module)
    assert module in facts["modules"]
    assert library not in facts["modules"]


def test_importing_prints_nothing() -> None:
    assert fresh_import("ringreduce")[1] == ""


def test_importing_starts_no_thread() -> None:
    assert fresh_import("ringreduce")[0]["threads"] == 1


def test_the_ring_is_imported_when_first_asked_for() -> None:
    program = "import sys, ringreduce; ringreduce.Communicator; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=30,
        env=clean_environment(),
        check=True,
    )
    assert done.stdout == "True\n"
