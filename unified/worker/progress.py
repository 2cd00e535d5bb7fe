"""Progress of this worker: `current_worker().report(…)`, of which the last counts, and signs that its code goes on.

The latter, collectives and calls, are looked at only where a role has a `hang_timeout`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from unified.protocol.records import Progress
from unified.threads import TimerThread

INTERVAL_S = 0.1
LOOKS = 8
"""Looks in one `hang_timeout`."""
LONGEST_S = 10.0
_MAX_TEXT = 200
_LARGEST = 2**63


class Reporter:
    """Keeps the newest progress and sends it to the agent at most once in `interval_s`, from a thread of its own;
    `flush` sends what is left."""

    def __init__(self, send: Callable[[Progress], None], interval_s: float = INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._newest = Progress()
        self._sent = self._newest
        self._next_at = 0.0
        self._timer = TimerThread("unified-progress", self._ring, stays=True)

    def report(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        """Merge into the newest progress: what is not named keeps its last value."""
        checked = {name: _plain(name, value) for name, value in metrics.items()}
        given = (("step", step), ("total", total))
        self._change(checked, **{name: _whole(name, value) for name, value in given if value is not None})

    def count_unread(self, count: int) -> None:
        """Report the number of errors of calls that nobody has read so far."""
        self._change({}, num_unread_errors=count)

    def count_activity(self) -> None:
        """Report that collectives or calls go on."""
        self._change({}, num_activities=self._newest.num_activities + 1)

    def _change(self, metrics: dict[str, float | int | str], **counts: int) -> None:
        with self._lock:
            self._newest = replace(self._newest, metrics={**self._newest.metrics, **metrics}, **counts)
        self._timer.set(self._next_at)

    def flush(self) -> None:
        """Send the newest progress now, unless it was sent already. Blocks until it is out."""
        with self._sending:
            newest = self._newest
            if newest is not self._sent:
                self._sent = newest
                self._send(newest)

    def _ring(self) -> None:
        self._next_at = time.monotonic() + self._interval_s
        self.flush()


class ActivityWatch:
    """Looks at counters again and again, and calls `on_activity` when they have changed.

    Args:
        timeout_s: `hang_timeout` of the role.
        num_messages: counter of calls and answers that have come.
        on_activity: must be quick.
    """

    def __init__(self, timeout_s: float, num_messages: Callable[[], int], on_activity: Callable[[], None]) -> None:
        self._every_s = min(LONGEST_S, timeout_s / LOOKS)
        self._num_messages = num_messages
        self._on_activity = on_activity
        self._seen: object = 0
        self._timer = TimerThread("unified-activity", self._look, stays=True)

    def start(self) -> None:
        """Look for the first time, and from now on; a second call changes nothing."""
        self._timer.set(time.monotonic())

    def _look(self) -> None:
        self._timer.set(time.monotonic() + self._every_s)
        # Who trains is asked for its state as well, by calls that its other threads answer while it hangs.
        seen: object = collectives() or self._num_messages()
        if seen != self._seen:
            self._seen = seen
            self._on_activity()


def collectives() -> dict[str, Any]:
    """Return torch's counts of the collectives of each process group; empty if there were none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return {}
    dump = getattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    counts: dict[str, Any] = json.loads(dump(includeCollectives=False)).get("pg_status", {})
    return counts


def _plain(name: str, value: Any) -> float | int | str:
    if hasattr(value, "item"):  # a numpy scalar, a 0-d array or tensor (one on a GPU is waited for)
        count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
        if count != 1:
            raise TypeError(f"report({name}=…) takes one number; this {type(value).__name__} has {count}.")
        value = value.item()
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, bool | int):
        return int(value) if abs(value) < _LARGEST else float(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"report({name}={value!r}) takes a number, a text or a 0-d tensor, not {type(value).__name__}.")


def _whole(name: str, value: Any) -> int:
    plain = _plain(name, value)
    if isinstance(plain, str) or not float(plain).is_integer():
        raise TypeError(f"report({name}={value!r}) takes a whole number.")
    return int(plain)
