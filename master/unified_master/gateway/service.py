"""Parts of a running gateway: its backend, what is known of runs, and the services beside HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

from unified.devices import has_accelerator
from unified.errors import RefusedError, UsageError
from unified.training.layout import RunLayout
from unified_master.gateway.backend import RunRecord, TrainingBackend
from unified_master.gateway.checkpoints import RunCheckpointReader
from unified_master.gateway.http.telemetry import Telemetry
from unified_master.gateway.master_backend import MasterBackend
from unified_master.gateway.options import GatewayOptions
from unified_master.gateway.plan import StoredRequest
from unified_master.gateway.runs import RunConflictError, RunNotFoundError, RunService
from unified_master.gateway.schemas import TrainingJobStatus
from unified_master.gateway.tokens import TOKEN_VARIABLE, Tokens

if TYPE_CHECKING:
    from unified.client.embedded import EmbeddedCluster

_log = logging.getLogger("unified.gateway")
MAX_FOLLOWERS = 256
VIRTUAL_DEVICES = 8
"""Devices of a host without accelerators, as many as the document's payload asks for."""


class Gateway:
    """One gateway, from `open` to `close`.

    Args:
        backend: what runs the jobs; None: what the options say.
    """

    def __init__(self, options: GatewayOptions, tokens: Tokens, backend: TrainingBackend | None = None) -> None:
        self.options = options
        self.tokens = tokens
        self._backend = backend
        self.telemetry = Telemetry()
        self.checkpoints = RunCheckpointReader()
        self._runs: RunService | None = None
        self._stack = AsyncExitStack()
        self._num_followers = 0

    @property
    def runs(self) -> RunService:
        if self._runs is None:
            raise RefusedError("unavailable", "the gateway is not open.")
        return self._runs

    async def open(self) -> None:
        """Connect to the cluster; start one on this host if no master is named.

        Raises:
            UsageError: an option that cannot be carried out; the message says which.
            ClusterError: the cluster of this host could not be started.
        """
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise

    async def _open(self) -> None:
        self._stack.callback(self.checkpoints.close)
        options = self.options
        address = options.master
        if options.grpc_bind is not None and options.backend != "master" and address is None:
            raise UsageError("--grpc-port forwards to a master: name one with --master or UNIFIED_MASTER.")
        backend = self._backend
        if backend is None and options.backend == "kubeflow":
            backend = _kubeflow(options)
        elif backend is None:
            if address is None:
                address = (await self._start_cluster()).address
            backend = MasterBackend(address, shares_host=options.master is None)
        self._stack.push_async_callback(backend.close)
        self._runs = RunService(backend)
        self._stack.push_async_callback(self._runs.cache.close)
        if options.grpc_bind is not None and address is not None:
            await self._serve_grpc(options.grpc_bind, address)

    async def close(self) -> None:
        """End what `open` began. Runs go on, unless the cluster is the gateway's own."""
        await self._stack.aclose()

    async def _start_cluster(self) -> EmbeddedCluster:
        from unified.client.embedded import EmbeddedCluster

        options = self.options
        devices = options.devices or (None if options.nodes == 1 and has_accelerator() else VIRTUAL_DEVICES)
        # Its workers descend from this process, and the token is none of their business.
        cluster = EmbeddedCluster(options.nodes, devices, env={TOKEN_VARIABLE: ""}, max_master_restarts=10)
        starting = asyncio.create_task(asyncio.to_thread(cluster.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # by a signal: the thread goes on, and what it starts has to end
            await asyncio.wait({starting})
            await asyncio.to_thread(cluster.stop, 1.0)
            raise
        self._stack.push_async_callback(asyncio.to_thread, cluster.stop)
        return cluster

    async def _serve_grpc(self, bind: str, address: str) -> None:
        from unified.data.coordinator_client import RemoteCoordinator

        try:
            from unified_master.gateway.coordinator_grpc import serve
        except ImportError as error:
            raise UsageError(f"--grpc-port needs grpcio ({error}): pip install 'unified-runtime[grpc]'.") from None
        coordinator = RemoteCoordinator(address)
        self._stack.callback(coordinator.close)
        server, port = await serve(bind=bind, coordinator=coordinator, tokens=self.tokens)
        _log.info("event=grpc-ready port=%d", port)
        self._stack.push_async_callback(server.stop, 1.0)

    async def status_body(self, name: str) -> bytes:
        """Return the encoded status of a run, as it was at most a second ago.

        Raises:
            RunNotFoundError: no run of this name is known.
        """
        snapshot = await self.runs.cache.snapshot()
        body = snapshot.bodies.get(name)
        if body is not None:
            return body
        run = snapshot.by_name.get(name) or await self.runs.cache.run(name)
        if run is None:
            raise RunNotFoundError(name)
        body = status_of(run).model_dump_json().encode()
        if snapshot.by_name.get(name) is run:
            snapshot.bodies[name] = body
        return body

    async def layout(self, name: str) -> RunLayout:
        """Return the layout of a run, from the payload that is kept with it."""
        run = await self.runs.run(name)
        stored = StoredRequest.read(run.annotations)
        if stored is None:
            raise RunConflictError(f"the payload of {name} is not known, and so not where its checkpoints are.", run)
        return RunLayout(stored.fields["checkpoint_base_uri"], run.run_id, run.framework)

    def check_followers(self) -> None:
        """Raise RefusedError if too many read logs already."""
        if self._num_followers >= MAX_FOLLOWERS:
            raise RefusedError("unavailable", f"{MAX_FOLLOWERS} readers follow logs: try again later.")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Count a reader of logs while it reads."""
        self._num_followers += 1
        self.telemetry.set_followers(self._num_followers)
        try:
            yield
        finally:
            self._num_followers -= 1
            self.telemetry.set_followers(self._num_followers)


def status_of(run: RunRecord) -> TrainingJobStatus:
    """Return a run as clients see it."""
    return TrainingJobStatus.model_validate(
        {
            "name": run.name,
            "namespace": run.namespace,
            "run_id": run.run_id,
            "framework": run.framework,
            "status": run.status,
            "detail": run.detail or None,
            "job_id": run.job_id,
            "submitted_at": run.submitted_at,
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "exit_code": run.exit_code,
            "num_restarts": run.num_restarts,
            "labels": dict(run.labels),
        }
    )


def _kubeflow(options: GatewayOptions) -> TrainingBackend:
    try:
        from unified_master.gateway.kubeflow import KubeflowBackend
    except ImportError as error:
        raise UsageError(
            f"--backend kubeflow needs the kubernetes client ({error}): pip install 'unified-runtime[k8s]'."
        ) from None
    return KubeflowBackend(namespaces=options.namespaces)
