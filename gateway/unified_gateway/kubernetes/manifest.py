"""Manifest of a run: the `PyTorchJob` of the Kubeflow Training Operator (``kubeflow.org/v1``). Pure.

The operator makes a pod for each node, the first of type Master, the others of type Worker, and gives each of them
MASTER_ADDR and MASTER_PORT. torchrun does the rest: ranks, and restarts of processes that fail. Its rendezvous is
`c10d`: with the static one, the other nodes would not restart together with a node whose processes failed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from unified.errors import UsageError
from unified_gateway.backend import KIND, KIND_LABEL, RunPlan

GROUP, VERSION, PLURAL, KIND_NAME = "kubeflow.org", "v1", "pytorchjobs", "PyTorchJob"
CONTAINER = "pytorch"
"""Name by which the operator knows the container."""
MAX_RESTARTS = 3
"""Most times that torchrun restarts the ranks of a node."""
STOP_GRACE_S = 90
"""Seconds between SIGTERM and SIGKILL of a pod. torchrun gives its ranks 30 of them."""
NOT_SHOWN = "(not shown)"
KIND_SELECTOR = f"{KIND_LABEL}={KIND}"
PREFIX = "TRAINER_API_KUBEFLOW_"
RestartPolicy = Literal["Never", "OnFailure", "ExitCode"]
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_RESOURCE = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9._-]+")
_DIGEST_DIGITS = 8


@dataclass(frozen=True, kw_only=True)
class KubeflowOptions:
    """Options of the Kubernetes cluster, the same for all runs."""

    image: str = ""
    """Container image of runs that name none."""
    service_account: str = ""
    """ServiceAccount of the training pods, such as one that is bound to a role of the object store."""
    secret: str = ""
    """Secret in the run's namespace whose keys are variables of the training pods, such as AWS_ACCESS_KEY_ID."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource of which a pod asks for `gpus_per_node`; empty for a cluster without GPUs."""
    restart_policy: RestartPolicy = "Never"
    """Policy for pods that end. ``Never``: the run fails, its pods stay, and their logs and the reason can be read; a
    resume goes on from the last checkpoint. ``ExitCode``: killed pods (exit codes from 128) are created again,
    without limit. ``OnFailure``: containers are started again; it is the operator's own default."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> KubeflowOptions:
        """Return the options in ``TRAINER_API_KUBEFLOW_IMAGE``, ``TRAINER_API_KUBEFLOW_SECRET`` and so on.

        Raises:
            UsageError: an unknown variable, or a value that Kubernetes would not take; the message names it.
        """
        given = {
            name.removeprefix(PREFIX).lower(): value.strip()
            for name, value in environment.items()
            if name.startswith(PREFIX)
        }
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            known = ", ".join(PREFIX + name.upper() for name in cls.__dataclass_fields__)
            raise UsageError(f"{PREFIX}{min(unknown).upper()} is no variable of the gateway; it has {known}.")
        for name in ("service_account", "secret"):
            _check(name, given.get(name) or "x", _NAME)
        _check("gpu_resource", given.get("gpu_resource") or "x/x", _RESOURCE)
        policy = given.pop("restart_policy", "") or "Never"
        if policy not in get_args(RestartPolicy):
            raise UsageError(f"{PREFIX}RESTART_POLICY={policy!r} is none of {', '.join(get_args(RestartPolicy))}.")
        return cls(restart_policy=policy, **given)  # type: ignore[arg-type]


def pytorch_job(plan: RunPlan, namespace: str, options: KubeflowOptions) -> dict[str, Any]:
    """Return the object to create.

    Raises:
        UsageError: neither the run nor the gateway names an image.
    """
    request = plan.request
    labels = {name: label_value(value) for name, value in plan.labels.items()}
    replica = {"restartPolicy": options.restart_policy, "template": _template(plan, labels, options)}
    replicas = {"Master": {"replicas": 1, **replica}}
    if request.num_nodes > 1:
        replicas["Worker"] = {"replicas": request.num_nodes - 1, **replica}
    whole = {name: value for name, value in plan.labels.items() if labels[name] != value}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND_NAME,
        "metadata": {
            "name": plan.name,
            "namespace": namespace,
            "labels": labels,
            "annotations": {**plan.annotations, **whole},
        },
        "spec": {
            "nprocPerNode": str(request.gpus_per_node),
            # Ended pods stay, so that their logs can be read; running pods of a failed run are removed.
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def shown(manifest: Mapping[str, Any], secret_names: frozenset[str]) -> dict[str, Any]:
    """Return a manifest without the values of these variables."""

    def hide(value: Any) -> Any:
        if isinstance(value, dict):
            if value.get("name") in secret_names and "value" in value:
                return {**value, "value": NOT_SHOWN}
            return {name: hide(each) for name, each in value.items()}
        return [hide(each) for each in value] if isinstance(value, list) else value

    return {name: hide(value) for name, value in manifest.items()}


def environment_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables, with values, that a gateway's `PyTorchJob` sets for its training program."""
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    container = next(each for each in template["spec"]["containers"] if each["name"] == CONTAINER)
    # The API server leaves out empty values.
    return {each["name"]: _unescaped(each.get("value", "")) for each in container["env"] if "valueFrom" not in each}


def label_value(text: str) -> str:
    """Return a text as a label's value: unchanged if Kubernetes allows it, else adapted, with a digest of the text."""
    if _LABEL.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"x{re.sub(r'[^A-Za-z0-9._-]', '-', text)[: 61 - _DIGEST_DIGITS]}-{digest}"


def _template(plan: RunPlan, labels: Mapping[str, str], options: KubeflowOptions) -> dict[str, Any]:
    request, variables = plan.request, {**plan.environment, **plan.options.as_environment()}
    image = request.image or options.image
    if not image:
        raise UsageError(
            "image: name the container of the run, which has unified-runtime and torchrun; the gateway has none of its "
            f"own ({PREFIX}IMAGE)."
        )
    resources = {"cpu": str(request.cpus_per_node), "memory": f"{request.memory_per_node_gb}Gi"}
    if options.gpu_resource:
        resources[options.gpu_resource] = str(request.gpus_per_node)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": image,
        "command": ["torchrun"],
        "args": _arguments(plan),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            # Ranks after a restart must not meet in the store of the ranks before.
            {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"},
            *({"name": name, "value": _escaped(value)} for name, value in variables.items()),
        ],
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {"allowPrivilegeEscalation": False},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    spec: dict[str, Any] = {
        "containers": [container],
        "automountServiceAccountToken": False,  # a training program sends no requests to Kubernetes
        "terminationGracePeriodSeconds": STOP_GRACE_S,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],  # the default of 64 MiB is too small for NCCL
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    # Kubeflow's namespaces add an Istio sidecar by default, and a pod with a sidecar would never end.
    return {"metadata": {"labels": dict(labels), "annotations": {"sidecar.istio.io/inject": "false"}}, "spec": spec}


def _arguments(plan: RunPlan) -> list[str]:
    return [
        f"--nnodes={plan.request.num_nodes}",
        f"--nproc_per_node={plan.request.gpus_per_node}",
        f"--max_restarts={MAX_RESTARTS}",
        "--rdzv_backend=c10d",
        f"--rdzv_id={_escaped(plan.options.attempt_id)}",
        "--rdzv_endpoint=$(MASTER_ADDR):$(MASTER_PORT)",  # Kubernetes expands both
        "--local_addr=$(POD_IP)",
        "-m",
        "unified.training",
        *("--framework", plan.options.framework, "--run-id", _escaped(plan.options.run_id)),
    ]


def _escaped(text: str) -> str:
    """Return a text in which Kubernetes expands no ``$(VARIABLE)``."""
    return text.replace("$", "$$")


def _unescaped(text: str) -> str:
    return text.replace("$$", "$")


def _check(name: str, value: str, pattern: re.Pattern[str]) -> None:
    if not pattern.fullmatch(value):
        raise UsageError(f"{PREFIX}{name.upper()}: {value!r} is no name that Kubernetes takes.")
