"""The simulated cluster: virtual time, the master's shell around its real core, and connections that delay and break.

Everything happens in one order, which the seed decides: the same seed gives the same cluster, event by event.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Literal, TypeVar

import msgspec

from unified.config.settings import Intervals
from unified.protocol.agent_master import DesiredWorkers, DirectoryChanged, MasterOrder, MasterToAgent
from unified.protocol.client_master import ClientToMaster, MasterAnswer
from unified.protocol.records import EventRecord
from unified_master.core import messages
from unified_master.core.master import MasterCore
from unified_simulator.invariants.master import InvariantChecks
from unified_simulator.keeper import SimulatedKeeper
from unified_simulator.measure import StepTimes
from unified_simulator.network import SLOW_AND_QUICK, Connection, NetworkOptions, delay_s
from unified_simulator.node import Said, SimulatedNode

CLIENT = b"client"
RECONNECT_S = 1.0
"""Longest time until an agent finds out that its master can be reached again."""
Watch = Callable[[float, str, object], None]
Crash = Literal["", "before-save", "before-send"]
"""Moment at which the master dies: before a decision is on disk, or between the disk and the network."""
KEPT_EVENTS = 10_000
"""Entries of the event log that a large cluster keeps."""
_DELIVERY, _WAKE = 0, 1


N = TypeVar("N", bound=SimulatedNode)


class SimulatedCluster(Generic[N]):
    """The master, agents and clients in virtual time. The master's invariants are checked after every step.

    Args:
        seed: of delays and losses; None: every message takes 1 ms.
        watch: called for every message and decision, with the time and its author.
        check_all_every: steps between two checks of the whole cluster; other steps check only what they touched.
        is_large: leaves out heartbeats of agents that nothing happens to, and the directories of jobs: each agent would
            hold them, and no simulated worker reads them.
    """

    def __init__(
        self,
        *,
        seed: int | None = None,
        intervals: Intervals | None = None,
        network: NetworkOptions | None = None,
        watch: Watch | None = None,
        check_all_every: int = 1,
        is_large: bool = False,
    ) -> None:
        self.intervals = intervals or Intervals()
        self.network = network or (NetworkOptions() if seed is None else SLOW_AND_QUICK)
        self.now = 0.0
        self.num_steps = 0
        self.rng = random.Random(seed) if seed is not None else None
        self.watch = watch or (lambda _now, _who, _what: None)
        self.agents: dict[str, N] = {}
        self.cut: set[str] = set()
        """Nodes that can neither send nor receive."""
        self.unreadable: set[str] = set()
        """Nodes that reach only a master of another version, which refuses all that they send."""
        self.answers: dict[int, MasterAnswer] = {}
        self.stored: dict[tuple[str, str], bytes] = {}
        self.log: deque[EventRecord] = deque(maxlen=KEPT_EVENTS if is_large else None)
        self._job_ids: set[str] = set()
        """Ids of all jobs so far, with those that the master has forgotten."""
        self.num_decisions = 0
        self.disk_s: Callable[[], float] = lambda: 0.0
        """Seconds that the next transaction of the master takes."""
        self.crash_at: Crash = ""
        """Moment within its next decision at which the master dies."""
        self.down_s = 0.0
        """Time for which a master that died at `crash_at` stays down."""
        self.is_large = is_large
        self.times = StepTimes()
        """Times of the master's core."""
        self.checks = InvariantChecks(check_all_every, is_sparing=is_large)
        self._resting: set[str] = set()
        """Nodes that would send only heartbeats, which are left out."""
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0
        self._connections: dict[str, Connection] = {}
        self.keepers: dict[str, SimulatedKeeper] = {}
        self._wake: dict[str, float] = {}
        self._frozen: dict[str, list[Callable[[], None]]] = {}
        """Messages to stopped agents, delivered when the agent continues."""
        self._request = 0
        self._term = 0
        self.is_down = self._is_writing = False
        self._inbox: list[messages.MasterEvent] = []
        """Messages to the master while it waits for its disk."""
        self._begin_term([])

    # -- events ------------------------------------------------------------------------------------------------------

    def add(self, agent: N) -> None:
        """Start an agent with its lease keeper; a running agent of the node is killed with its workers first."""
        if agent.node in self.agents:
            self.kill_agent(agent.node)
        self.agents[agent.node] = agent
        self.keepers[agent.node] = SimulatedKeeper(self, agent)
        connection = self._connections.setdefault(agent.node, Connection())
        connection.renew()
        connection.is_up = True
        self.say(agent.node, agent.begin(self.now))
        self.keepers[agent.node].wake()

    def kill_agent(self, node: str, *, with_host: bool = True) -> None:
        """Kill an agent and its workers, without a last message; its lease keeper ends only with the host."""
        self._rouse(node)
        self.agents.pop(node).die()
        self._frozen.pop(node, None)
        self._wake.pop(node, None)
        self.keepers[node].is_over = with_host
        if not with_host:
            self.watch(self.now, "fault", f"the agent of {node} has died")
            self.keepers[node].tell_death()

    def lose_state(self, backup: dict[tuple[str, str], bytes] | None = None) -> None:
        """Replace the store of the master, which restarts: by an earlier copy of it, or by an empty one."""
        self.stored = dict(backup or {})
        self.log.clear()
        self.restart_master()

    def freeze_agent(self, node: str) -> None:
        """Stop an agent's process as SIGSTOP does; its workers go on."""
        self._rouse(node)
        if node not in self._frozen:
            self._frozen[node] = []
            self.keepers[node].stopped_at = self.now

    def thaw_agent(self, node: str) -> None:
        if (arrived := self._frozen.pop(node, None)) is not None:
            self.keepers[node].stopped_at = None
            for take in arrived:
                take()
        self.wake(node)

    def cut_off(self, node: str) -> None:
        """Drop all messages to and from a node."""
        self._rouse(node)
        self.cut.add(node)
        self.wake(node)

    def make_unreadable(self, node: str) -> None:
        """Put a master of another version in the place of the node's master."""
        self._rouse(node)
        self.unreadable.add(node)
        self.break_connection(node)

    def heal(self, node: str) -> None:
        """Repair the network of a node; TCP has given up the old connection."""
        self.cut.discard(node)
        self.unreadable.discard(node)
        self.break_connection(node)

    def act(self, agent: N, what: Callable[[], list[Said]]) -> None:
        """Do something to an agent's processes; a frozen agent sees it when it continues."""
        self._to_agent(agent.node, lambda _agent: what())

    def break_connection(self, node: str) -> None:
        """End a connection: messages on their way are lost, and the agent connects again as soon as it can."""
        self._rouse(node)
        connection = self._connections[node]
        connection.renew()
        connection.is_up = False
        number = connection.number
        self.after(self._uniform(0.05, RECONNECT_S), lambda: self._connect(node, number))
        self.wake(node)

    def crash_master(self, down_s: float) -> None:
        """Kill the master, and restart it with its store after a time; all connections end."""
        self._die()
        self.is_down = True
        for node in self.agents:
            self.wake(node)
        self.watch(self.now, "fault", f"the master is killed, and away for {down_s:.3f} s")
        self.after(down_s, self.restart_master)

    @property
    def is_writing(self) -> bool:
        """True while a decision of the master is not on its disk, and not in `log`."""
        return self._is_writing

    def restart_master(self) -> None:
        """Start the master (again) with its store; all connections are made anew."""
        self._die()
        was_down, self.is_down = self.is_down, False
        records = [(kind, key, data) for (kind, key), data in self.stored.items()]
        if self.rng is not None:
            self.rng.shuffle(records)
        for node in self.agents:
            if was_down:
                self.break_connection(node)
            elif self._connections[node].is_up:
                self._connections[node].renew()
        self._begin_term(records)
        for node in self.agents:
            self.wake(node)

    def say(self, node: str, said: Iterable[Said]) -> None:
        """Send an agent's messages to the master; they are lost without a connection."""
        connection = self._connections[node]
        for request_id, message in said:
            if connection.is_up:
                event = messages.Received(peer=self._peer(node), request_id=request_id, message=message)
                self._deliver(node, "up", lambda event=event: self._heard(node, event))  # type: ignore[misc]  # a bound default
        self.wake(node)

    def ask(self, request: ClientToMaster) -> int:
        """Send a client's request; `answers` gets the answer under the returned number, unless the master dies."""
        self._request += 1
        number = self._request
        self.step(messages.Received(peer=CLIENT, request_id=number, message=request))
        return number

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call a function after some virtual seconds."""
        self._push(self.now + seconds, _DELIVERY, what)

    # -- time --------------------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self._next()) is not None and due <= end:
            self._advance(due)
        self.now = end

    def until(self, is_true: Callable[[], bool], what: str, limit_s: float = 300.0) -> None:
        """Run until a condition is true, or fail with the name of the condition."""
        end = self.now + limit_s
        while not is_true():
            due = self._next()
            if due is None or due > end:
                raise AssertionError(f"after {limit_s} s of virtual time still waiting for {what}\n{self.recent()}")
            self._advance(due)

    def recent(self) -> str:
        """Return the last 30 decisions, a line each."""
        return "\n".join(
            f"{e.at:8.3f} {e.event} {e.job} {e.worker or e.role or e.node}: {e.reason}" for e in list(self.log)[-30:]
        )

    # -- the master --------------------------------------------------------------------------------------------------

    def step(self, event: messages.MasterEvent) -> None:
        """Give the master an event; it handles the event at once, or after its disk is done."""
        if self.is_down:
            return
        if self._is_writing:
            self._inbox.append(event)
        else:
            self._decide([event])

    def _die(self) -> None:
        """Drop the events that wait, and the decision that is being written."""
        for node in list(self._resting):
            self._rouse(node)
        self._term += 1
        self._is_writing, self._inbox, self.crash_at = False, [], ""

    def _begin_term(self, records: list[tuple[str, str, bytes]]) -> None:
        self.core = MasterCore(self.intervals, id_suffix=f"{self._term:x}" if self._term else "")
        actions = self.core.restore(self.now, records, list(self.log))
        self._record(actions)
        self._perform(actions)
        self._check(None, actions)

    def _decide(self, events: list[messages.MasterEvent]) -> None:
        """Step through the events; save all decisions in one transaction, and send only after it."""
        actions: list[messages.MasterAction] = []
        for event in events:
            self.num_steps += 1
            begun = time.thread_time()
            decided = self.core.step(self.now, event)
            self.times.note(self.now, event, time.thread_time() - begun, decided)
            self._check(event, decided)
            actions += decided
        has_saves = any(not isinstance(action, messages.Send) for action in actions)
        if has_saves and (disk_s := self.disk_s()) > 0:
            self._is_writing, term = True, self._term
            self.after(disk_s, lambda: self._written(term, actions))
        else:
            self._finish(actions, has_saves)

    def _written(self, term: int, actions: list[messages.MasterAction]) -> None:
        if term != self._term:
            return  # the master died during the write
        self._is_writing = False
        self._finish(actions, True)
        if self._inbox and not self.is_down:
            events, self._inbox = self._inbox, []
            self._decide(events)

    def _finish(self, actions: list[messages.MasterAction], has_saves: bool) -> None:
        crash = self.crash_at if has_saves else ""
        if crash != "before-save":
            self._record(actions)
        if crash:
            self.crash_master(self.down_s)
        else:
            self._perform(actions)

    def _record(self, actions: list[messages.MasterAction]) -> None:
        for action in actions:
            match action:
                case messages.SaveRecord(kind=kind, key=key, data=data):
                    if data is None:
                        self.stored.pop((kind, key), None)
                    else:
                        if kind == "spec":  # saved once for each job
                            assert key not in self._job_ids, f"{key} is the id of two jobs\n{self.recent()}"
                            self._job_ids.add(key)
                        self.stored[kind, key] = data
                case messages.ReportEvent(record=record):
                    self.log.append(record)
                    self.num_decisions += 1
                    self.watch(self.now, "master", record)

    def _perform(self, actions: list[messages.MasterAction]) -> None:
        for action in actions:
            if isinstance(action, messages.Send):
                self._send(action)

    def _send(self, action: messages.Send) -> None:
        if action.peer == CLIENT:
            assert not isinstance(action.message, MasterOrder)
            assert action.request_id not in self.answers, f"request {action.request_id} was answered twice"
            self.answers[action.request_id] = action.message
            self.watch(self.now, "client", action.message)
            return
        assert isinstance(action.message, MasterOrder)
        node = action.peer.decode().split("/")[0]
        self.watch(self.now, f"to {node}", action.message)
        request_id, order = action.request_id, self._carried(action.message)
        if order is None:
            return
        if node not in self.cut and (keeper := self.keepers.get(node)) and action.peer == keeper.peer:
            self.after(self._delay_s(), lambda: keeper.answered(request_id))
        elif action.peer == self._peer(node) and self._connections[node].is_up:
            self._deliver(node, "down", lambda: self._arrived(node, action.peer, request_id, order))

    def _check(self, event: messages.MasterEvent | None, actions: list[messages.MasterAction]) -> None:
        if broken := self.checks.after(self.core.cluster, event, actions, but=CLIENT):
            raise AssertionError(
                "\n".join([f"at {self.now:.3f}:", *broken, f"after {str(event)[:2000]}", self.recent()])
            )

    # -- the network -------------------------------------------------------------------------------------------------

    def _peer(self, node: str) -> bytes:
        return f"{node}/{self._connections[node].number}".encode()

    def _deliver(self, node: str, direction: str, what: Callable[[], None]) -> None:
        """Deliver after a delay, in order within a connection and direction only."""
        connection = self._connections[node]
        at = max(self.now + self._delay_s(), connection.arrival.get(direction, 0.0))
        connection.arrival[direction] = at
        connection.num_underway += 1

        def arrive() -> None:
            connection.num_underway -= 1
            what()

        self._push(at, _DELIVERY, arrive)

    def _carried(self, order: MasterToAgent) -> MasterToAgent | None:
        """Return the part of an order that is delivered: a large cluster leaves out directories."""
        if self.is_large and isinstance(order, DirectoryChanged):
            return None
        if self.is_large and isinstance(order, DesiredWorkers):
            jobs = [msgspec.structs.replace(job, directory=[]) for job in order.jobs]
            return msgspec.structs.replace(order, jobs=jobs)
        return order

    def _heard(self, node: str, event: messages.Received) -> None:
        if node in self.cut or event.peer != self._peer(node):
            return
        self.watch(self.now, node, event.message)
        if node not in self.unreadable:
            self.step(event)
        elif node in self.agents:
            self._to_agent(node, lambda agent: agent.cannot_read("another protocol version"))

    def _arrived(self, node: str, peer: bytes, request_id: int, message: MasterToAgent) -> None:
        if node in self.agents and node not in self.cut and peer == self._peer(node):
            self._to_agent(node, lambda agent: agent.receive(self.now, request_id, message))

    def _connect(self, node: str, number: int) -> None:
        """Connect again, unless the connection was renewed meanwhile; retry later while the master is not reachable."""
        connection = self._connections[node]
        if connection.number != number or node not in self.agents:
            return
        if self.is_down or node in self.cut:
            self.after(self._uniform(0.05, RECONNECT_S), lambda: self._connect(node, number))
            return
        connection.is_up = True
        self._to_agent(node, lambda agent: agent.reached(self.now))

    # -- lease keepers -----------------------------------------------------------------------------------------------

    def hear_keeper(self, node: str, event: messages.Received) -> None:
        """Send a keeper's message to the master on the keeper's own connection; it ends with the master's process."""
        term = self._term

        def arrive() -> None:
            if node not in self.cut | self.unreadable and term == self._term:
                self.step(event)

        self.after(self._delay_s(), arrive)

    def lose_lease(self, node: str, reason: str) -> None:
        self._to_agent(node, lambda agent: agent.lose_lease(reason))

    # -- agents ------------------------------------------------------------------------------------------------------

    def _to_agent(self, node: str, what: Callable[[N], list[Said]]) -> None:
        agent = self.agents[node]
        if node in self._frozen:
            self._frozen[node].append(lambda: self._take(agent, what))
        else:
            self._take(agent, what)

    def _take(self, agent: N, what: Callable[[N], list[Said]]) -> None:
        if self.agents.get(agent.node) is agent:
            self._rouse(agent.node)
            self.say(agent.node, what(agent))

    def _may_rest(self, node: str, agent: N) -> bool:
        connection, record = self._connections[node], self.core.cluster.nodes.get(node)
        is_joined = record is not None and record.is_open and record.peer == self._peer(node)
        is_reached = connection.is_up and not connection.num_underway and node not in self.cut | self.unreadable
        return is_joined and is_reached and not self.is_down and node not in self._frozen and agent.is_quiet

    def _rest(self, node: str) -> None:
        """Keep a node's lease valid until something happens to the node: its heartbeats would change nothing."""
        self._resting.add(node)
        self.keepers[node].is_resting = True
        self.core.cluster.leases.renew(node, self.now, lease_s=math.inf)

    def _rouse(self, node: str) -> None:
        """End a node's rest, as if it had sent its heartbeats until now."""
        if node not in self._resting:
            return
        self._resting.discard(node)
        self.keepers[node].wake()
        beaten_at = self.now - self._uniform(0.0, self.intervals.heartbeat_s)
        if (record := self.core.cluster.nodes.get(node)) is not None and record.is_connected:
            record.seen_at = beaten_at
            self.core.cluster.leases.renew(node, beaten_at)
        self.agents[node].rouse(self.now)

    def wake(self, node: str) -> None:
        """Wake the agent at its next deadline."""
        agent = self.agents.get(node)
        if self.is_large and agent is not None and self._may_rest(node, agent):
            self._rest(node)
            return
        due = agent.next_deadline if agent is not None else None
        if due is not None and node not in self._frozen and due < self._wake.get(node, float("inf")):
            self._wake[node] = due
            self._push(max(due, self.now), _WAKE, lambda: self._woken(node, due))

    def _woken(self, node: str, due: float) -> None:
        if self._wake.get(node) != due:
            return  # the agent was woken earlier, or is gone
        del self._wake[node]
        agent = self.agents[node]
        if node in self._frozen or node in self._resting:
            return  # woken again when it continues
        if agent.next_deadline is not None and agent.next_deadline <= self.now:
            self.say(node, agent.tick(self.now))
        else:
            self.wake(node)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _uniform(self, least: float, most: float) -> float:
        return least if self.rng is None else self.rng.uniform(least, most)

    def _delay_s(self) -> float:
        return delay_s(self.network, self.rng)

    def _push(self, at: float, order: int, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, order, self._count, what))

    @property
    def _master_due(self) -> float | None:
        return None if self.is_down or self._is_writing else self.core.next_deadline

    def _next(self) -> float | None:
        due = self._master_due
        first = self._heap[0][0] if self._heap else None
        return first if due is None else due if first is None else min(first, due)

    def _advance(self, due: float) -> None:
        self.now = max(self.now, due)
        while self._heap and self._heap[0][0] <= self.now:
            heapq.heappop(self._heap)[3]()
        if (deadline := self._master_due) is not None and deadline <= self.now:
            self.step(messages.MasterTick())
