"""The Kubernetes API, for the gateway: calls in threads, each with a time limit, answered as plain JSON.

The Kubernetes client blocks, so calls run on a few threads. Errors are those of `unified.errors`:
`MasterUnreachableError` if the API server does not answer; `RefusedError` or `UsageError` with the server's reason.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from unified.errors import MasterUnreachableError, RefusedError, UsageError
from unified_gateway.backend import NameTakenError
from unified_gateway.kubernetes.conditions import Json, one_line
from unified_gateway.kubernetes.manifest import GROUP, PLURAL, VERSION

CONNECT_S, READ_S = 3.0, 8.0
FOLLOW_S = 86_400.0
"""Seconds without a line after which a followed log ends."""
DEADLINE_S = 10.0
"""Seconds for one call, including its retry."""
NUM_THREADS = 16
_PAGE = 500


def configured(environment: Mapping[str, str] = os.environ) -> client.Configuration:
    """Return the configuration of a client of the API server.

    In a pod it uses the pod's ServiceAccount; elsewhere the kubeconfig that ``kubectl`` would use.

    Raises:
        UsageError: there is neither.
    """
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in environment:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        reason = one_line(str(error))
        raise UsageError(
            f"--backend kubeflow finds no cluster ({reason}): run the gateway in a pod with a ServiceAccount, or set "
            "KUBECONFIG to a kubeconfig."
        ) from None
    return configuration


class KubernetesApi:
    def __init__(self, configuration: client.Configuration) -> None:
        configuration.client_side_validation = False
        configuration.connection_pool_maxsize = NUM_THREADS
        # One retry, since a connection that was kept open may be closed by the next call.
        configuration.retries = urllib3.Retry(total=1, connect=0, read=1, redirect=0, status=0, other=0)
        self.host = str(configuration.host)
        self._client = client.ApiClient(configuration)
        self._jobs = client.CustomObjectsApi(self._client)
        self._core = client.CoreV1Api(self._client)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kubernetes")

    async def create_job(self, namespace: str, body: dict[str, Any]) -> Json:
        """Create a `PyTorchJob`, and return it as the server has it. `NameTakenError`: its name is in use."""
        call = partial(self._jobs.create_namespaced_custom_object, *_place(namespace), body)
        return await self._call(call, f"create {PLURAL} in {namespace}")

    async def job(self, namespace: str, name: str) -> Json | None:
        """Return a `PyTorchJob`; None if there is none of this name."""
        call = partial(self._jobs.get_namespaced_custom_object, *_place(namespace), name)
        try:
            return await self._call(call, f"get {PLURAL} in {namespace}")
        except RefusedError as error:
            if error.code == "not-found":
                return None
            raise

    async def jobs(self, namespace: str, selector: str) -> list[Json]:
        """Return the `PyTorchJob` objects with these labels."""
        found: list[Json] = []
        page: dict[str, Any] = {"limit": _PAGE}
        while page:
            call = partial(
                self._jobs.list_namespaced_custom_object, *_place(namespace), label_selector=selector, **page
            )
            answer = await self._call(call, f"list {PLURAL} in {namespace}")
            found += answer.get("items") or ()
            token = (answer.get("metadata") or {}).get("continue")
            page = {**page, "_continue": token} if token else {}
        return found

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete a `PyTorchJob` once its pods are gone. Do nothing if none of this name and uid exists."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        call = partial(self._jobs.delete_namespaced_custom_object, *_place(namespace), name, body=body)
        try:
            await self._call(call, f"delete {PLURAL} in {namespace}")
        except RefusedError as error:
            if error.code not in ("not-found", "name-taken"):  # the latter: the precondition does not hold
                raise

    async def pods(self, namespace: str, selector: str, **fields: str) -> list[Json]:
        """Return the pods with these labels; `field_selector` is Kubernetes' own."""
        call = partial(self._core.list_namespaced_pod, namespace, label_selector=selector, **fields)
        return list((await self._call(call, f"list pods in {namespace}")).get("items") or ())

    async def events(self, namespace: str, name: str) -> list[Json]:
        call = partial(self._core.list_namespaced_event, namespace, field_selector=f"involvedObject.name={name}")
        return list((await self._call(call, f"list events in {namespace}")).get("items") or ())

    async def log_tail(self, namespace: str, pod: str, container: str, num_lines: int) -> str:
        call = partial(self._core.read_namespaced_pod_log, pod, namespace, container=container, tail_lines=num_lines)
        return (await self._send(call, f"read the log of pod {pod} in {namespace}")).decode(errors="replace")

    def open_log(self, namespace: str, pod: str, container: str, **options: Any) -> urllib3.HTTPResponse:
        """Open the log of a container. Blocks; `tail_lines` and `follow` are Kubernetes' own.

        Raises:
            RefusedError: there is no log, or it may not be read.
            MasterUnreachableError: the API server does not answer.
        """
        limits = (CONNECT_S, FOLLOW_S if options.get("follow") else READ_S)
        call = partial(self._core.read_namespaced_pod_log, pod, namespace, container=container, **options)
        try:
            response: urllib3.HTTPResponse = call(_preload_content=False, _request_timeout=limits)
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._translated(error, f"read the log of pod {pod} in {namespace}") from None
        return response

    def close(self) -> None:
        """Close threads and connections; running calls end by their time limits."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _call(self, call: Callable[..., urllib3.HTTPResponse], what: str) -> Json:
        data = await self._send(call, what)
        try:
            answer = json.loads(data)  # the client's models are slow, and refuse data of newer servers
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RefusedError("unavailable", f"what answers at {self.host} is no Kubernetes API.")
        return answer

    async def _send(self, call: Callable[..., urllib3.HTTPResponse], what: str) -> bytes:
        def read() -> bytes:
            return call(_preload_content=False, _request_timeout=(CONNECT_S, READ_S)).data

        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:  # a time limit is an OSError, too
            raise self._translated(error, what) from None

    def _translated(self, error: Exception, what: str) -> Exception:
        if not isinstance(error, ApiException) or not error.status:
            reason = one_line(str(error)) or f"no answer within {DEADLINE_S:g} s"
            return MasterUnreachableError(f"the Kubernetes API at {self.host} cannot be reached: {reason}.")
        reason = _reason(error)
        match error.status:
            case 401:
                return RefusedError("unavailable", f"the Kubernetes API does not know the gateway's account: {reason}")
            case 403:
                hint = "" if "quota" in reason else " deploy/kubernetes/kubeflow/ has the Role that the gateway needs."
                return RefusedError("forbidden", f"the gateway may not {what}: {reason}{hint}")
            case 404 if reason.startswith("404 page not found") or "could not find the requested resource" in reason:
                text = f"the cluster has no {PLURAL}.{GROUP}: install the Kubeflow Training Operator"
                return RefusedError("unavailable", text)
            case 404:
                return RefusedError("not-found", reason)
            case 409:
                return NameTakenError(reason)
            case 400 | 413 | 422:
                return UsageError(f"Kubernetes refuses to {what}: {reason}")
        return RefusedError("unavailable", f"the Kubernetes API failed to {what} ({error.status}): {reason}")


def _place(namespace: str) -> tuple[str, str, str, str]:
    return GROUP, VERSION, namespace, PLURAL


def _reason(error: ApiException) -> str:
    """Return the message of the server's `Status` object, else the body, else the HTTP reason."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    message = status.get("message") if isinstance(status, dict) else ""
    return one_line(str(message or body or error.reason))
