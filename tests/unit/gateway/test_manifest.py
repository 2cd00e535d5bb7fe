"""Manifest of a run for the Kubeflow Training Operator."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from unified.errors import UsageError
from unified.training.options import TrainingOptions
from unified_gateway.kubernetes.manifest import (
    NOT_SHOWN,
    KubeflowOptions,
    environment_of,
    label_value,
    pytorch_job,
    shown,
)
from unified_gateway.plan import plan_run
from unified_gateway.schemas import TrainingRequest

PAYLOAD = {
    "framework": "hf",
    "model_id": "meta-llama/Llama-3-8B",
    "run_id": "aml_ruleset_v4",
    "num_nodes": 3,
    "gpus_per_node": 8,
    "cpus_per_node": 48,
    "memory_per_node_gb": 512,
    "image": "ghcr.io/deepfinery/trainer:latest",
    "checkpoint_base_uri": "s3://deepfinery-training/runs",
    "dataset_uri": "s3://deepfinery-datasets/fraud/aml_ruleset.jsonl",
    "resume_from_checkpoint": True,
    "extra_args": {"max_steps": 50000, "lr": 3e-5, "dataset_text_field": "$(HOME) $$ $X"},
    "env": {"AWS_SECRET_ACCESS_KEY": "s3$(cr)et", "HF_HOME": ""},
    "labels": {"team": "fraud", "kueue.x-k8s.io/queue-name": "gpus"},
    "annotations": {"example.org/ticket": "F-1"},
}


def manifest(options: KubeflowOptions | None = None, **changes: Any) -> dict[str, Any]:
    request = TrainingRequest.model_validate({**PAYLOAD, **changes})
    plan = plan_run(request, attempt_id="a1", salt="s", namespace="default")
    return pytorch_job(plan, "team-a", options or KubeflowOptions())


def container(job: dict[str, Any], kind: str = "Master") -> dict[str, Any]:
    (one,) = job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"]["containers"]
    return dict(one)


def expanded(text: str, variables: dict[str, str]) -> str:
    """Expand a text as the kubelet does: ``$(NAME)`` is a variable's value, ``$$`` a dollar."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else variables.get(found[2], found[0]), text
    )


def test_the_pods_are_those_that_the_payload_asks_for() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == ("train-aml-ruleset-v4-" + _digits(job), "team-a")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {"Master": 1, "Worker": 2}
    assert container(job, "Master") == container(job, "Worker")
    limits = {"cpu": "48", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert container(job)["resources"] == {"requests": limits, "limits": limits}
    assert container(job)["image"] == PAYLOAD["image"]
    assert list(manifest(num_nodes=1)["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def _digits(job: dict[str, Any]) -> str:
    return str(job["metadata"]["name"])[-6:]


def test_labels_and_annotations_are_copied_and_what_is_too_long_for_a_label_is_an_annotation() -> None:
    job = manifest(run_id=f"{'x' * 80}-")
    metadata = job["metadata"]
    assert metadata["labels"].items() >= {"team": "fraud", "unified/kind": "training"}.items()
    assert metadata["annotations"]["example.org/ticket"] == "F-1"
    assert metadata["annotations"]["unified/run-id"] == f"{'x' * 80}-"
    assert metadata["labels"]["unified/run-id"] == label_value(f"{'x' * 80}-")
    assert "unified/run-id" not in manifest()["metadata"]["annotations"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]
    assert template["labels"] == metadata["labels"]
    assert "unified/request" not in template["annotations"]


def test_the_command_line_is_one_that_torchrun_and_the_program_take() -> None:
    """The real parsers read it, after an expansion like the kubelet's with what the operator gives a pod."""
    job = manifest()
    variables = {each["name"]: expanded(each.get("value", ""), {}) for each in container(job)["env"]}
    assert variables["AWS_SECRET_ACCESS_KEY"] == "s3$(cr)et"
    pod = {**variables, "POD_IP": "10.0.0.7", "MASTER_ADDR": "x-master-0", "MASTER_PORT": "23456"}
    assert container(job)["command"] == ["torchrun"]
    parsed = get_args_parser().parse_args([expanded(each, pod) for each in container(job)["args"]])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.max_restarts) == ("3", "8", 3)
    assert (parsed.rdzv_backend, parsed.rdzv_endpoint, parsed.local_addr) == ("c10d", "x-master-0:23456", "10.0.0.7")
    assert (parsed.module, parsed.training_script) == (True, "unified.training")
    options = TrainingOptions.parse(parsed.training_script_args, variables)
    assert (options.framework, options.run_id, options.resume) == ("hf", "aml_ruleset_v4", True)
    assert options.arguments.dataset_text_field == "$(HOME) $$ $X"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_no_value_is_expanded(text: str) -> None:
    job = manifest(env={"VALUE": text})
    raw = next(each["value"] for each in container(job)["env"] if each["name"] == "VALUE")
    assert expanded(raw, {"VALUE": "no", "": "no"}) == text
    assert environment_of(job)["VALUE"] == text


def test_a_manifest_can_be_shown_without_its_secrets() -> None:
    job = manifest(KubeflowOptions(secret="store"))
    text = str(shown(job, frozenset({"AWS_SECRET_ACCESS_KEY"})))
    assert "cr)et" in str(job)
    assert "cr)et" not in text
    assert NOT_SHOWN in text
    assert "aml_ruleset_v4" in text


def test_options_of_the_cluster_come_from_the_environment() -> None:
    options = KubeflowOptions.read(
        {
            "TRAINER_API_KUBEFLOW_IMAGE": "registry/trainer:1",
            "TRAINER_API_KUBEFLOW_SERVICE_ACCOUNT": "trainer",
            "TRAINER_API_KUBEFLOW_SECRET": "store",
            "TRAINER_API_KUBEFLOW_GPU_RESOURCE": "",
            "TRAINER_API_KUBEFLOW_RESTART_POLICY": "ExitCode",
            "TRAINER_API_TOKEN": "x",
        }
    )
    job = manifest(options, image=None)
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert spec["serviceAccountName"] == "trainer"
    assert container(job)["image"] == "registry/trainer:1"
    assert container(job)["envFrom"] == [{"secretRef": {"name": "store"}}]
    assert container(job)["resources"]["limits"].keys() == {"cpu", "memory"}
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert KubeflowOptions.read({}) == KubeflowOptions()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("IMGAE", "x", "IMAGE"),
        ("RESTART_POLICY", "Sometimes", "none of Never, OnFailure, ExitCode"),
        ("SECRET", "Not A Name", "no name that Kubernetes takes"),
        ("GPU_RESOURCE", "gpu", "no name that Kubernetes takes"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KubeflowOptions.read({f"TRAINER_API_KUBEFLOW_{name}": value})


def test_a_run_without_an_image_is_refused() -> None:
    with pytest.raises(UsageError, match="TRAINER_API_KUBEFLOW_IMAGE"):
        manifest(image=None)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=120))
def test_a_label_has_a_value_that_kubernetes_takes(text: str) -> None:
    value = label_value(text)
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value)
    assert label_value(value) == value
