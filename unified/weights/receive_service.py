"""A receiver's side of the bus: versions come in here, bucket by bucket, and the newest complete one is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from unified.bus.calls.registry import rpc
from unified.bus.endpoint import BusEndpoint
from unified.core.directory import Change
from unified.errors import RpcError, UsageError, WeightsError, WeightsTimeoutError
from unified.protocol.records import WorkerIncarnation
from unified.weights.arena import Arena, ArenaPool
from unified.weights.lives import FAILED, GONE, OVERTAKEN, Failure, LifeCalls, ended_lives, failure_of, method
from unified.weights.state_dict import VersionedStateDict, assemble, check_bucket
from unified.weights.transfer_plan import Manifest
from unified.weights.versions import Assembly, Ended, How, Opening, Take

GRACE_S = 5.0
"""How much longer than its sender a receiver keeps a session alive."""


class _Coming:
    """What has come of one session."""

    def __init__(self, manifest: Manifest, expires_at: float, arena: Arena | None) -> None:
        self.manifest = manifest
        self.expires_at = expires_at
        self.arena = arena
        self.tensors: dict[str, torch.Tensor] = {}


class Reception:
    """Receives under one name in one worker.

    Args:
        bus: of this worker.
        name: of the receiver.
        copy: copy what comes into memory of its own; None: where the sender cannot spare its own.
        on_published: called, without a lock, on the thread that completed a version.

    Raises:
        UsageError: there is one of this name in this process already.
    """

    def __init__(
        self, bus: BusEndpoint, name: str, *, copy: bool | None, on_published: Callable[[int], object]
    ) -> None:
        self.name = name
        self._bus = bus
        self._me = bus.worker
        self._copy = copy
        self._on_published = on_published
        self._assembly = Assembly()
        self._coming: dict[str, _Coming] = {}
        self._latest: VersionedStateDict | None = None
        self._spare: VersionedStateDict | None = None
        """The one before, kept until the next begins to come: its sender would give memory that lies idle back to the
        system, and sends five times as slowly into fresh memory."""
        self._awaited: dict[str, list[Future[Failure | None]]] = {}
        self._arenas = ArenaPool()
        self._changed = threading.Condition(threading.Lock())
        self._is_closed = False
        self._calls = LifeCalls(bus, also=self._learn)
        handlers: dict[str, Callable[..., Any]] = {
            "version": self._answer_version,
            "begin": self._begin,
            "bucket": self._bucket,
            "commit": self._commit,
            "abort": self._abort,
        }
        if method(name, "version") in bus.registry:
            raise UsageError(f"worker {self._me} has a WeightsReceiver({name!r}) already: use that one, or close it.")
        for verb, handler in handlers.items():
            bus.registry.register(method(name, verb), handler)
        self._verbs = list(handlers)

    @property
    def version(self) -> int:
        return self._assembly.version

    def wait(self, min_version: int, timeout: float | None) -> VersionedStateDict:
        """The newest complete version, once it is at least `min_version`.

        Raises:
            WeightsTimeoutError: it was not within `timeout` seconds.
            WeightsError: the receiver was closed.
        """

        def is_there() -> bool:
            return self._is_closed or (self._latest is not None and self._latest.version >= min_version)

        with self._changed:
            came = self._changed.wait_for(is_there, timeout)
            if self._is_closed:
                raise WeightsError(f"WeightsReceiver({self.name!r}) of worker {self._me} was closed.")
            latest = self._latest
            if not came or latest is None:
                there = f"version {latest.version}" if latest is not None else "none"
                coming = self._assembly.progress()
                raise WeightsTimeoutError(
                    f"worker {self._me} waited {timeout} s for version {min_version} or newer of weights "
                    f"{self.name!r}: complete is {there}; on its way {coming or 'nothing'}."
                )
            return latest

    def close(self) -> None:
        """Receive no more and let everything go; a second time changes nothing."""
        for verb in self._verbs:
            self._bus.registry.unregister(method(self.name, verb))
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            ended = [
                each
                for session in self._assembly.open_sessions
                for each in self._assembly.abort(session, "the receiver was closed")
            ]
            self._latest = self._spare = None
            self._arenas.close()
            self._changed.notify_all()
        self._settle(ended)

    @rpc(inline=True)
    def _answer_version(self) -> tuple[int, int]:
        """The newest complete version here, and which life of the worker this is."""
        return self._assembly.version, self._bus.incarnation

    def _begin(self, manifest: Manifest) -> str:
        now = time.monotonic()
        expires_at = now + manifest.timeout_s + GRACE_S
        opening = Opening(
            session=manifest.session,
            version=manifest.version,
            num_buckets=len(manifest.buckets),
            senders=manifest.senders,
            expires_at=expires_at,
            force=manifest.force,
        )
        copy = not manifest.is_lent if self._copy is None else self._copy
        with self._changed:
            if self._is_closed:
                return "the receiver was closed"
            begun = self._assembly.begin(now, opening)
            self._spare = None
        self._settle(begun.ended)  # before the memory for the next one is taken
        if begun.refusal:
            return begun.refusal
        try:
            arena = self._arenas.make(manifest) if copy else None
        except OSError as error:
            self._settle(self._locked(self._assembly.abort, manifest.session, str(error)))
            return f"it has no memory for {manifest.nbytes} bytes ({error})"
        coming = _Coming(manifest, expires_at, arena)
        with self._changed:
            if manifest.session in self._assembly.open_sessions:
                self._coming.setdefault(manifest.session, coming)
        return ""

    def _bucket(self, session: str, index: int, tensors: Sequence[object]) -> Any:
        """Failures by worker: of this one, and of those it passes the bucket on to (a future then)."""
        coming = self._coming.get(session)
        mates = () if coming is None else coming.manifest.mates.get(self._me, ())
        if coming is None or not mates:
            return self._kept(session, index, tensors)
        left_s = max(coming.expires_at - time.monotonic(), 0.001)
        try:
            passed_on = self._calls.call_many(
                mates, method(self.name, "bucket"), [session, index, tensors], timeout=left_s
            )
        except RpcError as error:  # no room on the way to them
            return self._kept(session, index, tensors) | {mate.worker: failure_of(error) for mate in mates}
        return _all_of(self._kept(session, index, tensors), mates, passed_on)

    def _kept(self, session: str, index: int, tensors: Sequence[object]) -> dict[str, Failure]:
        with self._changed:
            coming = self._coming.get(session)
            take = self._assembly.take(session, index)
            outcome = self._assembly.outcome(session)
        if take is Take.DUPLICATE:
            return {}
        if coming is None or take is Take.UNWANTED:
            return {self._me: self._as_failure(outcome) or Failure(OVERTAKEN, "")} if outcome is not None else {}
        try:
            kept = check_bucket(coming.manifest, index, tensors)
            if coming.arena is not None:
                kept = coming.arena.fill(index, kept)
        except Exception as error:
            self._settle(self._locked(self._assembly.abort, session, str(error)))
            raise
        with self._changed:
            for entry, tensor in zip(coming.manifest.buckets[index].entries, kept, strict=True):
                coming.tensors[entry.key] = tensor
            ended = self._assembly.stored(session, index)
            self._publish(ended)
        self._settle(ended)
        return {}

    def _commit(self, session: str) -> Future[Failure | None]:
        """Ends when the session does: with None, or why its version was not published."""
        future: Future[Failure | None] = Future()
        with self._changed:
            ended = self._assembly.commit(session)
            self._publish(ended)
            outcome = self._assembly.outcome(session)
            if outcome is None:
                self._awaited.setdefault(session, []).append(future)
        if outcome is not None:
            future.set_result(self._as_failure(outcome))
        self._settle(ended)
        return future

    @rpc(inline=True)
    def _abort(self, session: str, reason: str) -> None:
        self._settle(self._locked(self._assembly.abort, session, reason))

    def _learn(self, changes: Sequence[Change]) -> None:
        for life, reason in ended_lives(changes):
            self._settle(self._locked(self._assembly.life_over, life, reason))

    def _locked(self, do: Callable[..., list[Ended]], *args: object) -> list[Ended]:
        with self._changed:
            return do(*args)

    def _publish(self, ended: Sequence[Ended]) -> None:
        """Under the lock: what the assembly says is complete becomes the newest version in the same moment."""
        for each in ended:
            if each.how is How.PUBLISHED:
                coming = self._coming[each.session]
                self._spare, self._latest = self._latest, assemble(coming.manifest, coming.tensors)
                self._changed.notify_all()

    def _settle(self, ended: Sequence[Ended]) -> None:
        """Without the lock: let go of what has ended, and tell those who asked."""
        for each in ended:
            with self._changed:
                self._coming.pop(each.session, None)
                awaited = self._awaited.pop(each.session, [])
            for future in awaited:
                future.set_result(self._as_failure(each))
            if each.how is How.PUBLISHED:
                self._on_published(each.version)

    def _as_failure(self, ended: Ended) -> Failure | None:
        """The end of a session, for its sender. An overtaken one is as good as delivered."""
        if ended.how in (How.PUBLISHED, How.OVERTAKEN):
            return None
        if ended.how is How.UNKNOWN:
            return Failure(GONE, "this life of it never heard of the attempt")
        return Failure(GONE if self._is_closed else FAILED, ended.reason)


def _all_of(
    own: dict[str, Failure], mates: Sequence[WorkerIncarnation], passed_on: Sequence[Future[dict[str, Failure]]]
) -> Future[dict[str, Failure]]:
    """The failures of all, once all calls have ended."""
    whole: Future[dict[str, Failure]] = Future()
    failures = dict(own)
    lock = threading.Lock()
    left = len(passed_on)

    def ended(mate: str, future: Future[dict[str, Failure]]) -> None:
        nonlocal left
        try:
            found = future.result()
        except BaseException as error:
            found = {mate: failure_of(error)}
        with lock:
            failures.update(found)
            left -= 1
            is_last = left == 0
        if is_last:
            whole.set_result(failures)

    for mate, future in zip(mates, passed_on, strict=True):
        future.add_done_callback(partial(ended, mate.worker))
    return whole
