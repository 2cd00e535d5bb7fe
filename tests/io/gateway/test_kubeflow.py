"""The Kubeflow backend over HTTP.

No API server can run here: a small HTTP server stands in for it (`tests.support.kubernetes_server`), which checks every
manifest against the models of the Kubernetes and Kubeflow SDKs, and plays the operator's conditions and its pods back.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deadlines import met
from tests.support.gateway_process import PAYLOAD, StartGateway
from tests.support.kubernetes_models import faults_of
from tests.support.kubernetes_server import TOKEN as TOKEN_OF_ACCOUNT
from tests.support.kubernetes_server import ApiServer, api_of, kubernetes_server  # noqa: F401 - a fixture
from unified.errors import MasterUnreachableError, RefusedError, UsageError
from unified.testing import eventually
from unified_gateway.backend import NameTakenError, RunPlan, RunRecord, TrainingBackend
from unified_gateway.kubeflow import KubeflowBackend
from unified_gateway.kubernetes import api_server, pod_logs
from unified_gateway.kubernetes.api_server import configured
from unified_gateway.kubernetes.manifest import KubeflowOptions, environment_of
from unified_gateway.plan import plan_run
from unified_gateway.schemas import TrainingRequest

pytestmark = pytest.mark.processes

DEADLINE_S = met(100.0)
OPTIONS = KubeflowOptions(image="registry/trainer:1", service_account="trainer", secret="store")


def plan(run_id: str = "r1", attempt: str = "a1", kept: dict[str, str] | None = None, **changes: Any) -> RunPlan:
    payload = {
        "framework": "meta",
        "model_id": "config:{}",
        "run_id": run_id,
        "num_nodes": 2,
        "gpus_per_node": 4,
        "checkpoint_base_uri": "s3://bucket/runs",
        "dataset_uri": "s3://bucket/data.jsonl",
        "env": {"SECRET": "pa$$word$(X)"},
        **changes,
    }
    request = TrainingRequest.model_validate(payload)
    return plan_run(request, attempt_id=attempt, salt="s", namespace="default", kept=kept)


class Cluster:
    """A backend in an event loop of its own, and the server that it talks to."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server

    def run(self, test: Callable[[Any], Awaitable[None]], url: str = "") -> None:
        async def main() -> None:
            namespaces = ("default", "team-a")
            api = api_of(url or self.server.url)
            backend: TrainingBackend = KubeflowBackend(namespaces=namespaces, options=OPTIONS, api=api)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await test(backend)
            finally:
                await backend.close()

        asyncio.run(main())


@pytest.fixture
def cluster(kubernetes_server: ApiServer) -> Cluster:  # noqa: F811
    return Cluster(kubernetes_server)


async def known(backend: KubeflowBackend, name: str = "train-r1") -> RunRecord:
    found = await backend.get(name)
    assert found is not None
    return found


def test_a_run_from_its_creation_to_its_end(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        server = cluster.server
        submitted = await backend.submit(plan(), follows="")
        job = server.jobs["default", "train-r1"]
        assert job["metadata"]["uid"] == submitted
        assert environment_of(job).items() >= {**plan().environment, **plan().options.as_environment()}.items()
        run = await known(backend)
        assert (run.status, run.run_id, run.framework, run.namespace) == ("submitted", "r1", "meta", "default")
        assert run.annotations == plan().annotations
        assert await backend.find_run("r1") == run
        server.play("train-r1", "Created")
        master, worker = server.add_pods("train-r1", phase="Pending")
        server.container(worker, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
        assert (await backend.runs())[0].detail == "worker-0: ImagePullBackOff: no such image"
        server.play("train-r1", "Running")
        server.container(master, {"running": {}}, phase="Running")
        server.container(worker, {"running": {}}, restarts=2, phase="Running")
        run = await known(backend)
        assert (run.status, run.detail, run.num_restarts) == ("running", "", 2)
        server.play("train-r1", "Restarting", "PyTorchJob train-r1 is restarting because 1 Worker replica(s) failed.")
        assert "1 Worker replica(s) failed" in (await known(backend)).detail
        server.play("train-r1", "Running")
        server.play("train-r1", "Succeeded")
        (run,) = await backend.runs()
        assert (run.status, run.exit_code, run.annotations) == ("succeeded", 0, {})
        assert run.started_at is not None
        assert run.ended_at is not None
        await backend.stop("train-r1", force=False)
        assert (await known(backend)).status == "succeeded"

    cluster.run(test)


def test_a_failure_has_the_reason_of_its_first_pod_also_in_lists_which_ask_for_it_once(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        server = cluster.server
        await backend.submit(plan(), follows="")
        master, worker = server.add_pods("train-r1")
        server.play("train-r1", "Running")
        server.fail(master, "[rank0]: DistBackendError: peer is gone", at=9)
        server.fail(worker, "what Kubernetes keeps is too short\n", at=8)
        server.print(worker, "unified-train: train.jsonl:17 has no field 'text'", *["=" * 80] * 99, end=True)
        server.play("train-r1", "Failed", "PyTorchJob train-r1 is failed because 2 replica(s) failed.")
        run = await known(backend)
        assert (run.status, run.exit_code) == ("failed", 1)
        assert run.detail == "worker-0: unified-train: train.jsonl:17 has no field 'text'"
        assert [each.detail for each in await backend.runs()] == [run.detail]
        server.requests.clear()
        await backend.runs()
        assert [path.partition("?")[0].rpartition("/")[2] for _, path in server.requests] == ["pytorchjobs"] * 2

    cluster.run(test)


def test_lists_come_in_pages_from_all_namespaces_and_leave_others_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "_PAGE", 3)

    async def test(backend: KubeflowBackend) -> None:
        for number in range(8):
            where = "team-a" if number % 4 == 0 else None
            await backend.submit(plan(f"r{number}", namespace=where), follows="")
        foreign = cluster.server.jobs["default", "train-r1"]
        cluster.server.jobs["default", "other"] = {**foreign, "metadata": {**foreign["metadata"], "labels": {}}}
        runs = await backend.runs()
        assert {run.run_id for run in runs} == {f"r{number}" for number in range(8)}
        assert {run.namespace for run in runs if run.run_id in ("r0", "r4")} == {"team-a"}
        assert (await known(backend, "train-r4")).namespace == "team-a"
        assert await backend.get("train-r9") is None
        assert await backend.find_run("r9") is None
        with pytest.raises(UsageError, match=r"does not use 'prod'; it uses .*default, team-a"):
            await backend.submit(plan(namespace="prod"), follows="")

    cluster.run(test)


def test_of_many_submissions_of_a_name_one_wins(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        tries = [backend.submit(plan(attempt=f"a{number}"), follows="") for number in range(20)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(result, NameTakenError) for result in results) == 19
        assert len(cluster.server.jobs) == 1

    cluster.run(test)


def test_of_two_names_with_one_run_id_that_come_together_one_stays(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        cluster.server.before_create = threading.Barrier(2)
        tries = [backend.submit(plan(job_name=name), follows="") for name in ("one", "two")]
        results = await asyncio.gather(*tries, return_exceptions=True)
        cluster.server.before_create = None
        assert sum(isinstance(result, NameTakenError) for result in results) == 1
        assert len(cluster.server.jobs) == 1
        with pytest.raises(NameTakenError, match="run r1 goes on as"):
            await backend.submit(plan(job_name="three"), follows="")

    cluster.run(test)


def test_a_resume_takes_the_place_of_the_object_and_keeps_variables_that_were_not_given_again(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        server = cluster.server
        first = await backend.submit(plan(), follows="")
        again = plan(attempt="a2", kept={"SECRET": "digest"}, env={"OTHER": "x"})
        with pytest.raises(NameTakenError):
            await backend.submit(again, follows=first)  # it lives
        server.add_pods("train-r1")
        server.play("train-r1", "Failed")
        with pytest.raises(NameTakenError):
            await backend.submit(again, follows="another")
        server.keeps_deleted = True
        submitting = asyncio.create_task(backend.submit(again, follows=first))
        await asyncio.sleep(0.5)
        assert not submitting.done()
        assert server.jobs["default", "train-r1"]["metadata"]["uid"] == first
        server.sweep()
        second = await submitting
        assert second != first
        variables = environment_of(server.jobs["default", "train-r1"])
        assert (variables["SECRET"], variables["OTHER"], variables["ATTEMPT_ID"]) == ("pa$$word$(X)", "x", "a2")
        server.play("train-r1", "Failed")
        with pytest.raises(UsageError, match="values of GONE are not known"):
            await backend.submit(plan(kept={"GONE": "digest"}), follows=second)
        assert ("default", "train-r1") in server.jobs

    cluster.run(test)


def test_a_stop_removes_the_object_once_its_pods_are_gone(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        await backend.submit(plan(), follows="")
        cluster.server.keeps_deleted = True
        with pytest.raises(UsageError, match="kubectl delete pod"):
            await backend.stop("train-r1", force=True)
        await backend.stop("train-r1", force=False)
        assert (await known(backend)).detail == "it is being stopped"
        cluster.server.sweep()
        assert await backend.get("train-r1") is None
        await backend.stop("train-r1", force=False)

    cluster.run(test)


async def collected(lines: AsyncIterator[str]) -> list[str]:
    return [line async for line in lines]


def test_logs_are_followed_over_restarts_of_containers_to_the_end_of_the_run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "LOOK_S", 0.1)

    async def test(backend: KubeflowBackend) -> None:
        server = cluster.server
        await backend.submit(plan(), follows="")
        lines = backend.logs("train-r1", rank=None, follow=True, tail_bytes=None)
        first = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0.3)
        master, worker = server.add_pods("train-r1")
        server.print(master, "one")
        assert await first == "[master-0] one"
        server.print(worker, "ünï\r", end=True)
        assert await anext(lines) == "[worker-0] ünï"
        server.container(worker, {"running": {}}, restarts=1)
        server.print(worker, "again", "x" * 40_000)
        assert await anext(lines) == "[worker-0] again"
        server.play("train-r1", "Succeeded")
        for pod in (master, worker):
            server.print(pod, "last", end=True)
        rest = await collected(lines)
        assert "[master-0] last" in rest
        assert "".join(line.removeprefix("[worker-0] ") for line in rest if "x" in line) == "x" * 40_000

    cluster.run(test)


def test_one_rank_has_the_pod_of_its_node(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        await backend.submit(plan(), follows="")
        master, worker = cluster.server.add_pods("train-r1")
        cluster.server.print(master, "of ranks 0 to 3")
        cluster.server.print(worker, "of ranks 4 to 7")
        assert await collected(backend.logs("train-r1", rank=5, follow=False, tail_bytes=500)) == ["of ranks 4 to 7"]
        assert any("tailLines=5&" in f"{path}&" for _, path in cluster.server.requests)

    cluster.run(test)


def test_logs_of_pods_that_are_gone_say_where_they_are(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        await backend.submit(plan(), follows="")
        cluster.server.play("train-r1", "Failed")
        with pytest.raises(RefusedError, match="s3://bucket/runs/r1/framework=meta/logs") as gone:
            await collected(backend.logs("train-r1", rank=None, follow=False, tail_bytes=None))
        assert gone.value.code == "not-found"
        with pytest.raises(UsageError, match=r"keeps no metrics.*s3://bucket/runs/r1/framework=meta/logs"):
            await backend.metrics("train-r1", since=0, limit=10)
        with pytest.raises(RefusedError, match="there is no run 'nobody'"):
            await backend.events("nobody", limit=10)

    cluster.run(test)


def test_a_reader_that_goes_away_leaves_no_stream_and_no_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_logs, "MAX_STREAMS", 3)

    async def test(backend: KubeflowBackend) -> None:
        await backend.submit(plan(), follows="")
        master, _ = cluster.server.add_pods("train-r1")
        cluster.server.print(master, "one")
        lines = backend.logs("train-r1", rank=None, follow=True, tail_bytes=None)
        await anext(lines)
        with pytest.raises(RefusedError, match="3 logs are being read"):
            await collected(backend.logs("train-r1", rank=None, follow=True, tail_bytes=None))
        await lines.aclose()  # type: ignore[attr-defined]
        while threads := [each for each in threading.enumerate() if each.name == "pod-log"]:
            await asyncio.to_thread(threads[0].join, 5)
        assert not backend._logs._open

    cluster.run(test)


def test_events_are_those_of_the_job_and_its_pods_in_order(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        await backend.submit(plan(), follows="")
        cluster.server.add_pods("train-r1")
        for second, name in enumerate(["train-r1-worker-0", "train-r1", "train-r2", "train-r1-master-0"]):
            event = {
                "metadata": {"namespace": "default", "name": f"e{second}"},
                "involvedObject": {"name": name},
                "reason": f"Reason{second}",
                "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
            }
            cluster.server.events.insert(0, event)
        found = await backend.events("train-r1", limit=10)
        assert [(each.event, each.worker) for each in found] == [
            ("Reason0", "worker-0"),
            ("Reason1", ""),
            ("Reason3", "master-0"),
        ]
        assert [each.event for each in await backend.events("train-r1", limit=1)] == ["Reason3"]

    cluster.run(test)


def test_a_dry_run_shows_a_manifest_without_values_of_env(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        manifest = backend.describe(plan())
        assert not list(faults_of(manifest, "KubeflowOrgV1PyTorchJob"))
        assert "pa$" not in str(manifest)
        assert cluster.server.requests == []

    cluster.run(test)


def test_what_the_api_server_refuses_is_said(cluster: Cluster) -> None:
    async def test(backend: KubeflowBackend) -> None:
        server = cluster.server
        server.forbidden = {"POST"}
        with pytest.raises(
            RefusedError, match=r"may not create pytorchjobs in default.*deploy/kubernetes/kubeflow/"
        ) as refused:
            await backend.submit(plan(), follows="")
        assert refused.value.code == "forbidden"
        server.forbidden = set()
        server.namespaces.remove("team-a")
        with pytest.raises(RefusedError, match='namespaces "team-a" not found'):
            await backend.runs()
        server.namespaces.append("team-a")
        server.has_operator = False
        with pytest.raises(RefusedError, match="install the Kubeflow Training Operator"):
            await backend.submit(plan(), follows="")
        server.has_operator = True
        wrong = replace(plan(), request=plan().request.model_copy(update={"cpus_per_node": "-"}))
        with pytest.raises(UsageError, match=r"Kubernetes refuses to create .* resources: -"):
            await backend.submit(wrong, follows="")
        server.crashed = "etcdserver: request timed out\n"
        with pytest.raises(RefusedError, match=r"failed to get pytorchjobs.*\(500\): etcdserver") as failed:
            await backend.get("train-r1")
        assert failed.value.code == "unavailable"

    cluster.run(test)


def test_an_api_server_that_is_away_silent_or_something_else_is_told_apart(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_server, "READ_S", 0.5)

    async def away(backend: KubeflowBackend) -> None:
        with pytest.raises(MasterUnreachableError, match=r"Kubernetes API at http://127\.0\.0\.1.* cannot be reached"):
            await backend.get("train-r1")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cluster.run(away, url)
    cluster.run(away, url)

    async def unknown(backend: KubeflowBackend) -> None:
        backend._api._client.configuration.api_key = {"authorization": "Bearer wrong"}
        with pytest.raises(RefusedError, match="does not know the gateway's account: Unauthorized"):
            await backend.get("train-r1")

    cluster.run(unknown)


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "%s"}}]
users: [{name: u, user: {token: "%s"}}]
contexts: [{name: here, context: {cluster: c, user: u}}]
"""


def test_the_cluster_is_that_of_the_kubeconfig_or_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config"
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(UsageError, match="--backend kubeflow finds no cluster"):
        configured({})
    file.write_text(KUBECONFIG % ("https://k8s.example:6443", "x"))
    assert configured({}).host == "https://k8s.example:6443"
    with pytest.raises(UsageError, match="in a pod with a ServiceAccount"):
        configured({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_the_service_over_it(kubernetes_server: ApiServer, start_gateway: StartGateway, tmp_path: Path) -> None:  # noqa: F811
    """A gateway's process with a kubeconfig: a run is submitted, found again, fails, is resumed and stopped."""
    (tmp_path / "config").write_text(KUBECONFIG % (kubernetes_server.url, TOKEN_OF_ACCOUNT))
    env = {"KUBECONFIG": str(tmp_path / "config"), "TRAINER_API_KUBEFLOW_IMAGE": "registry/trainer:1"}
    client = start_gateway("--backend", "kubeflow", "--namespace", "team-a", env=env).client
    payload = {**PAYLOAD, "env": {"SECRET": "pa$$word"}, "labels": {"team": "a"}}
    shown = client.post("/train?dry_run=true", json=payload)
    assert (shown.status_code, "pa$" in shown.text, kubernetes_server.jobs) == (200, False, {})
    assert client.post("/train", json=payload).status_code == 201
    again = client.post("/train", json=payload)
    name = again.json()["name"]
    assert (again.status_code, again.json()["status"], again.json()["namespace"]) == (200, "submitted", "team-a")
    assert client.post("/train", json={**payload, "num_nodes": 2}).status_code == 409
    assert client.post("/train", json={**payload, "run_id": "x", "namespace": "default"}).status_code == 422
    (pod,) = kubernetes_server.add_pods(name, "team-a")
    kubernetes_server.print(pod, "unified-train: no such bucket", end=True)
    kubernetes_server.fail(pod, "", namespace="team-a")
    kubernetes_server.play(name, "Failed", namespace="team-a")
    failed = eventually(lambda: (body := client.get(f"/train/{name}").json())["status"] == "failed" and body)
    assert "master-0: unified-train: no such bucket" in failed["detail"]
    assert client.get(f"/train/{name}/metrics").status_code == 422
    assert client.post(f"/train/{name}/resume").status_code == 201
    assert environment_of(kubernetes_server.jobs["team-a", name])["SECRET"] == "pa$$word"
    kubernetes_server.play(name, "Running", namespace="team-a")
    assert client.delete(f"/train/{name}").json()["detail"] == "it is being stopped"
    assert kubernetes_server.jobs == {}
    assert eventually(lambda: client.get(f"/train/{name}").status_code == 404)
    kubernetes_server.forbidden = {"POST"}
    assert client.post("/train", json=payload).status_code == 503


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda job: job["spec"].pop("pytorchReplicaSpecs"), "pytorch_replica_specs"),
        (lambda job: job["spec"].update(nprocPerNode=4), ".spec.nprocPerNode: 4 is no str"),
        (lambda job: job["spec"]["runPolicy"].update(cleanPodPolice="x"), "no field 'cleanPodPolice'"),
        (lambda job: pod_spec(job)["containers"][0].pop("name"), "name"),
        (lambda job: pod_spec(job)["containers"][0]["env"].append({"value": "x"}), "name"),
        (lambda job: pod_spec(job).update(containers={}), "is no list"),
        (lambda job: pod_spec(job)["volumes"][0].update(emptyDir={"medium": 1}), "1 is no str"),
    ],
)
def test_the_check_against_the_models_finds_what_is_planted(
    change: Callable[[Any], object], fault: str, cluster: Cluster
) -> None:
    async def test(backend: KubeflowBackend) -> None:
        manifest = backend.describe(plan())
        change(manifest)
        assert any(fault in each for each in faults_of(manifest, "KubeflowOrgV1PyTorchJob"))

    cluster.run(test)


def pod_spec(job: dict[str, Any]) -> Any:
    return job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
