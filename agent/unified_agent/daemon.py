"""The agent's shell: one loop that waits, steps the core, and performs its actions. No decision is made here."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from msgspec import structs

from unified.config import cgroups
from unified.config.addresses import HostPort
from unified.config.settings import Intervals
from unified.core.timers import earliest
from unified.errors import UsageError
from unified.probes import Probes
from unified.protocol.agent_master import DesiredWorkers, LogRead, OutputTails
from unified.protocol.records import Evidence, Failure, JobWorkerIncarnation
from unified.protocol.worker_agent import KeyReplaced
from unified.sd_notify import ServiceNotifier
from unified.security.keys import ClusterKey, KeyWatch
from unified.values import Value
from unified_agent.core import messages
from unified_agent.core.agent import AgentCore
from unified_agent.environment import NodeFacts
from unified_agent.held_stacks import HeldStacks
from unified_agent.jobs.descriptions import Descriptions
from unified_agent.jobs.preparation import Preparation
from unified_agent.lease_keeper import LeaseKeeper
from unified_agent.logs import output
from unified_agent.master_channel import MasterChannel
from unified_agent.measure.evidence import EvidenceCollector, ProcessEnd
from unified_agent.measure.profiles import Profiler
from unified_agent.poll_loop import PollLoop
from unified_agent.ports import HeldPorts
from unified_agent.processes import Processes
from unified_agent.snapshots import SnapshotProcess
from unified_agent.spawn import Spawned, child_environment
from unified_agent.worker_groups import WorkerGroups

if TYPE_CHECKING:
    from unified_agent.measure.metrics import NodeMetrics

log = logging.getLogger("unified_agent")
REPEATED_S = 0.5
"""Seconds in which a further SIGTERM counts as a repetition: SLURM ends a step, and then its job."""
UNREADY = "the agent is not registered with a master"


class AgentOptions(Value, frozen=True):
    """Options of the command line, beyond the facts of the node."""

    entry: str
    """``module:function`` of a worker."""
    log_max_bytes: int
    log_files: int
    connect_timeout_s: float | None = None
    leave_after_s: float | None = None
    find_key: Callable[[], ClusterKey | None] | None = None
    """Reads the file of `key` anew; None: the key came without a file."""
    leave_fd: int | None = None
    """Descriptor at whose end of file the agent leaves in order."""
    key: ClusterKey | None = None
    """The cluster's key. Workers get it too, in their first message; the core never sees it."""
    snapshot_mb: float = 0.0
    """Memory that the snapshots of all jobs may take on this node."""
    snapshot_linger_s: float = 600.0
    """Time for which a job's snapshots are kept without a worker here, for example while it waits for a placement."""
    parent: int | None = None
    """Pid of the process whose death ends the agent at once."""
    divides_group: bool = False
    """True: the agent may divide its control group, and each worker gets a group within it."""
    health_bind: HostPort | None = None
    """Address of the probes; None: no probes."""
    metrics_bind: HostPort | None = None
    """Address of the metrics; None: no metrics over HTTP."""
    metrics_file: Path | None = None
    """File of the metrics; None: no file."""


class AgentDaemon:
    """Runs one agent in the main thread, until it is stopped or refused."""

    def __init__(
        self,
        facts: NodeFacts,
        intervals: Intervals,
        options: AgentOptions,
        env: Mapping[str, str],
        notifier: ServiceNotifier,
    ) -> None:
        groups = WorkerGroups(cgroups.own_group() if options.divides_group else None)
        self._keeper = LeaseKeeper(facts, options.key)  # forks, so before the first thread starts
        self._facts = facts
        self._options = options
        self._key = options.key
        self._notifier = notifier
        self._ready_at = time.monotonic() + intervals.connect_s
        """Time at which the agent counts as ready although no master has answered, so that a boot goes on."""
        self._events: deque[messages.AgentEvent] = deque()
        self._ended: list[tuple[JobWorkerIncarnation, int]] = []
        """Incarnations whose processes are gone, with their exit codes. Their output is closed after the core has
        handled all their messages, because their last reports go into a file there."""
        self._exit: messages.Exit | None = None
        self._terminated_at = -math.inf
        self._evidence = EvidenceCollector()
        self._found: dict[JobWorkerIncarnation, Evidence] = {}
        """Evidence of the incarnations in `_ended`, and of incarnations whose output is being closed."""
        self._core = AgentCore(
            facts, intervals, give_up_s=options.connect_timeout_s, leave_after_s=options.leave_after_s
        )
        self._loop = PollLoop()
        self._probes = Probes(options.health_bind, UNREADY)
        self._metrics = _metrics(facts, options)
        self._wake_read, self._wake_write = socket.socketpair()
        child_env = child_environment(env, facts.node, facts.incarnation)
        self._processes = Processes(
            self._loop,
            own=facts.zygote,
            entry=options.entry,
            run_dir=Path(facts.run_dir),
            env=child_env,
            fork_s=intervals.fork_s,
            on_event=self._events.append,
            on_end=self._on_end,
        )
        self._processes.groups = groups
        self._output = output.OutputReader(
            Path(facts.log_dir),
            max_bytes=options.log_max_bytes,
            max_files=options.log_files,
            run=self._processes.run_program,
        )
        if facts.log_archive:
            self._output.archive(facts.log_archive)
        self._processes.add_helper(self._keeper.pid, self._keeper.reaped)
        self._descriptions = Descriptions()
        self._preparation = Preparation(self._processes, facts, child_env, self._events.append)
        self._ports = HeldPorts(facts.node)
        self._held = HeldStacks(self._processes.run_program)
        self._profiler = Profiler(Path(facts.log_dir), self._processes.run_program, self._output.read)
        self._snapshots = SnapshotProcess(
            self._loop,
            self._processes,
            facts,
            child_env,
            key=options.key,
            quota_mb=options.snapshot_mb,
            linger_s=options.snapshot_linger_s,
            on_event=self._events.append,
        )
        self._core.membership.snapshots = self._snapshots.host
        if self._metrics is not None:
            self._core.membership.metrics = self._metrics.address(facts.address)
        self._keys = KeyWatch(options.key, options.find_key)
        self._channel = MasterChannel(self._loop, facts.master, options.key, self._events.append)

    def run(self, zygote: Spawned | None = None) -> messages.Exit:
        """Serve until the end; every worker and every helper process is gone when this returns.

        Args:
            zygote: the zygote of the agent's own interpreter, if it was started already.
        """
        self._take_signals()
        self._loop.watch(self._output.ready, self._on_output)
        self._loop.watch(self._held.ready, lambda: self._events.extend(self._held.take()))
        self._loop.watch(self._keeper.descriptor, self._on_keeper)
        if (leave_fd := self._options.leave_fd) is not None:
            os.set_blocking(leave_fd, False)
            self._loop.watch(leave_fd, lambda: self._on_leave(leave_fd))
        try:
            self._probes.start()
            if self._metrics is not None:
                self._metrics.start()
            with contextlib.suppress(OSError):
                self._processes.preload(zygote)
            while self._exit is None:
                self._loop.wait(self._timeout_s())
                self._probes.turned()
                if _is_due(self._core.next_deadline):
                    self._events.append(messages.AgentTick())
                if _is_due(self._processes.next_deadline):
                    self._processes.tick()
                if _is_due(self._evidence.next_deadline):
                    self._evidence.sample()
                if _is_due(self._preparation.next_deadline):
                    self._preparation.tell()
                if self._metrics is not None and _is_due(self._metrics.next_deadline):
                    is_registered = self._core.membership.is_registered
                    self._metrics.note(self._core.workers.values(), is_connected=is_registered)
                if _is_due(self._keys.next_deadline) and (key := self._keys.look()) is not None:
                    self._replace_key(key)
                self._drain()
                self._snapshots.note_copy_nodes(self._core.jobs.values())
                self._keeper.note(self._core.membership.lease(time.monotonic()))
                is_ready = self._core.membership.is_registered or time.monotonic() >= self._ready_at
                self._notifier.beat(is_ready, self._status)
                self._probes.unready = "" if self._core.membership.is_registered else UNREADY
        finally:
            self._probes.close()
            if self._metrics is not None:
                self._metrics.close()
            if is_orderly := self._exit is not None:  # the workers are gone: the rest may take time without a lease
                self._keeper.close(is_orderly=True)
            self._snapshots.close()
            self._processes.close()
            self._preparation.keep(())
            self._ports.close()
            if not is_orderly:
                self._keeper.close(is_orderly=False)
            self._output.close()
            self._evidence.close()
            self._channel.close()
            self._descriptions.close()
            self._release_signals()
        return self._exit

    def _timeout_s(self) -> float:
        daemon = (self._core, self._processes, self._evidence, self._preparation, self._keys, self._notifier)
        due = earliest(
            *(part.next_deadline for part in daemon), self._metrics.next_deadline if self._metrics is not None else None
        )
        longest_s = self._probes.longest_wait_s
        return longest_s if due is None else min(longest_s, max(0.0, due - time.monotonic()))

    def _status(self) -> str:
        """Return a line for `systemctl status`."""
        jobs = [worker.job_id for worker in self._core.workers.values() if not worker.is_ended]
        membership, master = self._core.membership, self._facts.master
        if self._core.shutdown.has_begun:
            return f"stops: {len(jobs)} workers of {len(set(jobs))} jobs are left"
        state = f"{membership.state.lower()} at the master {master}"
        if not membership.is_registered:
            state += ": it cannot be reached, or does not answer yet; the agent keeps trying"
        where = f"node {self._facts.node}, {state}"
        return f"{len(jobs)} workers of {len(set(jobs))} jobs; {where}"

    def _drain(self) -> None:
        while self._events and self._exit is None:
            event = self._events.popleft()
            if isinstance(event, messages.MasterSaid) and isinstance(event.message, DesiredWorkers):
                event = structs.replace(event, message=self._descriptions.share(self._prepared(event.message)))
            if isinstance(event, messages.WorkerNotStarted):
                self._output.finish(event.incarnation, 0)  # no process will write into its pipes
            elif isinstance(event, messages.WorkerStarted):
                self._evidence.began(event.incarnation, event.pid)
            for action in self._core.step(time.monotonic(), event):
                self._perform(action)
        self._descriptions.keep(self._core.specs.job_ids)
        self._preparation.keep(self._core.specs.job_ids)
        self._ports.keep(time.monotonic(), lambda: (*self._core.desired, *self._processes.incarnations()))
        ended, self._ended = self._ended, []
        for incarnation, code in ended:
            self._output.finish(incarnation, code)

    def _on_end(self, incarnation: JobWorkerIncarnation, end: ProcessEnd) -> None:
        self._found[incarnation] = evidence = self._evidence.ended(incarnation, end)
        if self._metrics is not None and (worker := self._core.workers.get(incarnation)) is not None:
            self._metrics.ended(incarnation, worker.role, evidence)
        self._ended.append((incarnation, end.code))

    def _perform(self, action: messages.AgentAction) -> None:
        match action:
            case messages.SendMaster():
                self._channel.send(action.message, action.request_id)
            case messages.Reconnect():
                self._channel.reconnect()
            case messages.StartWorker():
                self._start(action)
            case messages.TellWorker():
                self._processes.tell(action.incarnation, action.message)
            case messages.SignalWorker():
                self._processes.signal(action.incarnation, action.how)
            case messages.KeepZygotes():
                self._processes.keep(action.keys)
            case messages.HoldPorts():
                self._processes.tell(action.incarnation, self._ports.answer(action))
            case messages.ReadHeldStacks():
                self._held.read(action, self._processes.pidfd(action.incarnation))
            case messages.SendLog():
                self._output.read(action.order, action.request_id, action.error)
            case messages.SampleWorker():
                self._profiler.begin(action)
            case messages.KeepReports():
                self._output.keep_reports(action.incarnation, action.reports)
            case messages.WriteLog():
                self._write(action)
            case messages.PersistHeld():
                self._snapshots.persist()
            case messages.Exit():
                self._exit = action
            case _:
                assert_never(action)

    def _replace_key(self, key: ClusterKey) -> None:
        """Tell all processes here that the cluster's key has a successor; later workers get both keys."""
        self._key = key
        self._keeper.replace_key(key)
        self._snapshots.replace_key(key)
        for incarnation in self._processes.incarnations():
            self._processes.tell(incarnation, KeyReplaced(key=key))

    def _prepared(self, message: DesiredWorkers) -> DesiredWorkers:
        """Return the message with the interpreters of the environments that jobs have on this node."""
        jobs = [
            job if job.spec is None else structs.replace(job, spec=self._preparation.described(job.job_id, job.spec))
            for job in message.jobs
        ]
        return structs.replace(message, jobs=jobs)

    def _start(self, order: messages.StartWorker) -> None:
        try:
            order = self._ports.given(order)
            streams = self._output.open(order.incarnation, *output.destinations(order.launch))
            token = self._snapshots.token(order.incarnation.job_id)
            code_dir = self._preparation.code_dir(order.incarnation.job_id)
            launch = structs.replace(order.launch, key=self._key, snapshot_token=token, code_dir=code_dir)
            is_held = self._preparation.has_needs(order.incarnation.job_id)
            self._processes.start(order, *self._descriptions.without_spec(launch), streams, is_held=is_held)
            if is_held:
                self._preparation.release_when_met(order.incarnation)
        except (OSError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            failure = Failure(category="crash", summary=f"could not be started: {why}")
            self._events.append(messages.WorkerNotStarted(incarnation=order.incarnation, failure=failure))

    def _on_output(self) -> None:
        for result in self._output.take():
            match result:
                case output.OutputClosed():
                    self._events.append(
                        messages.WorkerExited(
                            incarnation=result.incarnation,
                            code=result.code,
                            last_lines=result.last_lines,
                            error=result.error.message if result.error else "",
                            traceback=result.error.traceback if result.error else "",
                            evidence=self._found.pop(result.incarnation, None),
                        )
                    )
                case output.SliceRead():
                    self._answer_log(result)
                case output.TailsRead():
                    node, incarnation = self._facts.node, self._facts.incarnation
                    self._channel.send(OutputTails(node=node, incarnation=incarnation, tails=result.tails))
                case output.OutputLost():
                    self._events.append(
                        messages.OutputDropped(incarnation=result.incarnation, stream=result.stream, text=result.text)
                    )
                case output.OutputFailed():
                    reason = "a defect: the thread that reads the workers' output has ended"
                    self._events.append(messages.StopAsked(reason=reason, at_once=True))

    def _on_leave(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(descriptor, 4096):
                self._loop.unwatch(descriptor)
                self._events.append(messages.StopAsked(reason="the process that started it has closed its input"))

    def _on_keeper(self) -> None:
        reason = self._keeper.receive()
        if reason:
            self._events.append(messages.LeaseLost(reason=reason))
        else:
            self._loop.unwatch(self._keeper.descriptor)
            text = "no process renews the lease while the agent is busy, or ends the workers if the agent hangs"
            log.error("event=lease-keeper-lost reason=%r", f"it was killed: {text}, until the agent starts again")

    def _answer_log(self, result: output.SliceRead) -> None:
        read = result.slice
        answer = LogRead(
            node=self._facts.node,
            incarnation=self._facts.incarnation,
            data=read.data,
            offset=read.offset,
            next_offset=read.offset + len(read.data) if read.next_offset is None else read.next_offset,
            size=read.size,
            path=read.path,
            error=read.error,
            is_missing=read.is_missing,
            is_busy=read.is_busy,
        )
        self._channel.send(answer, result.request_id)

    def _write(self, note: messages.WriteLog) -> None:
        incarnation = note.incarnation
        who = (
            ""
            if incarnation is None
            else f"job={incarnation.job_id} worker={incarnation.worker} incarnation={incarnation.number} "
        )
        level = logging.getLevelNamesMapping()[note.level.upper()]
        log.log(level, "event=%s %sreason=%r", note.event, who, note.reason)

    # Signals

    def _take_signals(self) -> None:
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)  # the byte in the socket is the signal's number
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self._loop.watch(self._wake_read.fileno(), self._on_signals)

    def _release_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        self._wake_read.close()
        self._wake_write.close()

    def _on_signals(self) -> None:
        for number in self._wake_read.recv(4096):
            if number == signal.SIGCHLD:
                self._processes.reap()
            elif number == signal.SIGTERM and time.monotonic() < self._terminated_at + REPEATED_S:
                continue
            elif number in (signal.SIGTERM, signal.SIGINT):
                if number == signal.SIGTERM:
                    self._terminated_at = time.monotonic()
                is_orphan = self._options.parent is not None and os.getppid() != self._options.parent
                reason = "the process that started it is gone" if is_orphan else signal.Signals(number).name
                self._events.append(messages.StopAsked(reason=reason, at_once=is_orphan))
                self._notifier.stopping()


def _metrics(facts: NodeFacts, options: AgentOptions) -> NodeMetrics | None:
    if options.metrics_bind is None and options.metrics_file is None:
        return None
    from unified_agent.measure.metrics import NodeMetrics  # needs the extra `metrics`

    return NodeMetrics(facts.node, facts.resources.devices, options.metrics_bind, options.metrics_file)


def _is_due(deadline: float | None) -> bool:
    return deadline is not None and deadline <= time.monotonic()
