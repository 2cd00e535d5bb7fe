"""The agent's shell: one loop that waits, steps the core, and performs what it answers. No decision is made here."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from msgspec import structs

from unified.config.settings import Intervals
from unified.core.timers import earliest
from unified.protocol.agent_master import DesiredWorkers, LogRead
from unified.protocol.records import Evidence, Failure, JobWorkerIncarnation, WorkerReport
from unified.security.keys import ClusterKey
from unified.values import Value
from unified_agent.core.agent import AgentCore
from unified_agent.core.messages import (
    AgentAction,
    AgentEvent,
    AgentTick,
    Exit,
    KeepInterpreters,
    KeepReport,
    LeaseLost,
    MasterSaid,
    PersistHeld,
    ReadHeldStacks,
    Reconnect,
    SendLog,
    SendMaster,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerNotStarted,
    WorkerStarted,
    WriteLog,
)
from unified_agent.descriptions import Descriptions
from unified_agent.environment import TUNABLES, NodeFacts, tunables
from unified_agent.evidence import EvidenceCollector, ProcessEnd
from unified_agent.held_stacks import HeldStacks
from unified_agent.host_resources import last_cache_bytes
from unified_agent.lease_keeper import LeaseKeeper
from unified_agent.master_channel import MasterChannel
from unified_agent.output import OutputClosed, OutputFailed, OutputReader, SliceRead, destinations
from unified_agent.poll_loop import PollLoop
from unified_agent.processes import Processes
from unified_agent.snapshots import SnapshotProcess
from unified_agent.zygote import MARKER_INCARNATION, MARKER_NODE

log = logging.getLogger("unified_agent")


class AgentOptions(Value, frozen=True):
    """Options of the command line, beyond the facts of the node."""

    entry: str
    """``module:function`` of a worker."""
    log_max_bytes: int
    log_files: int
    connect_timeout_s: float | None = None
    key: ClusterKey | None = None
    """The cluster's key. Workers are given it too, in their first message; the core never sees it."""
    snapshot_mb: float = 0.0
    """Memory that the snapshots of all jobs may take on this node."""
    snapshot_linger_s: float = 600.0
    """Time for which the snapshots of a job are kept that has no worker here, as while it waits for a place."""
    parent: int | None = None
    """Pid of the process whose death ends the agent at once."""


class AgentDaemon:
    """Runs one agent in the main thread, until it is stopped or refused."""

    def __init__(self, facts: NodeFacts, intervals: Intervals, options: AgentOptions, env: Mapping[str, str]) -> None:
        self._keeper = LeaseKeeper(facts, options.key)  # first: it is forked, while there is one thread
        self._facts = facts
        self._options = options
        self._events: deque[AgentEvent] = deque()
        self._ended: list[tuple[JobWorkerIncarnation, int]] = []
        """Lives whose processes are gone, with their exit codes. Their output is closed once the core has heard all
        that they said, since their last reports go into a file there."""
        self._exit: Exit | None = None
        self._evidence = EvidenceCollector()
        self._found: dict[JobWorkerIncarnation, Evidence] = {}
        """Evidence of the lives in `_ended`, and of those whose output is being closed."""
        self._core = AgentCore(facts, intervals, give_up_s=options.connect_timeout_s)
        self._loop = PollLoop()
        self._wake_read, self._wake_write = socket.socketpair()
        self._output = OutputReader(Path(facts.log_dir), max_bytes=options.log_max_bytes, max_files=options.log_files)
        child_env = {
            **env,
            TUNABLES: tunables(env.get(TUNABLES, ""), last_cache_bytes()),
            MARKER_NODE: facts.node,
            MARKER_INCARNATION: facts.incarnation,
        }
        self._processes = Processes(
            self._loop,
            python=facts.python,
            entry=options.entry,
            run_dir=Path(facts.run_dir),
            env=child_env,
            fork_s=intervals.fork_s,
            on_event=self._events.append,
            on_end=self._on_end,
        )
        self._processes.add_helper(self._keeper.pid, self._keeper.reaped)
        self._descriptions = Descriptions()
        self._held = HeldStacks()
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
        self._channel = MasterChannel(self._loop, facts.master, options.key, self._events.append)

    def run(self) -> Exit:
        """Serve until the end; every worker and every helper process is gone when this returns."""
        self._take_signals()
        self._loop.watch(self._output.ready, self._on_output)
        self._loop.watch(self._held.ready, lambda: self._events.extend(self._held.take()))
        self._loop.watch(self._keeper.descriptor, self._on_keeper)
        try:
            with contextlib.suppress(OSError):
                self._processes.preload()
            while self._exit is None:
                self._loop.wait(self._timeout_s())
                if _is_due(self._core.next_deadline):
                    self._events.append(AgentTick())
                if _is_due(self._processes.next_deadline):
                    self._processes.tick()
                if _is_due(self._evidence.next_deadline):
                    self._evidence.sample()
                self._drain()
                self._snapshots.note_copy_nodes(self._core.jobs.values())
                self._keeper.note(self._core.membership.lease(time.monotonic()))
        finally:
            if is_orderly := self._exit is not None:  # then the workers are gone, and the rest may take its time
                self._keeper.close(is_orderly=True)
            self._snapshots.close()
            self._processes.close()
            if not is_orderly:
                self._keeper.close(is_orderly=False)
            self._output.close()
            self._evidence.close()
            self._channel.close()
            self._descriptions.close()
            self._release_signals()
        return self._exit

    def _timeout_s(self) -> float | None:
        due = earliest(self._core.next_deadline, self._processes.next_deadline, self._evidence.next_deadline)
        return None if due is None else max(0.0, due - time.monotonic())

    def _drain(self) -> None:
        while self._events and self._exit is None:
            event = self._events.popleft()
            if isinstance(event, MasterSaid) and isinstance(event.message, DesiredWorkers):
                event = structs.replace(event, message=self._descriptions.share(event.message))
            if isinstance(event, WorkerNotStarted):
                self._output.finish(event.life, 0)  # nobody will ever write into its pipes
            elif isinstance(event, WorkerStarted):
                self._evidence.began(event.life, event.pid)
            for action in self._core.step(time.monotonic(), event):
                self._perform(action)
        self._descriptions.keep(self._core.specs.job_ids)
        ended, self._ended = self._ended, []
        for life, code in ended:
            self._output.finish(life, code)

    def _on_end(self, life: JobWorkerIncarnation, end: ProcessEnd) -> None:
        self._found[life] = self._evidence.ended(life, end)
        self._ended.append((life, end.code))

    def _perform(self, action: AgentAction) -> None:
        match action:
            case SendMaster():
                self._channel.send(action.message, action.request_id)
            case Reconnect():
                self._channel.reconnect()
            case StartWorker():
                self._start(action)
            case TellWorker():
                self._processes.tell(action.life, action.message)
            case SignalWorker():
                self._processes.signal(action.life, action.how)
            case KeepInterpreters():
                self._processes.keep(action.pythons)
            case ReadHeldStacks():
                self._held.read(action, self._processes.pidfd(action.life))
            case SendLog():
                self._output.read(action.order, action.request_id)
            case KeepReport():
                self._keep_report(action)
            case WriteLog():
                self._write(action)
            case PersistHeld():
                self._snapshots.persist()
            case Exit():
                self._exit = action
            case _:
                assert_never(action)

    def _start(self, order: StartWorker) -> None:
        try:
            streams = self._output.open(order.life, *destinations(order.launch))
            token = self._snapshots.token(order.life.job_id)
            launch = structs.replace(order.launch, key=self._options.key, snapshot_token=token)
            self._processes.start(order, *self._descriptions.without_spec(launch), streams)
        except OSError as error:
            failure = Failure(category="crash", summary=f"could not be started: {error.strerror}")
            self._events.append(WorkerNotStarted(life=order.life, failure=failure))

    def _on_output(self) -> None:
        for result in self._output.take():
            match result:
                case OutputClosed():
                    self._events.append(
                        WorkerExited(
                            life=result.life,
                            code=result.code,
                            last_lines=result.last_lines,
                            error=result.error.message if result.error else "",
                            traceback=result.error.traceback if result.error else "",
                            evidence=self._found.pop(result.life, None),
                        )
                    )
                case SliceRead():
                    self._answer_log(result)
                case OutputFailed():
                    self._events.append(StopAsked(reason="a defect: nobody reads the workers' output", at_once=True))

    def _on_keeper(self) -> None:
        reason = self._keeper.receive()
        if reason:
            self._events.append(LeaseLost(reason=reason))
        else:
            self._loop.unwatch(self._keeper.descriptor)
            text = "nothing renews the lease while the agent is busy, or ends the workers of one that hangs"
            log.error("event=lease-keeper-lost reason=%r", f"it was killed: {text}; start the agent again")

    def _answer_log(self, result: SliceRead) -> None:
        read = result.slice
        answer = LogRead(
            node=self._facts.node,
            incarnation=self._facts.incarnation,
            data=read.data,
            offset=read.offset,
            next_offset=read.offset + len(read.data),
            size=read.size,
            path=read.path,
            error=read.error,
        )
        self._channel.send(answer, result.request_id)

    def _keep_report(self, kept: KeepReport) -> None:
        progress = kept.progress
        report = WorkerReport(
            at=round(time.time(), 3),
            step=progress.step,
            total=progress.total,
            metrics=dict(progress.metrics),
            incarnation=kept.life.incarnation,
        )
        self._output.keep_report(kept.life, report)

    def _write(self, note: WriteLog) -> None:
        life = note.life
        who = "" if life is None else f"job={life.job_id} worker={life.worker} incarnation={life.incarnation} "
        level = logging.getLevelNamesMapping()[note.level.upper()]
        log.log(level, "event=%s %sreason=%r", note.event, who, note.reason)

    # Signals

    def _take_signals(self) -> None:
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda number, frame: None)  # the byte in the socket says which it was
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
            elif number in (signal.SIGTERM, signal.SIGINT):
                is_orphan = self._options.parent is not None and os.getppid() != self._options.parent
                reason = "the process that started it is gone" if is_orphan else signal.Signals(number).name
                self._events.append(StopAsked(reason=reason, at_once=is_orphan))


def _is_due(deadline: float | None) -> bool:
    return deadline is not None and deadline <= time.monotonic()
