"""Parts of a running gateway: its backend, its cache of runs, and the services beside HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unified.client.mirror import ClusterMirror
from unified.devices import VIRTUAL_DEVICES, has_accelerator
from unified.errors import MasterUnreachableError, RefusedError, UnifiedError, UsageError
from unified.training.layout import RunLayout
from unified_gateway.backend import RunRecord, TrainingBackend
from unified_gateway.checkpoints import RunCheckpointReader
from unified_gateway.http.telemetry import Telemetry
from unified_gateway.master_backend import MasterBackend
from unified_gateway.master_client import MasterClient
from unified_gateway.options import GatewayOptions
from unified_gateway.page.app import PageService
from unified_gateway.page.guard import PageOptions
from unified_gateway.page.watcher import ClusterWatcher
from unified_gateway.plan import StoredRequest
from unified_gateway.runs import RunConflictError, RunNotFoundError, RunService, newest_first
from unified_gateway.schemas import TrainingJobStatus
from unified_gateway.tokens import TOKEN_VARIABLE, Tokens

if TYPE_CHECKING:
    from unified.client.embedded import EmbeddedCluster

_log = logging.getLogger("unified.gateway")
MAX_FOLLOWERS = 256
MIRROR_WITHIN_S = 5.0
"""Seconds for which a scrape waits for the master; Prometheus gives up after 10."""
SAVED_AGE_S = 30.0
MAX_SAVED, MAX_CHECKPOINTS = 50, 100
"""Number of newest runs whose checkpoints the page shows, and of checkpoints per run."""
TASK_FIELDS = (
    "name", "namespace", "run_id", "framework", "status", "detail", "job_id", "submitted_at", "started_at", "ended_at",
    "exit_code", "num_restarts", "labels",
)  # fmt: skip


@dataclass
class SavedCheckpoints:
    """Checkpoints of a run for the page, as they were read last."""

    items: list[dict[str, Any]] | None = None
    read_at: float = -math.inf
    """Time of the monotonic clock."""
    reading: asyncio.Task[None] | None = None


class Gateway:
    """One gateway, from `open` to `close`.

    Args:
        backend: runs the jobs; None: the backend that the options name.
        page: options of the page; None: no page is served.
    """

    def __init__(
        self,
        options: GatewayOptions,
        tokens: Tokens,
        backend: TrainingBackend | None = None,
        page: PageOptions | None = None,
    ) -> None:
        self.options = options
        self.tokens = tokens
        self._backend = backend
        self.telemetry = Telemetry()
        self.checkpoints = RunCheckpointReader()
        self.page = None if page is None else PageService(page, tokens, self, self.telemetry)
        self._saved: dict[str, SavedCheckpoints] = {}
        self._runs: RunService | None = None
        self._watcher: ClusterWatcher | None = None
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
        if address is not None:
            self._watch(address)
        self._runs = RunService(backend)
        self._stack.push_async_callback(self._runs.cache.close)
        if options.grpc_bind is not None and address is not None:
            await self._serve_grpc(options.grpc_bind, address)

    def _watch(self, address: str) -> None:
        """Create the watcher of the cluster, which follows the master only while somebody looks."""
        if self.page is not None:
            self.page.open(address)
            self._stack.push_async_callback(self.page.close)
            self._watcher = self.page.parts.watcher
            return
        master = MasterClient(address)
        self._stack.push_async_callback(master.close)
        self._watcher = ClusterWatcher(master)
        self._stack.push_async_callback(self._watcher.close)

    async def mirror(self) -> ClusterMirror | None:
        """Return the mirror of the cluster, up to date; None: the master does not answer, or there is none."""
        if self._watcher is None:
            return None
        try:
            return await self._watcher.current(MIRROR_WITHIN_S)
        except MasterUnreachableError:
            return None

    async def close(self) -> None:
        """Close all that `open` opened. Runs go on, unless the gateway started the cluster."""
        await self._stack.aclose()

    async def _start_cluster(self) -> EmbeddedCluster:
        from unified.client.embedded import EmbeddedCluster

        options = self.options
        devices = options.devices or (None if options.nodes == 1 and has_accelerator() else VIRTUAL_DEVICES)
        # Its workers inherit this process's environment, and must not see the token.
        cluster = EmbeddedCluster(options.nodes, devices, env={TOKEN_VARIABLE: ""}, max_master_restarts=10)
        starting = asyncio.create_task(asyncio.to_thread(cluster.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # by a signal: the thread still starts the cluster, so wait and stop it
            await asyncio.wait({starting})
            await asyncio.to_thread(cluster.stop, 1.0)
            raise
        self._stack.push_async_callback(asyncio.to_thread, cluster.stop)
        return cluster

    async def _serve_grpc(self, bind: str, address: str) -> None:
        from unified.coordinator.client import RemoteCoordinator

        try:
            from unified_gateway.coordinator_grpc import serve
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

    async def tasks(self) -> list[dict[str, Any]]:
        """Return the newest attempt of each run, newest first, as the training API lists them."""
        runs = sorted((await self.runs.cache.snapshot()).by_name.values(), key=newest_first)
        return [
            {
                **{name: getattr(run, name) for name in TASK_FIELDS},
                "checkpoints": self._saved_of(run.name) if number < MAX_SAVED else None,
            }
            for number, run in enumerate(runs)
        ]

    def _saved_of(self, name: str) -> list[dict[str, Any]] | None:
        """Return the last known checkpoints of a run, None before the first read. Read again after `SAVED_AGE_S`."""
        known = self._saved.setdefault(name, SavedCheckpoints())
        if known.reading is None and time.monotonic() - known.read_at > SAVED_AGE_S:

            async def read() -> None:
                try:
                    found = await self.checkpoints.read(await self.layout(name), MAX_CHECKPOINTS)
                    known.items = [{"step": each.step, "nbytes": each.nbytes} for each in found]
                except (UnifiedError, OSError) as error:
                    _log.warning("event=checkpoints-unread run=%s reason=%r", name, str(error))
                finally:
                    known.read_at, known.reading = time.monotonic(), None

            known.reading = asyncio.create_task(read())
        return known.items

    async def layout(self, name: str) -> RunLayout:
        """Return the layout of a run, from its stored payload."""
        run = await self.runs.run(name)
        stored = StoredRequest.read(run.annotations)
        if stored is None:
            raise RunConflictError(f"the payload of {name} is not known, so its checkpoints cannot be found.", run)
        return RunLayout(stored.fields["checkpoint_base_uri"], run.run_id, run.framework)

    def check_followers(self) -> None:
        """Raise RefusedError if too many readers follow logs already."""
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
        from unified_gateway.kubeflow import KubeflowBackend
    except ImportError as error:
        raise UsageError(
            f"--backend kubeflow needs the kubernetes client ({error}): pip install 'unified-runtime[k8s]'."
        ) from None
    return KubeflowBackend(namespaces=options.namespaces)
