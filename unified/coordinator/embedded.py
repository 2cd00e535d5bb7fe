"""A coordinator in this process, for scripts without a master: the core, a lock, a thread while there are deadlines.

Its state is in memory only: it ends with the process, and no other process sees it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from unified.coordinator.client import Coordinator, expect, refusal
from unified.coordinator.core.coordinator import CoordinatorCore
from unified.coordinator.core.messages import AnswerRequest, CoordinatorTick, Event, LogEvent, RequestCame
from unified.errors import CoordinatorError, ProtocolError, UnifiedError
from unified.protocol.client_master import MasterAnswer, Refused
from unified.protocol.coordinator import CoordinatorRequest, Heartbeat, WorkerToCoordinator, worker_to_coordinator
from unified.threads import TimerThread

_log = logging.getLogger("unified.data")
_encoder = msgspec.msgpack.Encoder()

A = TypeVar("A")


class EmbeddedCoordinator(Coordinator):
    """Answers like a master, in the threads of the callers; a worker at a barrier waits for its future."""

    def __init__(self) -> None:
        self._core = CoordinatorCore()
        self._offset = time.time() - time.monotonic()
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], type[Any]]] = {}
        self._next_number = 1
        self._timer = TimerThread("unified-coordinator", self._pass_time)
        self._is_closed = False

    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        """Make a request, like `Coordinator.submit`. `timeout_s` is ignored: only barriers wait, and they have their
        own time."""
        future: Future[A] = Future()
        try:
            message = _as_sent(request)
        except CoordinatorError as error:
            future.set_exception(error)
            return future
        with self._lock:
            if self._is_closed:
                raise CoordinatorError("the coordinator in this process is closed.")
            if isinstance(message, Heartbeat):
                answers: list[tuple[Future[Any], object]] = [
                    (future, expect(self._core.heartbeat(self._now(), message), expected))
                ]
            else:
                self._waiting[self._next_number] = (future, expected)
                self._next_number += 1
                event = RequestCame(token=(b"", self._next_number - 1), request=message)
                answers = self._step(event)
        _resolve(answers)
        return future

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            left = list(self._waiting.values())
            self._waiting.clear()
        self._timer.close()
        closed = CoordinatorError("the coordinator in this process was closed.", code="closed")
        _resolve((future, closed) for future, *_ in left)

    def _now(self) -> float:
        """Return seconds since 1970 that never go back."""
        return time.monotonic() + self._offset

    def _step(self, event: Event) -> list[tuple[Future[Any], object]]:
        """Return the futures that have an answer now, to be ended after the lock is released. The lock is held."""
        answers: list[tuple[Future[Any], object]] = []
        for action in self._core.step(self._now(), event):
            if isinstance(action, AnswerRequest):
                found = self._waiting.pop(action.token[1], None)
                if found is not None:
                    answers.append((found[0], _judge(action.answer, found[1])))
            elif isinstance(action, LogEvent):
                _log.info("event=%s worker=%s reason=%r", action.event, action.worker_id, action.reason)
        due = self._core.next_deadline
        if due is None:
            self._timer.clear()
        else:
            self._timer.set(due - self._offset)
        return answers

    def _pass_time(self) -> None:
        with self._lock:
            answers = [] if self._is_closed else self._step(CoordinatorTick())
        _resolve(answers)


_shared: EmbeddedCoordinator | None = None
_shared_lock = threading.Lock()


def embedded_coordinator() -> EmbeddedCoordinator:
    """Return the coordinator of this process, made at the first call. A forked child has its own, empty one."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = EmbeddedCoordinator()
        return _shared


def _renew_after_fork() -> None:
    """Give a child its own coordinator, and a new lock: a thread of the parent may have held the old one."""
    global _shared, _shared_lock
    _shared, _shared_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_renew_after_fork)


def _as_sent(request: CoordinatorRequest) -> WorkerToCoordinator:
    """Return the request as a master would read it, so that wrong values raise the same error here as there."""
    try:
        return worker_to_coordinator.decode_body(_encoder.encode(request))
    except (ProtocolError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CoordinatorError(f"{type(request).__name__} cannot be sent: {error}", code="bad-request") from None


def _judge(answer: MasterAnswer, expected: type[A]) -> A | UnifiedError:
    if isinstance(answer, Refused):
        return refusal(answer.code, answer.reason)
    try:
        return expect(answer, expected)
    except CoordinatorError as error:
        return error


def _resolve(answers: Iterable[tuple[Future[Any], object]]) -> None:
    for future, answer in answers:
        with suppress(InvalidStateError):  # the caller has given up
            if isinstance(answer, UnifiedError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
