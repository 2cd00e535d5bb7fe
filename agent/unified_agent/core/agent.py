"""The agent's decisions: events in, actions out, no I/O.

Level-triggered: the master says which lives shall be (`DesiredWorkers`), the core compares with those that are, and
starts or stops what differs. Anything may be lost, doubled or late; the next comparison sees it.
"""

from __future__ import annotations

from typing import assert_never

from unified.config.settings import Intervals
from unified.core.directory import WorkerDirectory
from unified.protocol.agent_master import (
    AgentLeaving,
    AgentRefused,
    AgentRegistered,
    DesiredJob,
    DesiredWorker,
    DesiredWorkers,
    DirectoryChanged,
    HeartbeatSeen,
    MasterToAgent,
    ObservedWorkers,
    ReadAgentLog,
    RegisterAgain,
)
from unified.protocol.records import DirectoryEntry, Failure, JobWorkerIncarnation, Reachability, WorkerState
from unified.protocol.worker_agent import DirectoryNews, Failed, Hello, Reported, Run, Stop, WorkerToAgent
from unified_agent.core.launching import launch_of
from unified_agent.core.membership import Membership, MembershipState
from unified_agent.core.messages import (
    AgentAction,
    AgentEvent,
    AgentTick,
    Exit,
    KeepInterpreters,
    KeepReport,
    KeyRefused,
    MasterReached,
    MasterSaid,
    MasterUnreadable,
    Reconnect,
    SendLog,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerNotStarted,
    WorkerSaid,
    WorkerStarted,
)
from unified_agent.core.step import MARGIN_S, AgentStep, AgentTimer, Shutdown
from unified_agent.core.worker import LocalWorker
from unified_agent.environment import NodeFacts, starting_variables

OBSERVE_DELAY_S = 0.002
"""Time within which changes are reported in one message."""
PROGRESS_EVERY_S = 0.2
RESYNC_S = 10.0
"""Period of reports while nothing changes."""


class AgentCore:
    """The agent's core: routes events and owns the state."""

    def __init__(self, facts: NodeFacts, intervals: Intervals, *, give_up_s: float | None = None) -> None:
        self.facts = facts
        self.intervals = intervals
        self._step = AgentStep()
        self.timers = self._step.timers
        self.membership = Membership(self._step, facts, intervals, give_up_s)
        self.shutdown = Shutdown()
        self.workers: dict[JobWorkerIncarnation, LocalWorker] = {}
        self.desired: dict[JobWorkerIncarnation, DesiredWorker] = {}
        self.jobs: dict[str, DesiredJob] = {}
        self.directories: dict[str, WorkerDirectory] = {}
        self.generation = 0
        self._num_elsewhere = 0
        self._floor = 0
        self._pythons: list[str] = []
        self._observe_at: float | None = None
        self._observed_at = float("-inf")

    @property
    def next_deadline(self) -> float | None:
        """Time at which `AgentTick` is due, on the caller's clock."""
        return self.timers.next_deadline

    def step(self, now: float, event: AgentEvent) -> list[AgentAction]:
        """Take in one event; return the actions that it leads to, in order."""
        self._step.now, self._step.actions = now, []
        match event:
            case MasterReached():
                self.membership.reached(self.generation)
                self._observe_soon()
            case MasterSaid():
                self._on_master(event.message, event.request_id)
            case MasterUnreadable():
                self.membership.unreadable(event.reason)
            case KeyRefused():
                self.membership.locked_out(event.reason)
            case WorkerStarted():
                self._on_started(event.life, event.pid)
            case WorkerNotStarted():
                self._on_not_started(event.life, event.failure)
            case WorkerSaid():
                self._on_word(event.life, event.word)
            case WorkerExited():
                self._on_exited(event)
            case StopAsked():
                self._on_stop_asked(event)
            case AgentTick():
                for timer in self.timers.due(now):
                    self._on_timer(timer)
            case _:
                assert_never(event)
        return self._step.actions

    def _on_master(self, message: MasterToAgent, request_id: int) -> None:
        if self.membership.state is MembershipState.REFUSED:
            return
        if self.membership.heard():
            self._observe_soon()
        match message:
            case AgentRegistered():
                if self.membership.accept(message):
                    # Nothing older can arrive on this connection, and a master that lost its memory counts anew.
                    self._floor = 0
                    self._observe_soon(0.0)
            case AgentRefused():
                self.membership.refuse(message)
            case HeartbeatSeen():
                pass
            case RegisterAgain():
                self.membership.register()
            case DesiredWorkers():
                self._on_desired(message)
            case DirectoryChanged():
                self._on_directory(message.job_id, message.entries)
            case ReadAgentLog():
                self._step.act(SendLog(order=message, request_id=request_id))
            case _:
                assert_never(message)

    # Desired and observed

    def _on_desired(self, message: DesiredWorkers) -> None:
        if message.generation < self._floor:
            text = f"generation {message.generation} is older than {self._floor}, which is in force"
            self._step.report("desired-ignored", text, level="debug")
            return
        self.generation = self._floor = message.generation
        self._num_elsewhere = message.num_elsewhere
        self.desired = {JobWorkerIncarnation(w.job_id, w.name, w.worker_incarnation): w for w in message.workers}
        self.jobs = {job.job_id: job for job in message.jobs}
        for job in message.jobs:
            self._on_directory(job.job_id, job.directory)
        for life in [life for life, worker in self.workers.items() if life not in self.desired and _is_past(worker)]:
            del self.workers[life]
        self._reconcile()
        used = set(self.jobs) | {worker.job_id for worker in self.workers.values()}
        self.directories = {job_id: directory for job_id, directory in self.directories.items() if job_id in used}
        self._observe_soon()

    def _reconcile(self) -> None:
        """Stop workers that are not desired, start those that are, and pass on orders to run."""
        for worker in list(self.workers.values()):
            if self._is_to_stop(worker):
                self._stop(worker)
        if self.shutdown.has_begun:
            if all(worker.is_ended for worker in self.workers.values()):
                self._leave(0, self.shutdown.reason)
            return
        for life, wanted in self.desired.items():
            known = self.workers.get(life)
            if known is None:
                self._start_if_free(life, wanted)
            else:
                self._order_to_run(known, wanted)
        self._keep_interpreters()

    def _start_if_free(self, life: JobWorkerIncarnation, wanted: DesiredWorker) -> None:
        """Start an incarnation, unless an earlier one of the worker still runs, the exit of which leads here again."""
        job = self.jobs.get(life.job_id)
        if job is None or (wanted.kind == "worker" and all(role.name != wanted.role for role in job.spec.roles)):
            self._step.report("worker-unknown-job", "the desired set lacks its job or role", life, level="error")
            return
        if any(w.job_id == life.job_id and w.name == life.worker and not w.is_ended for w in self.workers.values()):
            return
        launch = launch_of(
            wanted,
            job.spec,
            self.facts,
            neighbours=list(self.desired.values()),
            num_elsewhere=self._num_elsewhere,
            relay=self.membership.relay,
            directory=self._directory(life.job_id).entries,
        )
        python = None if job.spec.python == self.facts.python else job.spec.python
        self.workers[life] = LocalWorker(life, wanted, job.spec.stop_grace_s, launch.log_file, python)
        envs = job.spec.role(wanted.role).envs if wanted.kind == "worker" else {}
        env = starting_variables(envs, self.facts.inherited)
        is_fresh = job.spec.start_method == "spawn" or bool(env)
        self._step.act(StartWorker(life=life, launch=launch, python=python, is_fresh=is_fresh, env=env))
        self._step.arm(AgentTimer("start", life), self.intervals.start_s)
        anew = f", in an interpreter that starts with {', '.join(sorted(env))}" if env else ""
        self._step.report("worker-starting", f"desired by generation {self.generation}{anew}", life)
        self._observe_soon()

    def _order_to_run(self, worker: LocalWorker, wanted: DesiredWorker) -> None:
        if wanted.run is not None and worker.wants(wanted.run):
            worker.ordered_round = wanted.run.round
            self._step.act(TellWorker(life=worker.life, message=Run(order=wanted.run)))

    def _keep_interpreters(self) -> None:
        wanted = {job.spec.python for job in self.jobs.values()}
        wanted |= {worker.python for worker in self.workers.values() if not worker.is_ended}
        pythons = sorted(python for python in wanted if python is not None and python != self.facts.python)
        if pythons != self._pythons:
            self._pythons = pythons
            self._step.act(KeepInterpreters(pythons=pythons))

    def _observe_soon(self, delay_s: float = OBSERVE_DELAY_S) -> None:
        due = self._step.now + delay_s
        if self._observe_at is None or due < self._observe_at:
            self._observe_at = due
            self.timers.arm(AgentTimer("observe"), due)

    def _on_observe_due(self) -> None:
        self._observe_at = None
        if not self.membership.is_registered:
            return  # told upon registration
        self._observed_at = self._step.now
        self._step.send(
            ObservedWorkers(
                node=self.facts.node,
                incarnation=self.facts.incarnation,
                generation=self.generation,
                workers=[worker.observed() for worker in self.workers.values()],
            )
        )
        for worker in self.workers.values():
            worker.is_end_reported = worker.is_ended

    # Directory

    def _directory(self, job_id: str) -> WorkerDirectory:
        return self.directories.setdefault(job_id, WorkerDirectory())

    def _on_directory(self, job_id: str, entries: list[DirectoryEntry]) -> None:
        news = self._directory(job_id).accept(entries)
        if not news:
            return
        for worker in self.workers.values():
            if worker.job_id == job_id and worker.kind == "worker" and not worker.is_ended:
                self._step.act(TellWorker(life=worker.life, message=DirectoryNews(entries=news)))

    def _tell_neighbours(self, worker: LocalWorker, how: str) -> None:
        """Tell workers here of a dead one at once, so that a call of it waits neither for the master to hear of it
        first, nor for a master that is away. A worker that was stopped is known to be going.
        """
        if worker.inbox is not None and not worker.is_stop_asked:
            life, node = worker.life.incarnation, self.facts.node
            entry = DirectoryEntry(worker=worker.name, incarnation=life, state=Reachability.DEAD, node=node, reason=how)
            self._on_directory(worker.job_id, [entry])

    # Workers

    def _live(self, life: JobWorkerIncarnation | None) -> LocalWorker | None:
        worker = self.workers.get(life) if life is not None else None
        return None if worker is None or worker.is_ended else worker

    def _on_started(self, life: JobWorkerIncarnation, pid: int) -> None:
        if (worker := self._live(life)) is None:
            return
        worker.pid = pid
        if worker.is_killed:  # a graceful stop may have overtaken this event
            self._kill(worker)
        self._observe_soon()

    def _on_not_started(self, life: JobWorkerIncarnation, failure: Failure) -> None:
        if (worker := self._live(life)) is None:
            return
        if not worker.is_stop_asked:
            worker.failure = worker.failure or failure
        self._blame_shutdown(worker)
        worker.move(WorkerState.EXITED)
        self._after_end(worker)

    def _on_word(self, life: JobWorkerIncarnation, word: WorkerToAgent) -> None:
        if (worker := self._live(life)) is None:
            return
        if isinstance(word, Reported) and worker.is_news(word.progress):
            self._step.act(KeepReport(life=life, progress=word.progress))
        worker.hear(word)
        match word:
            case Hello():
                self.timers.cancel(AgentTimer("start", life))
                if life in self.desired:
                    self._order_to_run(worker, self.desired[life])
            case Failed():  # it ends by itself now; a hanging atexit callback must not hold it up for ever
                if worker.state is not WorkerState.STOPPING:
                    self._step.arm(AgentTimer("kill", life), worker.grace_s)
        is_progress = isinstance(word, Reported)
        delay_s = self._observed_at + PROGRESS_EVERY_S - self._step.now if is_progress else 0.0
        self._observe_soon(max(OBSERVE_DELAY_S, delay_s))

    def _on_exited(self, event: WorkerExited) -> None:
        if (worker := self._live(event.life)) is None:
            return
        self._blame_shutdown(worker)
        worker.exit(event.code, event.traceback or event.last_lines, event.error)
        self._after_end(worker)

    def _blame_shutdown(self, worker: LocalWorker) -> None:
        """Fail an incarnation that is still desired and did not end by itself: the node took it along."""
        if self.shutdown.has_begun and worker.life in self.desired and not worker.is_finished:
            text = f"its agent stopped: {self.shutdown.reason}"
            worker.failure = worker.failure or Failure(category="node", summary=text)

    def _after_end(self, worker: LocalWorker) -> None:
        self.timers.cancel(AgentTimer("start", worker.life))
        self.timers.cancel(AgentTimer("kill", worker.life))
        if worker.failure is None:
            how = "it was stopped" if worker.is_stop_asked else "it had finished or ended itself with code 0"
            self._step.report("worker-exited", how, worker.life)
        else:
            how = worker.failure.summary
            self._step.report("worker-failed", how, worker.life, level="warning")
        self._tell_neighbours(worker, how)
        self._observe_soon()
        self._reconcile()

    # Stopping

    def _grace_s(self, worker: LocalWorker) -> float:
        if self.shutdown.is_at_once:
            return 0.0
        job = self.jobs.get(worker.job_id)
        if job is None or job.stop_grace_s is None:
            return worker.grace_s
        if self.shutdown.has_begun and job.stop_grace_s > 0:
            return worker.grace_s  # the master's is shorter for the sake of a restart, which our end is not
        return job.stop_grace_s

    def _stop(self, worker: LocalWorker) -> None:
        """Ask a worker to end, or hasten one whose grace has become shorter."""
        grace_s = self._grace_s(worker)
        if worker.state is WorkerState.STOPPING:
            self._hasten(worker, grace_s)
            return
        peers = (peer for peer in self.workers.values() if peer.job_id == worker.job_id and peer.kind == "worker")
        if worker.kind == "store" and grace_s > 0 and any(self._is_to_stop(peer) for peer in peers):
            return  # a worker on its way out may still need it; that one's end brings us here again
        is_graceful = worker.has_user_code and grace_s > 0
        worker.is_stop_asked = True
        worker.stop_began_at = self._step.now
        worker.grace_s = grace_s
        worker.move(WorkerState.STOPPING)
        self.timers.cancel(AgentTimer("start", worker.life))
        reason = f"the agent stops: {self.shutdown.reason}" if self.shutdown.has_begun else "it is no longer desired"
        self._step.report("worker-stopping", f"{reason}; grace {grace_s:g} s", worker.life)
        self._observe_soon()
        if not is_graceful:
            self._kill(worker)
            return
        if worker.failure is None:  # else it is on its way out, and writes its traceback
            job = self.jobs.get(worker.job_id)
            is_interrupt = job is not None and job.is_interrupted and not self.shutdown.has_begun
            stop = Stop(grace_s=grace_s, reason=reason, interrupt=is_interrupt)
            self._step.act(TellWorker(life=worker.life, message=stop))
            self._step.act(SignalWorker(life=worker.life, how="interrupt" if is_interrupt else "terminate"))
        self._step.arm(AgentTimer("kill", worker.life), grace_s)

    def _hasten(self, worker: LocalWorker, grace_s: float) -> None:
        if worker.is_killed or grace_s >= worker.grace_s:
            return
        worker.grace_s = grace_s
        deadline = worker.stop_began_at + grace_s
        if deadline <= self._step.now:
            self._kill(worker)
        else:
            self.timers.arm(AgentTimer("kill", worker.life), deadline)

    def _is_to_stop(self, worker: LocalWorker) -> bool:
        return not worker.is_ended and (worker.life not in self.desired or self.shutdown.has_begun)

    def _kill(self, worker: LocalWorker) -> None:
        worker.is_killed = True
        self.timers.cancel(AgentTimer("kill", worker.life))
        self._step.act(SignalWorker(life=worker.life, how="kill"))

    def _on_stop_asked(self, event: StopAsked) -> None:
        live = [worker for worker in self.workers.values() if not worker.is_ended]
        self.shutdown.begin(event.reason, at_once=event.at_once)
        longest = max((self._grace_s(worker) for worker in live), default=0.0)
        self._step.report("agent-stopping", f"{event.reason.rstrip('.')}; {len(live)} workers to stop")
        self._step.arm(AgentTimer("drain"), longest + MARGIN_S)
        self._reconcile()

    def _leave(self, code: int, reason: str) -> None:
        if self.membership.is_registered:
            self._on_observe_due()
            node, incarnation = self.facts.node, self.facts.incarnation
            self._step.send(AgentLeaving(node=node, incarnation=incarnation, reason=reason))
        self._step.act(Exit(code=code, reason=reason))

    # Timers

    def _on_timer(self, timer: AgentTimer) -> None:
        match timer.kind:
            case "register":
                if not self.shutdown.has_begun:
                    self.membership.register_due()
            case "heartbeat":
                self.membership.heartbeat_due(self.generation)
                if self._step.now - self._observed_at >= RESYNC_S:
                    self._observe_soon()
            case "observe":
                self._on_observe_due()
            case "complain":
                self.membership.complain_due()
            case "reconnect":  # a connection that was refused once is not tried again by itself
                self._step.act(Reconnect())
            case "drain":
                self._leave(1, f"{self.shutdown.reason}; not all workers ended in time")
            case "start" | "kill":
                self._on_worker_timer(timer)

    def _on_worker_timer(self, timer: AgentTimer) -> None:
        if (worker := self._live(timer.life)) is None:
            return
        if timer.kind == "start":
            text = f"did not answer within {self.intervals.start_s:g} s of its start"
            worker.failure = Failure(category="crash", summary=text)
        self._step.report("worker-killed", f"{timer.kind} deadline passed", worker.life, level="warning")
        self._kill(worker)


def _is_past(worker: LocalWorker) -> bool:
    """Return True if its end, which is past, is of no more use. One that a stop cut short has to be reported first."""
    is_cut = worker.failure is not None and worker.failure.is_cut
    return worker.is_ended and (worker.is_end_reported or not is_cut)
