"""The sending end of a transfer: a process by itself, or one of the ranks that send a model together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import SystemRandom
from typing import Any

import torch

from unified.bus.calls.future import RpcFuture
from unified.bus.endpoint import BusEndpoint
from unified.errors import (
    RpcError,
    RpcTimeoutError,
    UsageError,
    WeightsError,
    WeightsTimeoutError,
    WeightsVersionError,
)
from unified.protocol.records import WorkerIncarnation
from unified.rounds.rank_group import Alone, MeshGroup, Ranks, WholeGroup, lead
from unified.tensors.host_buffers import BufferPool, HostCopy, stage
from unified.tensors.walk import is_lazy
from unified.threads import start_thread
from unified.weights.handshake import (
    AGAIN,
    Attempt,
    Handshake,
    SendTask,
    SyncOptions,
    call_incarnations,
    left_s,
    method,
)
from unified.weights.state_dict import OutgoingStateDict, is_replicated
from unified.weights.transfer_plan import Bucket
from unified.weights.versions import (
    ENDED,
    GONE,
    LATE,
    LOST,
    SUPERSEDED,
    SyncReport,
    TransferFailure,
    failure_of,
)
from unified.worker.context import ActorInfo, current_worker

IN_FLIGHT = 3
"""Number of buckets that were sent and not answered yet."""
RANK_ERRORS = (WeightsError, WeightsTimeoutError, WeightsVersionError)
"""Errors of rank 0 that the other ranks raise as they are."""

Stream = Iterable[tuple[int, HostCopy]]

_senders: dict[tuple[str, ...], WeightsSender] = {}
"""Senders by inbox of this process, name of the receivers and names of their workers, kept from call to call."""
_lock = threading.Lock()


def sync_weights(
    group: str,
    actors: Sequence[ActorInfo],
    weights: torch.nn.Module | Mapping[str, Any],
    name: str,
    options: SyncOptions,
) -> SyncReport:
    """Send a version to the receivers called `name`; see `RoleGroup.sync_weights`."""
    if not actors:
        raise UsageError("No actors in the role group.")
    if options.version is not None and (type(options.version) is not int or options.version < 1):
        raise UsageError(f"version={options.version!r}: it must be a whole number from 1 up.")
    if options.bucket_bytes < 1 or options.timeout <= 0:
        raise UsageError("sync_weights: bucket_bytes and timeout must be above zero.")
    if type(options.require) is not int or not 1 <= options.require <= len(actors):
        raise UsageError(f"require={options.require!r}: the group has {len(actors)} workers; give a number from 1 up.")
    worker = current_worker()
    targets = {actor.name: actor.node for actor in actors}
    with _lock:
        key = (worker.bus.inbox_id, name, *targets)
        sender = _senders.get(key)
        if sender is None:
            sender = _senders[key] = WeightsSender(worker.bus, worker.actor_info.node, group, name)
    return sender.send(weights, targets, options)


class WeightsSender:
    """Sends to the receivers called `name` of a group of workers, one version at a time."""

    def __init__(self, bus: BusEndpoint, node: str, group: str, name: str) -> None:
        self._bus = bus
        self._name = name
        self._what = f"weights {name!r} for group {group!r}"
        self._handshake = Handshake(bus, name, self._what, node)
        self._pool = BufferPool()
        self._streams: dict[torch.device, Any] = {}
        self._last = 0
        self._lock = threading.Lock()
        self._background: threading.Thread | None = None
        self._late_error = ""

    def send(
        self, weights: torch.nn.Module | Mapping[str, Any], targets: Mapping[str, str], options: SyncOptions
    ) -> SyncReport:
        """Bring a version to all targets that have a receiver; return its number.

        Args:
            targets: node of each worker by its full name; empty: not known.
        """
        deadline = time.monotonic() + options.timeout
        if not self._lock.acquire(timeout=options.timeout):
            raise WeightsTimeoutError(f"another thread was sending {self._what} for all of {options.timeout:g} s.")
        try:
            source = OutgoingStateDict(weights, options.dtype)
            together = is_replicated(weights) if options.collective is None else options.collective
            ranks = ranks_for(source, together=together)
            buckets = source.cut(options.bucket_bytes, ranks.size)
            senders = self._agree(ranks, source.digest(buckets), buckets, deadline)
            return self._send(SendTask(source, buckets, senders, ranks, options, deadline), targets)
        finally:
            self._lock.release()

    def _agree(
        self, ranks: Ranks, digest: str, buckets: Sequence[Bucket], deadline: float
    ) -> tuple[WorkerIncarnation, ...]:
        """Check that all ranks send the same model, and that the previous version was sent; return the senders."""
        mine = WorkerIncarnation(self._bus.worker, self._bus.incarnation)
        said: list[tuple[WorkerIncarnation, str, str]] = ranks.gather((mine, digest, self._end_of_background(deadline)))
        for rank, (sender, theirs, error) in enumerate(said):
            if error:
                raise WeightsError(f"the previous version, sent with wait=False, failed: {error}")
            if theirs != said[0][1]:
                raise UsageError(
                    f"the ranks are about to send different models: the keys, shapes, dtypes or bucket_bytes of rank "
                    f"{rank} (worker {sender.worker}) differ from those of rank 0."
                )
        wanted = {0} | {bucket.rank for bucket in buckets}
        return tuple(sender for rank, (sender, _, _) in enumerate(said) if rank in wanted)

    def _send(self, task: SendTask, targets: Mapping[str, str]) -> SyncReport:
        """Make attempts until all targets that have a receiver have the version, and `require` at least.

        Later attempts are for targets that failed.
        """
        version = task.options.version
        num_tries = 0
        have: list[WorkerIncarnation] = []
        while True:
            begin = partial(self._handshake.begin, task, targets, version, self._last, task.options.require - len(have))
            attempt = lead(task.ranks, begin, RANK_ERRORS)
            version = attempt.plan.version
            self._last = max(self._last, version)
            pipeline = BucketPipeline(self._bus, self._name, attempt, task.deadline)
            if not task.options.wait:
                self._send_later(task, attempt, pipeline)
                return SyncReport(version, (), attempt.left_out)
            failures = self._send_now(task, attempt, pipeline) if attempt.receivers else {}
            have += [each for each in attempt.receivers if each.worker not in failures]
            is_over = not failures or not _are_lost(failures)
            if is_over and have and attempt.left_out and not task.options.is_catch_up:
                tell = partial(self._handshake.tell, attempt.left_out, version, have, task.deadline)
                late = lead(task.ranks, tell, RANK_ERRORS)
                left_out = {worker: why for worker, why in attempt.left_out.items() if worker not in late}
            else:
                late, left_out = [], attempt.left_out
            if not failures:
                return SyncReport(version, (*(each.worker for each in have), *late), left_out)
            if is_over:
                raise self._handshake.error(version, failures)
            with_it = {each.worker for each in have}
            targets = {worker: node for worker, node in targets.items() if worker not in with_it}
            time.sleep(AGAIN.delay_s(num_tries, SystemRandom()))
            num_tries += 1

    def _send_now(self, task: SendTask, attempt: Attempt, pipeline: BucketPipeline) -> dict[str, TransferFailure]:
        """Return the failures by worker."""
        try:
            _convey(pipeline, self._stage(task, keep=False))
            found = task.ranks.gather(pipeline.failures)
        except BaseException as error:
            self._give_up(attempt, error)
            raise
        failures = {worker: failure for each in [attempt.failures, *found] for worker, failure in each.items()}
        failures = lead(task.ranks, lambda: self._handshake.finish(attempt, failures, task.deadline), RANK_ERRORS)
        self._pool.trim(IN_FLIGHT + 2)
        return failures

    def _send_later(self, task: SendTask, attempt: Attempt, pipeline: BucketPipeline) -> None:
        """Copy this rank's buckets now, and send them in a thread."""
        try:
            kept = list(self._stage(task, keep=True))
            for _, copy in kept:
                copy.wait()
        except BaseException as error:
            self._give_up(attempt, error)
            raise

        def work() -> None:
            try:
                _convey(pipeline, kept)
                failures = {**attempt.failures, **pipeline.failures}
                if task.ranks.rank == 0:
                    failures = self._handshake.finish(attempt, failures, task.deadline)
                else:
                    self._handshake.abort(attempt, failures, f"worker {self._bus.worker} could not deliver its part")
                have = [each for each in attempt.receivers if each.worker not in failures]
                if task.ranks.rank == 0:
                    self._handshake.tell([*attempt.left_out, *failures], attempt.plan.version, have, None)
                if failures and not (_are_lost(failures) and len(have) >= task.options.require):
                    self._late_error = str(self._handshake.error(attempt.plan.version, failures))
            except Exception as error:
                self._late_error = f"{type(error).__name__}: {error}"
                self._give_up(attempt, error)

        self._background = start_thread("weights-sender", work)

    def _end_of_background(self, deadline: float) -> str:
        """Wait until the version in the background was sent; return its error, or an empty string."""
        if self._background is not None:
            self._background.join(left_s(deadline))
            if self._background.is_alive():
                return "it is still being sent."
            self._background = None
        error, self._late_error = self._late_error, ""
        return error

    def _stage(self, task: SendTask, *, keep: bool) -> Iterator[tuple[int, HostCopy]]:
        """Yield copies of this rank's buckets; help to gather the buckets of other ranks, which is a collective."""
        for index, bucket in enumerate(task.buckets):
            if bucket.rank != task.ranks.rank:
                for entry in bucket.entries:
                    if entry.is_sharded:
                        task.source.collect(entry)
                continue
            tensors = [task.source.collect(entry) for entry in bucket.entries]
            is_models = any(map(task.source.is_models, bucket.entries, tensors))
            yield index, stage_bucket(bucket, tensors, self._pool, self._streams, keep=keep and is_models)

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        reason = f"worker {self._bus.worker} could not send it: {type(error).__name__}: {error}"
        self._handshake.abort(attempt, [each.worker for each in attempt.receivers], reason)


@dataclass(eq=False)
class BucketPipeline:
    """Sends the buckets of one rank in one attempt, a few at a time."""

    bus: BusEndpoint
    name: str
    """The name of the receivers."""
    attempt: Attempt
    deadline: float
    """Time on the monotonic clock."""
    failures: dict[str, TransferFailure] = field(default_factory=dict)
    """Failures by worker; a failed worker gets no more buckets."""
    _superseded: set[str] = field(default_factory=set)
    _under_way: deque[tuple[HostCopy, dict[WorkerIncarnation, RpcFuture[Any]]]] = field(default_factory=deque)

    def put(self, index: int, copy: HostCopy) -> None:
        """Send a bucket as soon as there is room."""
        while len(self._under_way) >= IN_FLIGHT:
            self._take_oldest()
        copy.wait()
        done = self.failures.keys() | self._superseded
        roots = [root for root in self.attempt.roots if root.worker not in done]
        args, timeout_s = [self.attempt.plan.session, index, copy.value], left_s(self.deadline)
        futures: list[RpcFuture[Any]] = []
        try:
            futures = call_incarnations(self.bus, roots, method(self.name, "bucket"), args, timeout=timeout_s)
        except RpcTimeoutError as error:
            for root in roots:
                self._fail(root, TransferFailure(LATE, str(error)))
        self._under_way.append((copy, dict(zip(roots, futures, strict=False))))

    def drain(self) -> None:
        """Wait until every bucket was answered, or has failed."""
        while self._under_way:
            self._take_oldest()

    def _take_oldest(self) -> None:
        copy, futures = self._under_way.popleft()
        is_over = True
        for root, future in futures.items():
            if root.worker in self.failures:
                future.cancel()
                is_over = False
                continue
            try:
                self._learn(root, future.result())  # the call has a deadline of its own
            except RpcError as error:
                future.cancel()
                is_over = False
                self._fail(root, failure_of(error))
        if is_over:
            copy.release()  # else a queued message may still read the memory, which then stays with it

    def _learn(self, root: WorkerIncarnation, failures: dict[str, TransferFailure]) -> None:
        """Note a root's answer, which is about itself and its children."""
        self.failures |= {worker: failure for worker, failure in failures.items() if failure.kind != SUPERSEDED}
        own = failures.get(root.worker)
        if own is None:
            return
        if own.kind == SUPERSEDED:
            self._superseded.add(root.worker)
            own = TransferFailure(GONE, "it has a newer version")
        self._lose_children(root, own)

    def _fail(self, root: WorkerIncarnation, failure: TransferFailure) -> None:
        self.failures[root.worker] = failure
        self._lose_children(root, failure)

    def _lose_children(self, root: WorkerIncarnation, failure: TransferFailure) -> None:
        for child in self.attempt.plan.children.get(root.worker, ()):
            text = f"worker {root.worker}, which should pass buckets on to it, failed: {failure.text}"
            kind = GONE if failure.kind == ENDED else failure.kind
            self.failures.setdefault(child.worker, TransferFailure(kind, text))


def _are_lost(failures: Mapping[str, TransferFailure]) -> bool:
    return all(failure.kind in LOST for failure in failures.values())


def _convey(pipeline: BucketPipeline, stream: Stream) -> None:
    """Send each bucket while the next one is copied from the model."""
    before: tuple[int, HostCopy] | None = None
    for each in stream:
        if before is not None:
            pipeline.put(*before)
        before = each
    if before is not None:
        pipeline.put(*before)
    pipeline.drain()


def stage_bucket(
    bucket: Bucket,
    tensors: Sequence[torch.Tensor],
    pool: BufferPool,
    streams: dict[torch.device, Any],
    *,
    keep: bool,
) -> HostCopy:
    """Make a bucket's tensors ready to be sent: copies, unless they can be sent from the model's own memory.

    Copies from a GPU go through pinned memory, on a stream of their own beside the computation; casts run on the GPU.

    Args:
        tensors: those of the bucket, in its order, cast or not.
        streams: see `stage`.
        keep: the model's own memory may change before the tensors are sent.
    """
    dtypes = [getattr(torch, entry.dtype) for entry in bucket.entries]
    if not keep and all(map(_is_ready, tensors, dtypes)):
        return HostCopy(list(tensors), bucket.nbytes, None, (), pool)
    memory = pool.take(bucket.nbytes, pinned=any(tensor.is_cuda for tensor in tensors))
    copies = [
        memory[start : start + entry.nbytes].view(dtype).view(entry.shape)
        for start, entry, dtype in zip(bucket.offsets, bucket.entries, dtypes, strict=True)
    ]
    return HostCopy(copies, bucket.nbytes, memory, stage(copies, tensors, streams), pool)


def ranks_for(source: OutgoingStateDict, *, together: bool) -> Ranks:
    """Return the group that sends: ranks of a sharded model, all ranks of a replicated one, or this process alone."""
    from torch import distributed

    if not (together or source.is_sharded):
        return Alone()
    if not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError("sync_weights needs all ranks here, but this process is in no process group.")
    mesh = source.mesh
    if mesh is not None and mesh.size() != distributed.get_world_size():
        return MeshGroup(mesh)
    return WholeGroup()


def _is_ready(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and not is_lazy(tensor)
