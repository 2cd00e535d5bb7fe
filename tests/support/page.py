"""Browsers and a master for tests of the page, as far as HTTP and the protocol show them."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx

from tests.support.fake_master import RESOURCES, worker_status
from unified.protocol.client_master import (
    Changes,
    ClientToMaster,
    Done,
    JobStatus,
    MasterAnswer,
    NodeStatus,
    Refused,
    RoleStatus,
    StopJob,
    WatchCluster,
    WorkerStatus,
)
from unified.protocol.columns import columns_of
from unified.protocol.records import EventRecord, NodeState, Stage

OWN = {"X-Unified": "1", "Sec-Fetch-Site": "same-origin"}
"""Headers of the page's own scripts."""
IDLE_S = 0.2


class Event(NamedTuple):
    """An event of the stream."""

    name: str
    data: dict[str, Any]


@contextlib.contextmanager
def browser(url: str, shown: str = "", **options: Any) -> Iterator[httpx.Client]:
    """Yield a client that sends what the page's scripts send, signed in with a ticket or token if there is one."""
    with httpx.Client(base_url=url, headers=OWN, timeout=100, **options) as client:
        if shown:
            answer = client.post("/page/session", json={"ticket": shown})
            assert answer.status_code == 200, answer.text
        yield client


@contextlib.contextmanager
def stream(client: httpx.Client, job: str = "") -> Iterator[Iterator[Event]]:
    """Open the stream, and yield its events."""
    headers = {"X-Unified": "", "Sec-Fetch-Site": "same-origin"}
    with client.stream("GET", "/page/stream", params={"job": job} if job else {}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield _events(answer.iter_lines())


def _events(lines: Iterator[str]) -> Iterator[Event]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield Event(name, json.loads(line.removeprefix("data: ")))


def job(stage: Stage = Stage.RUNNING, job_id: str = "gpt-1", **fields: Any) -> JobStatus:
    roles = [RoleStatus(name="trainer", kind="elastic", total=2, is_driver=True, round=1)]
    return JobStatus(**{"job_id": job_id, "name": "gpt", "stage": stage, "roles": roles, **fields})


def node(name: str = "n1", **fields: Any) -> NodeStatus:
    place = {"hostname": "h", "address": "10.0.0.1", "resources": RESOURCES, "free": RESOURCES}
    return NodeStatus(**{"node": name, "state": NodeState.ALIVE, **place, **fields})


def changes(version: int, **fields: Any) -> Changes:
    """Return changes with rows of workers (of the job ``gpt-1``) and nodes as such."""
    workers: list[WorkerStatus] = fields.pop("workers", [])
    nodes: list[NodeStatus] = fields.pop("nodes", [])
    return Changes(
        version=version,
        at=float(version),
        workers={"gpt-1": columns_of(workers)} if workers else {},
        nodes=columns_of(nodes),
        **fields,
    )


class WatchedCluster:
    """What a `FakeMaster` tells: a cluster whose changes a test adds one by one."""

    def __init__(self) -> None:
        workers = [worker_status(rank, node="n1") for rank in range(2)]
        event = EventRecord(at=1.0, event="job-submitted", reason="by me", job="gpt-1", sequence=1)
        self.whole = changes(1, is_whole=True, jobs=[job()], workers=workers, nodes=[node()], events=[event])
        self.is_silent = False
        self.told: list[int] = []
        """Versions that were told, in order."""
        self.stops: list[StopJob] = []
        self._later: list[Changes] = []
        self._is_changed = threading.Event()

    def change(self, **fields: Any) -> int:
        """Add a change; return its version."""
        version = 2 + len(self._later)
        self._later.append(changes(version, **fields))
        self._is_changed.set()
        return version

    def respond(self, message: ClientToMaster) -> MasterAnswer | None:
        if self.is_silent:
            return None
        match message:
            case WatchCluster():
                return self._watch(message)
            case StopJob():
                self.stops.append(message)
                return Done(note="it stops")
            case _:
                return Refused(code="not-found", reason="there is no such thing.")

    def _watch(self, request: WatchCluster) -> Changes:
        if request.after_version < 1:
            return self.whole
        deadline = time.monotonic() + min(request.wait_s, IDLE_S)
        while len(self._later) < request.after_version:
            self._is_changed.clear()
            if not self._is_changed.wait(max(0.0, deadline - time.monotonic())):
                return Changes(version=request.after_version, at=float(request.after_version))
        self.told.append(request.after_version + 1)
        return self._later[request.after_version - 1]
