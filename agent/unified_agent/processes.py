"""The only file of the agent that starts, signals and reaps processes.

Workers are children of a zygote. The zygote reports each fork and each end; the agent signals by pidfd. When a zygote
is killed, the kernel kills its workers. They become the agent's children (it is a subreaper), so that their exit codes
are still known. A zygote that hangs gets no more orders: its workers go on, and it is killed after the last of them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from unified import process
from unified.bus.shm.files import Sweeper
from unified.core.timers import earliest
from unified.errors import ProtocolError
from unified.protocol.agent_zygote import ChildExited, Fork, Forked, ForkFailed, ZygoteToAgent, ZygoteUp
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import MAX_METRIC_TEXT, Evidence, Failure, JobWorkerIncarnation, Progress
from unified.protocol.worker_agent import AgentToWorker, Hello, Launch, Reported, worker_to_agent
from unified_agent.child_channel import ChannelOverflowError, ChildChannel
from unified_agent.core.messages import AgentEvent, StartWorker, WorkerNotStarted, WorkerSaid, WorkerStarted
from unified_agent.environment import ZygoteKey
from unified_agent.measure.evidence import ProcessEnd
from unified_agent.orphans import sweep
from unified_agent.poll_loop import PollLoop
from unified_agent.spawn import Spawned, spawn_zygote
from unified_agent.worker_groups import WorkerGroups
from unified_agent.zygote import ForkedWorker, ZygoteHandle

log = logging.getLogger("unified_agent")
CLOSE_S = 2.0
"""Time that zygotes have to kill their workers and leave, before they are killed themselves."""
LATE_S = 1.0
"""Most delay of the agent itself with which it still takes a silent zygote to hang."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a process start that say nothing of the interpreter: they may pass."""


class Processes:
    """The agent's child processes."""

    def __init__(
        self,
        loop: PollLoop,
        *,
        own: ZygoteKey,
        entry: str,
        run_dir: Path,
        env: Mapping[str, str],
        fork_s: float,
        on_event: Callable[[AgentEvent], None],
        on_end: Callable[[JobWorkerIncarnation, ProcessEnd], None],
    ) -> None:
        """Make the handle; nothing is started.

        Args:
            own: the agent's own zygote, which is always kept.
            entry: ``module:function`` that a worker runs.
            fork_s: time for which a zygote may be silent while it has to report a fork or an end.
            on_event: called with events for the core.
            on_end: called when a worker's process has ended, after all its messages were handed on.
        """
        self._loop = loop
        self._own = own
        self._entry = entry
        self._run_dir = run_dir
        self._env = dict(env)
        self._fork_s = fork_s
        self._on_event = on_event
        self._on_end = on_end
        self._zygotes: dict[ZygoteKey, ZygoteHandle] = {}
        """Zygotes that take orders."""
        self._running: dict[int, ZygoteHandle] = {}
        """Zygotes that take orders or are ending, by pid."""
        self._helpers: dict[int, Callable[[int], None]] = {}
        """Callbacks for the ends of other children of the agent, by pid."""
        self._kept: set[ZygoteKey] = {own}
        self._children: dict[int, ForkedWorker] = {}
        self._by_incarnation: dict[JobWorkerIncarnation, ForkedWorker] = {}
        self._ends = select.epoll()
        """Waits for the ends of workers; their zygotes have to report them then."""
        self._by_pidfd: dict[int, ForkedWorker] = {}
        loop.watch(self._ends.fileno(), self._on_processes_ended)
        self._count = 0
        self._num_zygotes = 0
        self._sweeper = Sweeper()
        self._starting = threading.Lock()
        """Held while a thread starts a program, and while unknown children are searched."""
        self._programs: set[int] = set()
        """Pids of the programs that threads run."""
        self.groups = WorkerGroups(None)
        """Control groups of the workers, if the agent makes any."""
        process.become_subreaper()

    def preload(self, zygote: Spawned | None = None) -> None:
        """Start, or take over, the agent's own zygote, so that the first worker need not wait."""
        if zygote is None:
            self._zygote(self._own)
        else:
            self._add(ZygoteHandle(zygote, self._own))
            self.reap()  # it may have ended before there was a handler of SIGCHLD

    def keep(self, keys: list[ZygoteKey]) -> None:
        """Close all zygotes but these and the agent's own, once they have no children."""
        self._kept = {self._own, *keys}
        for key in [key for key in self._zygotes if key not in self._kept]:
            self._close_if_idle(key)

    def start(
        self,
        order: StartWorker,
        launch: Launch,
        passed: Sequence[int],
        streams: tuple[int, int],
        *,
        is_held: bool = False,
    ) -> None:
        """Order a worker's process, and send it `launch`.

        Args:
            passed: descriptors that go with the launch.
            streams: its stdout and stderr. All descriptors are closed here in every case.
            is_held: True to wait for `release`, or `refuse`.

        Raises:
            OSError: there are no descriptors left.
        """
        incarnation = order.incarnation
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            for descriptor in (*passed, *streams):
                os.close(descriptor)
            raise
        channel = ChildChannel(ours)
        self._count += 1
        fork = Fork(child=self._count, fresh=order.is_fresh, env=order.env)
        held_for = order.zygote if is_held else None
        child = ForkedWorker(incarnation, channel, fork, [theirs.detach(), *streams], held_for=held_for)
        child.memory_mb = memory_of(order.launch)
        self._children[fork.child] = self._by_incarnation[incarnation] = child
        self._loop.watch_channel(channel, lambda: self._hear(child))
        channel.send(launch, passed)
        if not is_held:
            self._fork(child, order.zygote)

    def _fork(self, child: ForkedWorker, key: ZygoteKey) -> None:
        """Let a zygote fork a worker as soon as the zygote is up."""
        try:
            zygote = self._zygote(key)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            is_passing = isinstance(error, OSError) and error.errno in _PASSING
            why = error.strerror if isinstance(error, OSError) else error
            text = f"the interpreter {key.python} cannot be started: {why}"
            self._fail(child, "crash" if is_passing else "setup", text)
            return
        child.zygote = zygote
        if zygote.is_up:
            self._order(child)
        elif key.modules:  # said, so that nobody takes a long import for a start that failed
            self._report_wait(child, f"the preload of {', '.join(key.modules)}"[:MAX_METRIC_TEXT])

    def _report_wait(self, child: ForkedWorker, waits_for: str) -> None:
        word = Reported(progress=Progress(waits_for=waits_for))
        self._on_event(WorkerSaid(incarnation=child.incarnation, word=word))

    def release(self, incarnation: JobWorkerIncarnation) -> None:
        """Start the process of a held worker, unless the worker was stopped meanwhile."""
        child = self._by_incarnation.get(incarnation)
        if child is not None and child.held_for:
            key, child.held_for = child.held_for, None
            self._fork(child, key)

    def refuse(
        self, incarnation: JobWorkerIncarnation, reason: str, category: Literal["crash", "setup"] = "setup"
    ) -> None:
        """Fail a held worker before its start, because its needs cannot be met."""
        child = self._by_incarnation.get(incarnation)
        if child is not None and child.held_for:
            self._fail(child, category, reason)

    def incarnations(self) -> list[JobWorkerIncarnation]:
        """Return the incarnations that have a process, or wait for one."""
        return list(self._by_incarnation)

    def tell(self, incarnation: JobWorkerIncarnation, message: AgentToWorker) -> None:
        """Send a worker a message. A worker that reads nothing is killed before waiting messages fill the memory."""
        child = self._by_incarnation.get(incarnation)
        if child is None:
            return
        try:
            child.channel.send(message)
        except ChannelOverflowError as error:
            log.warning("event=worker-killed incarnation=%s reason=%r", incarnation, str(error))
            child.killed_for = f"its agent killed it: {error}"
            self._loop.unwatch_channel(child.channel)
            self.signal(incarnation, "kill")

    def signal(self, incarnation: JobWorkerIncarnation, how: Literal["terminate", "interrupt", "kill"] | int) -> None:
        """Send a worker's process a signal: one given by number only if it is handled. A killed worker's zygote kills
        the rest of its session; if the zygote hangs, whoever ends the zygote does."""
        child = self._by_incarnation.get(incarnation)
        if child is None:
            return
        if isinstance(how, int):
            if child.pidfd >= 0 and process.is_handled(child.pid, how):
                self._signal_pidfd(child, how)
            return
        if how != "kill":
            self._signal_pidfd(child, signal.SIGTERM if how == "terminate" else signal.SIGINT)
            return
        child.is_kill_asked = True
        if child.descriptors:
            self._fail(child, "crash", "was stopped before it started")
        else:
            self._signal_pidfd(child, signal.SIGKILL)

    def pidfd(self, incarnation: JobWorkerIncarnation) -> int:
        """Return a descriptor of a worker's process, which the caller closes; -1: there is none."""
        child = self._by_incarnation.get(incarnation)
        if child is None or child.pidfd < 0:
            return -1
        try:
            return os.dup(child.pidfd)
        except OSError:  # no descriptors are left
            return -1

    def reap(self) -> None:
        """Reap every ended child of the agent, after SIGCHLD."""
        has_lost_stray = False
        while (ended := _ended_child()) is not None:
            pid, code, peak_kb = ended
            zygote = self._running.pop(pid, None)
            if zygote is not None:
                self._on_zygote_ended(zygote, code)
                continue
            helper = self._helpers.pop(pid, None)
            if helper is not None:
                helper(code)
                continue
            has_lost_stray = has_lost_stray or pid not in self._programs
            for child in [child for child in self._children.values() if child.pid == pid]:
                self._end(child, code, peak_kb, is_orphan=True)  # adopted from a dead zygote
        if has_lost_stray:  # the stray's children are the agent's now
            self._kill_strays()

    def add_helper(self, pid: int, on_end: Callable[[int], None]) -> None:
        """Call `on_end(exit code)` when a child ends that another part of the agent has started."""
        self._helpers[pid] = on_end

    def forget_helper(self, pid: int) -> None:
        """Leave the end of a helper to the part that started it."""
        self._helpers.pop(pid, None)

    def run_program(self, command: Sequence[str], within_s: float, passed: Sequence[int] = ()) -> tuple[bytes, bytes]:
        """Run a program to its end, from any thread; return what it wrote to stdout and to stderr.

        Its exit code is not known: the agent reaps all its children, including the program.

        Args:
            passed: descriptors that it inherits.

        Raises:
            TimeoutExpired: it did not end within that time, and was killed.
            OSError: it cannot be started.
        """
        with self._starting:
            program = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=passed
            )
            self._programs.add(program.pid)
        with program:
            try:
                return program.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                program.kill()
                raise
            finally:
                self._programs.discard(program.pid)

    @property
    def next_deadline(self) -> float | None:
        """Time at which `tick` is to be called, on the monotonic clock."""
        return earliest(self._sweeper.due_at, self.groups.due_at, *map(self._deadline, self._zygotes.values()))

    def tick(self) -> None:
        """Do what is due: give up zygotes that hang, and remove empty groups and shared memory."""
        now = time.monotonic()
        for zygote in list(self._zygotes.values()):
            deadline = self._deadline(zygote)
            if deadline is None or now < deadline:
                continue
            if now > deadline + LATE_S:  # what stopped the agent may have stopped the zygote, too
                zygote.was_heard()
            else:
                self._give_up(zygote)
        self.groups.remove_empty()
        self.sweep()

    def _deadline(self, zygote: ZygoteHandle) -> float | None:
        return None if zygote.silent_since is None else zygote.silent_since + self._fork_s

    def sweep(self) -> None:
        """Remove the shared memory that dead workers left and nobody reads."""
        sweep(self._sweeper, {child.inbox_id for child in self._children.values()})

    def close(self) -> None:
        """End every child; return when they are gone."""
        zygotes = list(self._running.values())
        deadline = time.monotonic() + CLOSE_S
        for zygote in zygotes:
            self._loop.unwatch_channel(zygote.channel)
            zygote.close()
        for zygote in zygotes:
            zygote.await_end(deadline)
        self._running.clear()
        self._programs.clear()
        self._kill_strays()
        for child in list(self._children.values()):
            self._drop(child)
        self._zygotes.clear()
        self._loop.unwatch(self._ends.fileno())
        self._ends.close()

    # Zygotes

    def _zygote(self, key: ZygoteKey) -> ZygoteHandle:
        known = self._zygotes.get(key)
        if known is not None:
            return known
        env, number = {**self._env, **dict(key.env)}, self._num_zygotes + 1
        return self._add(
            ZygoteHandle(spawn_zygote(key.python, self._entry, self._run_dir, env, number, key.modules), key)
        )

    def _add(self, zygote: ZygoteHandle) -> ZygoteHandle:
        self._num_zygotes += 1
        self._zygotes[zygote.key] = self._running[zygote.pid] = zygote
        self._loop.watch_channel(zygote.channel, lambda: self._hear_zygote(zygote))
        return zygote

    def _hear_zygote(self, zygote: ZygoteHandle) -> None:
        try:
            words = zygote.receive()
        except (msgspec.DecodeError, ProtocolError) as error:
            log.error("event=zygote-unreadable pid=%d python=%s reason=%r", zygote.pid, zygote.python, str(error))
            words = []
            zygote.close()
        if not zygote.channel.is_open:
            self._loop.unwatch_channel(zygote.channel)
        for word in words:
            self._on_zygote_word(zygote, word)

    def _on_zygote_word(self, zygote: ZygoteHandle, word: ZygoteToAgent) -> None:
        if isinstance(word, ZygoteUp):
            self._on_zygote_up(zygote, word)
            return
        zygote.was_heard(word.child)
        child = self._children.get(word.child)
        if child is None:
            return
        match word:
            case Forked():
                self._on_forked(child, word.pid)
            case ForkFailed():
                self._fail(child, "crash", f"could not be started: {word.error}")
            case ChildExited():
                self._end(child, word.code, word.peak_kb)
                self._close_if_idle(zygote.key)
                self._kill_if_unused(zygote)

    def _on_zygote_up(self, zygote: ZygoteHandle, word: ZygoteUp) -> None:
        log.info("event=zygote-up pid=%d python=%s torch=%s", word.pid, zygote.python, word.has_torch)
        zygote.is_up = word.protocol_version == PROTOCOL_VERSION
        for child in [child for child in self._children.values() if child.zygote is zygote]:
            if zygote.is_up:
                if zygote.key.modules:
                    self._report_wait(child, "")
                self._order(child)
            else:
                versions = f"its unified speaks protocol version {word.protocol_version}, the agent {PROTOCOL_VERSION}"
                text = f"the interpreter {zygote.python} cannot start workers: {versions}; install the same release."
                self._fail(child, "setup", text)
        if not zygote.is_up:  # dismiss it, so that the next request fails at once, too
            self._dismiss(zygote)

    def _order(self, child: ForkedWorker) -> None:
        assert child.zygote is not None
        descriptors, child.descriptors = child.descriptors, []
        child.zygote.channel.send(child.order, descriptors)
        child.zygote.expect(child.order.child)

    def _on_forked(self, child: ForkedWorker, pid: int) -> None:
        child.pid = pid
        with contextlib.suppress(ProcessLookupError):
            child.pidfd = os.pidfd_open(pid)
            found = process.facts(pid)
            if child.zygote is None or found is None or found.parent != child.zygote.pid:
                os.close(child.pidfd)  # it has ended, and another process has its number
                child.pidfd = -1
            else:
                self.groups.add(child.incarnation, pid, child.memory_mb)
                self._by_pidfd[child.pidfd] = child
                self._ends.register(child.pidfd, select.EPOLLIN | select.EPOLLONESHOT)
        if child.pidfd < 0 and child.zygote is not None:
            child.zygote.expect(child.order.child)
        self._on_event(WorkerStarted(incarnation=child.incarnation, pid=pid))
        if child.is_kill_asked:
            self.signal(child.incarnation, "kill")

    def _on_zygote_ended(self, zygote: ZygoteHandle, code: int) -> None:
        self._hear_zygote(zygote)  # its last messages may say how a worker ended
        self._dismiss(zygote)
        zygote.reaped(code)
        if code != 0:
            self._kill_strays()
        how = process.describe_end(code)
        children = [child for child in self._children.values() if child.zygote is zygote]
        if code != 0 or children:
            log.warning(
                "event=zygote-ended pid=%d python=%s: %s; %s", zygote.pid, zygote.python, how, zygote.last_words()
            )
        for child in children:
            if not zygote.is_up:
                self._fail(child, "crash" if code < 0 else "setup", zygote.why_useless(how), zygote.cause)
            elif child.pid:
                child.killed_for = f"the zygote that it was forked from was {how}"
                self._adopt(child)
            else:
                self._fail(child, "crash", f"could not be started: its zygote was {how}", zygote.cause)
        if code == 0:
            zygote.remove_log()
        if zygote.is_up and zygote.key in self._kept and zygote.is_settled:
            with contextlib.suppress(OSError):
                self._zygote(zygote.key)

    def _adopt(self, child: ForkedWorker) -> None:
        """Kill a child of a dead zygote; the agent reaps it now, unless the zygote did so without a report."""
        found = process.facts(child.pid)
        if found is None or found.parent != os.getpid():
            self._end(child, -signal.SIGKILL, is_orphan=True)
        else:
            process.signal_group(child.pid, signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Kill what workers of a dead zygote left: the agent's children now, which nobody else will end."""
        own = os.getpid()

        def strays() -> list[int]:
            with self._starting:
                known = {*self._running, *self._helpers, *self._programs}
                return [each.pid for each in process.every_process() if each.parent == own and each.pid not in known]

        process.kill_until_none(strays)

    def _give_up(self, zygote: ZygoteHandle) -> None:
        """Replace a zygote that hangs. Its workers go on, and the agent sees their ends."""
        fault = f"its zygote (pid {zygote.pid}) hangs: it has said nothing for {self._fork_s:g} s"
        log.error("event=zygote-hangs pid=%d python=%s reason=%r", zygote.pid, zygote.python, fault)
        zygote.is_given_up = True
        del self._zygotes[zygote.key]
        for child in [child for child in self._children.values() if child.zygote is zygote]:
            if not child.pid:
                self._fail(child, "crash", f"could not be started: {fault}", zygote.cause)
            elif process.facts(child.pid) is None:
                self._end(child, -signal.SIGKILL)  # reaped, but not reported
            else:
                self._end_unreaped(child)
        self._kill_if_unused(zygote)
        if zygote.key in self._kept:
            with contextlib.suppress(OSError):
                self._zygote(zygote.key)

    def _on_processes_ended(self) -> None:
        for pidfd, _ in self._ends.poll(0):
            child = self._by_pidfd[pidfd]
            if child.zygote is not None and child.zygote.is_given_up:
                self._end_unreaped(child)
                self._kill_if_unused(child.zygote)
            elif child.zygote is not None:
                child.zygote.expect(child.order.child)

    def _end_unreaped(self, child: ForkedWorker) -> None:
        """Handle the end of a child whose zygote hangs, if the child has ended."""
        found = process.facts(child.pid)
        if found is not None and found.state == "Z":
            process.signal_group(child.pid, signal.SIGKILL)
            self._end(child, os.waitstatus_to_exitcode(found.status))

    def _kill_if_unused(self, zygote: ZygoteHandle) -> None:
        """Kill a zygote that hangs, or that imports what nobody waits for, once it has no workers."""
        is_used = any(child.zygote is zygote for child in self._children.values())
        if (zygote.is_given_up or not zygote.is_up) and not is_used and zygote.pid in self._running:
            os.kill(zygote.pid, signal.SIGKILL)

    def _close_if_idle(self, key: ZygoteKey) -> None:
        zygote = self._zygotes.get(key)
        is_idle = all(child.zygote is not zygote for child in self._children.values())
        if zygote is not None and key not in self._kept and is_idle:
            self._dismiss(zygote)
            self._kill_if_unused(zygote)

    def _dismiss(self, zygote: ZygoteHandle) -> None:
        """Send a zygote no more orders; `reap` sees its end."""
        if self._zygotes.get(zygote.key) is zygote:
            del self._zygotes[zygote.key]
        self._loop.unwatch_channel(zygote.channel)
        zygote.close()

    # Workers

    def _hear(self, child: ForkedWorker) -> None:
        try:
            for body in child.channel.receive():
                word = worker_to_agent.decode(body)
                if isinstance(word, Hello) and word.inbox is not None:
                    child.routes, child.inbox_id = word.inbox.routes, word.inbox.inbox_id
                self._on_event(WorkerSaid(incarnation=child.incarnation, word=word))
        except (msgspec.DecodeError, ProtocolError) as error:
            reason = f"it sent an unreadable message: {error}"
            child.killed_for = f"its agent killed it: {reason}"
            log.error("event=worker-killed incarnation=%s reason=%r", child.incarnation, reason)
            child.channel.close()
            self.signal(child.incarnation, "kill")
        if not child.channel.is_open:
            self._loop.unwatch_channel(child.channel)

    def _signal_pidfd(self, child: ForkedWorker, number: int) -> bool:
        if child.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(child.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def _fail(self, child: ForkedWorker, category: Literal["crash", "setup"], summary: str, cause: str = "") -> None:
        self._drop(child)
        failure = Failure(category=category, summary=summary, evidence=Evidence(cause=cause) if cause else None)
        self._on_event(WorkerNotStarted(incarnation=child.incarnation, failure=failure))

    def _end(self, child: ForkedWorker, code: int, peak_kb: int = 0, *, is_orphan: bool = False) -> None:
        """Report the end of a process. If its zygote has ended (`is_orphan`), SIGKILL came with that end."""
        self._hear(child)
        self._drop(child)
        cause = child.zygote.cause if is_orphan and child.zygote and code == -signal.SIGKILL else ""
        killed_for = child.killed_for or ("the zygote that it was forked from has ended" if cause else "")
        self._on_end(child.incarnation, ProcessEnd(code, peak_kb, killed_for, cause))
        self.groups.end(child.incarnation)  # after its evidence was read

    def _drop(self, child: ForkedWorker) -> None:
        self._loop.unwatch_channel(child.channel)
        child.channel.close()
        for descriptor in child.descriptors:
            os.close(descriptor)
        child.descriptors = []
        if child.pidfd >= 0:
            del self._by_pidfd[child.pidfd]
            self._ends.unregister(child.pidfd)
            os.close(child.pidfd)
            child.pidfd = -1
        self._children.pop(child.order.child, None)
        if self._by_incarnation.get(child.incarnation) is child:
            del self._by_incarnation[child.incarnation]
        self._remove_sockets(child)
        self.sweep()

    def _remove_sockets(self, child: ForkedWorker) -> None:
        """Remove the files of a worker's inbox: a killed worker leaves them behind."""
        for route in child.routes:
            path = Path(route.removeprefix("ipc://"))
            if route.startswith("ipc://") and path.is_relative_to(self._run_dir) and ".." not in path.parts:
                with contextlib.suppress(OSError):
                    path.unlink()


def memory_of(launch: Launch) -> float:
    """Return the MB of memory that a worker's role asks for; 0: any."""
    return launch.spec.role(launch.role).resources.memory_mb if launch.kind == "worker" else 0.0


def _ended_child() -> tuple[int, int, int] | None:
    """Return pid, exit code and most resident KiB of an ended child; None if there is none."""
    try:
        pid, status, usage = os.wait4(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status), usage.ru_maxrss) if pid else None
