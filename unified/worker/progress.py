"""Progress of this worker: `current_worker().report(…)`, its newest values and its series, and signs of activity.

Signs of activity are collectives and calls, which are checked only for a role with a `hang_timeout`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from unified.errors import UsageError
from unified.protocol import records
from unified.protocol.records import MAX_METRIC_TEXT, MAX_METRICS, MAX_POINTS, Progress, WorkerReport, json_value
from unified.protocol.worker_agent import Reported
from unified.threads import TimerThread

if TYPE_CHECKING:
    from unified.trackers.feed import Trackers
    from unified.worker.step_recorder import StepRecorder

INTERVAL_S = 0.1
LOOKS = 8
"""Number of checks of the counters in one `hang_timeout`."""
LONGEST_S = 10.0
QUEUES_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LARGEST = 2**63
QueueWaits = defaultdict[tuple[Literal["gets", "puts"], str], int]
"""Uses of queues by a thread, with how often the owner has told it to wait on. That takes 20 s, longer than the end of
another wait is on its way to the master: so waits that followed one another are not taken for a cycle."""
QUEUE_USES: defaultdict[threading.Thread, QueueWaits] = defaultdict(lambda: defaultdict(int))
QUEUE_STATS: dict[str, Callable[[], dict[str, Any]]] = {}
"""Functions that return the fields of `QueueStats`, by name of the queue: of the queues that this process owns."""
WEIGHTS: dict[str, int] = {}
"""Newest complete version of each of this process's weights receivers, by its name."""


class Reporter:
    """Keeps the newest progress and the points of the series, and sends them to the agent from a thread of its own.

    It sends once in `interval_s`, and sooner when there are many points; `flush` sends the rest. If the agent is too
    slow, every other point of the older half is dropped.
    """

    def __init__(self, send: Callable[[Reported], None], interval_s: float = INTERVAL_S) -> None:
        self._send = send
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._newest = Progress()
        self._points: list[WorkerReport] = []
        self._num_values = 0
        self._number = -1
        self._step: int | None = None
        """Step of the current point; `_number` is the point's number."""
        self._is_full = False
        self._sent = self._newest
        self._next_at = 0.0
        self._timer = TimerThread("unified-progress", self._ring, stays=True)
        self._queue_timer = TimerThread("unified-queues", self.watch_queues, stays=True)
        self._measured = (0.0, 0.0)
        """Time, and the CPU seconds of this process until then; 0.0: its load was not measured yet."""
        self.trackers: Trackers | None = None
        self.recorder: StepRecorder | None = None

    def report(self, step: Any, total: Any, metrics: dict[str, Any]) -> None:
        """Merge values into the newest progress, and add them to the series. Other names keep their last value."""
        checked = {_text(name): _plain(name, value) for name, value in metrics.items()}
        given = (("step", step), ("total", total))
        before = self._newest.step
        self._change(checked, True, **{name: _whole(name, value) for name, value in given if value is not None})
        if self.trackers is not None:
            self.trackers.report(self._newest.step, checked)
        if self.recorder is not None and not self.recorder.is_idle and self._newest.step != before:
            self.recorder.next_step()

    def count_unread(self, count: int) -> None:
        """Report the number of errors of calls that nobody has read so far."""
        self._change({}, num_unread_errors=count)

    def count_activity(self) -> None:
        """Report that collectives or calls go on."""
        self._change({}, num_activities=self._newest.num_activities + 1)

    def wait_for(self, what: str) -> None:
        """Report the debugger that the worker waits for; empty: it goes on."""
        self._change({}, waits_for=what[:MAX_METRIC_TEXT])

    def clean_up(self, error: str) -> None:
        """Report an exception that the main thread handles within a collective; empty: none any more."""
        self._change({}, cleans_up=error)

    def end_program(self, num_collectives: int | None) -> None:
        """Report how many collectives the program had entered when it ended."""
        self._change({}, num_collectives=num_collectives)

    def watch_queues(self) -> None:
        """Report the load, and the uses of queues by the threads that live, now and every `QUEUES_S`."""
        self._queue_timer.set(time.monotonic() + QUEUES_S)
        found: set[records.QueueUse] = set()
        for thread in set(QUEUE_USES) - set(threading.enumerate()):
            QUEUE_USES.pop(thread, None)
        for thread, uses in list(QUEUE_USES.items()):
            for use in list(uses)[:-MAX_METRICS]:  # a program may make a queue for each of its requests
                uses.pop(use, None)
            seen = {use: count > 0 for use, count in uses.copy().items()}
            name = thread.name.encode(errors="replace").decode()[:MAX_METRIC_TEXT] if any(seen.values()) else ""
            found |= {records.QueueUse(name, *use, waits) for use, waits in seen.items()}
        queues, load = sorted(found)[:MAX_METRICS], self._load()
        if (queues, load) != (self._newest.queues, self._newest.load):
            self._change({}, queues=queues, load=load)

    def _load(self) -> records.WorkerLoad | None:
        """Return the load since the last call; None at the first."""
        (before, cpu_before_s), self._measured = self._measured, (time.monotonic(), time.process_time())
        now, cpu_s = self._measured
        if now <= before or not before:
            return self._newest.load
        queues = [each for find in list(QUEUE_STATS.values()) if (each := find())["depth"] or not each["is_closed"]]
        queues = queues[-MAX_METRICS:]
        ages_s = {each["name"]: each["oldest_age_s"] for each in queues if each["depth"]}
        put_at = {name: round(time.time() - age_s) for name, age_s in ages_s.items()}
        return records.WorkerLoad(
            memory_mb=_two_digits(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20),
            cpu=_two_digits((cpu_s - cpu_before_s) / (now - before)),
            device_memory_mb=_device_memory_mb(),
            queues={each["name"]: (each["depth"], each["size"], put_at.get(each["name"], 0)) for each in queues},
            weights={name[:MAX_METRIC_TEXT]: version for name, version in list(WEIGHTS.items())[:MAX_METRICS]},
        )

    def _change(self, metrics: dict[str, float | int | str], is_report: bool = False, **counts: Any) -> None:
        with self._lock:
            merged = {**self._newest.metrics, **metrics}
            left_out = list(merged)[MAX_METRICS:]
            for name in left_out:
                del merged[name]
            self._newest = replace(self._newest, metrics=merged, **counts)
            if is_report:
                self._add({name: value for name, value in metrics.items() if name in merged})
            is_first, self._is_full = bool(left_out) and not self._is_full, self._is_full or bool(left_out)
        if is_first:
            print(
                f"unified: {MAX_METRICS} metrics of a worker are kept at most: {left_out[0]!r} and later ones are not.",
                file=sys.stderr,
            )
        self._timer.set(0.0 if self._num_values > MAX_POINTS // 4 else self._next_at)

    def _add(self, metrics: dict[str, float | int | str]) -> None:
        """Add to the current point of the series, or begin one: for each step, or for each report without a step."""
        newest = self._newest
        if self._number < 0 or newest.step is None or newest.step != self._step:
            self._number, self._step = self._number + 1, newest.step
        elif not metrics:
            return
        at, number, values = time.time(), self._number, dict[str, float | int | str | None](json_value(metrics))
        if self._points and self._points[-1].number == number:
            values = {**self._points.pop().metrics, **values}
        self._points.append(WorkerReport(at=at, step=newest.step, total=newest.total, metrics=values, number=number))
        self._num_values += 1 + len(metrics)
        if self._num_values >= MAX_POINTS:
            half = len(self._points) // 2
            self._points[:half] = self._points[:half:2]
            self._num_values = sum(1 + len(point.metrics) for point in self._points)

    def flush(self) -> None:
        """Send the newest progress now, unless it was sent already. Blocks until it is sent."""
        with self._sending:
            with self._lock:
                newest, points, self._points, self._num_values = self._newest, self._points, [], 0
            if newest is not self._sent:
                self._sent = newest
                self._send(Reported(progress=newest, points=points))

    def _ring(self) -> None:
        self._next_at = time.monotonic() + self._interval_s
        self.flush()


class ActivityWatch:
    """Polls counters, and calls `on_activity` when they have changed.

    Args:
        timeout_s: `hang_timeout` of the role.
        num_messages: returns the number of calls and answers received.
        on_activity: must be quick.
    """

    def __init__(self, timeout_s: float, num_messages: Callable[[], int], on_activity: Callable[[], None]) -> None:
        self._every_s = min(LONGEST_S, timeout_s / LOOKS)
        self._num_messages = num_messages
        self._on_activity = on_activity
        self._seen: object = 0
        self._timer = TimerThread("unified-activity", self._look, stays=True)

    def start(self) -> None:
        """Start to poll; a second call changes nothing."""
        self._timer.set(time.monotonic())

    def _look(self) -> None:
        self._timer.set(time.monotonic() + self._every_s)
        # Collectives first: the other threads of a hanging rank still answer calls for its state.
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


def _device_memory_mb() -> float | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    return _two_digits(sum(map(cuda.memory_reserved, range(cuda.device_count()))) / 2**20)


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}") if value >= 0.01 else 0.0


def _plain(name: str, value: Any) -> float | int | str:
    if hasattr(value, "item"):  # a numpy scalar, a 0-d array or tensor; `item` waits for a GPU
        count = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
        if count != 1:
            raise TypeError(f"report({name}=…) takes one number; this {type(value).__name__} has {count}.")
        value = value.item()
    if isinstance(value, str):
        return _text(value[:MAX_METRIC_TEXT])
    if isinstance(value, bool | int):
        if value.bit_length() >= 1024:
            raise UsageError(f"report({name}=…) takes a number that a float can hold, not one of 2**1023 or more.")
        return int(value) if abs(value) < _LARGEST else float(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"report({name}={value!r}) takes a number, a text or a 0-d tensor, not {type(value).__name__}.")


def _text(text: str) -> str:
    if len(text) > MAX_METRIC_TEXT:
        raise UsageError(f"report({text[:20]}…=…): a name has {MAX_METRIC_TEXT} characters at most, not {len(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"report(): {text!r} is no text that can be sent: {error.reason}.") from None
    return text


def _whole(name: str, value: Any) -> int:
    plain = _plain(name, value)
    if isinstance(plain, str) or not float(plain).is_integer():
        raise TypeError(f"report({name}={value!r}) takes a whole number.")
    if abs(plain) >= _LARGEST:
        raise UsageError(f"report({name}={value!r}) takes a number of less than 64 bits.")
    return int(plain)
