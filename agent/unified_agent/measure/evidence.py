"""Evidence of how workers ended: their memory over the last minute, and the kernel's records of out-of-memory kills.

No worker needs it to run, so evidence that cannot be read is left out. A sample costs some 20 µs of a CPU per worker.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from unified.config import cgroups
from unified.protocol.records import Evidence, JobWorkerIncarnation, MemorySample

SAMPLE_S = 5.0
KEPT_S = 60.0
_S_PER_WORKER = 0.005
"""Least time between samples, per worker, so that ten thousand workers do not take up the agent's time."""
_HOST = Path("/proc/vmstat")
_MB = 2**20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_RECORDS = 4096
"""Most records of the kernel's log that are read at a time."""
_KILLED = re.compile(r"([^;]*[Oo]ut of memory[^;]*): Killed process (\d+) \(([^)]*)\)(.*?)(?:, UID:.*)?$")
_INITIAL_PIDS = "pid:[4026531836]"
"""The pid namespace of the pids in the kernel's log; the kernel fixes its number."""


class ProcessEnd(NamedTuple):
    code: int
    """Exit code, or minus the signal."""
    peak_kb: int = 0
    """Most resident memory of the process; 0: not known."""
    killed_for: str = ""
    """Reason of a kill that the core did not order: by this agent, or with its zygote."""
    cause: str = ""
    """Id of its zygote, if it was killed with the zygote."""


@dataclass
class _Watched:
    pid: int
    counter: Path | None = None
    """The file in which the kernel counts the out-of-memory kills of its control group."""
    samples: deque[tuple[float, float]] = field(default_factory=deque)
    """Times, and resident MB."""


class EvidenceCollector:
    """Samples workers at intervals, and reads the kernel's records when a worker was killed."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        proc: Path = Path("/proc"),
        kernel_log: Path = Path("/dev/kmsg"),
    ) -> None:
        self._clock = clock
        self._proc = proc
        self._watched: dict[JobWorkerIncarnation, _Watched] = {}
        self._counts: dict[Path, int] = {}
        """Out-of-memory kills by counter, as last seen."""
        self._counters: dict[bytes, Path | None] = {}
        """Counters by control groups, as the kernel writes them."""
        self._kernel_log = _open_at_end(kernel_log)
        self._look(_HOST)
        self.next_deadline: float | None = None
        """Time at which `sample` is due."""

    def began(self, incarnation: JobWorkerIncarnation, pid: int) -> None:
        """Watch a process from now on."""
        self._watched[incarnation] = worker = _Watched(pid)
        self._sample(worker, self._clock())
        if self.next_deadline is None:
            self.next_deadline = self._clock() + SAMPLE_S

    def sample(self) -> None:
        """Look at every worker."""
        now = self._clock()
        for worker in self._watched.values():
            self._sample(worker, now)
        for counter in {_HOST, *(worker.counter for worker in self._watched.values() if worker.counter)}:
            self._look(counter)
        every_s = max(SAMPLE_S, _S_PER_WORKER * len(self._watched))
        self.next_deadline = now + every_s if self._watched else None

    def ended(self, incarnation: JobWorkerIncarnation, end: ProcessEnd) -> Evidence:
        """Return what is known about the end of a process, and stop watching it."""
        now, worker = self._clock(), self._watched.pop(incarnation, None) or _Watched(0)
        own, host = "", ""
        if end.code == -9 and not end.killed_for:
            own = self._risen(worker.counter, f"its control group {worker.counter.parent}") if worker.counter else ""
            host = self._risen(_HOST, "this host") if self._kernel_log is None and not own else ""
            own = self._kernel_record(worker.pid) or own
        is_counted = _HOST in self._counts or worker.counter in self._counts
        self._forget(worker.counter)
        return Evidence(
            killed_for=end.killed_for,
            cause=end.cause,
            out_of_memory=own,
            out_of_memory_here=host,
            is_memory_counted=is_counted,
            memory=[MemorySample(round(now - at, 1), round(mb)) for at, mb in worker.samples if now - at <= KEPT_S],
            peak_mb=round(end.peak_kb * 1024 / _MB),
        )

    def _forget(self, counter: Path | None) -> None:
        """Forget a counter that no worker has any more: a worker's own control group is removed after its end."""
        if counter is not None and all(worker.counter != counter for worker in self._watched.values()):
            self._counts.pop(counter, None)
            self._counters = {group: each for group, each in self._counters.items() if each != counter}

    def close(self) -> None:
        if self._kernel_log is not None:
            os.close(self._kernel_log)

    def _sample(self, worker: _Watched, now: float) -> None:
        pages, group = _read(f"{self._proc}/{worker.pid}/statm").split(), _read(f"{self._proc}/{worker.pid}/cgroup")
        if len(pages) < 2:
            return
        worker.samples.append((now, int(pages[1]) * _PAGE_BYTES / _MB))
        while worker.samples and now - worker.samples[0][0] > KEPT_S:
            worker.samples.popleft()
        if group not in self._counters:
            self._counters[group] = cgroups.oom_counter(self._proc / str(worker.pid))
        worker.counter = self._counters[group]
        if worker.counter is not None and worker.counter not in self._counts:
            self._look(worker.counter)

    def _look(self, counter: Path) -> tuple[int, int]:
        """Return the counts at the last look and now."""
        found = re.search(r"^oom_kill (\d+)", cgroups.read_text(counter), re.MULTILINE)
        if found is None:
            self._counts.pop(counter, None)
            return 0, 0
        before, self._counts[counter] = self._counts.get(counter, int(found[1])), int(found[1])
        return before, int(found[1])

    def _risen(self, counter: Path, where: str) -> str:
        """Return how a count has risen since the last look; empty if it did not rise."""
        before, now = self._look(counter)
        return f"the kernel's out-of-memory kills of {where} rose from {before} to {now}" if now > before else ""

    def _kernel_record(self, pid: int) -> str:
        """Return what the kernel's log says of the kill of a pid; empty if nothing, or if the log cannot be read."""
        if self._kernel_log is None:
            return ""
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._kernel_log, 8192).decode(errors="replace")
            except BrokenPipeError:  # records that were overwritten before they were read
                continue
            except OSError:  # BlockingIOError: that was the last one
                break
            if (found := _KILLED.search(record.partition("\n")[0])) and int(found[2]) == pid:
                return f"{found[1]}: killed process {pid} ({found[3]}){found[4].rstrip()}"
        return ""


def _read(path: str) -> bytes:
    """Return a kernel file; empty if it cannot be read. `Path.read_text` takes more than twice the time."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 4096)
    except OSError:  # it has ended since
        return b""
    finally:
        os.close(descriptor)


def _open_at_end(kernel_log: Path) -> int | None:
    """Open the kernel's log behind its last record; None if it cannot be read, or has pids of another namespace."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self/ns/pid") == _INITIAL_PIDS:
            descriptor = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.lseek(descriptor, 0, os.SEEK_END)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor
    return None
