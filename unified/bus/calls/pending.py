"""Table of pending calls: every decision about them. Pure: no socket, no clock, no thread.

Every call ends exactly once. An open call was *sent* to one incarnation of its target, or it *waits*: for an
incarnation, until the relay knows that incarnation, or until earlier calls that waited are sent. So calls to one worker
leave in the order in which they were made. A call that the relay gave back gets its old position again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from unified.core.backoff import Backoff
from unified.core.directory import Change, IncarnationDied, IncarnationStarted, WorkerDirectory, WorkerEnded
from unified.core.timers import TimerTable
from unified.errors import (
    BusOverloadedError,
    RouteLostError,
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.values import Value

GIVEN_BACK = Backoff(first_s=0.02, limit_s=1.0, num_free=0)
"""Waits before a call that a relay gave back is sent again."""
LOST_GRACE_S = 2.0
"""Seconds to wait for news that the worker behind a broken link died."""


class DeliveryFailed(Value, frozen=True, kw_only=True):
    """The relay gave a call back: it was surely not delivered."""

    call_id: int
    code: Literal["unknown-target", "overloaded"]


class MailLost(Value, frozen=True, kw_only=True):
    """The answer to a call, or a message of its stream, was lost. If the callee died, news of that is coming."""

    call_id: int
    reason: str


class SendFailed(Value, frozen=True, kw_only=True):
    """A call could not be sent: there is no route, or the queue to the peer stayed full."""

    call_id: int
    error: RpcError


class LinkLost(Value, frozen=True, kw_only=True):
    """The connection to an inbox broke, or nobody listened there. If its process died, news of that is on its way."""

    inbox_id: str
    reason: str


class CallCancelled(Value, frozen=True, kw_only=True):
    call_id: int


class TimePassed(Value, frozen=True, kw_only=True):
    """A deadline may have come."""


class BusClosed(Value, frozen=True, kw_only=True):
    reason: str


Event = DeliveryFailed | MailLost | SendFailed | LinkLost | CallCancelled | TimePassed | BusClosed


class SendWaiting(Value, frozen=True, kw_only=True):
    """Send the waiting calls to `target`: call `CallTable.release` until it returns none."""

    target: str


class SendCall(Value, frozen=True, kw_only=True):
    """Send a call that has `timeout_s` seconds left; None: no deadline."""

    call_id: int
    inbox: Inbox
    timeout_s: float | None


class FailCall(Value, frozen=True, kw_only=True):
    call_id: int
    error: RpcError


class SendCancel(Value, frozen=True, kw_only=True):
    """Tell the callee that nobody waits any more."""

    call_id: int
    inbox: Inbox


class DropPeer(Value, frozen=True, kw_only=True):
    """Close the connection to this inbox: its process is gone."""

    inbox_id: str


Action = SendWaiting | FailCall | SendCancel | DropPeer
TimerKey = tuple[Literal["deadline", "lost"], int] | tuple[Literal["retry"], str]


class _OpenCall(msgspec.Struct, gc=False):
    call_id: int
    target: str
    method: str
    made_at: float
    timeout_s: float | None
    inbox: Inbox | None = None
    """Inbox of the incarnation that the call was sent to; None while it waits."""
    incarnation: int = -1
    """Incarnation whose end ends the call: the only one that may get it, or that it was sent to (even if the relay gave
    the call back); -1: neither."""
    sent_at: float = 0.0
    num_refused: int = 0
    """Number of times that a relay did not know the target."""
    lost: str = ""
    """Reason why the link of the call broke, or its answer was lost; empty: neither."""

    def left(self, now: float) -> float | None:
        return None if self.timeout_s is None else max(self.made_at + self.timeout_s - now, 0.0)


class CallTable:
    """The open calls of one process. `step(now, event)` takes any event in any state and returns the actions.

    The events of every call come ten thousand times a second, and have their own methods: `make` and `answer`.
    """

    def __init__(self, directory: WorkerDirectory | None = None) -> None:
        self.directory = WorkerDirectory() if directory is None else directory
        self._open: dict[int, _OpenCall] = {}
        self._by_target: dict[str, dict[int, _OpenCall]] = {}
        self._waiting: dict[str, dict[int, _OpenCall]] = {}
        """Open calls that are not sent and may go to the newest incarnation of their target, by target."""
        self._early: dict[str, dict[int, _OpenCall]] = {}
        """Open calls whose incarnation has not begun, by target."""
        self._ready: dict[str, tuple[Inbox, int]] = {}
        """Inbox and incarnation of each worker that gets calls at once: it is alive, and no earlier calls wait."""
        self._sending: set[str] = set()
        """Workers to which calls that waited are being sent."""
        self._timers: TimerTable[TimerKey] = TimerTable()
        self._closed = ""
        self._handlers: dict[type, Callable[[float, Any], list[Action]]] = {
            DeliveryFailed: self._on_delivery_failed,
            MailLost: self._on_mail_lost,
            SendFailed: self._on_send_failed,
            LinkLost: self._on_link_lost,
            CallCancelled: self._on_cancelled,
            TimePassed: self._on_time,
            BusClosed: self._on_closed,
        }

    def step(self, now: float, event: Event) -> list[Action]:
        return self._handlers[type(event)](now, event)

    @property
    def next_deadline(self) -> float | None:
        """The time at which `TimePassed` is due."""
        return self._timers.next_deadline

    def make(
        self,
        now: float,
        call_id: int,
        target: str,
        method: str,
        timeout_s: float | None,
        incarnation: int | None = None,
    ) -> Inbox | None:
        """Open a call of `method` of `target` (a worker's full name). With `incarnation`, only that one gets it.

        Return the inbox to send the call to, with all its time left; None: it waits. RpcError: the call is not opened.
        """
        if self._closed:
            raise RpcCancelledError(self._closed)
        call = _OpenCall(call_id, target, method, now, timeout_s)
        ready = self._ready.get(target)
        if ready is not None and (incarnation is None or incarnation == ready[1]):
            call.inbox, call.incarnation = ready
            call.sent_at = now
        else:
            entry = self.directory.get(target)
            if entry is not None and entry.state is Reachability.ENDED:
                raise _ended_for_good(call, WorkerEnded(target, entry.incarnation, entry.reason))
            if incarnation is not None:
                call.incarnation = incarnation
            self._wait(call)
        self._open[call_id] = call
        same = self._by_target.get(target)
        if same is None:
            self._by_target[target] = {call_id: call}
        else:
            same[call_id] = call
        if timeout_s is not None:
            self._timers.arm(("deadline", call_id), now + timeout_s)
        return call.inbox

    def answer(self, call_id: int, sender: str, is_last: bool = True) -> bool:
        """Note an answer from the inbox `sender`; return True if it is awaited. Unless last, it opens a stream."""
        call = self._open.get(call_id)
        if call is None or call.inbox is None or call.inbox.inbox_id != sender:
            return False  # a late answer, or one from another incarnation
        if is_last:
            self._close(call)
        return True

    def learn(self, now: float, entries: Iterable[DirectoryEntry]) -> tuple[list[Change], list[Action]]:
        """Merge entries of the directory; return its changes, and the actions.

        A call ends, in WorkerDiedError, with the incarnation that it was sent to or made for. These `FailCall` actions
        come before all others. Perform them before another call is made, and before anybody else hears of the changes:
        when the next incarnation becomes known, no call of an earlier one is open.
        """
        changes = self.directory.merge(entries)
        failed: list[Action] = []
        others: list[Action] = []
        for change in changes:
            match change:
                case IncarnationDied(worker, incarnation):
                    self._ready.pop(worker, None)
                    self._timers.cancel(("retry", worker))
                    bound = [call for call in self._calls_to(worker) if 0 <= call.incarnation <= incarnation]
                    failed += [self._fail(call, _died(call, change)) for call in bound]
                    if change.inbox is not None:
                        others.append(DropPeer(inbox_id=change.inbox.inbox_id))
                case IncarnationStarted(worker, incarnation, inbox):
                    for call in self._early.pop(worker, {}).values():
                        self._wait(call)
                    if worker in self._waiting:
                        others += self._send_waiting(worker)
                    else:
                        self._ready[worker] = inbox, incarnation
                case WorkerEnded(worker):
                    failed += [self._fail(call, _ended_for_good(call, change)) for call in self._calls_to(worker)]
        return changes, failed + others

    def release(self, now: float, target: str) -> list[SendCall]:
        """Return the waiting calls to send now, in this order.

        Call this again when they are sent: there may be new ones. An empty list: done, until another `SendWaiting`.
        """
        incarnation = self._incarnation_of(target)
        waiting = None
        if incarnation is not None and ("retry", target) not in self._timers:
            waiting = self._waiting.pop(target, None)
            if waiting is None:
                self._ready[target] = incarnation
        if incarnation is None or waiting is None:
            self._sending.discard(target)
            return []
        released = []
        for call_id, call in sorted(waiting.items()):  # a call that was given back was added after later ones
            call.inbox, call.incarnation = incarnation
            call.sent_at = now
            released.append(SendCall(call_id=call_id, inbox=call.inbox, timeout_s=call.left(now)))
        return released

    def _incarnation_of(self, worker: str) -> tuple[Inbox, int] | None:
        """Return the inbox and the incarnation of a worker that can be called; None: it cannot."""
        entry = self.directory.get(worker)
        if entry is None or entry.state is not Reachability.ALIVE or entry.inbox is None:
            return None
        return entry.inbox, entry.incarnation

    def _wait(self, call: _OpenCall) -> None:
        """Have a call wait; WorkerDiedError: it is for an incarnation that is over."""
        call.inbox = None
        if 0 <= call.incarnation <= self.directory.newest_over(call.target):
            raise WorkerDiedError(
                f"worker {call.target} (incarnation {call.incarnation}) died before {call.method!r} was called."
            )
        entry = self.directory.get(call.target)
        is_early = call.incarnation > (-1 if entry is None else entry.incarnation)
        line = self._early if is_early else self._waiting
        line.setdefault(call.target, {})[call.call_id] = call

    def _send_waiting(self, worker: str) -> list[Action]:
        """Return the action that sends the waiting calls of a worker, which may be alive now."""
        if worker in self._sending:
            return []
        self._sending.add(worker)
        return [SendWaiting(target=worker)]

    def _on_delivery_failed(self, now: float, event: DeliveryFailed) -> list[Action]:
        call = self._open.get(event.call_id)
        if call is None or call.inbox is None:
            return []
        if event.code == "overloaded":
            error = BusOverloadedError(
                f"the relay dropped the call of {call.method!r} to worker {call.target}: too many bytes already wait "
                "there for that worker. Call less at once, or send smaller arguments."
            )
            return [self._fail(call, error)]
        # The target is alive in the directory, but not yet connected to the relay: later calls wait behind this one.
        if ("retry", call.target) not in self._timers:
            self._timers.arm(("retry", call.target), now + GIVEN_BACK.delay_s(call.num_refused))
        self._ready.pop(call.target, None)
        self._wait(call)
        call.num_refused += 1
        return []

    def _on_send_failed(self, now: float, event: SendFailed) -> list[Action]:
        call = self._open.get(event.call_id)
        return [] if call is None else [self._fail(call, event.error)]

    def _on_mail_lost(self, now: float, event: MailLost) -> list[Action]:
        call = self._open.get(event.call_id)
        if call is not None:
            self._lose(now, call, event.reason)
        return []

    def _on_link_lost(self, now: float, event: LinkLost) -> list[Action]:
        for call in self._open.values():
            if call.inbox is not None and call.inbox.inbox_id == event.inbox_id:
                self._lose(now, call, event.reason)
        return []

    def _lose(self, now: float, call: _OpenCall, reason: str) -> None:
        """Note that a call will not be answered. News of its worker's death may come within `LOST_GRACE_S`."""
        if not call.lost:
            call.lost = reason
            self._timers.arm(("lost", call.call_id), now + LOST_GRACE_S)

    def _on_cancelled(self, now: float, event: CallCancelled) -> list[Action]:
        call = self._open.get(event.call_id)
        if call is None:
            return []
        error = RpcCancelledError(f"the call of {call.method!r} to worker {call.target} was cancelled by its caller.")
        return self._give_up(call, error)

    def _on_time(self, now: float, event: TimePassed) -> list[Action]:
        actions: list[Action] = []
        for key in self._timers.due(now):
            if key[0] == "retry":
                actions += self._send_waiting(key[1])
                continue
            call = self._open.get(key[1])
            if call is None:
                continue
            actions += self._give_up(call, self._late(now, call) if key[0] == "deadline" else _broken(call))
        return actions

    def _on_closed(self, now: float, event: BusClosed) -> list[Action]:
        self._closed = event.reason
        return [self._fail(call, RpcCancelledError(event.reason)) for call in list(self._open.values())]

    def _give_up(self, call: _OpenCall, error: RpcError) -> list[Action]:
        actions: list[Action] = [self._fail(call, error)]
        if call.inbox is not None:
            actions.append(SendCancel(call_id=call.call_id, inbox=call.inbox))
        return actions

    def _fail(self, call: _OpenCall, error: RpcError) -> Action:
        self._close(call)
        return FailCall(call_id=call.call_id, error=error)

    def _close(self, call: _OpenCall) -> None:
        del self._open[call.call_id]
        calls = self._by_target[call.target]
        del calls[call.call_id]
        if not calls:
            del self._by_target[call.target]
        if call.timeout_s is not None:
            self._timers.cancel(("deadline", call.call_id))
        if call.inbox is None:
            lines = self._early if call.call_id in self._early.get(call.target, {}) else self._waiting
            del lines[call.target][call.call_id]
            if not lines[call.target]:
                del lines[call.target]
        if call.lost:
            self._timers.cancel(("lost", call.call_id))

    def num_open(self, worker: str) -> int:
        """Return the number of open calls to a worker."""
        return len(self._by_target.get(worker, ()))

    def _calls_to(self, worker: str) -> list[_OpenCall]:
        return list(self._by_target.get(worker, {}).values())

    def _late(self, now: float, call: _OpenCall) -> RpcTimeoutError:
        if call.call_id in self._early.get(call.target, {}):
            state = f"its incarnation {call.incarnation} has not begun"
        elif self._incarnation_of(call.target) is None:
            state = self.directory.why_waiting(call.target).rstrip(".")
        elif call.num_refused:
            state = f"the relay has not known it in {call.num_refused} attempts"
        elif call.inbox is None:
            state = "calls that were made before it are still to be sent"
        else:
            state = f"incarnation {call.incarnation} has had the call for {now - call.sent_at:.3g} s"
        return RpcTimeoutError(
            f"worker {call.target} did not answer {call.method!r} within {call.timeout_s:g} s: {state}. "
            f"`unified explain {call.target}` says what it does."
        )


def _died(call: _OpenCall, death: IncarnationDied) -> WorkerDiedError:
    where = f" on node {death.node}" if death.node else ""
    return WorkerDiedError(
        f"worker {call.target} (incarnation {call.incarnation}{where}) died before it answered {call.method!r}: "
        f"{death.reason.rstrip('.')}. `unified explain {call.target}` says more."
    )


def _broken(call: _OpenCall) -> RouteLostError:
    return RouteLostError(
        f"messages to or from worker {call.target} were lost while {call.method!r} was open ({call.lost}), and no "
        "report says that it died; whether its handler ran is not known. Call again if it may run twice."
    )


def _ended_for_good(call: _OpenCall, end: WorkerEnded) -> WorkerDiedError:
    reason = end.reason.rstrip(".") or f"incarnation {end.incarnation} was its last"
    return WorkerDiedError(
        f"worker {call.target} has ended for good, so {call.method!r} cannot be called: "
        f"{reason}. `unified explain {call.target}` says more.",
        is_final=True,
    )
