"""What users may rely on: names, their documentation, the version."""

import ast
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

import ringreduce

# A name that goes breaks somebody's program; one that comes stays for ever.
PUBLIC = [
    *("ArrayError", "ClosedError", "Communicator", "Config", "ConfigError", "CorruptionError"),
    *("MismatchError", "NativeError", "NumericsError", "PeerError", "PeerLostError"),
    *("PeerTimeoutError", "ProtocolError", "ReduceOp", "RendezvousError", "RingReduceError"),
    *("Statistics", "WorkerError", "__version__", "default_communicator", "init"),
    *("is_initialized", "launch", "leave", "local_rank", "local_size", "on_rank_zero"),
    *("rank", "shutdown"),
    "size",
]
COMMUNICATOR = [
    *("all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast"),
    *("broadcast_object", "close", "closed", "config", "empty", "failure", "gather"),
    *("gather_object", "local_rank", "local_size", "members", "parent", "rank", "recv"),
    *("recv_object", "reduce_scatter", "scatter", "scatter_object", "send", "send_object"),
    *("size", "split", "statistics", "transport"),
]
KERAS = [
    *("ColumnParallelDense", "DataWarning", "DiLoCo", "DistributedGradientTape"),
    *("DistributedOptimizer", "LocalSGD", "ParallelMultiHeadAttention", "ParityWarning"),
    *("Pipeline", "PowerSGD", "RowParallelDense", "ShardedEmbedding", "Strategy"),
    *("SyncBatchNormalization", "all_gather", "all_reduce", "all_to_all", "broadcast"),
    *("broadcast_variables", "callbacks", "elastic", "evaluate", "fit", "fold_seeds", "init"),
    *("is_initialized", "joined", "launch", "leave", "load_model", "local_rank", "local_size"),
    *("on_rank_zero", "parts", "predict", "rank", "recv", "reduce_scatter", "send", "shard"),
    *("shutdown", "size", "step_weight", "verify_replicas"),
]
OF_KERAS = {
    "callbacks": ["OnRankZero", "Profile", "Together", "VerifyReplicas"],
    "elastic": ["KerasState", "State", "Stopped", "run"],
    "parts": ["PartLayer", "in_parts", "look_up", "summary"],
}


def documentables(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The module itself, its public functions and classes, with their names.

    Methods too, where users see them; else their names may say it all.
    """
    module = ast.parse(path.read_text(encoding="utf-8"))
    yield path.stem, module

    def below(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in parent.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            # What a setter does is said where the property is read; of hooks Keras says it.
            if node.name.startswith(("_", "on_")) or is_setter(node):
                continue
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef) and is_seen(path):
                yield from below(node, f"{prefix}.{node.name}")

    yield from below(module, path.stem)


def is_seen(path: Path) -> bool:
    """Whether users have objects of a file's classes."""
    name = path.relative_to(PACKAGE).as_posix()
    return name.startswith(("keras/", "ray/", "spark/", "tensorflow/", "testing")) or name in SEEN


def is_setter(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)


PACKAGE = Path(ringreduce.__file__).parent
SEEN = [
    "communicator/communicator.py",
    *(f"vocabulary/{name}.py" for name in ("config", "errors", "types")),
]


def test_the_public_names_are_these_in_order_and_lead_somewhere():
    assert ringreduce.__all__ == PUBLIC == sorted(PUBLIC)
    assert None not in [getattr(ringreduce, name) for name in PUBLIC]
    assert [n for n in dir(ringreduce.Communicator) if not n.startswith("_")] == COMMUNICATOR
    with pytest.raises(AttributeError, match=r"module 'ringreduce' has no attribute 'allreduce'"):
        _ = ringreduce.allreduce


@pytest.mark.tensorflow
def test_the_names_for_keras_are_these():
    import ringreduce.keras as rr

    assert sorted(rr.__all__) == KERAS
    assert {name: sorted(getattr(rr, name).__all__) for name in OF_KERAS} == OF_KERAS


def test_everything_public_is_documented():
    documented = {path: [*documentables(path)] for path in sorted(PACKAGE.rglob("*.py"))}
    assert not [
        f"{path}: {name}"
        for path, nodes in documented.items()
        for name, node in nodes
        if not ast.get_docstring(node)
    ]


def test_every_setting_of_config_and_argument_of_init_is_documented():
    settings = set(ringreduce.Config.__dataclass_fields__)
    arguments = set(inspect.signature(ringreduce.init).parameters)
    assert arguments <= settings
    for documented, names in ((ringreduce.Config, settings), (ringreduce.init, arguments)):
        text = inspect.getdoc(documented)
        assert names <= set(re.findall(r"^ +(\w+): \S", text, re.MULTILINE))


def test_the_version_is_a_version():
    # The canonical form of PEP 440, without epochs.
    number = r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?"
    assert re.fullmatch(number, ringreduce.__version__)


@pytest.mark.tensorflow
def test_every_name_that_a_message_gives_is_there():
    import ringreduce.keras as rr

    texts = [
        node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {name for text in texts for name in re.findall(r"\brr\.([A-Za-z_.]*[A-Za-z_])", text)}
    for lists in re.findall(r"ringreduce\.keras has (\w+) and (\w+)", "\n".join(texts)):
        named |= set(lists)
    assert {"fit", "joined", "callbacks.OnRankZero"} <= named

    def is_there(name: str) -> bool:
        try:
            attrgetter(name)(rr)
        except AttributeError:
            return False
        return True

    assert not sorted(name for name in named if not is_there(name))
