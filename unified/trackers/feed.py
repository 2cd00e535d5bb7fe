"""Feeds of trackers: a thread for each tracker passes a worker's reports on, each step once.

A report goes into a bounded buffer, so that the library of the tracker may block. A worker never fails because of a
tracker: an error is printed once on stderr, and switches the tracker off.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from unified.job.report_to import REPORT_RUN, REPORT_TO, parse_targets
from unified.lazy import needed_by
from unified.protocol.records import WorkerReport
from unified.protocol.worker_agent import Launch
from unified.threads import start_thread
from unified.trackers.backends import TRACKERS
from unified.trackers.points import Point, PointBuffer, StepOrder, TrackedRun, Tracker, Value, points_of

INTERVAL_S = 0.2


class TrackerFeed:
    """Feed of one tracker: a buffer, and the thread that opens the tracker and empties the buffer.

    Args:
        earlier: returns the reports of earlier incarnations, as far as this node has them. From these, the tracker
            gets what its library had not written before a kill.
    """

    def __init__(self, name: str, connect: Callable[[], Tracker], earlier: Callable[[], Iterable[Point]]) -> None:
        self._name, self._connect, self._earlier = name, connect, earlier
        self._lock = threading.Lock()
        self._buffer: PointBuffer | None = PointBuffer()
        self._closing = threading.Event()
        self._thread = start_thread(f"unified-{name}", self._work)

    def add(self, step: int | None, values: Mapping[str, Value]) -> None:
        """Add a report to the buffer, without blocking or raising."""
        with self._lock:
            if self._buffer is not None:
                self._buffer.add(step, time.time(), values)

    def close(self, within_s: float) -> None:
        """Let the thread write the rest and end; wait for it for at most `within_s` seconds."""
        self._closing.set()
        self._thread.join(within_s)
        if within_s and self._thread.is_alive():
            _say(f"{self._name} did not take all reports before this worker had to end")

    def _work(self) -> None:
        try:
            with needed_by(f"{self._name} in {REPORT_TO}"):
                tracker = self._connect()
            self._feed(tracker)
        except BaseException as error:  # a library may raise SystemExit
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            _say(f"{self._name} is switched off, and this worker goes on: {type(error).__name__}: {reason}")
        with self._lock:
            self._buffer = None

    def _feed(self, tracker: Tracker) -> None:
        missed = (point for point in self._earlier() if point.step > tracker.highest)
        points = StepOrder(tracker.highest, rewinds=tracker.rewinds).new(missed)
        highest = max([tracker.highest, *(point.step for point in points)])
        order = StepOrder(highest, rewinds=tracker.rewinds)
        is_last = is_said = False
        while True:
            if points:
                tracker.write(points)
            if is_last:
                break
            is_last = self._closing.wait(INTERVAL_S)
            with self._lock:
                assert self._buffer is not None
                if is_last and self._buffer.early:  # values that never got a step
                    self._buffer.add(highest + 1, time.time(), dict(self._buffer.early))
                points, is_thinned = order.new(self._buffer.take()), self._buffer.is_thinned
            if is_thinned and not is_said:
                is_said = True
                _say(f"{self._name} is slower than the reports of this worker: some steps are left out there")
        tracker.close()


class Trackers:
    """All trackers of a worker, opened with its first report as rank 0.

    Args:
        rank: returns the present rank, which may change with a round.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str], rank: Callable[[], int]) -> None:
        self._launch, self._rank = launch, rank
        self._targets = parse_targets(environ.get(REPORT_TO, ""))
        self._run = run_of(launch, environ.get(REPORT_RUN, ""))
        self._feeds: list[TrackerFeed] = []

    def report(self, step: int | None, values: Mapping[str, Value]) -> None:
        if self._rank() != 0:
            while self._feeds:  # it was rank 0 before
                self._feeds.pop().close(0)
            return
        if not self._feeds and self._targets:
            for name, argument in self._targets:
                self._feeds.append(TrackerFeed(name, partial(TRACKERS[name], argument, self._run), self._earlier))
        for feed in self._feeds:
            feed.add(step, values)

    def close(self, within_s: float) -> None:
        """Write what is left. Blocks for `within_s` at most; a second call does nothing."""
        until = time.monotonic() + within_s
        self._targets, feeds, self._feeds = [], self._feeds, []
        for feed in feeds:
            feed.close(0)
        for feed in feeds:
            feed.close(max(1e-3, until - time.monotonic()))

    def _earlier(self) -> Iterable[Point]:
        folder, decoder = Path(self._launch.log_file).parent, msgspec.json.Decoder(WorkerReport)
        for incarnation in range(self._launch.incarnation):
            for path in sorted(folder.glob(f"{incarnation}.metrics.jsonl*"), reverse=True):  # the oldest is .N
                with contextlib.suppress(OSError):
                    for line in path.read_bytes().splitlines():
                        with contextlib.suppress(msgspec.DecodeError):  # the last line may be half written
                            yield from points_of([decoder.decode(line)])


def run_of(launch: Launch, identity: str) -> TrackedRun:
    """Return the run of a worker, the same in all its incarnations. Each of several roles has a run of its own."""
    job_id, parts = launch.job_id, [launch.role] if len(launch.spec.roles) > 1 else []
    return TrackedRun("-".join([identity or job_id, *parts]), "/".join([job_id, *parts]), launch.spec.name)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # user code may have closed stderr
        print(f"unified: {text.rstrip('.')}.", file=sys.stderr, flush=True)
