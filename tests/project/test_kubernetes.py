"""The manifests of examples/kubernetes: what the API's own models and our ranks make of them.

What each controller adds to a pod is written down here as its source has it: the Job controller's
labels and annotations, TF_CONFIG of Kubeflow's training operator 1.9 (genTFConfigJSONStr), the
PET_* variables of Kubeflow Trainer 2's plugin Torch (EnforceMLPolicy).
"""

import copy
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubeflow.training
import kubernetes.client
import pytest
import yaml

from ringreduce.vocabulary.config import Config
from ringreduce.vocabulary.errors import ConfigError

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
GUIDE = ROOT / "docs" / "guides" / "kubernetes.md"
FILES = sorted(FOLDER.glob("*.yaml"))

Object = dict[str, Any]

MODELS = {"TFJob": (kubeflow.training, "KubeflowOrgV1TFJob")}  # of the others V1 and the kind
# Models of another generator, in modules that take a moment to load.
PYDANTIC = {"TrainJob": "train_job", "TrainingRuntime": "training_runtime"}

INDEX = "batch.kubernetes.io/job-completion-index"
SECRET = "0123456789abcdef" * 2


def load(name: str) -> dict[str, Object]:
    """The objects of a file by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text())}


OBJECTS = [each for file in FILES for each in load(file.name).values()]


def known_part(each: Object) -> Object:
    """What its client's model has of an object: no unknown field, each value of the right type."""
    if module := PYDANTIC.get(kind := each["kind"]):
        models = importlib.import_module(f"kubeflow_trainer_api.models.trainer_v1alpha1_{module}")
        model = getattr(models, f"TrainerV1alpha1{kind}")
        return model.from_dict(copy.deepcopy(each)).to_dict()
    package, model = MODELS.get(kind, (kubernetes.client, f"V1{kind}"))
    client, response = package.ApiClient(), SimpleNamespace(data=json.dumps(each))
    return client.sanitize_for_serialization(client.deserialize(response, model))


def dictionaries(each: Any) -> Iterator[Object]:
    if isinstance(each, dict):
        yield each
    for below in each.values() if isinstance(each, dict) else each:
        if isinstance(below, dict | list):
            yield from dictionaries(below)


def test_the_models_have_every_field_and_a_wrong_one_would_be_found():
    """In the object's spec, and at the end of the way down, in a container."""
    for each in OBJECTS:
        assert known_part(each) == each
        for number, found in enumerate(dictionaries(each)):
            if found is each["spec"] or "volumeMounts" in found:
                wrong = copy.deepcopy(each)
                list(dictionaries(wrong))[number]["misspelt"] = "1"
                assert known_part(wrong) == each


def value_of(variable: Object, container: Object, metadata: Object) -> str:
    """What the kubelet makes of a container's variable."""
    if "value" in variable:
        return str(variable["value"])
    (source,) = variable["valueFrom"].items()
    if source[0] == "secretKeyRef":
        assert source[1] == {"name": "ringreduce", "key": "secret"}
        return SECRET
    if source[0] == "resourceFieldRef":
        kind, _, name = source[1]["resource"].partition(".")
        return str(container["resources"][kind][name])
    matched = re.fullmatch(r"metadata\.(labels|annotations)\['(.*)'\]", source[1]["fieldPath"])
    assert matched, source
    return str(metadata[matched[1]][matched[2]])


def environment(container: Object, metadata: Object, added: dict[str, str]) -> dict[str, str]:
    own = {each["name"]: value_of(each, container, metadata) for each in container["env"]}
    assert not own.keys() & added.keys()
    return own | added


def indexed_job() -> tuple[str, list[dict[str, str]]]:
    """The DNS name of pod 0, and the variables of each pod."""
    found = load("indexed-job.yaml")
    job, service = found["Job"], found["Service"]
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"]
    pods = []
    for index in range(spec["completions"]):
        labels = {
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/controller-uid": "1b4e28ba-2fa1-11d2-883f-0016d3cca427",
            INDEX: str(index),
        }
        metadata = {"labels": labels, "annotations": {INDEX: str(index)}}
        (container,) = spec["template"]["spec"]["containers"]
        pods.append(environment(container, metadata, {"JOB_COMPLETION_INDEX": str(index)}))
        assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return f"{job['metadata']['name']}-0.{service['metadata']['name']}", pods


def tfjob() -> tuple[str, list[dict[str, str]]]:
    job = load("tfjob.yaml")["TFJob"]
    name = job["metadata"]["name"]
    replicas = job["spec"]["tfReplicaSpecs"]
    cluster: dict[str, list[str]] = {}
    for kind, each in replicas.items():
        (container,) = each["template"]["spec"]["containers"]
        (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == "tfjob-port")
        low = kind.lower()
        cluster[low] = [f"{name}-{low}-{i}.team.svc:{port}" for i in range(each["replicas"])]
    pods = []
    for kind, each in replicas.items():
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"
        for index in range(each["replicas"]):
            task = {"type": kind.lower(), "index": index}
            text = json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})
            pods.append(environment(container, {}, {"TF_CONFIG": text}))
    return f"{name}-worker-0.team.svc", pods


def trainer() -> tuple[str, list[dict[str, str]]]:
    found = load("trainer.yaml")
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["metadata"]["labels"] == label
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert replicated["name"] == container["name"] == "node"
    name, asked = job["metadata"]["name"], job["spec"]["trainer"]
    pods = []
    for index in range(asked["numNodes"]):
        variables = {
            "PET_NNODES": str(asked["numNodes"]),
            "PET_NPROC_PER_NODE": str(asked["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(index),
        }
        pods.append(environment(container, {}, variables))
    return f"{name}-node-0-0.{name}", pods


@pytest.mark.parametrize("made", [indexed_job, tfjob, trainer])
def test_the_pods_are_ranks_of_one_job(made):
    pod_0, pods = made()
    configs = [Config.from_environment(each) for each in pods]
    assert [config.rank for config in configs] == list(range(3))
    (common,) = {(c.size, c.rendezvous, c.job_id, c.secret, c.log_dir) for c in configs}
    size, rendezvous, job_id, *others = common
    assert (size, bool(job_id), *others) == (3, True, SECRET, "/logs")
    assert re.fullmatch(re.escape(pod_0) + r":\d+", rendezvous)
    for pod in pods:
        assert pod["OMP_NUM_THREADS"] == pod["TF_NUM_INTRAOP_THREADS"] == "2"


def test_trainer_with_as_many_processes_as_cpus_is_refused():
    """What it sets unless numProcPerNode is 1."""
    _, (first, *_) = trainer()
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE is 2"):
        Config.from_environment({**first, "PET_NPROC_PER_NODE": "2"})


def test_containers_fit_the_image():
    lines = (FOLDER / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    stages = [n for n, line in enumerate(lines) if line.startswith("FROM")]
    last = dict(line.split(" ", 1) for line in lines[stages[-1] :] if line[:1].isupper())
    for line in lines:
        if line.startswith("COPY"):
            *sources, _ = line.split()[1:]
            for source in sources:
                assert (ROOT / source).exists(), line
    # Process 1 is tini's: `command` would take its place, `args` takes that of CMD.
    assert last["ENTRYPOINT"] == '["tini", "--"]'
    pods = [pod for each in OBJECTS for pod in dictionaries(each)]
    found = [(pod, container) for pod in pods for container in pod.get("containers", ())]
    assert len(found) == 3
    for pod, container in found:
        assert "command" not in container
        assert pod["securityContext"]["runAsUser"] == int(last["USER"])
        assert container["resources"]["limits"] == container["resources"]["requests"]
    commands = [c["args"] for _, c in found if "args" in c]
    commands.append(load("trainer.yaml")["TrainJob"]["spec"]["trainer"]["args"])
    assert len(commands) == 3
    for command in commands:
        assert command[:2] == json.loads(last["CMD"])
        assert last["COPY"] == f"examples/{command[1]} ."


def test_the_guide_shows_the_manifests_as_they_are():
    shown = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), flags=re.S)
    assert shown
    for block in shown:
        assert any(block in file.read_text() for file in FILES), block
