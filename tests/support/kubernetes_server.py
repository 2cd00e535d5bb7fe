"""A stand-in for the API server of Kubernetes with the Kubeflow Training Operator, over real HTTP.

No API server can run on the machines of these tests. This one checks each `PyTorchJob` that is created against the
models of the SDKs and against the rules that the operator states, keeps it, and lets a test play what operator and
kubelets would do: conditions, pods, events and logs, in the words of training-operator 1.9.
"""

import contextlib
import itertools
import json
import queue
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from kubernetes import client

from tests.support.kubernetes_models import faults_of
from unified_gateway.kubernetes.api_server import KubernetesApi

Json = dict[str, Any]
TOKEN = "token-of-the-gateway's-account"
_JOBS = re.compile(r"/apis/kubeflow\.org/v1/namespaces/([^/]+)/pytorchjobs(?:/([^/]+))?")
_CORE = re.compile(r"/api/v1/namespaces/([^/]+)/(pods|events)(?:/([^/]+)/log)?")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_UIDS = itertools.count(1)


class Refusal(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ApiServer:
    """What the server has. Every attribute may be changed by the test between two requests."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.namespaces = ["default", "team-a"]
        self.jobs: dict[tuple[str, str], Json] = {}
        self.pods: dict[tuple[str, str], Json] = {}
        self.events: list[Json] = []
        self.logs: dict[str, queue.Queue[bytes | None]] = {}
        """Lines of a pod's log as they come; None: the end."""
        self.requests: list[tuple[str, str]] = []
        self.forbidden: set[str] = set()
        """Methods that are answered with 403."""
        self.crashed = ""
        """Body of the 500 that every request is answered with."""
        self.keeps_deleted = False
        """Deleted objects stay, with a deletionTimestamp, until `sweep`."""
        self.has_operator = True
        self.before_create: threading.Barrier | None = None
        self.url = ""

    # Played by the test

    def play(self, name: str, condition: str, message: str = "", namespace: str = "default") -> None:
        """Set a condition as the operator does: of those that exclude each other, one is true."""
        with self.lock:
            status = self.jobs[namespace, name].setdefault("status", {"conditions": []})
            now = _now()
            for each in status["conditions"]:
                if {each["type"], condition} in ({"Running", "Restarting"}, {"Running", "Suspended"}) or (
                    each["type"] == "Running" and condition in ("Succeeded", "Failed")
                ):
                    each["status"] = "False"
            status["conditions"] = [each for each in status["conditions"] if each["type"] != condition] + [
                {
                    "type": condition,
                    "status": "True",
                    "reason": f"PyTorchJob{condition}",
                    "message": message or f"PyTorchJob {name} is {condition.lower()}.",
                    "lastUpdateTime": now,
                    "lastTransitionTime": now,
                }
            ]
            if condition == "Succeeded":
                status["completionTime"] = now
            assert not list(faults_of(status, "KubeflowOrgV1JobStatus"))

    def add_pods(self, name: str, namespace: str = "default", *, phase: str = "Running") -> list[str]:
        """Make the pods of a job, as the operator does."""
        with self.lock:
            job = self.jobs[namespace, name]
            made = []
            for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
                for index in range(replica["replicas"]):
                    pod = f"{name}-{kind.lower()}-{index}"
                    labels = {
                        **replica["template"]["metadata"]["labels"],
                        "training.kubeflow.org/job-name": name,
                        "training.kubeflow.org/replica-type": kind.lower(),
                        "training.kubeflow.org/replica-index": str(index),
                    }
                    owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": name, "controller": True}
                    self.pods[namespace, pod] = {
                        "metadata": {
                            "name": pod,
                            "namespace": namespace,
                            "uid": f"pod-{next(_UIDS)}",
                            "labels": labels,
                            "ownerReferences": [{**owner, "uid": job["metadata"]["uid"]}],
                        },
                        "spec": replica["template"]["spec"],
                        "status": {"phase": phase, "containerStatuses": []},
                    }
                    self.logs[pod] = queue.Queue()
                    made.append(pod)
                    if phase == "Running":
                        self.container(pod, {"running": {"startedAt": _now()}}, namespace=namespace)
            return made

    def container(
        self, pod: str, state: Json, *, restarts: int = 0, phase: str = "", namespace: str = "default"
    ) -> None:
        """Set the state of a pod's container, ``{"terminated": {"exitCode": 1}}``."""
        with self.lock:
            status = self.pods[namespace, pod]["status"]
            status["phase"] = phase or status["phase"]
            status["containerStatuses"] = [{"name": "pytorch", "state": state, "restartCount": restarts}]

    def fail(self, pod: str, message: str, *, exit_code: int = 1, at: int = 0, namespace: str = "default") -> None:
        """End a pod's container, as a program that fails does."""
        finished = f"2026-01-01T00:00:{at:02}Z"
        ended = {"exitCode": exit_code, "reason": "Error", "message": message, "finishedAt": finished}
        self.container(pod, {"terminated": ended}, phase="Failed", namespace=namespace)

    def print(self, pod: str, *lines: str, end: bool = False) -> None:
        for line in lines:
            self.logs[pod].put(f"{line}\n".encode())
        if end:
            self.logs[pod].put(None)

    def sweep(self) -> None:
        """Remove the objects that were deleted, with their pods."""
        with self.lock:
            for key in [key for key, job in self.jobs.items() if job["metadata"].get("deletionTimestamp")]:
                self._remove(key)

    # Served

    def serve(self, method: str, path: str, query: dict[str, str], body: Json | None) -> Json:
        if self.crashed:
            raise Refusal(500, "InternalError", self.crashed)
        if method in self.forbidden:
            raise Refusal(403, "Forbidden", f'pytorchjobs.kubeflow.org is forbidden: User "x" cannot {method} resource')
        found = _JOBS.fullmatch(path)
        if found is not None and self.has_operator:
            namespace, name = found[1], found[2] or ""
            if namespace not in self.namespaces:
                raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found')
            return self._serve_jobs(method, namespace, name, query, body)
        if (found := _CORE.fullmatch(path)) is not None:
            items = list(self.pods.values()) if found[2] == "pods" else self.events
            chosen = [each for each in items if each["metadata"]["namespace"] == found[1] and _is_selected(each, query)]
            return {"kind": "List", "metadata": {}, "items": chosen}
        raise Refusal(404, "NotFound", "404 page not found")

    def _serve_jobs(self, method: str, namespace: str, name: str, query: dict[str, str], body: Json | None) -> Json:
        if method == "POST":
            assert body is not None
            if self.before_create is not None:
                self.before_create.wait(100)
            return self._create(namespace, body)
        if method == "GET" and not name:
            items = [job for key, job in self.jobs.items() if key[0] == namespace and _is_selected(job, query)]
            start, limit = int(query.get("continue") or 0), int(query.get("limit") or 500)
            rest = str(start + limit) if start + limit < len(items) else ""
            return {"kind": "PyTorchJobList", "metadata": {"continue": rest}, "items": items[start : start + limit]}
        with self.lock:
            job = self.jobs.get((namespace, name))
            if job is None:
                raise Refusal(404, "NotFound", f'pytorchjobs.kubeflow.org "{name}" not found')
            if method == "DELETE":
                uid = ((body or {}).get("preconditions") or {}).get("uid")
                if uid != job["metadata"]["uid"]:
                    raise Refusal(409, "Conflict", "the UID in the precondition does not match")
                assert (body or {}).get("propagationPolicy") == "Foreground"
                job["metadata"]["deletionTimestamp"] = _now()
                if not self.keeps_deleted:
                    self._remove((namespace, name))
            return job

    def _create(self, namespace: str, body: Json) -> Json:
        name = body["metadata"]["name"]
        if faults := [*faults_of(body, "KubeflowOrgV1PyTorchJob"), *_rules(body)]:
            raise Refusal(422, "Invalid", f'PyTorchJob.kubeflow.org "{name}" is invalid: {"; ".join(faults)}')
        with self.lock:
            if (namespace, name) in self.jobs:
                raise Refusal(409, "AlreadyExists", f'pytorchjobs.kubeflow.org "{name}" already exists')
            made: Json = json.loads(json.dumps(body))
            made["metadata"] |= {"uid": f"uid-{next(_UIDS)}", "creationTimestamp": _now()}
            self.jobs[namespace, name] = made
            return made

    def _remove(self, key: tuple[str, str]) -> None:
        uid = self.jobs.pop(key)["metadata"]["uid"]
        for pod in [pod for pod, each in self.pods.items() if each["metadata"]["ownerReferences"][0]["uid"] == uid]:
            del self.pods[pod]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: ApiServer

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.state.requests.append((self.command, self.path))
        try:
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            found = _CORE.fullmatch(url.path)
            if found is not None and found[3]:
                self._stream(found[3], query)
                return
            self._send(200, self.state.serve(self.command, url.path, query, json.loads(body) if body else None))
        except Refusal as refusal:
            status = {"kind": "Status", "status": "Failure", "reason": refusal.reason, "message": str(refusal)}
            self._send(refusal.status, {**status, "code": refusal.status})

    do_GET = do_POST = do_DELETE = _answer

    def _send(self, status: int, answer: Json) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, pod: str, query: dict[str, str]) -> None:
        """Send a log in chunks; one that is followed stays open until its end."""
        lines = self.state.logs.get(pod)
        if lines is None or query.get("container") != "pytorch":
            raise Refusal(404, "NotFound", f'pods "{pod}" not found')
        is_followed = query.get("follow", "").lower() == "true"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(queue.Empty, OSError):
            while (line := lines.get(timeout=20 if is_followed else 0.05)) is not None:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        with contextlib.suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def _rules(job: Json) -> Iterator[str]:
    """Yield what the operator's and Kubernetes' own validation would refuse of an object whose types are right."""
    metadata, spec = job["metadata"], job["spec"]
    if (job["apiVersion"], job["kind"]) != ("kubeflow.org/v1", "PyTorchJob"):
        yield "apiVersion, kind"
    if not _DNS.fullmatch(f"{metadata['name']}-worker-9999"):
        yield f"metadata.name: {metadata['name']}"
    if spec["runPolicy"]["cleanPodPolicy"] not in ("None", "Running", "All"):
        yield "runPolicy.cleanPodPolicy"
    replicas = spec["pytorchReplicaSpecs"]
    if replicas.keys() - {"Master", "Worker"} or replicas["Master"]["replicas"] != 1:
        yield "pytorchReplicaSpecs"
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        if replica["restartPolicy"] not in ("Always", "OnFailure", "Never", "ExitCode"):
            yield "restartPolicy"
        (container,) = pod["containers"]
        if container["name"] != "pytorch" or not container["image"]:
            yield "containers[0].name, image"
        for labels in (metadata["labels"], replica["template"]["metadata"]["labels"]):
            yield from (f"labels.{key}: {value}" for key, value in labels.items() if not _LABEL.fullmatch(value))
        names = [each["name"] for each in container["env"]]
        yield from (f"env.{name}: twice" for name in set(names) if names.count(name) > 1)
        yield from (f"env.{name}" for name in names if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
        for amount in container["resources"]["limits"].values():
            if not re.fullmatch(r"[0-9]+(Gi)?", amount):
                yield f"resources: {amount}"
        if container["resources"]["limits"] != container["resources"]["requests"]:
            yield "resources: GPUs cannot be overcommitted"
        if {each["name"] for each in container["volumeMounts"]} != {each["name"] for each in pod["volumes"]}:
            yield "volumeMounts"


def _is_selected(item: Json, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels") or {}
    for part in filter(None, (query.get("labelSelector") or "").split(",")):
        key, _, value = part.partition("=")
        if labels.get(key) != value:
            return False
    for part in filter(None, (query.get("fieldSelector") or "").split(",")):
        path, _, value = part.partition("=")
        found: Any = item
        for name in path.split("."):
            found = found.get(name) or {}
        if found != value:
            return False
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@pytest.fixture
def kubernetes_server() -> Iterator[ApiServer]:
    """The server's state; `api_of` makes clients of it."""
    state = ApiServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="kubernetes")
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    yield state
    for lines in state.logs.values():
        lines.put(None)
    server.shutdown()
    server.server_close()
    thread.join()


def api_of(url: str) -> KubernetesApi:
    """A client of a server at this address, with the right token."""
    configuration = client.Configuration(host=url, api_key={"authorization": TOKEN}, api_key_prefix={})
    configuration.api_key = {"authorization": f"Bearer {TOKEN}"}
    return KubernetesApi(configuration)
