"""Imports point down, and some things appear in one place or nowhere: checked on the source."""

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
    **{name: (name,) for name in ("effects", "transport", "bootstrap", "collectives", "engine")},
    **{name: (name,) for name in ("communicator", "tensorflow", "keras", "ray", "spark")},
    "unchanged programs": ("unchanged",),
    "entry points": ("commands", "__main__", "testing"),
}
# Folders of `keras/`, from the bottom up; "" is what lies in `keras/` itself, but names for users.
ROOMS = ("", "layers", "strategies", "checks", "recording", "optimizer", "data", "model")
ROOMS += ("elastic", "callbacks", "training", "pipeline", "horovod")
NAMES_FOR_USERS = ("ringreduce.keras", "ringreduce.keras.parts")
LAUNCH = "ringreduce.commands.launch"
DECIDES = ["ringreduce.commands.doctor.findings", "ringreduce.commands.report.verdict"]
DECIDES += [f"{LAUNCH}.{name}" for name in ("conclusion", "exchange", "failure", "frames", "hosts")]
DECIDES += [f"{LAUNCH}.{name}" for name in ("comebacks", "output", "worker_records")]
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


def test_imports_point_down_and_none_is_of_the_facade():
    order = list(LAYERS)
    height = {module: order.index(layer_of(module)) for module in MODULES}
    imports = [(module, name) for module in MODULES for name in imports_of(module)]
    assert not [
        f"{module} imports {name}"
        for module, name in imports
        if name == "ringreduce" or height.get(name, 0) > height[module]
    ]


def room_of(module: str) -> str:
    """The folder of `keras/` that a module of it is in."""
    first, _, rest = module.removeprefix("ringreduce.keras").lstrip(".").partition(".")
    return first if rest or first in ROOMS else ""


def test_imports_between_rooms_of_keras_point_down():
    modules = [name for name in in_layer("keras") if name not in NAMES_FOR_USERS]
    assert {room_of(module) for module in modules} == set(ROOMS)
    height = {module: ROOMS.index(room_of(module)) for module in modules}
    assert not [
        f"{module} imports {name}"
        for module in modules
        for name in imports_of(module)
        if height.get(name, 0) > height[module]
    ]


def imported_for_types_alone(module: str) -> set[str]:
    """Modules that only annotations need: a session's parts name its class."""
    blocks = [each for each in tree_of(module).body if isinstance(each, ast.If)]
    typed = [block for block in blocks if "TYPE_CHECKING" in ast.dump(block.test)]
    nodes = [node for block in typed for node in block.body]
    return {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def packages_of(module: str) -> list[str]:
    """The packages that `module` is in, but for the whole one."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(2, len(parts))]


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def test_modules_of_one_layer_do_not_import_each_other_in_circles():
    open_, done = [], set()

    def visit(module: str) -> None:
        assert module not in open_, " -> ".join([*open_, module])
        if module in done:
            return
        open_.append(module)
        needed = imports_of(module) - imported_for_types_alone(module)
        # A package is imported before what is in it.
        needed |= {p for name in needed for p in packages_of(name) if not is_within(module, p)}
        for name in sorted(needed & set(MODULES)):
            visit(name)
        done.add(open_.pop())

    for module in MODULES:
        visit(module)


def test_the_facade_imports_only_the_vocabulary_at_once():
    direct = [node for node in tree_of("ringreduce").body if isinstance(node, ast.ImportFrom)]
    ours = {str(node.module) for node in direct} & set(MODULES)
    assert {layer_of(module) for module in ours} == {"vocabulary"}


def test_the_pure_layer_and_what_launcher_and_report_decide_do_no_input_or_output():
    effects = {"os", "time", "threading", "socket", "subprocess", "sys", "psutil"}
    assert set(DECIDES) <= set(MODULES)
    assert not importers_of(*effects) & {*DECIDES, *in_layer("pure")}
    assert not importers_of("zmq", "io", "logging") & set(in_layer("pure"))


def test_only_two_modules_read_the_environment():
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    readers = set()
    for module in SOURCES:
        for node in ast.walk(tree_of(module)):
            as_attribute = isinstance(node, ast.Attribute) and node.attr in names
            by_import = isinstance(node, ast.ImportFrom) and node.module == "os"
            if as_attribute or (by_import and names & {alias.name for alias in node.names}):
                readers.add(module)
    vocabulary = "ringreduce.vocabulary"
    assert readers == {f"{vocabulary}.config", f"{vocabulary}.worker_environment"}


def test_only_few_modules_import_these():
    of_zmq = ("authenticator", "channel", "control", "diagnosis", "libzmq")
    of_zmq += ("security", "sockets", "visits")
    assert importers_of("zmq") == {
        *("ringreduce.bootstrap.rendezvous", *(f"ringreduce.transport.{name}" for name in of_zmq))
    }
    starters = {f"{LAUNCH}.processes", f"{LAUNCH}.remote"}
    assert importers_of("subprocess", "multiprocessing") == starters
    # Functions and results of own children.
    picklers = importers_of("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
    assert picklers == {f"{LAUNCH}.call", f"{LAUNCH}.function"}
    integrations = {*in_layer("tensorflow"), *in_layer("keras"), *in_layer("unchanged programs")}
    integrations.add("ringreduce.ray.checkpoints")
    for importers, layers in (
        (importers_of("tensorflow", "keras"), integrations),
        (importers_of("ray"), set(in_layer("ray"))),
        (importers_of("pyspark", "pyarrow"), set(in_layer("spark"))),
    ):
        assert importers
        assert importers <= layers


def test_only_the_communicator_s_own_files_use_its_session():
    users = {
        module
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and node.attr == "_session"
        # Which has a key of that name.
        if module != "ringreduce.transport.security"
    }
    assert {layer_of(module) for module in users} == {"communicator"}


def test_no_text_is_run_as_code():
    called = {
        (module, node.func.id)
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    running = {(m, name) for m, name in called if name in ("eval", "exec", "compile", "__import__")}
    # A worker's program is what that module is for.
    assert running <= {(f"{LAUNCH}.start", "exec"), (f"{LAUNCH}.start", "compile")}


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not drawers & {part for name in SOURCES for part in name.split(".")}


@pytest.mark.parametrize("module", ["ringreduce", "ringreduce.commands.cli"])
def test_a_fresh_import_stays_light_prints_nothing_and_starts_no_thread(module):
    program = (
        f"import sys, {module}; kept = list(sys.modules)\n"
        "import json, psutil, os, ringreduce\n"
        "threads = psutil.Process().num_threads(); ringreduce.Communicator\n"
        "os.write(3, json.dumps([kept, threads, 'numba' in sys.modules]).encode())"
    )
    # Descriptor 3 carries the answer, so that any output at all is the import's own.
    shell = ["sh", "-c", 'exec 3>&1 1>&2; exec "$0" "$@"', sys.executable, "-c", program]
    done = subprocess.run(
        shell, capture_output=True, text=True, timeout=30, env=clean_environment(), check=True
    )
    modules, threads, is_imported_when_asked_for = json.loads(done.stdout)
    assert module in modules
    assert not {"tensorflow", "keras", "numba", "numpy", "zmq"} & {*modules}
    assert (threads, done.stderr, is_imported_when_asked_for) == (1, "", True)
