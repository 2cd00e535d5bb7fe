"""Client of a process's coordinator: a master with an address, or a coordinator in this process.

A `Coordinator` takes the requests of `unified.protocol.coordinator`, from any thread; each ends in its answer or in one
error. All requests may be sent twice. So a request that is lost with a connection, or in a master that restarts, is
sent again until its own time is over. A barrier's answer comes when the barrier is released, however late; a repeated
request for it says how much of its time is left.
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

from unified import errors
from unified.client.connection import RESEND_S, MasterConnection, PendingReply
from unified.config import settings
from unified.config.addresses import parse_coordinator
from unified.protocol.coordinator import CoordinatorRequest, WaitBarrier, coordinator_to_worker
from unified.security.keys import ClusterKey, find_key
from unified.threads import after_fork
from unified.values import ClosedOnExit

LONGEST_WAIT_S = 1_000_000.0
"""Eleven days: a wait without an end, for a socket."""
BARRIER_GRACE_S = 10.0
"""Seconds beyond a barrier's own time to wait for its answer."""

A = TypeVar("A")


class Coordinator(ABC, ClosedOnExit):
    """The receiver of the requests of `unified.protocol.coordinator`. Any thread may use it."""

    @abstractmethod
    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        """Send a request, and do not wait. If the future is cancelled, the request may have been carried out.

        Args:
            expected: the class of the answer.
            timeout_s: seconds until the future fails; None: the coordinator's own time. For a barrier, whose end the
                coordinator tells, None is somewhat more than the barrier's time; without one it may wait for ever.

        The future's errors:
            CoordinatorError: the coordinator refused; has its code.
            MasterUnreachableError: nobody answered in time.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the coordinator. Requests that still wait fail; a second call does nothing."""

    def ask(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> A:
        """Make a request as `submit` does, and wait for the answer."""
        return self.submit(request, expected, timeout_s=timeout_s).result()


class RemoteCoordinator(Coordinator):
    """A master as coordinator. The connection is opened with the first request, in each process that makes one.

    Args:
        address: the address of a master, in any form that `unified.config.addresses.parse_coordinator` takes.
        key: the cluster key; None: found as clients find it (`unified.security.keys.find_key`).
        timeout_s: seconds that a request waits for its answer; None: the time of clients (``UNIFIED_CONNECT_S``, 10 s).

    Raises:
        UsageError: `address` is not an address, or is ``local``.
    """

    def __init__(self, address: str, *, key: ClusterKey | None = None, timeout_s: float | None = None) -> None:
        parsed = parse_coordinator(address)
        if parsed is None:
            raise errors.UsageError("'local' is a coordinator in this process, not the address of one elsewhere.")
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
                raise errors.MasterUnreachableError(f"the connection to the coordinator at {self.address} is closed.")
            if self._connection is None or not self._connection.is_open:
                key = self._key or find_key(self.address)
                self._connection = MasterConnection(
                    self.address, key=key, timeout_s=self.timeout_s, answers=coordinator_to_worker
                )
            return self._connection


def barrier_after(request: WaitBarrier, waited_s: float) -> WaitBarrier:
    """Return the request to send `waited_s` seconds after the arrival. A master that knows the arrival keeps its first
    deadline; a master that was started since then learns the time only here.

    The new master learns of the other workers, too, only when each asks again. Before it can tell which are missing,
    they need half of the time until this side gives up.
    """
    if request.timeout_s is None or waited_s < RESEND_S:
        return request
    left_s = request.timeout_s - waited_s
    return msgspec.structs.replace(request, timeout_s=max(left_s, (left_s + BARRIER_GRACE_S) / 2, 0.0))


def refusal(code: str, reason: str) -> errors.CoordinatorError:
    kind = errors.WorkerUnknownError if code in ("replaced", "unknown-worker") else errors.CoordinatorError
    return kind(reason, code=code)


def expect(answer: object, expected: type[A]) -> A:
    if not isinstance(answer, expected):
        raise errors.CoordinatorError(
            f"the coordinator answered with {type(answer).__name__}, not with {expected.__name__}: install the same "
            "release of unified-runtime on both sides."
        )
    return answer


def _settle(future: Future[A], connection: MasterConnection, expected: type[A], reply: PendingReply) -> None:
    with suppress(InvalidStateError):  # cancelled at the same moment
        try:
            future.set_result(connection.take(reply, expected))
        except errors.KeyRefusedError as error:
            future.set_exception(error)
        except errors.RefusedError as error:
            future.set_exception(refusal(error.code, error.reason))
        except errors.UnifiedError as error:
            future.set_exception(error)
