"""`TrainingOrchestrator`: registration, heartbeats, barriers and checkpoint notices of one worker of a training."""

from __future__ import annotations

import asyncio
import math
import secrets
import socket
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

from unified.config.runtime import RuntimeSettings
from unified.coordinator import worker_identity
from unified.coordinator.client import Coordinator
from unified.coordinator.heartbeats import Heartbeats, check_heartbeats, heartbeat_error, interval_within
from unified.errors import (
    BarrierError,
    BarrierTimeoutError,
    MasterUnreachableError,
    UnifiedError,
    UsageError,
    WorkerUnknownError,
)
from unified.protocol import coordinator as protocol
from unified.protocol.client_master import Done
from unified.protocol.coordinator import BarrierResponse, CheckpointResponse, HeartbeatResponse, RecoveryInfo


class CheckpointNotices:
    """Notices of complete checkpoints in one space. Made by `TrainingOrchestrator`."""

    def __init__(self, coordinator: Coordinator, space: str, worker_id: str, world_size: int) -> None:
        self._coordinator = coordinator
        self._space = space
        self._worker_id = worker_id
        self._world_size = world_size

    async def notify(
        self,
        step: int,
        path: str,
        *,
        name: str = "default",
        size_bytes: int = 0,
        checksum: str = "",
        **metadata: object,
    ) -> bool:
        """Announce a complete checkpoint, from which all can go on. `CheckpointManager` does it by itself: this is for
        checkpoints that something else wrote.

        Args:
            path: the path of its manifest.
            name: the series of the checkpoint.
            metadata: anything else, kept as text.

        Returns:
            Whether the checkpoint is the latest of its series.

        Raises:
            CoordinatorError: refused.
        """
        request = protocol.NotifyCheckpoint(
            space=self._space,
            worker_id=self._worker_id,
            step=step,
            path=path,
            name=name,
            size_bytes=size_bytes,
            checksum=checksum,
            world_size=self._world_size,
            metadata={key: str(value) for key, value in metadata.items()},
        )
        answer = await asyncio.wrap_future(self._coordinator.submit(request, CheckpointResponse))
        return answer.is_latest

    async def latest(self, name: str = "default") -> RecoveryInfo | None:
        """Return the latest complete checkpoint of a series that was announced; None if there was none."""
        request = protocol.GetLatestCheckpoint(space=self._space, name=name)
        answer = await asyncio.wrap_future(self._coordinator.submit(request, RecoveryInfo))
        return answer if answer.is_found else None


class TrainingOrchestrator:
    """A training script's registration with its coordinator, and the barriers where it waits for the others.

    Args:
        worker_id: unique in the training; not an address. Default: inside a job the worker's name, else
            ``WORKER_ID``, else ``worker-{rank}``.
        coordinator_url: ``tcp://HOST:PORT``, ``http://HOST:PORT`` or ``HOST:PORT`` of a master; ``local`` for a
            coordinator in this process, which other processes do not see. Default: inside a job its master, else
            ``COORDINATOR_URL``, else ``local``. If there are other workers, ``local`` must be given explicitly.
        world_size: the number of workers. Default: inside a job the workers of its role, else ``WORLD_SIZE``, else 1.
        rank: the rank of this worker, from 0. Default: as in its role, else ``RANK``, else 0.
        heartbeat_interval_s: seconds between heartbeats, fewer than the time-out. Default: ``heartbeat_interval_ms`` of
            the settings here, else of the coordinator's: 1, or less if the time-out is short.
        heartbeat_timeout_s: seconds of silence after which the coordinator takes this worker for lost. Default:
            ``heartbeat_timeout_ms`` of the settings here, else of the coordinator's: 30.

    Any number of tasks may use it. If several threads use it, register and deregister in one of them.
    ``async with`` deregisters at the end, and closes.

    Raises:
        UsageError: the rank is not in the world, there is no coordinator where the worker could meet the others, or an
            argument is not valid; says which.
    """

    def __init__(
        self,
        worker_id: str | None = None,
        coordinator_url: str | Coordinator | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        *,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
    ) -> None:
        identity = worker_identity.discover()
        if worker_id:
            worker_identity.check_worker_id(worker_id, coordinator_url)
        self.world_size = _first(world_size, identity.world_size, 1)
        self.rank = _first(rank, identity.rank, 0)
        worker_identity.check_rank(self.rank, self.world_size)
        worker_identity.check_meeting_place(coordinator_url, self.rank, self.world_size)
        self.worker_id = worker_id or identity.worker_id or f"worker-{self.rank}"
        self._member = worker_identity.member_of_rank(identity, self.rank, self.world_size)
        configured = RuntimeSettings.load_shared()
        if heartbeat_interval_s is None and configured.says("coordinator", "heartbeat_interval_ms"):
            heartbeat_interval_s = configured.coordinator.heartbeat_interval_ms / 1000
        if heartbeat_timeout_s is None and configured.says("coordinator", "heartbeat_timeout_ms"):
            heartbeat_timeout_s = configured.coordinator.heartbeat_timeout_ms / 1000
        check_heartbeats(heartbeat_interval_s, heartbeat_timeout_s)
        self.heartbeat_interval_s = heartbeat_interval_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        """None: the coordinator's time-out."""
        self._space = identity.space
        self._coordinator, self._is_mine = worker_identity.open_coordinator(coordinator_url)
        self.checkpoints = CheckpointNotices(self._coordinator, self._space, self.worker_id, self.world_size)
        """Notices of complete checkpoints, and the latest one."""
        self._lock = threading.Lock()
        self._session = secrets.token_hex(8)
        self._is_lost = False
        self._arrival = 0
        self._heartbeats: Heartbeats | None = None
        self._waiting: set[Future[BarrierResponse]] = set()

    @property
    def is_registered(self) -> bool:
        """False before `register_worker`, after `deregister`, and once the coordinator has taken it for lost."""
        return self._heartbeats is not None

    async def register_worker(
        self, ip: str = "", port: int = 0, *, gpu_count: int = 0, memory_bytes: int = 0, **metadata: object
    ) -> str:
        """Register this worker, and begin its heartbeats. A second call corrects the values of the first one.

        Args:
            ip: the address at which others may reach it; default: this host's name.
            port: the port at that address; 0: none.
            gpu_count: accelerators of this worker.
            memory_bytes: memory of this worker.
            metadata: anything else, kept as text.

        Returns:
            The id under which the coordinator knows this worker: its own id.

        Raises:
            CoordinatorError: refused, for example because another registered worker has this rank.
            MasterUnreachableError: no coordinator answered.
        """
        session = self._session
        request = protocol.RegisterWorker(
            space=self._space,
            worker_id=self.worker_id,
            session=session,
            hostname=ip or socket.gethostname(),
            port=port,
            gpu_count=gpu_count,
            memory_bytes=memory_bytes,
            metadata={name: str(value) for name, value in metadata.items()},
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self.heartbeat_timeout_s,
            member=self._member,
        )
        answer = await asyncio.wrap_future(self._coordinator.submit(request, protocol.WorkerRegistration))
        with self._lock:
            self._is_lost = False
            if self._heartbeats is None and session == self._session:
                self._heartbeats = Heartbeats(
                    self._coordinator,
                    self._incarnation(session),
                    interval_s=interval_within(
                        self.worker_id, self.heartbeat_interval_s or answer.heartbeat_interval_s, answer.timeout_s
                    ),
                    timeout_s=answer.timeout_s,
                    when_lost=lambda error: self._lost(session, error),
                )
        worker_identity.register(self._registration(session))
        return answer.assigned_id

    async def heartbeat(self) -> None:
        """Send one heartbeat, in addition to those that are sent automatically after the registration.

        Raises:
            WorkerUnknownError: the coordinator has taken this worker for lost; it may register again.
            MasterUnreachableError: no coordinator answered.
        """
        await self._be_registered()
        message = self._incarnation(self._session)
        answer = await asyncio.wrap_future(self._coordinator.submit(message, HeartbeatResponse))
        error = heartbeat_error(message, answer)
        if error is not None:
            self._lost(message.session, error)
            raise error

    async def wait_barrier(
        self,
        barrier_id: str,
        timeout: float | None = None,  # noqa: ASYNC109  the reference document's word
        *,
        on_loss: Literal["fail", "shrink"] = "fail",
    ) -> BarrierResponse:
        """Wait until all workers of the world have come to this barrier. Its id can be used again.

        Args:
            barrier_id: the same for all workers.
            timeout: seconds to wait; None: without an end, unless a worker is lost. When one worker's time is over, the
                wait ends for all. The time runs on while the master is away.
            on_loss: what happens when a worker is lost: ``"fail"`` raises in all waiting workers; ``"shrink"`` goes on
                without it. All workers must give the same value.

        Returns:
            The workers that arrived; with ``"shrink"`` also the lost ones.

        Raises:
            BarrierTimeoutError: not all workers came in time; names the missing ones.
            BarrierError: a worker is lost; names it.
            WorkerUnknownError: the coordinator has taken this worker for lost.
            CoordinatorError: refused, for example because others wait there with another world size.
            MasterUnreachableError: no coordinator answered within the heartbeat time-out.
        """
        if timeout is not None and not 0 <= timeout < math.inf:
            raise UsageError(
                f"a barrier's timeout is {timeout} s: give seconds from 0, or None to wait without an end."
            )
        await self._be_registered()
        with self._lock:
            self._arrival += 1
            request = protocol.WaitBarrier(
                space=self._space,
                barrier_id=barrier_id,
                worker_id=self.worker_id,
                session=self._session,
                arrival=self._arrival,
                world_size=self.world_size,
                timeout_s=timeout,
                on_loss=on_loss,
            )
            future = self._coordinator.submit(request, BarrierResponse)
            self._waiting.add(future)
        try:
            answer = await asyncio.wrap_future(future)
        except (asyncio.CancelledError, MasterUnreachableError):
            future.cancel()
            leave_barrier(self._coordinator, request)
            raise
        finally:
            self._waiting.discard(future)
        check_release(barrier_id, answer)
        return answer

    async def deregister(self) -> None:
        """Leave: nobody waits for this worker any more, and its unfinished shards go to others. A second call is no
        error.

        Raises:
            MasterUnreachableError: no coordinator answered; it takes this worker for lost after the heartbeat time-out.
        """
        with self._lock:
            session, self._session = self._session, secrets.token_hex(8)
            heartbeats, self._heartbeats = self._heartbeats, None
            self._is_lost = False
        worker_identity.deregister(self._registration(session))
        if heartbeats is not None:
            heartbeats.stop()
            request = protocol.DeregisterWorker(space=self._space, worker_id=self.worker_id, session=session)
            await asyncio.wrap_future(self._coordinator.submit(request, Done))

    def close(self) -> None:
        """End the heartbeats and the connection. If the worker did not deregister, the coordinator takes it for lost
        after the heartbeat time-out."""
        with self._lock:
            heartbeats, self._heartbeats = self._heartbeats, None
        worker_identity.deregister(self._registration(self._session))
        if heartbeats is not None:
            heartbeats.stop()
        if self._is_mine:
            self._coordinator.close()
        if heartbeats is not None:
            heartbeats.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.deregister()
        except UnifiedError:
            if error is None:
                raise
        finally:
            self.close()

    async def _be_registered(self) -> None:
        if self._heartbeats is None and not self._is_lost:
            await self.register_worker()
        if self._is_lost:
            raise WorkerUnknownError(
                f"worker {self.worker_id} was taken for lost: call register_worker again, or end this process.",
                code="unknown-worker",
            )

    def _registration(self, session: str) -> worker_identity.LocalRegistration:
        return worker_identity.LocalRegistration(
            space=self._space,
            rank=self.rank,
            world_size=self.world_size,
            worker_id=self.worker_id,
            session=session,
            member=self._member,
        )

    def _incarnation(self, session: str) -> protocol.Heartbeat:
        return protocol.Heartbeat(space=self._space, worker_id=self.worker_id, session=session)

    def _lost(self, session: str, error: UnifiedError) -> None:
        """End open waits at barriers in an error: their answers would never come."""
        with self._lock:
            if session != self._session:
                return
            if isinstance(error, WorkerUnknownError):
                self._is_lost = True
                heartbeats, self._heartbeats = self._heartbeats, None
                if heartbeats is not None:
                    heartbeats.stop()
            waiting = list(self._waiting)
        for future in waiting:
            with suppress(InvalidStateError):
                future.set_exception(error)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def leave_barrier(coordinator: Coordinator, request: protocol.WaitBarrier) -> None:
    """Tell the coordinator that this arrival waits no more, without waiting for the answer."""
    leave = protocol.LeaveBarrier(
        space=request.space,
        barrier_id=request.barrier_id,
        worker_id=request.worker_id,
        session=request.session,
        arrival=request.arrival,
    )
    with suppress(UnifiedError):
        coordinator.submit(leave, Done)


def check_release(barrier_id: str, answer: BarrierResponse) -> None:
    """Raise an error for a barrier that ended before all workers had arrived."""
    if answer.released_by == "arrived":
        return
    kind = BarrierTimeoutError if answer.released_by == "timeout" else BarrierError
    raise kind(
        answer.reason or f"barrier {barrier_id!r} was {answer.released_by}.",
        arrived=answer.arrived,
        missing=answer.missing,
        lost=answer.lost,
        code=answer.released_by,
    )
