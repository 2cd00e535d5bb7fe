"""The way to a process's coordinator: a master by its address, or one in this process.

A `Coordinator` takes the requests of `unified.protocol.coordinator`, from any thread; each ends in its answer or in one
error. All of them may be asked twice, so what a lost connection or a master that restarts has swallowed is asked again
until the request's own time is over. A barrier's answer comes when it is released, however late: whoever asks again for
it says how much of its time is left.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from unified.client.connection import RESEND_S, MasterConnection, PendingReply
from unified.config import settings
from unified.config.addresses import parse_coordinator
from unified.errors import (
    CoordinatorError,
    KeyRefusedError,
    MasterUnreachableError,
    RefusedError,
    UnifiedError,
    UsageError,
    WorkerUnknownError,
)
from unified.protocol.coordinator import CoordinatorRequest, WaitBarrier, coordinator_to_worker
from unified.security.keys import ClusterKey, find_key
from unified.threads import after_fork
from unified.values import ClosedOnExit

LONGEST_WAIT_S = 1_000_000.0
"""Eleven days: a socket's "without an end"."""
BARRIER_GRACE_S = 10.0
"""Seconds beyond a barrier's own time to wait for its answer."""

A = TypeVar("A")


class Coordinator(ABC, ClosedOnExit):
    """The receiver of the requests of `unified.protocol.coordinator`. Any thread may use it."""

    @abstractmethod
    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        """Ask, and do not wait. Cancelling the future gives the answer up; what was asked for may have been done.

        Args:
            expected: the class of the answer.
            timeout_s: seconds until the future fails; None means the coordinator's own time, or some more than that of
                a barrier, whose end the coordinator tells; one that has none may wait for ever.

        The future's errors:
            CoordinatorError: the coordinator said no; has its code.
            MasterUnreachableError: nobody answered in time.
        """

    @abstractmethod
    def close(self) -> None:
        """End what is open here. Requests still waiting fail; a second call does nothing."""

    def ask(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> A:
        """Make a request as `submit` does, and wait for the answer."""
        return self.submit(request, expected, timeout_s=timeout_s).result()


class RemoteCoordinator(Coordinator):
    """A master as coordinator. The connection is opened with the first request, in each process that makes one.

    Args:
        address: a master's, in any form that `unified.config.addresses.parse_coordinator` takes.
        key: the cluster's; None looks where clients look (`unified.security.keys.find_key`).
        timeout_s: how long a request waits for its answer; None: what clients wait (``UNIFIED_CONNECT_S``, 10 s).

    Raises:
        UsageError: `address` is none, or is ``local``.
    """

    def __init__(self, address: str, *, key: ClusterKey | None = None, timeout_s: float | None = None) -> None:
        parsed = parse_coordinator(address)
        if parsed is None:
            raise UsageError("'local' is a coordinator in this process, not the address of one elsewhere.")
        self.address = parsed
        self.timeout_s = settings.intervals().connect_s if timeout_s is None else timeout_s
        self._key = key
        self._is_closed = False
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        """Have no connection: after a fork the socket and its thread are the parent's."""
        self._lock = threading.Lock()
        self._connection: MasterConnection | None = None

    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        future: Future[A] = Future()
        connection = self._connected()
        seconds = self.timeout_s if timeout_s is None else timeout_s
        after: Callable[[float], WaitBarrier] | None = None
        if isinstance(request, WaitBarrier):
            after = partial(barrier_after, request)
            if timeout_s is None:
                own_s = LONGEST_WAIT_S if request.timeout_s is None else request.timeout_s + BARRIER_GRACE_S
                seconds = min(own_s, LONGEST_WAIT_S)

        when_done = partial(_settle, future, connection, expected)
        reply = connection.send(request, timeout_s=seconds, when_done=when_done, after=after)
        future.add_done_callback(lambda _: connection.abandon(reply))
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> MasterConnection:
        with self._lock:
            if self._is_closed:
                raise MasterUnreachableError(f"the connection to the coordinator at {self.address} is closed.")
            if self._connection is None or not self._connection.is_open:
                key = self._key or find_key(self.address)
                self._connection = MasterConnection(
                    self.address, key=key, timeout_s=self.timeout_s, answers=coordinator_to_worker
                )
            return self._connection


def barrier_after(request: WaitBarrier, waited_s: float) -> WaitBarrier:
    """Return what to ask so many seconds after the arrival. A master that knows of it goes by what it was told then;
    one that was started since hears of the time only here.

    That one hears of the others, too, only as each asks again: before it can tell who is missing, they need half of the
    time until this side gives up.
    """
    if request.timeout_s is None or waited_s < RESEND_S:
        return request
    left_s = request.timeout_s - waited_s
    return msgspec.structs.replace(request, timeout_s=max(left_s, (left_s + BARRIER_GRACE_S) / 2, 0.0))


def refusal(code: str, reason: str) -> CoordinatorError:
    """Return the error that stands for a refusal."""
    kind = WorkerUnknownError if code in ("replaced", "unknown-worker") else CoordinatorError
    return kind(reason, code=code)


def expect(answer: object, expected: type[A]) -> A:
    """Return the answer, if it is of this class."""
    if not isinstance(answer, expected):
        raise CoordinatorError(
            f"the coordinator answered with {type(answer).__name__}, not with {expected.__name__}: install the same "
            "release of unified-runtime on both sides."
        )
    return answer


def _settle(future: Future[A], connection: MasterConnection, expected: type[A], reply: PendingReply) -> None:
    with suppress(InvalidStateError):  # cancelled at the same moment
        try:
            future.set_result(connection.take(reply, expected))
        except KeyRefusedError as error:
            future.set_exception(error)
        except RefusedError as error:
            future.set_exception(refusal(error.code, error.reason))
        except UnifiedError as error:
            future.set_exception(error)
