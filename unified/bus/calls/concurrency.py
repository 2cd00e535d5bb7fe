"""Concurrency limits of methods, per-sender order of calls, and the inline policy. Pure: the call server calls these
methods, and holds its lock meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar


class QueuedCall(Protocol):
    """An incoming call, as its limit and its order see it."""

    sender: str
    method: str
    chain: list[int]
    limit: Any
    stream: Any

    @property
    def waits(self) -> Sequence[object]:
        """Calls and streams that threads and tasks of the handler wait for now."""

    @property
    def token(self) -> int:
        """Name of the call in the chains of its handler's calls."""


CallT = TypeVar("CallT", bound=QueuedCall)


class ConcurrencyLimit(Generic[CallT]):
    """Limit on the calls of a method or group that run at once; the others wait in its queue.

    Args:
        name: the method or group, for messages.
        size: how many run at once.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.running: list[CallT] = []
        self.waiting: deque[CallT] = deque()

    def enter(self, call: CallT) -> bool:
        """Return True if the call may run now; otherwise the call is queued."""
        call.limit = self
        if len(self.running) < self.size and not self.waiting:
            self.running.append(call)
            return True
        self.waiting.append(call)
        return False

    def leave(self, call: CallT) -> list[CallT]:
        """Note that a call has ended, or was given up; return the calls that may run now."""
        if call in self.running:
            self.running.remove(call)
        elif call in self.waiting:
            self.waiting.remove(call)
        admitted = []
        while self.waiting and len(self.running) < self.size:
            call = self.waiting.popleft()
            self.running.append(call)
            admitted.append(call)
        return admitted

    @property
    def has_streams(self) -> bool:
        """True while streams run under this limit: they may wait for their readers."""
        return any(call.stream is not None for call in self.running)

    def deadlocked(self) -> list[CallT]:
        """Return the queued calls that can never run: each running call waits for it, through calls of its handler."""
        if any(not call.waits for call in self.running):
            return []
        holders = {call.token for call in self.running}
        return [call for call in self.waiting if holders.issubset(call.chain)]


class SenderOrder(Generic[CallT]):
    """Per-sender order: the calls of one sender to one method start in the order in which they came, although different
    threads run them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], deque[CallT]] = {}

    def is_free(self, call: CallT) -> bool:
        """Return True if all earlier calls of the sender to the method have started."""
        return (call.sender, call.method) not in self._lines

    def line_up(self, call: CallT) -> bool:
        """Return True if the call may be handed on now; otherwise `started` returns it later."""
        key = (call.sender, call.method)
        line = self._lines.get(key)
        if line is None:
            self._lines[key] = deque()
            return True
        line.append(call)
        return False

    def started(self, call: CallT) -> CallT | None:
        """Note that a call that was handed on has started, or never will; return the next to hand on."""
        key = (call.sender, call.method)
        line = self._lines.get(key)
        if line is None:
            return None
        if line:
            return line.popleft()
        del self._lines[key]
        return None


class InlinePolicy:
    """Policy that runs a method's handler inline, on the I/O thread, once the method has shown that it is short.

    Seconds are wall-clock time: a short call looks long if its thread loses the processor. So a long call after many
    short ones changes nothing.
    """

    SHORT_S = 0.0002
    LONG_S = 0.001
    MANY = 32

    def __init__(self) -> None:
        self.is_short = False
        self._num_short = 0
        """Short calls since the last long one."""
        self._needed = 4

    def took(self, seconds: float) -> None:
        """Note how long a call ran."""
        if seconds < self.SHORT_S:
            self._num_short += 1
            if self._num_short >= self._needed:
                self.is_short = True
        elif not self.is_short or (seconds >= self.LONG_S and self._num_short < self.MANY):
            self.forget()
        elif seconds >= self.LONG_S:
            self._num_short = 0
            self._needed = max(self._needed // 4, 4)

    def forget(self) -> None:
        """Note that a call was long, or waited: the method needs more short calls now."""
        if self.is_short:
            self._needed = min(self._needed * 4, 4096)
        self.is_short = False
        self._num_short = 0
