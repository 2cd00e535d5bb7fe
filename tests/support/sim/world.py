"""The real master core, simulated agents and clients, a virtual clock and a network that can be cut."""

import heapq
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from tests.support.invariants.master import check
from tests.support.sim.real_agent import RealAgent
from tests.support.sim.sim_agent import Said, SimAgent
from unified.config.settings import Intervals
from unified.protocol.agent_master import MasterOrder, MasterToAgent
from unified.protocol.client_master import ClientToMaster, MasterAnswer
from unified.protocol.records import EventRecord, Stage
from unified_master.core.master import MasterCore
from unified_master.core.messages import MasterAction, MasterTick, Received, ReportEvent, SaveRecord, Send
from unified_master.core.state import JobRecord

A = TypeVar("A")
CLIENT = b"client"
Watch = Callable[[float, str, object], None]


class World:
    """Runs everything in virtual time, in a fixed order, and checks the master's invariants after every step."""

    def __init__(self, *, seed: int | None = None, watch: Watch | None = None) -> None:
        self.intervals = Intervals()
        self.now = 0.0
        self.num_steps = 0
        self.rng = random.Random(seed) if seed is not None else None
        self.watch = watch or (lambda _now, _who, _what: None)
        self.agents: dict[str, SimAgent | RealAgent] = {}
        self.cut: set[str] = set()
        """Nodes that neither hear nor are heard."""
        self.answers: list[tuple[int, MasterAnswer]] = []
        self.stored: dict[tuple[str, str], bytes] = {}
        self.log: list[EventRecord] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._connection: dict[str, int] = {}
        self._arrival: dict[str, float] = {}
        self._request = 0
        self.core = MasterCore(self.intervals)
        self._perform(self.core.restore(self.now))

    # -- what happens ------------------------------------------------------------------------------------------------

    def add(self, agent: SimAgent | RealAgent) -> None:
        """Start an agent; one of the same node that runs is gone, with its workers."""
        self.agents[agent.node] = agent
        self._connection[agent.node] = self._connection.get(agent.node, 0) + 1
        self.say(agent.node, agent.begin(self.now))

    def kill_agent(self, node: str) -> None:
        """An agent and its workers are gone, without a word."""
        del self.agents[node]

    def say(self, node: str, said: Iterable[Said]) -> None:
        peer = self._peer(node)
        for request_id, message in said:
            event = Received(peer=peer, request_id=request_id, message=message)
            self._deliver(f"{node} up", lambda event=event, node=node: self._heard(node, event))  # type: ignore[misc]  # a bound default

    def ask(self, request: ClientToMaster) -> int:
        """A client asks; the answer will be in `answers` under the id returned."""
        self._request += 1
        number = self._request
        self.step(Received(peer=CLIENT, request_id=number, message=request))
        return number

    def answer(self, number: int) -> MasterAnswer | None:
        return next((message for request, message in self.answers if request == number), None)

    def request(self, request: ClientToMaster) -> MasterAnswer:
        """Ask, and wait for the answer."""
        number = self.ask(request)
        self.until(lambda: self.answer(number) is not None, f"an answer to {type(request).__name__}")
        found = self.answer(number)
        assert found is not None
        return found

    def get(self, kind: type[A], request: ClientToMaster) -> A:
        """Ask, and wait for the answer, which must be of this kind."""
        answer = self.request(request)
        assert isinstance(answer, kind), answer
        return answer

    def sim_agent(self, node: str) -> SimAgent:
        agent = self.agents[node]
        assert isinstance(agent, SimAgent)
        return agent

    def restart_master(self) -> None:
        """The master is killed and started again with its store; connections are made anew."""
        self.core = MasterCore(self.intervals)
        for node in self.agents:
            self._connection[node] += 1
        records = [(kind, key, data) for (kind, key), data in self.stored.items()]
        if self.rng is not None:
            self.rng.shuffle(records)
        self._perform(self.core.restore(self.now, records, list(self.log)))
        self._check("restore")

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self._next()) is not None and due <= end:
            self._advance(due)
        self.now = end

    def until(self, is_true: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
        """Run until something is true, or fail saying what was awaited."""
        end = self.now + limit_s
        while not is_true():
            due = self._next()
            if due is None or due > end:
                raise AssertionError(f"after {limit_s} s of virtual time still waiting for {what}\n{self.recent()}")
            self._advance(due)

    def recent(self) -> str:
        return "\n".join(
            f"{e.at:8.3f} {e.event} {e.job} {e.worker or e.role or e.node}: {e.reason}" for e in self.log[-30:]
        )

    def job(self, name: str) -> JobRecord:
        found = [job for job in self.core.cluster.jobs.values() if name in (job.job_id, job.spec.name)]
        return max(found, key=lambda job: job.sequence)

    def until_stage(self, name: str, stage: Stage) -> None:
        self.until(lambda: self.job(name).stage is stage, f"{name} to be {stage}")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _peer(self, node: str) -> bytes:
        return f"{node}/{self._connection[node]}".encode()

    def _next(self) -> float | None:
        deadlines = [self.core.next_deadline, *(agent.next_deadline for agent in self.agents.values())]
        if self._heap:
            deadlines.append(self._heap[0][0])
        return min((due for due in deadlines if due is not None), default=None)

    def _advance(self, due: float) -> None:
        self.now = max(self.now, due)
        while self._heap and self._heap[0][0] <= self.now:
            heapq.heappop(self._heap)[2]()
        for agent in list(self.agents.values()):
            if agent.next_deadline is not None and agent.next_deadline <= self.now:
                self.say(agent.node, agent.tick(self.now))
        if (deadline := self.core.next_deadline) is not None and deadline <= self.now:
            self.step(MasterTick())

    def _deliver(self, channel: str, what: Callable[[], None]) -> None:
        """After a delay, in order within a channel."""
        delay = 0.001 if self.rng is None else self.rng.choice((0.001, 0.001, 0.01, 0.2))
        at = max(self.now + delay, self._arrival.get(channel, 0.0))
        self._arrival[channel] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, what))

    def _heard(self, node: str, event: Received) -> None:
        is_current = node in self._connection and event.peer == self._peer(node)
        if node not in self.cut and is_current:
            self.watch(self.now, node, event.message)
            self.step(event)

    def step(self, event: Received | MasterTick) -> None:
        """The master takes in an event, and its invariants are checked."""
        self.num_steps += 1
        self._perform(self.core.step(self.now, event))
        self._check(event)

    def _check(self, event: object) -> None:
        if broken := check(self.core.cluster):
            raise AssertionError(f"at {self.now:.3f} after {event}:\n" + "\n".join(broken) + f"\n{self.recent()}")

    def _perform(self, actions: list[MasterAction]) -> None:
        for action in actions:
            match action:
                case SaveRecord(kind=kind, key=key, data=data):
                    if data is None:
                        self.stored.pop((kind, key), None)
                    else:
                        self.stored[kind, key] = data
                case ReportEvent(record=record):
                    self.log.append(record)
                    self.watch(self.now, "master", record)
                case Send():
                    pass
        for action in actions:
            if isinstance(action, Send):
                self._send(action)

    def _send(self, action: Send) -> None:
        if action.peer == CLIENT:
            assert not isinstance(action.message, MasterOrder)
            self.answers.append((action.request_id, action.message))
            self.watch(self.now, "client", action.message)
            return
        assert isinstance(action.message, MasterOrder)
        node = action.peer.decode().split("/")[0]
        self.watch(self.now, f"to {node}", action.message)
        order = action.message
        self._deliver(f"{node} down", lambda: self._arrive(node, action.peer, action.request_id, order))

    def _arrive(self, node: str, peer: bytes, request_id: int, message: MasterToAgent) -> None:
        agent = self.agents.get(node)
        if agent is not None and node not in self.cut and peer == self._peer(node):
            self.say(node, agent.receive(self.now, request_id, message))
