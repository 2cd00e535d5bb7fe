"""A master that the test plays, and real agents that talk to it."""

import functools
import itertools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import zmq

from tests.support.deadlines import met
from unified import process, testing
from unified.job.spec import EntryPoint, JobSpec, RoleSpec, WorkerPlace
from unified.protocol.agent_master import (
    AgentDied,
    AgentHeartbeat,
    AgentPulse,
    AgentRegistered,
    DesiredJob,
    DesiredWorker,
    DesiredWorkers,
    HeartbeatSeen,
    LogRead,
    ObservedWorker,
    ObservedWorkers,
    ReadAgentLog,
    RegisterAgent,
    RunOrder,
    agent_to_master,
    master_to_agent,
)
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import Failure, WorkerState
from unified.security.curve import Gatekeeper
from unified.security.keys import ClusterKey

DEADLINE_S = met(100.0)
ROOT = Path(__file__).parents[2]
eventually = functools.partial(testing.eventually, timeout=DEADLINE_S)
M = TypeVar("M", bound=msgspec.Struct)


class PlayedMaster:
    """A ROUTER in the test's own hands."""

    def __init__(self, key: ClusterKey | None = None) -> None:
        self.key = key
        self.address = ""
        self.listen("tcp://127.0.0.1:*")
        self.generation = 0
        self.peer = b""
        self.request_id = 0
        """Request id of the message that was heard last."""
        self.seen: dict[str, ObservedWorker] = {}
        """The observed set that was heard last."""

    def listen(self, address: str = "") -> None:
        # A context of its own each time, as a master that is started again has: sockets that were just closed keep
        # their inproc names until ZeroMQ's reaper has got to them.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.gatekeeper = Gatekeeper(self._context, self.key, name="played")
        self.gatekeeper.guard(self._socket)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                self._socket.bind(address or self.address)
                break
            except zmq.ZMQError as error:
                # A socket that was just closed keeps its port until its I/O thread has let go.
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def hang_up(self) -> None:
        self.gatekeeper.close()
        self._context.destroy(0)  # of a test that failed, sockets may be open

    def hear(self, kind: type[M], is_so: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind of which something is so; heartbeats are answered meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        last: object = None
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(int(left * 1000)):
            peer, *frames = self._socket.recv_multipart()
            self.request_id, message = agent_to_master.decode(frames)
            if isinstance(message, AgentPulse | AgentDied):  # on a connection of its own
                self._socket.send_multipart([peer, *master_to_agent.encode(HeartbeatSeen(), self.request_id)])
            else:
                self.peer = peer
            if isinstance(message, AgentHeartbeat):
                self.say(HeartbeatSeen(), self.request_id)
            if isinstance(message, ObservedWorkers):
                self.seen = by_incarnation(message)
            if isinstance(message, kind):
                last = message
                if is_so(message):
                    return message
        raise AssertionError(f"no such {kind.__name__} within {DEADLINE_S} s; the last was {last}")

    def say(self, message: object, request_id: int = 0, version: int = PROTOCOL_VERSION) -> None:
        self._socket.send_multipart([self.peer, *master_to_agent.encode(message, request_id, version=version)])

    def welcome(self, lease_s: float = 20.0) -> RegisterAgent:
        registered = self.hear(RegisterAgent)
        self.say(AgentRegistered(lease_s=lease_s, heartbeat_s=0.1, relay="tcp://127.0.0.1:1"), self.request_id)
        self.hear(ObservedWorkers)
        return registered

    def desire(self, *workers: DesiredWorker, jobs: list[DesiredJob]) -> None:
        self.generation += 1
        self.say(DesiredWorkers(generation=self.generation, workers=list(workers), jobs=jobs))

    def observe(self, is_so: Callable[[dict[str, ObservedWorker]], bool]) -> dict[str, ObservedWorker]:
        """The first observed set, by worker and incarnation, of which something is so."""
        found = self.hear(ObservedWorkers, lambda message: is_so(by_incarnation(message)))
        return by_incarnation(found)

    def reaches(self, incarnation: str, state: WorkerState) -> ObservedWorker:
        """The worker in that state, which the set heard last may already show."""

        def is_there(workers: dict[str, ObservedWorker]) -> bool:
            return incarnation in workers and workers[incarnation].state is state

        return (self.seen if is_there(self.seen) else self.observe(is_there))[incarnation]

    def failure(self, incarnation: str = "w-0#0") -> Failure:
        """How a worker ended that did not end well."""
        failure = self.reaches(incarnation, WorkerState.EXITED).failure
        assert failure is not None
        return failure


def by_incarnation(message: ObservedWorkers) -> dict[str, ObservedWorker]:
    return {f"{worker.name}#{worker.worker_incarnation}": worker for worker in message.workers}


class AgentProcess:
    def __init__(
        self, folder: Path, master: str, *flags: str, entry: str = "agent_entry:main", stdin: int | None = None
    ) -> None:
        self.run_root = folder / "run"
        self._stderr = folder / "agent.err"
        command = [sys.executable, "-m", "unified_agent", "--master", master, "--node-id", "n1"]
        command += ["--state-dir", str(folder / "state"), "--worker-entry", entry, *flags]
        env = {"UNIFIED_VACATE_S": "0.5", **os.environ, "UNIFIED_RUN_DIR": str(self.run_root)}
        env["PYTHONPATH"] = f"{ROOT / 'tests/support/programs'}:{folder}"
        with self._stderr.open("ab") as stderr:
            self.process = subprocess.Popen(command, env=env, stderr=stderr, stdin=stdin, start_new_session=True)

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def inbox_file(self, worker: ObservedWorker) -> Path:
        """The socket of a worker's inbox."""
        assert worker.inbox is not None
        return Path(worker.inbox.routes[0].removeprefix("ipc://"))

    def allow_no_more_descriptors(self) -> tuple[int, int]:
        """Let every further one fail; the limits that were in force."""
        used = {int(entry) for entry in os.listdir(f"/proc/{self.process.pid}/fd")}
        first_free = next(number for number in itertools.count() if number not in used)
        before = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (first_free, before[1]))
        return before

    def descendants(self) -> list[int]:
        """Everything that carries this agent's mark, itself excluded."""
        marker = "UNIFIED_AGENT_NODE=n1"
        return [
            found.pid
            for found in process.every_process()
            if found.is_alive
            and process.has_environment(found.pid, marker)
            and process.has_environment(found.pid, f"UNIFIED_RUN_DIR={self.run_root}")
        ]


def a_job(
    mode: str, *, grace_s: float = 5.0, python: str | None = None, start_method: Literal["fork", "spawn"] = "fork"
) -> DesiredJob:
    role = RoleSpec(name="w", kind="simple", entry_point=EntryPoint(kind="attribute", target="x", argv=[mode]), total=4)
    spec = JobSpec(name="job", roles=[role], stop_grace_s=grace_s, python=python, start_method=start_method)
    return DesiredJob(job_id="job-1", spec=spec)


def a_worker(rank: int = 0, incarnation: int = 0, *, is_told_to_run: bool = True) -> DesiredWorker:
    return DesiredWorker(
        job_id="job-1",
        name=f"w-{rank}",
        worker_incarnation=incarnation,
        kind="worker",
        role="w",
        place=WorkerPlace(rank=rank, world_size=4),
        run=RunOrder(round=1, rank=rank, world_size=4) if is_told_to_run else None,
    )


STORE = DesiredWorker(job_id="job-1", name="store", worker_incarnation=0, kind="store")


def read_log(master: PlayedMaster, stream: Literal["out", "err"], offset: int = 0, worker: str = "w-0") -> LogRead:
    order = ReadAgentLog(
        job_id="job-1", worker=worker, worker_incarnation=0, stream=stream, offset=offset, max_bytes=65536
    )
    master.say(order, request_id=7)
    return master.hear(LogRead)
