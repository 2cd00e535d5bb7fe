"""A master of a few lines on a real socket, and a job as it tells of it: `stage` and output are what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from unified.protocol.client_master import (
    Accepted,
    Changes,
    ClientToMaster,
    Done,
    EndReport,
    Explain,
    GetJob,
    JobLine,
    JobList,
    JobStatus,
    ListJobs,
    ListNodes,
    LogChunk,
    MasterAnswer,
    NodeList,
    NodeStatus,
    ReadLog,
    Refused,
    RoleStatus,
    SignalWorkers,
    StopJob,
    Story,
    SubmitJob,
    WatchCluster,
    WorkerStatus,
    client_to_master,
    master_to_client,
)
from unified.protocol.columns import columns_of
from unified.protocol.framing import PROTOCOL_VERSION, Codec
from unified.protocol.records import Device, EventRecord, NodeResources, NodeState, Progress, Stage, WorkerState

A = TypeVar("A")
Respond = Callable[[ClientToMaster], MasterAnswer | list[bytes] | None]


class FakeMaster:
    """A ROUTER that answers requests as the test says: a record, raw frames, or None for silence."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        self.respond: Respond = lambda message: Refused(code="bad-request", reason="the test says nothing of this")
        self.requests: list[Any] = []
        self.codec: Codec[Any] = client_to_master
        """Of what is asked here."""
        self.version = PROTOCOL_VERSION
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-master")

    def start(self) -> FakeMaster:
        self._thread.start()
        return self

    def requests_of(self, kind: type[A]) -> list[A]:
        return [request for request in self.requests if isinstance(request, kind)]

    def close(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            self._socket.close()
            self._context.term()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(10):
                continue
            sender, *frames = self._socket.recv_multipart()
            request_id, message = self.codec.decode(frames)
            self.requests.append(message)
            answer = self.respond(message)
            if isinstance(answer, msgspec.Struct):
                self._socket.send_multipart(
                    [sender, *master_to_client.encode(answer, request_id, version=self.version)]
                )
            elif answer is not None:
                self._socket.send_multipart([sender, *answer])


@pytest.fixture
def fake_master() -> Iterator[FakeMaster]:
    master = FakeMaster().start()
    yield master
    master.close()


def worker_status(rank: int = 0, role: str = "trainer", **fields: Any) -> WorkerStatus:
    """Return a worker that runs, with values for what `fields` leaves open."""
    place = {"name": f"{role}_1-{rank}_1-0", "local_rank": 0, "node_rank": 0, "incarnation": 0}
    return WorkerStatus(**{"role": role, "rank": rank, "state": WorkerState.RUNNING, **place, **fields})


def changes_of(status: JobStatus, version: int) -> Changes:
    """Return the answer of a master that tells the whole of one job."""
    return Changes(
        version=version,
        at=0.0,
        is_whole=True,
        jobs=[msgspec.structs.replace(status, workers=[])],
        workers={status.job_id: columns_of(status.workers)} if status.workers else {},
    )


WORKER = "trainer_1-0_1-0"
RESOURCES = NodeResources(cpu=8, memory_mb=16384, disk_mb=0, devices=[Device(index=0, kind="virtual")])


class Job:
    """What the fake master knows: one job of one worker, whose `stage` and output the test moves."""

    def __init__(self) -> None:
        self.stage = Stage.RUNNING
        self.version = 1
        self.exit_code: int | None = None
        self.end: EndReport | None = None
        self.reason = "all workers run"
        self.output = {"out": b"", "err": b"", "out.times": b"", "err.times": b""}
        self.ends_on_stop = True
        self.num_workers = 1
        self.output_lost = ""
        self.stops: list[StopJob] = []

    def finish(self, exit_code: int, reason: str = "", end: EndReport | None = None) -> None:
        self.stage, self.exit_code, self.end = Stage.STOPPED, exit_code, end
        self.reason = reason
        self.version += 1

    def status(self) -> JobStatus:
        workers = [self.worker(rank) for rank in range(self.num_workers)]
        return JobStatus(
            job_id="gpt-1",
            name="gpt",
            stage=self.stage,
            exit_code=self.exit_code,
            reason=self.reason,
            roles=[RoleStatus(name="trainer", kind="simple", total=self.num_workers, is_driver=True)],
            workers=workers,
            end=self.end,
        )

    def worker(self, rank: int) -> WorkerStatus:
        name = f"trainer_{self.num_workers}-{rank}_1-0"
        state = WorkerState.EXITED if self.stage == Stage.STOPPED else WorkerState.RUNNING
        more: dict[str, Any] = {"output_lost": self.output_lost, "progress": Progress(step=3, total=10)}
        return worker_status(rank, name=name, state=state, node="n1", pid=77, **more)

    def respond(self, message: ClientToMaster) -> MasterAnswer:
        match message:
            case SubmitJob():
                return Accepted(job_id="gpt-1")
            case GetJob(job="gpt-1" | "gpt"):
                return self.status()
            case WatchCluster(job="gpt-1" | "gpt"):
                return changes_of(self.status(), self.version)
            case ReadLog():
                return self.chunk(message)
            case StopJob():
                self.stops.append(message)
                if self.ends_on_stop or message.force:
                    self.finish(130, message.reason)
                return Done()
            case SignalWorkers():
                return Done()
            case ListJobs():
                line = JobLine(
                    job_id="gpt-1",
                    name="gpt",
                    stage=self.stage,
                    exit_code=self.exit_code,
                    reason=self.reason,
                    submitted_at=5.0,
                    ended_at=None,
                    num_workers=1,
                )
                return JobList(jobs=[line])
            case ListNodes():
                node = NodeStatus(
                    node="n1",
                    state=NodeState.ALIVE,
                    hostname="h",
                    address="10.0.0.1",
                    resources=RESOURCES,
                    free=NodeResources(cpu=6, memory_mb=8192, disk_mb=0),
                    labels={"zone": "a"},
                )
                return NodeList(nodes=[node])
            case Explain(job="gpt-1"):
                return Story(events=[EventRecord(at=5.5, event="job-submitted", reason="by me", job="gpt-1")])
            case _:
                return Refused(code="not-found", reason="there is no such job.")

    def chunk(self, request: ReadLog) -> LogChunk:
        data = self.output.get(request.stream, b"")
        start = max(0, len(data) + request.offset) if request.offset < 0 else request.offset
        part = data[start : start + request.max_bytes]
        return LogChunk(
            worker=WORKER,
            incarnation=0,
            data=part,
            offset=start,
            next_offset=start + len(part),
            size=len(data),
            is_final=self.stage == Stage.STOPPED and start + len(part) == len(data),
            path="/logs/0.out",
        )


@pytest.fixture
def job(fake_master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job()
    fake_master.respond = job.respond
    monkeypatch.setenv("UNIFIED_MASTER", fake_master.address)
    monkeypatch.setenv("UNIFIED_PROGRESS", "plain")
    return job
