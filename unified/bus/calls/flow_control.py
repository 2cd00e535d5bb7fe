"""Flow control: a limit on the bytes in flight to each peer, so that a caller that is faster than its callee does not
fill memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from unified.errors import BusOverloadedError, RpcTimeoutError

CALL_OVERHEAD_BYTES = 512
"""Memory that an empty call takes, on both sides, roughly."""


class FlowControl:
    """Counter of the bytes of the open calls to each target, from the call until its end.

    Args:
        limit_bytes: limit for one target. A single call larger than this passes when nothing else is in flight.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._is_closed = False

    def held(self, target: str) -> int:
        return self._held.get(target, 0)

    def is_full(self, target: str, nbytes: int) -> bool:
        """Return True if `take` would have to wait."""
        return not self._has_room(target, nbytes)

    def take(self, target: str, nbytes: int, *, block: bool, deadline: float | None) -> None:
        """Add to the bytes in flight to `target`; wait for room if `block`, until `deadline` on the monotonic clock.

        Raises:
            BusOverloadedError: no room, and `block` is False.
            RpcTimeoutError: no room came before the deadline.
        """
        with self._lock:
            if not self._has_room(target, nbytes):
                if not block:
                    raise BusOverloadedError(self._full(target, nbytes))
                self._wait(lambda: self._is_closed or self._has_room(target, nbytes), deadline, target, nbytes)
            self._held[target] = self._held.get(target, 0) + nbytes

    def give_back(self, target: str, nbytes: int) -> None:
        with self._lock:
            left = self._held.get(target, 0) - nbytes
            if left > 0:
                self._held[target] = left
            else:
                self._held.pop(target, None)
            if self._num_waiting:
                self._changed.notify_all()

    def close(self) -> None:
        """Let all waiting callers through: their calls fail at the closed bus."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_room(self, target: str, nbytes: int) -> bool:
        held = self._held.get(target, 0)
        return held == 0 or held + nbytes <= self.limit_bytes

    def _wait(self, ready: Callable[[], bool], deadline: float | None, target: str, nbytes: int) -> None:
        self._num_waiting += 1
        try:
            if not self._changed.wait_for(ready, None if deadline is None else max(deadline - time.monotonic(), 0)):
                raise RpcTimeoutError(f"{self._full(target, nbytes)} No room came before the call's deadline.")
        finally:
            self._num_waiting -= 1

    def _full(self, target: str, nbytes: int) -> str:
        return (
            f"a call of {nbytes} bytes to worker {target} does not fit: {self.held(target)} of {self.limit_bytes} "
            "bytes are in flight to it already. Wait for some of the earlier calls first."
        )
