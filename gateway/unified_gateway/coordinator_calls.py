"""The calls of the gRPC coordinator, for programs in other languages: each becomes requests to the master.

`deploy/proto/coordinator.proto` says what the messages mean. This module keeps no state of workers, datasets and
barriers, so that another gateway can replace this one.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import msgspec

from unified.config.runtime import DatasetSettings
from unified.coordinator.client import RemoteCoordinator
from unified.coordinator.orchestrator import check_release, leave_barrier
from unified.data.reading import dataset_files
from unified.data.registry import is_registered_as
from unified.errors import CoordinatorError, MasterUnreachableError, RefusedError, UsageError
from unified.protocol import coordinator as protocol
from unified.protocol.client_master import Done
from unified.threads import start_thread

COUNT_WITHIN_S = 60.0
COUNTS_AT_ONCE = 4
"""Seconds to count the files of one dataset, and the most datasets that are counted at once."""
_ON_LOSS_SHRINK = 1
Fields = dict[str, Any]
"""Fields of a message."""
A = TypeVar("A")


class GrpcCall(NamedTuple):
    space: str
    deadline: float
    """The client's deadline on the clock `time.monotonic`; infinite if the client gave none."""

    def within(self, seconds: float) -> float:
        """Return `seconds`, or the remaining time of the call if that is less."""
        return max(min(seconds, self.deadline - time.monotonic()), 0.0)


class CoordinatorCalls:
    """The seven calls, each a method from a message to the fields of its answer, with the errors of the coordinator.

    A call that waits at a barrier takes no thread; when it is cancelled, the worker leaves the barrier.
    """

    def __init__(self, coordinator: RemoteCoordinator) -> None:
        self._coordinator = coordinator
        self._counts: dict[tuple[str, str], Future[list[protocol.FileRun]]] = {}
        """Counts under way, by path and format: all workers of a training register its dataset at once."""

    async def register_worker(self, asked: Any, call: GrpcCall) -> Fields:
        rank = asked.rank if asked.HasField("rank") else -1
        request = protocol.RegisterWorker(
            space=call.space,
            worker_id=asked.worker_id,
            session=asked.session or secrets.token_hex(8),
            hostname=asked.hostname,
            port=asked.port,
            gpu_count=asked.gpu_count,
            memory_bytes=asked.memory_bytes,
            metadata=dict(asked.metadata),
            rank=rank,
            world_size=asked.world_size,
            timeout_s=asked.timeout_s if asked.HasField("timeout_s") else None,
            member=f"worker-{rank}" if rank >= 0 else "",  # as `DatasetRegistry` names the rank in Python
        )
        answer = await self._ask(request, protocol.WorkerRegistration, call)
        found = _fields(answer, "assigned_id", "heartbeat_interval_s", "timeout_s", "incarnation")
        return {"session": request.session, **found}

    async def heartbeat(self, asked: Any, call: GrpcCall) -> Fields:
        """Renew a worker's lease, or end it in order."""
        session = _session(asked)
        if asked.is_leaving:
            leave = protocol.DeregisterWorker(space=call.space, worker_id=asked.worker_id, session=session)
            await self._ask(leave, Done, call)
            return {"is_known": False}
        request = protocol.Heartbeat(space=call.space, worker_id=asked.worker_id, session=session)
        answer = await self._ask(request, protocol.HeartbeatResponse, call)
        return _fields(answer, "is_known", "revision")

    async def register_dataset(self, asked: Any, call: GrpcCall) -> Fields:
        """Register a dataset, counting its files unless the number of samples is given."""
        request = protocol.RegisterDataset(
            space=call.space,
            dataset_id=asked.dataset_id,
            path=_absolute(asked.path),
            format=asked.format,
            total_samples=asked.total_samples,
            shard_size=asked.shard_size or DatasetSettings().default_shard_size,
            shuffle=asked.shuffle,
            seed=asked.seed,
            metadata=dict(asked.metadata),
        )
        if not request.total_samples:
            values = (request.path, request.format, request.shard_size, request.shuffle, request.seed, request.metadata)
            known = await self._ask(protocol.GetDatasets(space=call.space), protocol.Datasets, call)
            for each in known.datasets:
                if each.dataset_id == request.dataset_id and is_registered_as(each, values, None):
                    return _fields(each, "dataset_id", "num_shards", "epoch")
            files = await self._count(request.path, request.format, call)
            total_samples = sum(file.num_samples for file in files)
            request = msgspec.structs.replace(request, files=files, total_samples=total_samples)
        answer = await self._ask(request, protocol.DatasetRegistration, call)
        return _fields(answer, "dataset_id", "num_shards", "epoch")

    async def get_data_shard(self, asked: Any, call: GrpcCall) -> Fields:
        """Report shards as read, and return the next one. A worker that is new to the dataset joins it."""
        who: dict[str, Any] = {
            "space": call.space,
            "dataset_id": asked.dataset_id,
            "worker_id": asked.worker_id,
            "is_id": True,
            "session": asked.session,
        }
        if asked.done_shard_ids:
            done = protocol.MarkDone(epoch=asked.epoch, shard_ids=list(asked.done_shard_ids), **who)
            await self._ask(done, protocol.ShardsDone, call)
        request = protocol.GetDataShard(epoch=asked.epoch, limit=1, **who)
        try:
            answer = await self._ask(request, protocol.DataShards, call)
        except CoordinatorError as error:
            if error.code != "not-found":
                raise
            await self._ask(protocol.SetDataWorker(**who), Done, call)  # refused if the dataset itself was not found
            answer = await self._ask(request, protocol.DataShards, call)
        found = _fields(answer, "num_left")
        for shard in answer.shards:  # one at most
            found |= _fields(shard, "shard_id", "file_paths", "start_sample", "end_sample", "first_row")
        return found

    async def wait_barrier(self, asked: Any, call: GrpcCall) -> Fields:
        """Wait until all of a world have arrived; raise an error if the barrier ends for another reason."""
        request = protocol.WaitBarrier(
            space=call.space,
            barrier_id=asked.barrier_id,
            worker_id=asked.worker_id,
            session=_session(asked),
            arrival=asked.arrival or time.time_ns(),  # higher each time, also when another gateway took over
            world_size=asked.world_size,
            timeout_s=_timeout(asked),
            on_loss="shrink" if asked.on_loss == _ON_LOSS_SHRINK else "fail",
        )
        future = self._coordinator.submit(request, protocol.BarrierResponse)
        try:
            answer = await asyncio.wrap_future(future)
        except (asyncio.CancelledError, MasterUnreachableError):
            leave_barrier(self._coordinator, request)
            raise
        check_release(asked.barrier_id, answer)
        return _fields(answer, "generation", "arrived", "lost")

    async def notify_checkpoint(self, asked: Any, call: GrpcCall) -> Fields:
        request = protocol.NotifyCheckpoint(
            space=call.space,
            worker_id=asked.worker_id,
            step=asked.step,
            path=asked.path,
            name=asked.name or "default",
            size_bytes=asked.size_bytes,
            checksum=asked.checksum,
            world_size=asked.world_size or 1,
            metadata=dict(asked.metadata),
            goes_back=asked.goes_back,
        )
        answer = await self._ask(request, protocol.CheckpointResponse, call)
        return _fields(answer, "is_latest")

    async def get_latest_checkpoint(self, asked: Any, call: GrpcCall) -> Fields:
        request = protocol.GetLatestCheckpoint(space=call.space, name=asked.name or "default")
        answer = await self._ask(request, protocol.RecoveryInfo, call)
        if not answer.is_found:
            return {}
        checkpoint = _fields(answer, "step", "path", "size_bytes", "checksum", "world_size", "worker_id", "metadata")
        return {"is_found": True, "saved_at": answer.saved_at, **checkpoint}

    async def _ask(self, request: protocol.CoordinatorRequest, expected: type[A], call: GrpcCall) -> A:
        timeout_s = call.within(self._coordinator.timeout_s)
        return await asyncio.wrap_future(self._coordinator.submit(request, expected, timeout_s=timeout_s))

    async def _count(self, path: str, format: str, call: GrpcCall) -> list[protocol.FileRun]:  # noqa: A002
        """Find and count the files of a dataset in a thread, which goes on after the call has ended."""
        key = (path, format)
        future = self._counts.get(key)
        if future is None:
            if len(self._counts) >= COUNTS_AT_ONCE:
                raise RefusedError(
                    "busy", f"{COUNTS_AT_ONCE} datasets are being counted: try again later, or give total_samples."
                )
            future = self._counts[key] = Future()
            future.set_running_or_notify_cancel()  # a cancelled call does not cancel the count for other calls
            try:
                start_thread("unified-dataset-count", self._count_now, key, future)
            except RuntimeError:  # the system has no thread left
                del self._counts[key]
                raise
        seconds = call.within(COUNT_WITHIN_S)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TimeoutError(
                f"the samples of {path} were not counted within {seconds:.0f} s: give total_samples, or try again."
            ) from None

    def _count_now(self, key: tuple[str, str], future: Future[list[protocol.FileRun]]) -> None:
        try:
            future.set_result(dataset_files(*key, None))
        except BaseException as error:
            future.set_exception(error)
        finally:
            del self._counts[key]


def _fields(source: object, *names: str) -> Fields:
    return {name: getattr(source, name) for name in names}


def _session(asked: Any) -> str:
    if not asked.session:
        raise UsageError(
            f"worker {asked.worker_id!r} says no session: RegisterWorker returns it, for all calls that follow."
        )
    session: str = asked.session
    return session


def _timeout(asked: Any) -> float | None:
    """Return the timeout of a barrier, or None. Check it here: the connection to the master computes with it."""
    if not asked.HasField("timeout_s"):
        return None
    seconds: float = asked.timeout_s
    if not 0 <= seconds < math.inf:
        raise UsageError(f"a barrier's timeout_s is {seconds}: give seconds from 0, or leave it out to wait on.")
    return seconds


def _absolute(path: str) -> str:
    """Return the path of a dataset; raise UsageError if it depends on the host's working directory."""
    path = path.removeprefix("file://")
    if path and not path.startswith("/") and "://" not in path:
        raise UsageError(f"the path {path!r} is not absolute: write /folder/files or s3://bucket/folder.")
    return path
