"""Metrics of one node for Prometheus: over HTTP, or as a file for node_exporter. They need the extra `metrics`.

The agent's loop notes which workers there are. A scrape reads the rest from the kernel, on a thread of its own, and
costs the loop nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.config.addresses import HostPort
from unified.errors import ClusterError, UsageError
from unified.probes import Probes
from unified.protocol.records import Device, Evidence, JobWorkerIncarnation, WorkerState
from unified.threads import start_thread
from unified_agent.core.worker import LocalWorker

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError:
    raise UsageError(
        "--metrics-bind and --metrics-file need prometheus-client: pip install 'unified-runtime[metrics]'."
    ) from None

NOTE_EVERY_S = 5.0
FILE_EVERY_S = 15.0
SHOWN_S = 3600.0
"""Seconds for which a job without workers here keeps its series."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LivingWorker(NamedTuple):
    incarnation: JobWorkerIncarnation
    role: str
    state: WorkerState
    pid: int
    devices: list[int]


class NodeMetrics:
    """Metrics of one agent, from `start` to `close`.

    Args:
        node: name of the node.
        devices: devices that the node offers.
        bind: where to answer ``GET /metrics``; None: nowhere.
        file: file that is written anew each 15 s, by rename; None: no file.

    Raises:
        ClusterError: the address cannot be listened on, or the file cannot be written.
    """

    def __init__(self, node: str, devices: Iterable[Device], bind: HostPort | None, file: Path | None) -> None:
        self.next_deadline = time.monotonic()
        """Time at which `note` is due."""
        self._node = node
        self._devices = {device.index: device for device in devices}
        self._bind = bind
        self._file = file
        self._workers: list[LivingWorker] = []
        self._is_connected = False
        self._cpu_s: dict[tuple[str, str], dict[JobWorkerIncarnation, float]] = {}
        self._seen_at: dict[str, float] = {}
        self._oom_kills: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if file is not None:
            self._write(file)
        self._listener = Probes(bind, "", flag="--metrics-bind", pages={b"/metrics": self.render})

    def address(self, own: str) -> str:
        """Return ``host:port`` for Prometheus, where `own` is the address of the node; empty without a listener."""
        if self._bind is None:
            return ""
        host = own if self._bind.bare_host in ("0.0.0.0", "::") else self._bind.bare_host
        return f"[{host}]:{self._listener.port}" if ":" in host else f"{host}:{self._listener.port}"

    def start(self) -> None:
        """Begin to answer, and to write the file."""
        self._listener.start()
        if self._file is not None:
            self._thread = start_thread("unified-metrics", self._write_often, self._file)

    def note(self, workers: Iterable[LocalWorker], *, is_connected: bool) -> None:
        """Note the running workers, every few seconds."""
        self.next_deadline = time.monotonic() + NOTE_EVERY_S
        self._listener.turned()
        living = [
            LivingWorker(worker.incarnation, worker.role, worker.state, worker.pid, worker.devices)
            for worker in workers
            if worker.kind == "worker" and worker.pid and not worker.is_ended
        ]
        with self._lock:
            self._workers, self._is_connected = living, is_connected

    def ended(self, incarnation: JobWorkerIncarnation, role: str, evidence: Evidence) -> None:
        if evidence.out_of_memory:
            with self._lock:
                self._oom_kills[incarnation.job_id, role] += 1

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise the registration would collect all metrics."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; called by a scrape."""
        with self._lock:
            workers, is_connected = self._workers, self._is_connected
            kills = {(worker.incarnation.job_id, worker.role): 0 for worker in workers} | self._oom_kills
            memory = self._measure(workers)
            cpu_s = {role: sum(incarnations.values()) for role, incarnations in self._cpu_s.items()}
        yield GaugeMetricFamily(
            "unified_agent_master_connected", "1 if the agent is registered.", value=float(is_connected)
        )
        states = Counter(worker.state.value for worker in workers)
        yield _gauge(
            "unified_agent_workers",
            "Workers by state.",
            ["state"],
            [((state,), number) for state, number in states.items()],
        )
        holders = {index: (worker.incarnation.job_id, worker.role) for worker in workers for index in worker.devices}
        info = {
            (self._node, device.uuid, str(index), device.kind, *holders.get(index, ("", ""))): 1.0
            for index, device in self._devices.items()
        }
        labels = ["node", "uuid", "index", "kind", "job_id", "role"]
        yield _gauge(
            "unified_device_info", "Holder of an accelerator: joins other exporters by uuid.", labels, info.items()
        )
        sizes = {(*role, "sum"): sum(found) for role, found in memory.items()}
        sizes |= {(*role, "max"): max(found) for role, found in memory.items()}
        yield _gauge(
            "unified_worker_memory_bytes", "Resident memory of workers.", ["job_id", "role", "of"], sizes.items()
        )
        for name, text, values in (
            ("unified_worker_cpu_seconds", "Processor time of workers, without their children.", cpu_s),
            ("unified_agent_oom_kills", "Workers that the kernel killed for want of memory.", kills),
        ):
            made = CounterMetricFamily(name, text, labels=["job_id", "role"])
            for role, value in values.items():
                made.add_metric(role, value)
            yield made

    def close(self) -> None:
        """Stop answering, and remove the file: its values would be old."""
        self._stop.set()
        self._listener.close()
        if self._thread is not None:
            self._thread.join()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def _measure(self, workers: Iterable[LivingWorker]) -> dict[tuple[str, str], list[int]]:
        """Return the memory of workers by role, and update their processor time."""
        memory: dict[tuple[str, str], list[int]] = {}
        now = time.monotonic()
        for worker in workers:
            role = (worker.incarnation.job_id, worker.role)
            self._seen_at[worker.incarnation.job_id] = now
            try:
                pages = Path(f"/proc/{worker.pid}/statm").read_text().split()[1]
                ticks = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            except (OSError, IndexError):  # it has ended meanwhile
                continue
            memory.setdefault(role, []).append(int(pages) * _PAGE_BYTES)
            self._cpu_s.setdefault(role, {})[worker.incarnation] = sum(map(int, ticks)) / _TICKS_PER_S
        for job_id in [job_id for job_id, at in self._seen_at.items() if now - at > SHOWN_S]:
            del self._seen_at[job_id]
            for known in (self._cpu_s, self._oom_kills):
                for role in [role for role in known if role[0] == job_id]:
                    del known[role]
        return memory

    def _write_often(self, file: Path) -> None:
        while not self._stop.wait(FILE_EVERY_S):
            self._write(file)

    def _write(self, file: Path) -> None:
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            temporary.write_bytes(self.render())
            temporary.replace(file)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if self._thread is None:
                raise ClusterError(f"cannot write {file} for --metrics-file: {error.strerror}.") from None


def _gauge(name: str, text: str, labels: list[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    made = GaugeMetricFamily(name, text, labels=labels)
    for each, value in values:
        made.add_metric(each, value)
    return made
