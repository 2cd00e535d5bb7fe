"""How a process sends versions to a group of receivers: by itself, or as one of the ranks that do it together.

Buckets on their way from one sender to all receivers, a few at a time.

`RoleGroup.sync_weights`: the senders of this process, kept from call to call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from unified.bus.endpoint import BusEndpoint
from unified.errors import RpcError, RpcTimeoutError, UsageError, WeightsError, WeightsTimeoutError
from unified.protocol.records import WorkerIncarnation
from unified.weights.handshake import FIRST_PAUSE_S, LAST_PAUSE_S, Attempt, Handshake, left_s
from unified.weights.lives import GONE, LATE, OVERTAKEN, Failure, LifeCalls, failure_of, method
from unified.weights.ranks import lead, ranks_for
from unified.weights.staging import Staged, Stager
from unified.weights.state_dict import Source, is_replicated
from unified.weights.transfer_plan import Bucket, Manifest
from unified.worker.context import ActorInfo, current_worker
from unified.worker.rank_group import Ranks

if TYPE_CHECKING:
    import torch


IN_FLIGHT = 3
"""Buckets that were sent and not answered yet."""


class Conveyor:
    """Sends the buckets of one rank in one attempt.

    Args:
        name: of the receivers.
        heads: to whom it sends; they pass on to their mates.
        deadline: on the monotonic clock.

    Attributes:
        failures: by worker; who is in there gets no more.
    """

    def __init__(
        self,
        calls: LifeCalls,
        stager: Stager,
        name: str,
        manifest: Manifest,
        heads: Sequence[WorkerIncarnation],
        deadline: float,
    ) -> None:
        self.failures: dict[str, Failure] = {}
        self._calls = calls
        self._stager = stager
        self._method = method(name, "bucket")
        self._manifest = manifest
        self._heads = heads
        self._deadline = deadline
        self._overtaken: set[str] = set()
        self._under_way: deque[tuple[Staged, dict[WorkerIncarnation, Future[Any]]]] = deque()

    def put(self, index: int, staged: Staged) -> None:
        """Send a bucket as soon as there is room."""
        while len(self._under_way) >= IN_FLIGHT:
            self._take_oldest()
        staged.wait()
        done = self.failures.keys() | self._overtaken
        heads = [head for head in self._heads if head.worker not in done]
        futures: list[Future[Any]] = []
        try:
            futures = self._calls.call_many(
                heads, self._method, [self._manifest.session, index, staged.tensors], timeout=self._left_s()
            )
        except RpcTimeoutError as error:
            for head in heads:
                self._fail(head, Failure(LATE, str(error)))
        self._under_way.append((staged, dict(zip(heads, futures, strict=False))))

    def drain(self) -> None:
        """Wait until every bucket was answered, or cannot be."""
        while self._under_way:
            self._take_oldest()

    def _take_oldest(self) -> None:
        staged, futures = self._under_way.popleft()
        is_over = True
        for head, future in futures.items():
            if head.worker in self.failures:
                future.cancel()
                is_over = False
                continue
            try:
                self._learn(head, future.result())  # the call has a deadline of its own
            except RpcError as error:
                future.cancel()
                is_over = False
                self._fail(head, failure_of(error))
        if is_over:
            self._stager.put_back(staged)  # else a message that reads it may still be waiting: the memory goes with it

    def _learn(self, head: WorkerIncarnation, failures: dict[str, Failure]) -> None:
        """What a head answered, of itself and of its mates."""
        self.failures |= {worker: failure for worker, failure in failures.items() if failure.kind != OVERTAKEN}
        own = failures.get(head.worker)
        if own is None:
            return
        if own.kind == OVERTAKEN:
            self._overtaken.add(head.worker)
            own = Failure(GONE, "it has a newer version")
        self._lose_mates(head, own)

    def _fail(self, head: WorkerIncarnation, failure: Failure) -> None:
        self.failures[head.worker] = failure
        self._lose_mates(head, failure)

    def _lose_mates(self, head: WorkerIncarnation, failure: Failure) -> None:
        for mate in self._manifest.mates.get(head.worker, ()):
            text = f"worker {head.worker}, which passes buckets on to it, did not: {failure.text}"
            self.failures.setdefault(mate.worker, Failure(failure.kind, text))

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)


Stream = Iterable[tuple[int, Staged]]


class Order(NamedTuple):
    """How a version is to be sent; see `RoleGroup.sync_weights`."""

    version: int | None
    dtype: torch.dtype | None
    bucket_bytes: int
    timeout: float
    wait: bool
    force: bool
    collective: bool | None


class _Task(NamedTuple):
    """One call of `send`."""

    source: Source
    buckets: tuple[Bucket, ...]
    senders: tuple[WorkerIncarnation, ...]
    ranks: Ranks
    order: Order
    deadline: float


class WeightsSender:
    """Sends to the receivers called `name` of a group of workers, one version at a time.

    Args:
        node: of this worker.
        group: for messages.
    """

    def __init__(self, bus: BusEndpoint, node: str, group: str, name: str) -> None:
        self._bus = bus
        self._name = name
        self._what = f"weights {name!r} for group {group!r}"
        self._calls = LifeCalls(bus)
        self._handshake = Handshake(self._calls, name, self._what, node)
        self._stager = Stager()
        self._last = 0
        self._lock = threading.Lock()
        self._background: threading.Thread | None = None
        self._late_error = ""

    def send(self, weights: torch.nn.Module | Mapping[str, Any], targets: Mapping[str, str], order: Order) -> int:
        """Bring a version to all targets; its number.

        Args:
            targets: node of each worker by its full name; empty: not known.

        Raises:
            WeightsError: it did not reach all; or the one before, which was not waited for, had not.
        """
        deadline = time.monotonic() + order.timeout
        if not self._lock.acquire(timeout=order.timeout):
            raise WeightsTimeoutError(f"another thread was sending {self._what} for all of {order.timeout:g} s.")
        try:
            source = Source(weights, order.dtype)
            together = is_replicated(weights) if order.collective is None else order.collective
            ranks = ranks_for(source, together=together)
            buckets = source.cut(order.bucket_bytes, ranks.size)
            senders = self._agree(ranks, source.digest(buckets), buckets, deadline)
            return self._send(_Task(source, buckets, senders, ranks, order, deadline), targets)
        finally:
            self._lock.release()

    def _agree(
        self, ranks: Ranks, digest: str, buckets: Sequence[Bucket], deadline: float
    ) -> tuple[WorkerIncarnation, ...]:
        """That every rank sends the same model, and that the last one was sent; the lives of those that will send."""
        mine = WorkerIncarnation(self._bus.worker, self._bus.incarnation)
        said: list[tuple[WorkerIncarnation, str, str]] = ranks.gather((mine, digest, self._end_of_background(deadline)))
        for rank, (life, theirs, error) in enumerate(said):
            if error:
                raise WeightsError(f"the version before, which was not waited for: {error}")
            if theirs != said[0][1]:
                raise UsageError(
                    f"the ranks are about to send different models: the keys, shapes, dtypes or bucket_bytes of rank "
                    f"{rank} (worker {life.worker}) differ from those of rank 0."
                )
        wanted = {0} | {bucket.rank for bucket in buckets}
        return tuple(life for rank, (life, _, _) in enumerate(said) if rank in wanted)

    def _send(self, task: _Task, targets: Mapping[str, str]) -> int:
        """Attempt after attempt, the later ones for those whose lives ended on the way."""
        version = task.order.version
        pause_s = FIRST_PAUSE_S
        while True:
            attempt = self._begin(task, targets, version)
            version = attempt.manifest.version
            self._last = max(self._last, version)
            conveyor = Conveyor(self._calls, self._stager, self._name, attempt.manifest, attempt.heads, task.deadline)
            if not task.order.wait:
                self._send_later(task, attempt, conveyor)
                return version
            failures, again = self._send_now(task, attempt, conveyor)
            if not failures:
                return version
            if not again:
                raise self._handshake.error(version, failures)
            targets = {worker: node for worker, node in targets.items() if worker in failures}
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LAST_PAUSE_S)

    def _begin(self, task: _Task, targets: Mapping[str, str], version: int | None) -> Attempt:
        def begin() -> Attempt:
            return self._handshake.begin(
                targets,
                task.source,
                task.buckets,
                task.senders,
                version=version,
                last=self._last,
                force=task.order.force,
                deadline=task.deadline,
            )

        return lead(task.ranks, begin)

    def _send_now(self, task: _Task, attempt: Attempt, conveyor: Conveyor) -> tuple[dict[str, Any], bool]:
        """Who did not get it, and whether to try again."""
        try:
            _convey(conveyor, self._stage(task, keep=False))
            found = task.ranks.gather(conveyor.failures)
        except BaseException as error:
            self._give_up(attempt, error)
            raise
        failures = {worker: failure for each in [attempt.failures, *found] for worker, failure in each.items()}
        verdict = lead(task.ranks, lambda: self._handshake.finish(attempt, failures, task.deadline))
        self._stager.trim(IN_FLIGHT + 2)
        return verdict.failures, verdict.again

    def _send_later(self, task: _Task, attempt: Attempt, conveyor: Conveyor) -> None:
        """Copy now what this rank is to send, and send it in a thread."""
        try:
            kept = list(self._stage(task, keep=True))
            for _, staged in kept:
                staged.wait()
        except BaseException as error:
            self._give_up(attempt, error)
            raise

        def work() -> None:
            try:
                _convey(conveyor, kept)
                failures = {**attempt.failures, **conveyor.failures}
                if task.ranks.rank == 0:
                    failures = self._handshake.finish(attempt, failures, task.deadline).failures
                else:
                    self._handshake.abort(attempt, failures, f"worker {self._bus.worker} could not deliver its part")
                if failures:
                    self._late_error = str(self._handshake.error(attempt.manifest.version, failures))
            except Exception as error:
                self._late_error = f"{type(error).__name__}: {error}"
                self._give_up(attempt, error)

        self._background = threading.Thread(target=work, name="weights-sender", daemon=True)
        self._background.start()

    def _end_of_background(self, deadline: float) -> str:
        """What went wrong with the version that was not waited for; empty: nothing."""
        if self._background is not None:
            self._background.join(left_s(deadline))
            if self._background.is_alive():
                return "it is still being sent."
            self._background = None
        error, self._late_error = self._late_error, ""
        return error

    def _stage(self, task: _Task, *, keep: bool) -> Iterator[tuple[int, Staged]]:
        """This rank's buckets. Those of others it helps to gather: that is a collective."""
        for index, bucket in enumerate(task.buckets):
            if bucket.rank != task.ranks.rank:
                for entry in bucket.entries:
                    if entry.is_sharded:
                        task.source.collect(entry)
                continue
            tensors = [task.source.collect(entry) for entry in bucket.entries]
            is_models = any(map(task.source.is_models, bucket.entries, tensors))
            yield index, self._stager.stage(bucket, tensors, keep=keep and is_models)

    def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        reason = f"worker {self._bus.worker} could not send it: {type(error).__name__}: {error}"
        self._handshake.abort(attempt, [life.worker for life in attempt.lives], reason)


def _convey(conveyor: Conveyor, stream: Stream) -> None:
    """Send each bucket while the next is being copied off the model."""
    before: tuple[int, Staged] | None = None
    for each in stream:
        if before is not None:
            conveyor.put(*before)
        before = each
    if before is not None:
        conveyor.put(*before)
    conveyor.drain()


__all__ = ["Order", "sync_weights"]

_senders: dict[tuple[str, ...], WeightsSender] = {}
"""By inbox of this process, name of the receivers and names of their workers."""
_lock = threading.Lock()


def sync_weights(
    group: str, actors: Sequence[ActorInfo], weights: torch.nn.Module | Mapping[str, Any], name: str, order: Order
) -> int:
    """See `RoleGroup.sync_weights`."""
    if not actors:
        raise UsageError("No actors in the role group.")
    if order.version is not None and (type(order.version) is not int or order.version < 1):
        raise UsageError(f"version={order.version!r}: a whole number from 1 up is wanted.")
    if order.bucket_bytes < 1 or order.timeout <= 0:
        raise UsageError("sync_weights: bucket_bytes and timeout are to be more than zero.")
    worker = current_worker()
    targets = {actor.name: actor.node for actor in actors}
    with _lock:
        key = (worker.bus.inbox_id, name, *targets)
        sender = _senders.get(key)
        if sender is None:
            sender = _senders[key] = WeightsSender(worker.bus, worker.actor_info.node, group, name)
    return sender.send(weights, targets, order)
