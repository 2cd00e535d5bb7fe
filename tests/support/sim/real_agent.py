"""The real agent core behind the simulator's door: its processes live in virtual time, its decisions are its own."""

from collections.abc import Callable, Iterable

import msgspec

from tests.support.invariants.agent import check
from tests.support.sim.sim_agent import Delays, Said, log_of, next_claims
from unified.config.settings import Intervals
from unified.core.timers import TimerTable
from unified.protocol.agent_master import MasterToAgent
from unified.protocol.records import (
    DirectoryEntry,
    Failure,
    Inbox,
    JobWorkerIncarnation,
    NameClaims,
    NodeResources,
    Progress,
)
from unified.protocol.worker_agent import (
    Claimed,
    Failed,
    Finished,
    Hello,
    Launch,
    Reported,
    Run,
    Running,
    WorkerToAgent,
)
from unified_agent.core.agent import AgentCore
from unified_agent.core.messages import (
    AgentAction,
    AgentEvent,
    AgentTick,
    Exit,
    MasterReached,
    MasterSaid,
    Reconnect,
    SendLog,
    SendMaster,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
)
from unified_agent.environment import NodeFacts

SIGNAL_S = 0.001
"""From SIGKILL, or from the last word of a worker that fails, to the end of its process."""


class SimProcess(msgspec.Struct):
    launch: Launch
    is_running: bool = False
    """In its entry point."""
    round: int = 0
    code: int = 0
    """With which it will exit."""
    claims: NameClaims = NameClaims()


class RealAgent:
    """One life of an agent: the real core, simulated processes. Its invariants are checked after every step.

    Args:
        clock: the world's virtual time, for what a test does to it.
    """

    def __init__(
        self,
        node: str,
        resources: NodeResources,
        clock: Callable[[], float],
        *,
        incarnation: str = "a",
        host_id: str = "",
        delays: Delays | None = None,
    ) -> None:
        self.node = node
        self._clock = clock
        self.delays = delays or Delays()
        self.lives: dict[tuple[str, str, int], SimProcess] = {}
        """Processes that exist."""
        self.is_stuck = False
        """Its processes ignore SIGTERM."""
        self.is_over = False
        self._timers: TimerTable[tuple[str, JobWorkerIncarnation | None]] = TimerTable()
        self._core = AgentCore(
            NodeFacts(
                node=node,
                incarnation=incarnation,
                hostname=f"{node}.local",
                host_id=host_id or f"host-{node}",
                address=f"10.0.0.{node[1:] or 0}",
                master="tcp://10.0.0.100:7077",
                pid=1,
                run_dir="/run",
                log_dir="/logs",
                resources=resources,
            ),
            Intervals(),
        )

    @property
    def next_deadline(self) -> float | None:
        deadlines = [] if self.is_over else [self._core.next_deadline, self._timers.next_deadline]
        return min((due for due in deadlines if due is not None), default=None)

    def begin(self, now: float) -> list[Said]:
        return self._step(now, MasterReached())

    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]:
        return self._step(now, MasterSaid(message=message, request_id=request_id))

    def tick(self, now: float) -> list[Said]:
        said: list[Said] = []
        for what, life in self._timers.due(now):
            said += self._do(now, what, life)
        if (deadline := self._core.next_deadline) is not None and deadline <= now:
            said += self._step(now, AgentTick())
        return said

    # -- what a test does to it --------------------------------------------------------------------------------------

    def end(self, job_id: str, worker: str, failure: Failure | None) -> list[Said]:
        """The worker's process ends now: by a signal, with an exception, or (None) because its work is done."""
        said: list[Said] = []
        now = self._clock()
        for life in self._of(job_id, worker):
            word, code = _last_word(failure)
            if word is not None and (failure is not None or self.lives[life].is_running):
                said += self._step(now, WorkerSaid(life=life, word=word))
            said += self._exited(now, life, code)
        return said

    def finish(self, job_id: str, worker: str) -> list[Said]:
        return self._say_if_running(job_id, worker, Finished())

    def report_progress(self, job_id: str, worker: str, step: int) -> list[Said]:
        return self._say_if_running(job_id, worker, Reported(progress=Progress(step=step)))

    def claim(self, job_id: str, worker: str, names: Iterable[str]) -> list[Said]:
        said: list[Said] = []
        for life in self._of(job_id, worker):
            if self.lives[life].is_running:
                self.lives[life].claims = next_claims(self.lives[life].claims, names)
                said += self._step(self._clock(), WorkerSaid(life=life, word=Claimed(claims=self.lives[life].claims)))
        return said

    def directory(self, job_id: str) -> list[DirectoryEntry]:
        return self._core.directories[job_id].entries

    def leave(self) -> list[Said]:
        return self._step(self._clock(), StopAsked(reason="SIGTERM"))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of(self, job_id: str, worker: str) -> list[JobWorkerIncarnation]:
        return [JobWorkerIncarnation(*life) for life in self.lives if life[:2] == (job_id, worker)]

    def _say_if_running(self, job_id: str, worker: str, word: WorkerToAgent) -> list[Said]:
        said: list[Said] = []
        for life in self._of(job_id, worker):
            if self.lives[life].is_running:
                said += self._step(self._clock(), WorkerSaid(life=life, word=word))
        return said

    def _step(self, now: float, event: AgentEvent) -> list[Said]:
        if self.is_over:
            return []
        actions = self._core.step(now, event)
        broken = check(self._core)
        assert not broken, f"{self.node} at {now:.3f} after {event}: {broken}"
        return self._carry_out(now, actions)

    def _carry_out(self, now: float, actions: Iterable[AgentAction]) -> list[Said]:
        said: list[Said] = []
        for action in actions:
            match action:
                case SendMaster(message=message):
                    said.append((1, message))
                case Reconnect():
                    self._timers.arm(("reached", None), now + self.delays.run)
                case StartWorker(life=life, launch=launch):
                    rivals = [other for other in self.lives if other[:2] == life[:2]]
                    assert not rivals, f"{life} is started beside {rivals}"
                    self.lives[life] = SimProcess(launch)
                    self._timers.arm(("started", life), now)
                    self._timers.arm(("hello", life), now + self.delays.start)
                case TellWorker(life=life, message=Run(order=order)) if life in self.lives:
                    self.lives[life].round = order.round
                    self._timers.arm(("run", life), now + self.delays.run)
                case SignalWorker(life=life, how=how) if life in self.lives:
                    self._signal(now, life, how)
                case SendLog(order=order, request_id=request_id):
                    said.append((request_id, log_of(order, self.node, self._core.facts.incarnation)))
                case Exit():
                    self.is_over = True
        return said

    def _signal(self, now: float, life: JobWorkerIncarnation, how: str) -> None:
        process = self.lives[life]
        if how == "kill":
            process.code = -9
            self._timers.arm(("exit", life), now + SIGNAL_S)
        elif not self.is_stuck:
            process.code = 0
            self._timers.arm(("exit", life), now + self.delays.stop)

    def _do(self, now: float, what: str, life: JobWorkerIncarnation | None) -> list[Said]:
        if life is None:
            return self._step(now, MasterReached())
        process = self.lives.get(life)
        if process is None:
            return []
        match what:
            case "started":
                return self._step(now, WorkerStarted(life=life, pid=100))
            case "hello":
                return self._step(now, WorkerSaid(life=life, word=_hello(life, process.launch)))
            case "run":
                process.is_running = True
                return self._step(now, WorkerSaid(life=life, word=Running(round=process.round)))
            case _:
                return self._exited(now, life, process.code)

    def _exited(self, now: float, life: JobWorkerIncarnation, code: int) -> list[Said]:
        del self.lives[life]
        return self._step(now, WorkerExited(life=life, code=code))


def _hello(life: JobWorkerIncarnation, launch: Launch) -> Hello:
    if launch.kind == "store":
        return Hello(pid=100, store_port=29500)
    return Hello(pid=100, inbox=Inbox(inbox_id=f"{life}@{launch.node}"))


def _last_word(failure: Failure | None) -> tuple[WorkerToAgent | None, int]:
    """What a worker says before it exits, and its exit code."""
    if failure is None:
        return Finished(), 0
    if failure.category == "crash":
        return None, -9
    return Failed(failure=failure), 1
