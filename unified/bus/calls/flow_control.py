"""Flow control: a limit on the bytes in flight to each peer, so that a caller that is faster than its callee does not
fill memory."""

from __future__ import annotations

import threading
import time

from unified.errors import BusOverloadedError, RpcTimeoutError
from unified.threads import OwnedLock

CALL_OVERHEAD_BYTES = 512
"""Memory that an empty call takes, on both sides, roughly."""


class FlowControl:
    """Counter of the bytes of open calls, by target.

    A call larger than the limit passes when nothing else is in flight to its target.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._held: dict[str, int] = {}
        self.lock = OwnedLock()
        self._changed = threading.Condition(self.lock)
        self._num_waiting = 0
        self._is_closed = False

    def take(self, target: str, nbytes: int, *, block: bool, deadline: float | None) -> None:
        """Add to the bytes in flight to `target`; wait for room if `block`, until `deadline` on the monotonic clock.

        BusOverloadedError: no room, and `block` is False. RpcTimeoutError: no room came before the deadline.
        """
        with self.lock:
            if not self.has_room(target, nbytes):
                if not block:
                    raise BusOverloadedError(self._full(target, nbytes))
                left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
                self._num_waiting += 1
                try:
                    if not self._changed.wait_for(lambda: self._is_closed or self.has_room(target, nbytes), left_s):
                        raise RpcTimeoutError(f"{self._full(target, nbytes)} No room came before the call's deadline.")
                finally:
                    self._num_waiting -= 1
            self._held[target] = self._held.get(target, 0) + nbytes

    def give_back(self, target: str, nbytes: int) -> None:
        with self.lock:
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

    def has_room(self, target: str, nbytes: int) -> bool:
        """Return False if `take` would have to wait."""
        held = self._held.get(target, 0)
        return held == 0 or held + nbytes <= self.limit_bytes

    def _full(self, target: str, nbytes: int) -> str:
        return (
            f"a call of {nbytes} bytes to worker {target} does not fit: {self._held.get(target, 0)} of "
            f"{self.limit_bytes} bytes are in flight to it already. Wait for some of the earlier calls first."
        )
