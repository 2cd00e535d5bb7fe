"""The agent's decisions: events in, actions out, no I/O.

Level-triggered: the master says which incarnations are desired (`DesiredWorkers`). The core compares them with the
existing ones, and starts or stops the difference. A message may be lost, doubled or late; the next comparison sees it.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import structs

from unified.config.settings import Intervals
from unified.core.directory import WorkerDirectory
from unified.protocol import agent_master, worker_agent
from unified.protocol.records import DirectoryEntry, Failure, JobWorkerIncarnation, Reachability, WorkerState
from unified_agent.core import messages
from unified_agent.core.launching import JobSpecs, start_of
from unified_agent.core.membership import Membership, MembershipState
from unified_agent.core.shutdown import Shutdown
from unified_agent.core.stacks import StackReads
from unified_agent.core.starting import StartQueue, max_starts
from unified_agent.core.step import OBSERVE_EACH_S, AgentStep, AgentTimer
from unified_agent.core.worker import LocalWorker
from unified_agent.environment import NodeFacts, ZygoteKey, zygote_of

OBSERVE_DELAY_S = 0.002
"""Time within which changes are reported in one message."""
PROGRESS_EVERY_S = 0.2
RESYNC_S = 10.0
"""Period of reports while nothing changes."""


class AgentCore:
    """The agent's core: routes events and owns the state."""

    def __init__(
        self,
        facts: NodeFacts,
        intervals: Intervals,
        *,
        give_up_s: float | None = None,
        leave_after_s: float | None = None,
    ) -> None:
        self.facts = facts
        self.intervals = intervals
        self._step = AgentStep()
        self.timers = self._step.timers
        self.membership = Membership(self._step, facts, intervals, give_up_s, leave_after_s)
        self.shutdown = Shutdown(self._step, self.membership, intervals.vacate_s)
        self.stack_reads = StackReads(self._step, facts)
        self._recording: dict[JobWorkerIncarnation, messages.SendLog] = {}
        """Answers to send when workers have recorded a step."""
        self.workers: dict[JobWorkerIncarnation, LocalWorker] = {}
        self.desired: dict[JobWorkerIncarnation, agent_master.DesiredWorker] = {}
        self.jobs: dict[str, agent_master.DesiredJob] = {}
        self.specs = JobSpecs()
        self.directories: dict[str, WorkerDirectory] = {}
        self.generation = 0
        self._num_elsewhere = self._num_neighbours = 0
        self._starts = StartQueue(max_starts(facts.host_cpus))
        self._running: set[tuple[str, str]] = set()  # job and name of each worker here that has not ended
        self._held: set[int] = set()  # devices of workers of forgotten jobs, at `_reconciled_at`
        self._deaths: dict[str, list[DirectoryEntry]] = {}  # by job, for the dead workers' neighbours
        self._reconciled_at = float("-inf")
        self._floor = 0
        self._zygotes: list[ZygoteKey] = []
        self._observe_at: float | None = None
        self._observed_at = float("-inf")

    @property
    def next_deadline(self) -> float | None:
        """Time at which `AgentTick` is due, on the caller's clock."""
        return self.timers.next_deadline

    def step(self, now: float, event: messages.AgentEvent) -> list[messages.AgentAction]:
        """Take in one event; return the actions that it leads to, in order."""
        self._step.now, self._step.actions = now, []
        match event:
            case messages.MasterReached():
                self.membership.reached(self.generation)
                self._observe_soon()
            case messages.MasterSaid():
                self._on_master(event.message, event.request_id)
            case messages.MasterUnreadable():
                self.membership.lock_out("master-unreadable", event.reason, may_pass=event.may_pass)
            case messages.KeyRefused():
                self.membership.lock_out("key-refused", event.reason)
            case messages.LeaseLost():
                self._on_lease_lost(event.reason)
            case messages.WorkerStarted():
                self._on_started(event.incarnation, event.pid)
            case messages.WorkerNotStarted():
                self._on_not_started(event.incarnation, event.failure)
            case messages.WorkerSaid():
                self._on_word(event.incarnation, event.word)
            case messages.WorkerExited():
                self._on_exited(event)
            case messages.OutputDropped():
                if (worker := self._live(event.incarnation)) is not None:
                    worker.output_lost[event.stream] = event.text
                    self._observe_soon()
            case messages.StopAsked():
                self._on_stop_asked(event)
            case messages.SnapshotsReported():
                self.shutdown.has_snapshots = event.is_to_persist
                if self.shutdown.has_begun:
                    self._reconcile()
            case messages.HeldStacksRead():
                self.stack_reads.take(event.incarnation, event.number, event.report)
            case messages.AgentTick():
                for timer in self.timers.due(now):
                    self._on_timer(timer)
            case _:
                assert_never(event)
        return self._step.actions

    def _on_master(self, message: agent_master.MasterToAgent, request_id: int) -> None:
        if self.membership.state is MembershipState.REFUSED:
            return
        if self.membership.heard():
            self._observe_soon()
        if isinstance(message, agent_master.AgentRegistered | agent_master.HeartbeatSeen):
            self.membership.answered(request_id)
        match message:
            case agent_master.AgentRegistered():
                if self.membership.accept(message):
                    # No older set can arrive on this connection, and a master that lost its state counts anew.
                    self._floor = 0
                    self._observe_soon(0.0)
            case agent_master.AgentRefused():
                self.membership.refuse(message)
            case agent_master.HeartbeatSeen():
                pass
            case agent_master.MasterStopping():
                self.membership.keep(message.away_s, self.generation)
                if self.shutdown.is_vacating:
                    self._begin_shutdown(self.shutdown.reason)
            case agent_master.RegisterAgain():
                self.membership.register()
            case agent_master.DesiredWorkers():
                if not self.membership.is_cut_off:  # else the set is from before the master gave up these workers
                    self._on_desired(message)
            case agent_master.DirectoryChanged():
                self._on_directory(message.job_id, message.entries)
            case agent_master.ReadStacks():
                self.stack_reads.begin(message, request_id, self.workers.values())
            case agent_master.PassSignal():
                for worker in self.workers.values():
                    if worker.job_id == message.job_id and worker.name in message.workers:
                        self._step.act(messages.SignalWorker(incarnation=worker.incarnation, how=message.signal))
            case agent_master.ReadAgentLog():
                answer = messages.SendLog(order=message, request_id=request_id)
                self._step.act(answer) if message.take is None else self._profile(answer)
            case _:
                assert_never(message)

    def _profile(self, answer: messages.SendLog) -> None:
        """Profile a worker from outside, or let it record a step itself."""
        order = answer.order
        incarnation = JobWorkerIncarnation(order.job_id, order.worker, order.worker_incarnation)
        worker = self._live(incarnation)
        if worker is None or worker.state is WorkerState.STARTING:
            why = "it has ended" if worker is None else "its process has not said hello yet"
            self._step.act(structs.replace(answer, error=why))
        elif order.take != "torch":
            self._step.act(messages.SampleWorker(incarnation, worker.pid, order, answer.request_id))
        elif incarnation in self._recording:
            self._step.act(structs.replace(answer, error="it is recording a step already"))
        else:
            self._recording[incarnation] = answer
            self._step.act(
                messages.TellWorker(incarnation=incarnation, message=worker_agent.RecordStep(within_s=order.wait_s))
            )

    def _on_recorded(self, incarnation: JobWorkerIncarnation, error: str) -> None:
        if (answer := self._recording.pop(incarnation, None)) is not None:
            self._step.act(structs.replace(answer, error=error))

    def _on_lease_lost(self, reason: str) -> None:
        """End every worker at once: the master is about to start them elsewhere, or has done so."""
        self._step.report("lease-lost", f"{reason}: all workers are killed", level="warning")
        self.membership.cut_off(reason)
        self.desired = {}
        self.jobs = {job_id: structs.replace(job, stop_grace_s=0.0) for job_id, job in self.jobs.items()}
        self._reconcile()

    # Desired and observed

    def _on_desired(self, message: agent_master.DesiredWorkers) -> None:
        if message.generation < self._floor:
            text = f"generation {message.generation} is older than {self._floor}, which is in force"
            self._step.report("desired-ignored", text, level="debug")
            return
        if not self.specs.take(self._step, message):
            return
        self.generation = self._floor = message.generation
        self._num_elsewhere = message.num_elsewhere
        self._num_neighbours = sum(worker.kind == "worker" for worker in message.workers)
        self.desired = {JobWorkerIncarnation(w.job_id, w.name, w.worker_incarnation): w for w in message.workers}
        self.jobs = {job.job_id: job for job in message.jobs}
        for job in message.jobs:
            self._on_directory(job.job_id, job.directory)
        if not self.shutdown.holds_ends:
            for incarnation in [
                incarnation
                for incarnation, worker in self.workers.items()
                if incarnation not in self.desired and worker.is_past
            ]:
                del self.workers[incarnation]
        self._reconcile()
        used = set(self.jobs) | {worker.job_id for worker in self.workers.values()}
        self.directories = {job_id: directory for job_id, directory in self.directories.items() if job_id in used}
        self._observe_soon()

    def _reconcile(self) -> None:
        """Stop workers that are not desired, start those that are, and pass on notices and orders to run."""
        self._reconciled_at = self._step.now
        while self._deaths:
            self._on_directory(*self._deaths.popitem())
        for worker in list(self.workers.values()):
            if self._is_to_stop(worker):
                self._stop(worker)
        forgotten = (w for w in self.workers.values() if w.job_id not in self.jobs and not w.is_ended)
        self._held = {device for worker in forgotten for device in worker.devices}
        self._starts.clear()
        if self.shutdown.has_begun:
            are_gone = all(worker.is_ended for worker in self.workers.values())
            if are_gone and not self.shutdown.persists_first(self.specs):
                self._leave(0, self.shutdown.reason)
            return
        for incarnation in self.desired:
            known = self.workers.get(incarnation)
            if known is None:
                self._starts.add(incarnation)
                self._start_next()
            else:
                self._order_to_run(known)
        self._keep_zygotes()
        if self.shutdown.is_vacating and all(worker.is_ended for worker in self.workers.values()):
            self._begin_shutdown(self.shutdown.reason)

    def _reconcile_soon(self) -> None:
        """Reconcile after an end: at once, or with so many workers that it takes long, once for all ends of a while."""
        due = self._reconciled_at + OBSERVE_EACH_S * len(self.workers) - OBSERVE_DELAY_S
        self._reconcile() if due <= self._step.now else self.timers.arm(AgentTimer("end"), due)

    def _start_next(self, settled: JobWorkerIncarnation | None = None) -> None:
        for incarnation in self._starts.take(settled):
            self._start_if_free(incarnation, self.desired[incarnation])

    def _start_if_free(self, incarnation: JobWorkerIncarnation, wanted: agent_master.DesiredWorker) -> None:
        """Start an incarnation, unless an earlier one of the worker still runs, or its device is held by a worker of a
        job that the master has forgotten. The exits of both lead here again.
        """
        spec = self.specs.of(wanted)
        if spec is None:
            self._step.report("worker-unknown-job", "the desired set lacks its job or role", incarnation, level="error")
            return
        if incarnation[:2] in self._running or not self._held.isdisjoint(wanted.devices):
            return
        start = start_of(
            wanted,
            spec,
            self.facts,
            num_neighbours=self._num_neighbours,
            num_elsewhere=self._num_elsewhere,
            relay=self.membership.relay,
            directory=self._directory(incarnation.job_id).entries,
        )
        self.workers[incarnation] = LocalWorker(incarnation, wanted, spec, start.launch.log_file, start.zygote)
        self._running.add(incarnation[:2])
        self._step.act(start)
        self._starts.began(incarnation)
        self._step.arm(AgentTimer("start", incarnation), self.intervals.start_s)
        anew = f", in an interpreter that starts with {', '.join(sorted(start.env))}" if start.env else ""
        self._step.report("worker-starting", f"desired by generation {self.generation}{anew}", incarnation)
        self._observe_soon()

    def _order_to_run(self, worker: LocalWorker) -> None:
        if (wanted := self.desired.get(worker.incarnation)) is not None:
            for message in worker.orders(wanted):
                self._step.act(messages.TellWorker(incarnation=worker.incarnation, message=message))

    def _keep_zygotes(self) -> None:
        wanted = {zygote_of(spec, self.facts) for spec in self.specs}
        wanted |= {worker.zygote for worker in self.workers.values() if not worker.is_ended}
        keys = sorted(wanted - {self.facts.zygote})
        if keys != self._zygotes:
            self._zygotes = keys
            self._step.act(messages.KeepZygotes(keys=keys))

    def _observe_soon(self, delay_s: float = OBSERVE_DELAY_S) -> None:
        due = self._step.now + max(delay_s, OBSERVE_EACH_S * len(self.workers))
        if self._observe_at is None or due < self._observe_at:
            self._observe_at = due
            self.timers.arm(AgentTimer("observe"), due)

    def _on_observe_due(self) -> None:
        self._observe_at = None
        if not self.membership.is_registered:
            return  # reported at registration
        self._observed_at = self._step.now
        holds_ends = self.shutdown.holds_ends
        self._step.send(
            agent_master.ObservedWorkers(
                node=self.facts.node,
                incarnation=self.facts.incarnation,
                generation=self.generation,
                workers=[worker.observed(holds_end=holds_ends) for worker in self.workers.values()],
            )
        )
        for worker in self.workers.values():
            worker.is_end_reported = worker.is_ended and not holds_ends

    # Directory

    def _directory(self, job_id: str) -> WorkerDirectory:
        return self.directories.setdefault(job_id, WorkerDirectory())

    def _on_directory(self, job_id: str, entries: list[DirectoryEntry]) -> None:
        if not (found := self._directory(job_id).accept(entries)):
            return
        news = worker_agent.DirectoryNews(entries=found)
        for worker in self.workers.values():
            if worker.job_id == job_id and worker.kind == "worker" and not worker.is_ended:
                self._step.act(messages.TellWorker(incarnation=worker.incarnation, message=news))

    def _tell_neighbours(self, worker: LocalWorker, how: str) -> None:
        """Tell workers here of a dead worker soon, so that their calls to it need not wait for the master.

        The end of a stopped worker is expected, and not told.
        """
        if worker.inbox is not None and not worker.is_stop_asked:
            incarnation, node = worker.incarnation.number, self.facts.node
            entry = DirectoryEntry(
                worker=worker.name, incarnation=incarnation, state=Reachability.DEAD, node=node, reason=how
            )
            self._deaths.setdefault(worker.job_id, []).append(entry)

    # Workers

    def _live(self, incarnation: JobWorkerIncarnation | None) -> LocalWorker | None:
        worker = self.workers.get(incarnation) if incarnation is not None else None
        return None if worker is None or worker.is_ended else worker

    def _on_started(self, incarnation: JobWorkerIncarnation, pid: int) -> None:
        if (worker := self._live(incarnation)) is None:
            return
        worker.pid = pid
        if worker.is_killed:  # the kill may have come before this event
            self._kill(worker)
        self._observe_soon()

    def _on_not_started(self, incarnation: JobWorkerIncarnation, failure: Failure) -> None:
        if (worker := self._live(incarnation)) is None:
            return
        if not worker.is_stop_asked:
            worker.failure = worker.failure or failure
        self._blame_shutdown(worker)
        worker.move(WorkerState.EXITED)
        self._after_end(worker)

    def _on_word(self, incarnation: JobWorkerIncarnation, word: worker_agent.WorkerToAgent) -> None:
        if (worker := self._live(incarnation)) is None:
            return
        if isinstance(word, worker_agent.StacksDumped):
            self.stack_reads.take(incarnation, word.number, word.report)
            return
        if isinstance(word, worker_agent.StepRecorded):
            self._on_recorded(incarnation, word.error)
            return
        if isinstance(word, worker_agent.PortsWanted):
            self._step.act(messages.HoldPorts(incarnation=incarnation, num=word.num))
            return
        if isinstance(word, worker_agent.Reported) and word.points:
            self._step.act(messages.KeepReports(incarnation=worker.incarnation, reports=word.points))
        waited = worker.waits
        worker.hear(word)
        if waited and not worker.waits and worker.state is WorkerState.STARTING:  # its start begins now
            self._step.arm(AgentTimer("start", incarnation), self.intervals.start_s)
        match word:
            case worker_agent.Hello():
                self.timers.cancel(AgentTimer("start", incarnation))
                self._start_next(incarnation)
                self._order_to_run(worker)
            case worker_agent.Reported() if word.progress.waits_for and not worker.pid:
                self._start_next(incarnation)  # it is held for its job's needs, and must not delay others
            case worker_agent.Running() | worker_agent.Rejoins():
                self._order_to_run(worker)
            case worker_agent.Saving():
                worker.saved_at = self._step.now
                if worker.state is WorkerState.STOPPING and not worker.is_killed:
                    self._arm_kill(worker)
            case worker_agent.Failed():  # it ends by itself now; a hanging atexit callback must not hold it up for ever
                if worker.state is not WorkerState.STOPPING:
                    self._step.arm(AgentTimer("kill", incarnation), worker.grace_s)
        is_progress = isinstance(word, worker_agent.Reported)
        delay_s = self._observed_at + PROGRESS_EVERY_S - self._step.now if is_progress else 0.0
        self._observe_soon(max(OBSERVE_DELAY_S, delay_s))

    def _on_exited(self, event: messages.WorkerExited) -> None:
        if (worker := self._live(event.incarnation)) is None:
            return
        self._blame_shutdown(worker)
        worker.exit(event)
        self._after_end(worker)

    def _blame_shutdown(self, worker: LocalWorker) -> None:
        """Fail an incarnation that is still desired and did not end by itself: the agent's stop ended it."""
        if self.shutdown.has_begun and worker.incarnation in self.desired and not worker.is_finished:
            text = f"its agent stopped: {self.shutdown.reason}"
            worker.failure = worker.failure or Failure(category="node", summary=text)

    def _after_end(self, worker: LocalWorker) -> None:
        self._starts.settled(worker.incarnation)
        self._running.discard(worker.incarnation[:2])
        self.timers.cancel(AgentTimer("start", worker.incarnation))
        self.timers.cancel(AgentTimer("kill", worker.incarnation))
        if worker.failure is None:
            how = "it was stopped" if worker.is_stop_asked else "it had finished or ended itself with code 0"
            self._step.report("worker-exited", how, worker.incarnation)
        else:
            how = worker.failure.summary
            self._step.report("worker-failed", how, worker.incarnation, level="warning")
        self.stack_reads.ended(worker.incarnation, how)
        self._on_recorded(worker.incarnation, f"it ended before a step was recorded: {how}")
        self._tell_neighbours(worker, how)
        self._observe_soon()
        self._reconcile_soon()

    # Stopping

    def _stop(self, worker: LocalWorker) -> None:
        """Ask a worker to end, or hasten its stop if its grace has become shorter."""
        grace_s, save_grace_s = self.shutdown.grace_s(worker, self.jobs.get(worker.job_id))
        if worker.state is WorkerState.STOPPING:
            self._hasten(worker, grace_s, save_grace_s)
            return
        peers = (peer for peer in self.workers.values() if peer.job_id == worker.job_id and peer.kind == "worker")
        if worker.kind == "store" and grace_s > 0 and any(self._is_to_stop(peer) for peer in peers):
            return  # a stopping worker may still need the store; the worker's end leads here again
        is_graceful = worker.has_user_code and grace_s > 0
        worker.is_stop_asked = True
        worker.stop_began_at = self._step.now
        worker.grace_s, worker.save_grace_s = grace_s, save_grace_s
        worker.move(WorkerState.STOPPING)
        self.timers.cancel(AgentTimer("start", worker.incarnation))
        reason = f"the agent stops: {self.shutdown.reason}" if self.shutdown.has_begun else "it is no longer desired"
        self._step.report("worker-stopping", f"{reason}; grace {grace_s:g} s", worker.incarnation)
        self._observe_soon()
        if not is_graceful:
            self._kill(worker)
            return
        if worker.failure is None:  # else it is ending already, and writes its traceback
            job = self.jobs.get(worker.job_id)
            is_interrupt = job is not None and job.is_interrupted and not self.shutdown.has_begun
            stop = worker_agent.Stop(grace_s=grace_s, save_grace_s=save_grace_s, reason=reason, interrupt=is_interrupt)
            self._step.act(messages.TellWorker(incarnation=worker.incarnation, message=stop))
            self._step.act(
                messages.SignalWorker(incarnation=worker.incarnation, how="interrupt" if is_interrupt else "terminate")
            )
        self._arm_kill(worker)

    def _hasten(self, worker: LocalWorker, grace_s: float, save_grace_s: float) -> None:
        if worker.is_killed or (grace_s >= worker.grace_s and save_grace_s >= worker.save_grace_s):
            return
        if grace_s > 0 and worker.is_saving:
            return  # the job goes on already; the worker's next incarnation here waits for the save
        worker.grace_s, worker.save_grace_s = grace_s, save_grace_s
        if worker.kill_at <= self._step.now:
            self._kill(worker)
        else:
            self._arm_kill(worker)

    def _arm_kill(self, worker: LocalWorker) -> None:
        self.timers.arm(AgentTimer("kill", worker.incarnation), worker.kill_at)
        self.shutdown.awaits(worker)

    def _is_to_stop(self, worker: LocalWorker) -> bool:
        return not worker.is_ended and (worker.incarnation not in self.desired or self.shutdown.has_begun)

    def _kill(self, worker: LocalWorker) -> None:
        worker.is_killed = True
        self.timers.cancel(AgentTimer("kill", worker.incarnation))
        self._step.act(messages.SignalWorker(incarnation=worker.incarnation, how="kill"))

    def _on_stop_asked(self, event: messages.StopAsked) -> None:
        at_once = event.at_once or self.shutdown.is_asked
        if at_once or not self.shutdown.vacates(event.reason, self.workers.values(), self.generation):
            self._begin_shutdown(event.reason, at_once=at_once)

    def _begin_shutdown(self, reason: str, *, at_once: bool = False) -> None:
        self.shutdown.begin(reason, self.workers.values(), self.jobs, at_once=at_once)
        self._reconcile()

    def _leave(self, code: int, reason: str) -> None:
        self.shutdown.has_snapshots = False  # snapshots are on storage, or their time is over
        if self.membership.is_registered:
            self._on_observe_due()
            node, incarnation = self.facts.node, self.facts.incarnation
            self._step.send(agent_master.AgentLeaving(node=node, incarnation=incarnation, reason=reason))
        self._step.act(messages.Exit(code=code, reason=reason))

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
            case "end":
                self._reconcile()
            case "complain":
                self.membership.complain_due()
            case "reconnect":  # the socket does not retry a refused connection by itself
                self._step.act(messages.Reconnect())
            case "vacate":
                if not self.shutdown.still_vacates():
                    self._begin_shutdown(self.shutdown.reason)
            case "drain":
                self._leave(1, f"{self.shutdown.reason}; {self.shutdown.what_is_late}")
            case "stacks":
                self.stack_reads.due()
            case "start" | "kill":
                self._on_worker_timer(timer)

    def _on_worker_timer(self, timer: AgentTimer) -> None:
        if (worker := self._live(timer.incarnation)) is None:
            return
        if timer.kind == "start" and worker.waits:
            self._step.arm(timer, self.intervals.start_s)
            return
        if timer.kind == "start":
            text = f"did not answer within {self.intervals.start_s:g} s of its start"
            worker.failure = Failure(category="crash", summary=text)
        self._step.report("worker-killed", f"{timer.kind} deadline passed", worker.incarnation, level="warning")
        self._kill(worker)
