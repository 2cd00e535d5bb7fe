"""The receiving end of a transfer: versions come in bucket by bucket, and the newest complete one is kept."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from unified.bus.calls.registry import rpc
from unified.bus.endpoint import BusEndpoint
from unified.core.directory import Change, IncarnationDied
from unified.errors import RpcError, UsageError, WeightsError, WeightsTimeoutError
from unified.protocol.records import WorkerIncarnation
from unified.tensors.host_buffers import BufferPool
from unified.weights.catch_up import CatchUp
from unified.weights.handshake import call_incarnations, left_s, method
from unified.weights.state_dict import VersionedStateDict, assemble, check_bucket
from unified.weights.transfer_plan import TransferPlan
from unified.weights.versions import (
    FAILED,
    GONE,
    SUPERSEDED,
    BucketVerdict,
    SessionEnd,
    SessionOutcome,
    TransferFailure,
    VersionTable,
    failure_of,
)
from unified.worker.progress import WEIGHTS

GRACE_S = 5.0
"""Seconds for which a receiver keeps a session alive longer than its sender."""
MAX_IDLE = 2
"""Number of idle buffers kept for copied versions. Two are in use: readers use one, and the other one is filled. More
than that were for slow readers."""


class IncomingVersion:
    """A version that comes in one session.

    Args:
        memory: for copies of the tensors; None: they stay where they arrived. It is reused once no tensor refers to it.
    """

    def __init__(self, plan: TransferPlan, expires_at: float, memory: Any) -> None:
        self.plan = plan
        self.expires_at = expires_at
        self.tensors: dict[str, torch.Tensor] = {}
        self._memory = memory
        self._starts = [0, *itertools.accumulate(bucket.nbytes for bucket in plan.buckets)]

    def kept(self, index: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of a bucket to keep: the received ones, or copies."""
        if self._memory is None:
            return tensors
        bucket, copies = self.plan.buckets[index], []
        for entry, offset, tensor in zip(bucket.entries, bucket.offsets, tensors, strict=True):
            if entry.nbytes == 0:
                copies.append(tensor)
                continue
            flat = torch.frombuffer(
                self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._starts[index] + offset
            )
            copies.append(flat.view(entry.shape).copy_(tensor))
        return copies


class ReceiveService:
    """Receives under one name in one worker.

    Args:
        copy: copy tensors into memory of this process; None: only if the sender cannot spare its own memory.
        node: the node of this worker; empty: not known.
        members: full names of all workers of the role, which receive the same versions.
        load: called with a complete version before its sender learns that it is here, one at a time.
    """

    def __init__(
        self,
        bus: BusEndpoint,
        name: str,
        *,
        copy: bool | None,
        node: str,
        members: Sequence[str],
        load: Callable[[VersionedStateDict], object] | None = None,
    ) -> None:
        self.name = name
        self._bus = bus
        self._me = bus.worker
        self._copy = copy
        self._load = load
        self._loaded: VersionedStateDict | None = None
        self._loading = threading.Lock()
        self._versions = VersionTable()
        self._coming: dict[str, IncomingVersion] = {}
        self._latest: VersionedStateDict | None = None
        self._spare: VersionedStateDict | None = None
        """The version before, kept until the next one begins to come: its sender would give idle memory back to the
        system, and sends five times as slowly into fresh memory."""
        self._awaited: dict[str, list[Future[TransferFailure | None]]] = {}
        self._buffers = BufferPool(one_size=True, max_idle=MAX_IDLE)
        self._changed = threading.Condition(threading.Lock())
        self._is_closed = False
        self._catch_up = CatchUp(bus, name, node, members, lambda: self._latest, self._await_coming)
        self._stop_listening = bus.on_directory(self._learn)
        handlers: dict[str, Callable[..., Any]] = {
            "version": self._answer_version,
            "begin": self._begin,
            "bucket": self._bucket,
            "commit": self._commit,
            "abort": self._abort,
            **self._catch_up.handlers,
        }
        if method(name, "version") in bus.registry:
            raise UsageError(f"worker {self._me} has a WeightsReceiver({name!r}) already: use that one, or close it.")
        for verb, handler in handlers.items():
            bus.registry.register(method(name, verb), handler)
        self._verbs = list(handlers)
        self._catch_up.run()

    @property
    def version(self) -> int:
        return self._versions.version

    def wait(self, min_version: int, timeout: float | None) -> VersionedStateDict:
        """Return the newest complete version, once it is at least `min_version`."""

        def is_there() -> bool:
            return self._is_closed or (self._latest is not None and self._latest.version >= min_version)

        with self._changed:
            came = self._changed.wait_for(is_there, timeout)
            if self._is_closed:
                raise WeightsError(f"WeightsReceiver({self.name!r}) of worker {self._me} was closed.")
            latest = self._latest
            if not came or latest is None:
                there = f"version {latest.version}" if latest is not None else "none"
                coming = self._versions.progress()
                raise WeightsTimeoutError(
                    f"worker {self._me} waited {timeout} s for version {min_version} or newer of weights "
                    f"{self.name!r}: newest complete: {there}; under way: {coming or 'nothing'}."
                )
            return latest

    def _await_coming(self, version: int, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._versions.is_coming(version), timeout_s)

    def close(self) -> None:
        """Stop receiving and drop all versions. Can be called twice."""
        for verb in self._verbs:
            self._bus.registry.unregister(method(self.name, verb))
        with self._changed:
            if self._is_closed:
                return
            self._stop_listening()
            self._is_closed = True
            WEIGHTS.pop(self.name, None)
            self._catch_up.close()
            ended = [
                each
                for session in self._versions.open_sessions
                for each in self._versions.abort(session, "the receiver was closed")
            ]
            self._latest = self._spare = None
            self._buffers.close()
            self._changed.notify_all()
        self._settle(ended)

    @rpc(inline=True)
    def _answer_version(self) -> tuple[int, int]:
        """Return the newest complete version here, and the incarnation of this worker."""
        return self._versions.version, self._bus.incarnation

    def _begin(self, plan: TransferPlan) -> str:
        now = time.monotonic()
        expires_at = now + plan.timeout_s + GRACE_S
        copy = not plan.stays_shared if self._copy is None else self._copy
        with self._changed:
            if self._is_closed:
                return "the receiver was closed"
            begun = self._versions.begin(now, plan, expires_at)
            self._spare = None
        self._settle(begun.ended)  # before the memory for the next one is taken
        if begun.refusal:
            return begun.refusal
        try:
            memory = self._buffers.borrow(max(plan.nbytes, 1)) if copy else None
        except OSError as error:
            self._settle(self._locked(self._versions.abort, plan.session, str(error)))
            return f"it has no memory for {plan.nbytes} bytes ({error})"
        coming = IncomingVersion(plan, expires_at, memory)
        with self._changed:
            if plan.session in self._versions.open_sessions:
                self._coming.setdefault(plan.session, coming)
        return ""

    def _bucket(self, session: str, index: int, tensors: Sequence[object]) -> Any:
        """Return failures by worker: of this one, and of its children if it passes the bucket on (a future then)."""
        coming = self._coming.get(session)
        children = () if coming is None else coming.plan.children.get(self._me, ())
        if coming is None or not children:
            return self._kept(session, index, tensors)
        args, timeout_s = [session, index, tensors], left_s(coming.expires_at)
        try:
            passed_on = call_incarnations(self._bus, children, method(self.name, "bucket"), args, timeout=timeout_s)
        except RpcError as error:  # too many bytes are in flight to them
            return self._kept(session, index, tensors) | {child.worker: failure_of(error) for child in children}
        return _all_of(self._kept(session, index, tensors), children, passed_on)

    def _kept(self, session: str, index: int, tensors: Sequence[object]) -> dict[str, TransferFailure]:
        with self._changed:
            coming = self._coming.get(session)
            take = self._versions.take(session, index)
            outcome = self._versions.outcome(session)
        if take is BucketVerdict.DUPLICATE:
            return {}
        if coming is None or take is BucketVerdict.UNWANTED:
            return (
                {self._me: self._as_failure(outcome) or TransferFailure(SUPERSEDED, "")} if outcome is not None else {}
            )
        try:
            kept = coming.kept(index, check_bucket(coming.plan, index, tensors))
        except Exception as error:
            self._settle(self._locked(self._versions.abort, session, str(error)))
            raise
        with self._changed:
            for entry, tensor in zip(coming.plan.buckets[index].entries, kept, strict=True):
                coming.tensors[entry.key] = tensor
            ended = self._versions.stored(session, index)
            self._publish(ended)
        self._settle(ended)
        return {}

    def _commit(self, session: str) -> Any:
        """Return a future of the session's end: None, or the reason why its version was not published."""
        ended = self._publish_committed(session)
        if self._load is None:
            return ended
        failure = ended.result()
        with self._loading:
            latest = self._latest
            if failure is None and latest is not None and latest is not self._loaded:
                self._load(latest)
                self._loaded = latest
        return failure

    def _publish_committed(self, session: str) -> Future[TransferFailure | None]:
        future: Future[TransferFailure | None] = Future()
        with self._changed:
            ended = self._versions.commit(session)
            self._publish(ended)
            outcome = self._versions.outcome(session)
            if outcome is None:
                self._awaited.setdefault(session, []).append(future)
        if outcome is not None:
            future.set_result(self._as_failure(outcome))
        self._settle(ended)
        return future

    @rpc(inline=True)
    def _abort(self, session: str, reason: str) -> None:
        self._settle(self._locked(self._versions.abort, session, reason))

    def _learn(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, IncarnationDied):
                dead = WorkerIncarnation(change.worker, change.incarnation)
                self._settle(self._locked(self._versions.incarnation_died, dead, change.reason))

    def _locked(self, do: Callable[..., list[SessionEnd]], *args: object) -> list[SessionEnd]:
        with self._changed:
            return do(*args)

    def _publish(self, ended: Sequence[SessionEnd]) -> None:
        """Make a complete version the newest one. Called under the lock."""
        for each in ended:
            if each.how is SessionOutcome.PUBLISHED:
                coming = self._coming[each.session]
                self._spare, self._latest = self._latest, assemble(coming.plan, coming.tensors)
                self._changed.notify_all()

    def _settle(self, ended: Sequence[SessionEnd]) -> None:
        """Drop ended sessions, and answer the senders that wait. Called without the lock."""
        for each in ended:
            with self._changed:
                self._coming.pop(each.session, None)
                self._changed.notify_all()
                awaited = self._awaited.pop(each.session, [])
            for future in awaited:
                future.set_result(self._as_failure(each))
            if each.how is SessionOutcome.PUBLISHED:
                WEIGHTS[self.name] = each.version

    def _as_failure(self, ended: SessionEnd) -> TransferFailure | None:
        """Return the failure of an ended session, for its sender; None: published, or superseded, which is as good."""
        if ended.how in (SessionOutcome.PUBLISHED, SessionOutcome.SUPERSEDED):
            return None
        if ended.how is SessionOutcome.UNKNOWN:
            return TransferFailure(GONE, "its present incarnation does not know the attempt")
        return TransferFailure(GONE if self._is_closed else FAILED, ended.reason)


def _all_of(
    own: dict[str, TransferFailure],
    children: Sequence[WorkerIncarnation],
    passed_on: Sequence[Future[dict[str, TransferFailure]]],
) -> Future[dict[str, TransferFailure]]:
    """Return a future of all failures, which is done once all calls have ended."""
    whole: Future[dict[str, TransferFailure]] = Future()
    failures = dict(own)
    lock = threading.Lock()
    left = len(passed_on)

    def ended(child: str, future: Future[dict[str, TransferFailure]]) -> None:
        nonlocal left
        try:
            found = future.result()
        except BaseException as error:
            found = {child: failure_of(error)}
        with lock:
            failures.update(found)
            left -= 1
            is_last = left == 0
        if is_last:
            whole.set_result(failures)

    for child, future in zip(children, passed_on, strict=True):
        future.add_done_callback(partial(ended, child.worker))
    return whole
