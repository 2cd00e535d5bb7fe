"""Manifests of every shape: the schemas of Kubernetes take them, their parts fit together, and a typo is found.

No API server runs here: admission, defaults and the controllers are not tried.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import container_of, cross_faults, read, schema_faults
from unified.cli.main import main
from unified.kubernetes import render
from unified.kubernetes.options import ClusterOptions, RunOptions

DEPLOY = Path(__file__).parents[3] / "deploy/kubernetes"
GPUS: dict[str, Any] = {"gpus": 8, "cpus": "96", "memory": "1Ti", "agents": 8}
MORE: dict[str, Any] = {
    "name": "llm",
    "namespace": "training",
    "image": "registry.example/llm:1@sha256:0a",
    "host_network": True,
    "resource": {"rdma/hca": 1},
    "claim": {"checkpoints": "/checkpoints", "data": "/data"},
    "env": {"NCCL_DEBUG": "INFO"},
    "node_selector": {"pool": "a"},
    "service_account": "trainer",
    "scheduler": "volcano",
    "uid": 2000,
    "key_secret": "llm-key",
    "shm": "100Gi",
}


def cluster(**options: Any) -> str:
    made = ClusterOptions(**options)
    return render.to_yaml(render.cluster(made), made)


def run(**options: Any) -> str:
    made = RunOptions(**options)
    return render.to_yaml(render.run(made), made)


SHAPES = {
    "cluster": cluster(),
    "cluster with GPUs": cluster(**GPUS, gateway=True, storage_class="fast"),
    "cluster of everything": cluster(**GPUS, **MORE, gateway=True),
    "a master alone": cluster(agents=0),
    "daemonset": cluster(agents_as="daemonset", gpus=4),
    "daemonset of everything": cluster(agents_as="daemonset", **{**GPUS, "agents": None}, **MORE),
    "run": run(),
    "run with GPUs": run(**GPUS, queue="team-a"),
    "jobset": run(jobset=True, agents=3),
    "jobset with GPUs": run(**GPUS, queue="team-a", jobset=True),
    "jobset of one pod": run(agents=1, jobset=True),
    "jobset of everything": run(**GPUS, **{**MORE, "name": "x" * 40}, jobset=True),
    "run of everything": run(**GPUS, **MORE, command=("python", "-m", "train", "--lr", "3")),
}


def one(text: str, kind: str, name: str) -> Any:
    (found,) = (each for each in read(text) if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_the_schemas_take_it_and_its_parts_fit_together(text: str) -> None:
    assert list(schema_faults(read(text))) == []
    assert list(cross_faults(text)) == []
    assert "&" not in text, "no anchors: people edit it"


@pytest.mark.parametrize(("shape", "file"), [("cluster", "cluster"), ("run", "run"), ("run --jobset", "run-jobset")])
def test_the_files_are_what_the_command_prints(shape: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kubernetes", "render", *shape.split()]) == 0
    made = f"`unified kubernetes render {shape} > deploy/kubernetes/{file}.yaml` makes it"
    assert (DEPLOY / f"{file}.yaml").read_text() == capsys.readouterr().out, made


def by_schema(text: str) -> list[str]:
    return [*schema_faults(read(text))]


def by_cross_check(text: str) -> list[str]:
    return [*cross_faults(text)]


INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
TYPOS = [
    ("cluster", "readinessProbe:", "redinessProbe:", by_schema),
    ("cluster", "apiVersion: apps/v1", "apiVersion: app/v1", by_schema),
    ("cluster", "terminationGracePeriodSeconds: 90", "terminationGracePeriodSeconds: 90s", by_schema),
    ("run", "backoffLimitPerIndex:", "backoffLimitPerIndexes:", by_schema),
    ("cluster", "app.kubernetes.io/component: master", "app.kubernetes.io/component: mister", by_cross_check),
    ("cluster", "targetPort: relay", "targetPort: rely", by_cross_check),
    ("cluster", "- name: shm\n          mountPath", "- name: shn\n          mountPath", by_cross_check),
    ("cluster", "key: cluster.key", "key: cluster.kay", by_cross_check),
    ("cluster", "port: health", "port: heath", by_cross_check),
    ("cluster with GPUs", "nvidia.com/gpu: '8'", "nvidia.com/gpu: '4'", by_cross_check),
    ("cluster", "--health-bind=", "--helth-bind=", by_cross_check),
    ("cluster", "- unified-agent", "- unified-agnet", by_cross_check),
    ("cluster", "--master=tcp://unified-master:7077", "--master=tcp://unified-master:7777", by_cross_check),
    ("cluster", "--address=$(POD_IP)", "--address=$(POT_IP)", by_cross_check),
    ("cluster", "serviceName: unified-agent", "serviceName: unified-agents", by_cross_check),
    ("cluster", "/etc/unified/cluster.key", "/etc/unified/custer.key", by_cross_check),
    ("cluster with GPUs", "key: token", "key: tokens", by_cross_check),
    ("run", "type: DisruptionTarget", "type: DisruptonTarget", by_cross_check),
    ("run", "subdomain: unified", "subdomain: unifed", by_cross_check),
    ("run", "containerName: run", "containerName: rum", by_cross_check),
    ("run", "- kubernetes\n", "- kubernets\n", by_cross_check),
    ("run", INDEX, "metadata.annotations['job-index']", by_cross_check),
    ("jobset", "v1alpha2", "v1alpha1", by_schema),
    ("jobset", "kind: JobSet", "kind: Jobset", by_schema),
    ("jobset", "replicatedJobs:", "replicatedjobs:", by_schema),
    ("jobset", "enableDNSHostnames:", "enableDnsHostnames:", by_schema),
    ("jobset", "targetReplicatedJobs:", "targetReplicatedJob:", by_schema),
    ("jobset", "maxRestarts: 3", "maxRestarts: '3'", by_schema),
    ("jobset", "operator: All", "operators: All", by_schema),
    ("jobset", "backoffLimitPerIndex:", "backoffLimitPerIndices:", by_schema),
    ("jobset", "completionMode: Indexed", "completionMode: Index", by_schema),
    ("jobset", "readOnlyRootFilesystem:", "readOnlyRootFileSystem:", by_schema),
    ("jobset", "enableDNSHostnames: true", "enableDNSHostnames: false", by_cross_check),
    ("jobset", "operator: All", "operator: Every", by_cross_check),
    ("jobset", "restartStrategy: Blocking", "restartStrategy: Block", by_cross_check),
    ("jobset", "action: FailJobSet", "action: FailJobset", by_cross_check),
    ("jobset", "- PodFailurePolicy", "- PodFailure", by_cross_check),
    ("jobset", "- first\n", "- frist\n", by_cross_check),
    ("jobset", "name: first", "name: leader", by_cross_check),
    ("jobset", "- others\n", "- other\n", by_cross_check),
    ("jobset", "replicas: 1", "replicas: 2", by_cross_check),
    ("jobset", "subdomain: unified", "subdomain: unifed", by_cross_check),
    ("jobset", "=unified-first-0-0.unified", "=unified-first-0.unified", by_cross_check),
    ("jobset", "--node-id=unified-others-0", "--node-id=unified-others", by_cross_check),
    ("jobset", "component: run", "component: runs", by_cross_check),
    ("jobset", "action: Ignore", "action: Count", by_cross_check),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "right", "wrong", "faults"), TYPOS, ids=[typo[2].strip() for typo in TYPOS])
def test_a_typo_is_found(shape: str, right: str, wrong: str, faults: Callable[[str], list[str]]) -> None:
    text = SHAPES[shape]
    assert right in text
    for number in range(text.count(right)):  # in each place by itself
        parts = text.split(right)
        planted = right.join(parts[: number + 1]) + wrong + right.join(parts[number + 1 :])
        assert faults(planted), f"place {number} of {text.count(right)}"


def test_agents_have_requests_as_limits_and_half_of_their_memory_as_shm() -> None:
    agent = one(cluster(**GPUS), "StatefulSet", "unified-agent")
    amounts = container_of(agent)["resources"]
    assert amounts["requests"] == amounts["limits"] == {"cpu": "96", "memory": "1Ti", "nvidia.com/gpu": "8"}
    volumes = {each["name"]: each for each in agent["spec"]["template"]["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{512 * 1024}Mi"}
    assert agent["spec"]["podManagementPolicy"] == "Parallel"


def test_a_daemonset_is_on_gpu_nodes_names_nodes_and_has_no_budget() -> None:
    text = cluster(agents_as="daemonset", gpus=4)
    pod = one(text, "DaemonSet", "unified-agent")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert "fieldPath: spec.nodeName" in text
    assert "PodDisruptionBudget" not in text
    assert "nodeSelector" not in cluster(agents_as="daemonset")


def test_the_pods_of_agents_alone_are_on_hosts_networks_and_have_devices() -> None:
    text = cluster(**GPUS, **MORE, gateway=True)
    master = one(text, "StatefulSet", "llm-master")["spec"]["template"]["spec"]
    agent = one(text, "StatefulSet", "llm-agent")["spec"]["template"]["spec"]
    assert agent["hostNetwork"] is True
    assert agent["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert agent["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert agent["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert (agent["nodeSelector"], agent["schedulerName"]) == ({"pool": "a"}, "volcano")
    assert not master.keys() & {"hostNetwork", "nodeSelector", "tolerations"}
    assert master["securityContext"]["fsGroup"] == 2000
    assert master["serviceAccountName"] == "trainer"


def test_a_run_in_a_queue_waits_until_kueue_has_room_for_all_of_it() -> None:
    job = one(run(**GPUS, queue="team-a"), "Job", "unified")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert (job["spec"]["suspend"], job["spec"]["completions"]) == (True, 8)
    assert "suspend" not in one(run(), "Job", "unified")["spec"]


def test_a_jobset_has_the_pods_of_a_job_and_waits_for_kueue_as_one() -> None:
    jobset = one(run(**GPUS, queue="team-a", jobset=True), "JobSet", "unified")
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert jobset["spec"]["suspend"] is True
    first, others = (each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"])
    assert (first["completions"], others["completions"]) == (1, 7)
    pods = [one(run(**GPUS), "Job", "unified")["spec"]["template"], first["template"], others["template"]]
    for pod in pods:
        container = pod["spec"]["containers"][0]
        container["args"] = [word for word in container["args"] if not word.startswith(("--node-id", "--master-host"))]
    assert pods[0] == pods[1] == pods[2]


def test_no_kind_is_there_that_the_schemas_do_not_know() -> None:
    kinds = {each["kind"] for text in SHAPES.values() for each in read(text)} - {"JobSet"}  # which models know
    known = {"StatefulSet", "DaemonSet", "Deployment", "Job", "Service", "NetworkPolicy", "PodDisruptionBudget"}
    assert kinds == known
