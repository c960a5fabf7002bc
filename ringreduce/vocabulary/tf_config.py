"""Reads TF_CONFIG, in which TensorFlow's launchers describe a cluster and one task in it."""

import json

from ringreduce.vocabulary.errors import ConfigError


def read_tf_config(text: str) -> tuple[int, list[str]] | None:
    """The rank of the task in `text`, and the addresses of all, chief first; None for no cluster.

    The evaluator is no rank: it trains nothing, so it is alone. Raises ConfigError if it is no
    cluster of a chief (or master) and workers, or has parameter servers.
    """
    try:
        config = json.loads(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise _unusable("it is no JSON object")
    cluster, own = config.get("cluster") or {}, config.get("task") or {}
    if not isinstance(cluster, dict) or not isinstance(own, dict):
        raise _unusable("cluster and task must be objects")
    kind, index = own.get("type"), own.get("index", 0)
    if not cluster:  # As for TensorFlow: nothing is distributed.
        return None
    if cluster.get("ps") or kind == "ps":
        raise _unusable(
            "it has parameter servers (ps), and ringreduce has none: every worker keeps the whole "
            "model, and they exchange gradients with each other"
        )
    if kind == "evaluator":
        return 0, [""]
    tasks: list[tuple[object, int]] = []
    addresses: list[str] = []
    for part in ("chief", "master", "worker"):
        found = cluster.get(part) or []
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise _unusable(f"{part} must be a list with the addresses of all its tasks")
        tasks += [(part, number) for number in range(len(found))]
        addresses += found
    if type(index) is not int or (kind, index) not in tasks:
        raise _unusable(f"the cluster has no task of type {kind!r} with index {index!r}")
    return tasks.index((kind, index)), addresses


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"cannot use TF_CONFIG: {why}",
        remedy='Expected is {"cluster": {"chief": ["HOST:PORT"], "worker": ["HOST:PORT", ...]}, '
        '"task": {"type": "worker", "index": 0}}, where chief may be absent.',
    )
