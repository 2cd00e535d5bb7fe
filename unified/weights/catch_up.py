"""Catch-up of a receiver that syncs have left out: it gets the newest version from a member of its role.

A new receiver asks members for their versions. A sync that began before the receiver was there tells it, when the
others have the version, who has it: `Handshake.tell`. So a receiver misses no version, whichever comes first.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from unified.bus.calls.registry import rpc
from unified.bus.endpoint import BusEndpoint
from unified.errors import RpcError, WeightsError, listed
from unified.protocol.records import WorkerIncarnation
from unified.threads import SerialWorker
from unified.weights.handshake import ANSWER_S, SyncOptions, call_incarnations, left_s, method
from unified.weights.sender import WeightsSender
from unified.weights.state_dict import VersionedStateDict
from unified.weights.transfer_plan import BUCKET_BYTES

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ASKED = 64
"""Members that a new receiver asks. More would cost the start of a large role a connection of each with each."""
WITHIN_S = 300.0
"""Seconds that a transfer may take, the default of `sync_weights`."""


class CatchUp:
    """One receiver's transfers from and to other members of its role.

    Args:
        node: the node of this worker; empty: not known.
        members: full names of all workers of the role.
        latest: returns the newest complete version here, or None.
        await_coming: waits, so many seconds at most, while a version of at least this number is on its way here.
    """

    def __init__(
        self,
        bus: BusEndpoint,
        name: str,
        node: str,
        members: Sequence[str],
        latest: Callable[[], VersionedStateDict | None],
        await_coming: Callable[[int, float], object],
    ) -> None:
        self._bus = bus
        self._name = name
        self._node = node
        self._members = [worker for worker in members if worker != bus.worker]
        self._latest = latest
        self._await_coming = await_coming
        self._why = ""
        """Reason why the last transfer failed."""
        self._puller: SerialWorker[Callable[[], None]] = SerialWorker("weights-catch-up", lambda work: work())
        self._passer: SerialWorker[Callable[[], None]] = SerialWorker("weights-pass-on", lambda work: work())
        self.handlers: dict[str, Callable[..., object]] = {"news": self._take_news, "pull": self._answer_pull}

    def run(self) -> None:
        """Ask members for their versions, and wait until the newest one is here.

        Raises:
            WeightsError: members have it, and none of them could send it.
        """
        directory = self._bus.directory
        asked = [worker for worker in self._members if directory.reachable(worker) is not None]
        asked = random.SystemRandom().sample(asked, min(len(asked), MAX_ASKED))
        try:
            calls = self._bus.call_many(asked, method(self._name, "version"), [], {}, timeout=ANSWER_S)
        except RpcError:  # too many bytes are in flight
            return
        holders: dict[int, list[WorkerIncarnation]] = {}
        for worker, call in zip(asked, calls, strict=True):
            if call.exception() is None:  # else it has no receiver
                version, incarnation = call.result()
                holders.setdefault(version, []).append(WorkerIncarnation(worker, incarnation))
        newest = max(holders, default=0)
        self._pull(newest, holders.get(newest, ()))
        still = [each.worker for each in holders.get(newest, ()) if directory.reachable(each.worker) is not None]
        if still and self._version() < newest:
            who = f"worker {self._bus.worker} did not get version {newest} of weights {self._name!r}"
            raise WeightsError(f"{who} from {listed(still)}: {self._why or 'it did not come'}")

    def close(self) -> None:
        for worker in (self._puller, self._passer):
            worker.close(0.0)

    def _pull(self, version: int, holders: Sequence[WorkerIncarnation]) -> None:
        """Get a version from the first of its holders that can send it, unless it is here."""
        deadline = time.monotonic() + WITHIN_S
        for holder in holders:
            if self._version() >= version:
                return
            args, timeout_s = [self._bus.worker, self._node], left_s(deadline)
            try:
                (call,) = call_incarnations(self._bus, [holder], method(self._name, "pull"), args, timeout=timeout_s)
                call.result()
            except RpcError as error:
                self._why = str(error)
                logger.info("weights=%s event=not-caught-up from=%s reason=%r", self._name, holder.worker, self._why)
                self._await_coming(version, left_s(deadline))  # a sync may have taken the place of the transfer

    def _version(self) -> int:
        latest = self._latest()
        return 0 if latest is None else latest.version

    @rpc(inline=True)
    def _take_news(self, version: int, holders: list[WorkerIncarnation]) -> Future[int]:
        """Return a future of the version that is here after a catch-up, for the sync that left this worker out."""

        def pull() -> int:
            self._pull(version, random.SystemRandom().sample(holders, len(holders)))
            return self._version()

        return _put(self._puller, pull)

    @rpc(inline=True)
    def _answer_pull(self, target: str, node: str) -> Future[None]:
        """Return a future of the end of a transfer to a member."""
        return _put(self._passer, partial(self._pass_on, target, node))

    def _pass_on(self, target: str, node: str) -> None:
        latest = self._latest()
        if latest is None:
            raise WeightsError(f"worker {self._bus.worker} has no version of weights {self._name!r} any more.")
        options = SyncOptions(latest.version, None, BUCKET_BYTES, WITHIN_S, wait=True, require=0, is_catch_up=True)
        WeightsSender(self._bus, self._node, "its own role", self._name).send(latest, {target: node}, options)


def _put(worker: SerialWorker[Callable[[], None]], work: Callable[[], T]) -> Future[T]:
    """Let a worker do some work; return a future of the result."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except Exception as error:
            ended.set_exception(error)

    worker.put(run)
    worker.start()
    return ended
