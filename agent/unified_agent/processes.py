"""The only file of the agent that starts, signals and reaps processes.

Workers are children of a zygote. The zygote says when one was forked and how it ended; the agent signals by pidfd. When
a zygote itself is killed, the kernel kills its workers, and they become the agent's own children (it is a subreaper),
so that their exit codes are still known.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from unified import process
from unified.bus.shm.files import Sweeper
from unified.errors import ProtocolError
from unified.protocol.agent_zygote import ChildExited, Fork, Forked, ForkFailed, ZygoteToAgent, ZygoteUp
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import Failure, JobWorkerIncarnation
from unified.protocol.worker_agent import AgentToWorker, Hello, Launch, worker_to_agent
from unified_agent.child_channel import ChannelOverflowError, ChildChannel
from unified_agent.core.messages import AgentEvent, WorkerNotStarted, WorkerSaid, WorkerStarted
from unified_agent.orphans import sweep
from unified_agent.poll_loop import PollLoop
from unified_agent.zygote import ZygoteHandle

log = logging.getLogger("unified_agent")
CLOSE_S = 2.0
"""Time that zygotes have to kill their workers and leave, before they are killed themselves."""
SETTLED_S = 10.0
"""Age below which a zygote that ends is not replaced before a worker needs one: what ended it may end the next."""
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Reasons why a process cannot be started now, that say nothing of its interpreter."""


@dataclass(eq=False)
class _Child:
    """A worker's process, from the wish for it to its end."""

    life: JobWorkerIncarnation
    channel: ChildChannel
    order: Fork
    descriptors: list[int]
    zygote: ZygoteHandle | None = None
    """None while the order waits for a zygote that is up."""
    pid: int = 0
    pidfd: int = -1
    is_kill_asked: bool = False
    routes: Sequence[str] = ()
    """Routes to its inbox, since its hello."""
    inbox_id: str = ""


class Processes:
    """The agent's child processes."""

    def __init__(
        self,
        loop: PollLoop,
        *,
        python: str,
        entry: str,
        run_dir: Path,
        env: Mapping[str, str],
        on_event: Callable[[AgentEvent], None],
        on_end: Callable[[JobWorkerIncarnation, int], None],
    ) -> None:
        """Make the handle; nothing is started.

        Args:
            python: the interpreter of workers that name none.
            entry: ``module:function`` that a worker runs.
            on_event: what happened, for the core.
            on_end: a worker's process has ended with this code, and all it said has been handed on.
        """
        self._loop = loop
        self._python = python
        self._entry = entry
        self._run_dir = run_dir
        self._env = dict(env)
        self._on_event = on_event
        self._on_end = on_end
        self._zygotes: dict[str, ZygoteHandle] = {}
        """Zygotes that take orders, by interpreter."""
        self._running: dict[int, ZygoteHandle] = {}
        """Zygotes that take orders or are on their way out, by pid."""
        self._kept: set[str] = {python}
        self._children: dict[int, _Child] = {}
        self._by_life: dict[JobWorkerIncarnation, _Child] = {}
        self._count = 0
        self._num_zygotes = 0
        self._sweeper = Sweeper()
        process.become_subreaper()

    def preload(self) -> None:
        """Start the zygote of the agent's own interpreter, so that the first worker need not wait."""
        self._zygote(self._python)

    def keep(self, pythons: list[str]) -> None:
        """Close the zygotes of other interpreters than these and our own, once they have no children."""
        self._kept = {self._python, *pythons}
        for python in [python for python in self._zygotes if python not in self._kept]:
            self._close_if_idle(python)

    def start(
        self,
        life: JobWorkerIncarnation,
        launch: Launch,
        python: str | None,
        is_fresh: bool,
        env: Mapping[str, str],
        descriptors: tuple[int, int],
    ) -> None:
        """Have a worker's process made. `descriptors`, its stdout and stderr, are closed here in every case.

        `env` is that of a fresh interpreter, above its zygote's. OSError: there are no descriptors left.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        channel = ChildChannel(ours)
        self._count += 1
        marker = f"UNIFIED_WORKER={launch.env.get('UNIFIED_WORKER', '')}"
        order = Fork(child=self._count, fresh=is_fresh, marker=marker, env=dict(env))
        child = _Child(life, channel, order, [theirs.detach(), *descriptors])
        self._children[order.child] = self._by_life[life] = child
        self._loop.watch_channel(channel, lambda: self._hear(child))
        channel.send(launch)
        try:
            zygote = self._zygote(python or self._python)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            is_passing = isinstance(error, OSError) and error.errno in _PASSING
            why = error.strerror if isinstance(error, OSError) else error
            text = f"the interpreter {python or self._python} cannot be started: {why}"
            self._fail(child, "crash" if is_passing else "setup", text)
            return
        child.zygote = zygote
        if zygote.is_up:
            self._order(child)

    def tell(self, life: JobWorkerIncarnation, message: AgentToWorker) -> None:
        """Send a worker a message. A worker that reads nothing is killed before what waits for it fills the memory."""
        child = self._by_life.get(life)
        if child is None:
            return
        try:
            child.channel.send(message)
        except ChannelOverflowError as error:
            log.warning("event=worker-killed life=%s reason=%r", life, str(error))
            self._loop.unwatch_channel(child.channel)
            self.signal(life, "kill")

    def signal(self, life: JobWorkerIncarnation, how: Literal["terminate", "interrupt", "kill"]) -> None:
        """Send SIGTERM or SIGINT to a worker's process, or SIGKILL to its whole group."""
        child = self._by_life.get(life)
        if child is None:
            return
        if how != "kill":
            self._signal_pidfd(child, signal.SIGTERM if how == "terminate" else signal.SIGINT)
            return
        child.is_kill_asked = True
        if child.descriptors:
            self._fail(child, "crash", "was stopped before it started")
        elif child.pidfd >= 0 and self._signal_pidfd(child, signal.SIGKILL):
            process.signal_group(child.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Reap every child of the agent's own that has ended, upon SIGCHLD."""
        has_lost_stray = False
        while (ended := _ended_child()) is not None:
            pid, code = ended
            zygote = self._running.pop(pid, None)
            if zygote is not None:
                self._on_zygote_ended(zygote, code)
                continue
            has_lost_stray = True
            for child in [child for child in self._children.values() if child.pid == pid]:
                self._end(child, code)  # adopted from a dead zygote
        if has_lost_stray:  # its own children are ours now
            self._kill_strays()

    @property
    def next_deadline(self) -> float | None:
        """Time at which `sweep` is to be called, on the monotonic clock."""
        return self._sweeper.due_at

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
            self._await_end(zygote, deadline)
        self._running.clear()
        self._kill_strays()
        for child in list(self._children.values()):
            self._drop(child)
        self._zygotes.clear()

    def _await_end(self, zygote: ZygoteHandle, deadline: float) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(zygote.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.poll()
            os.close(pidfd)
            _, status = os.waitpid(zygote.pid, 0)
            zygote.reaped(os.waitstatus_to_exitcode(status))

    # Zygotes

    def _zygote(self, python: str) -> ZygoteHandle:
        known = self._zygotes.get(python)
        if known is not None:
            return known
        self._num_zygotes += 1
        zygote = ZygoteHandle(python, self._entry, self._run_dir, self._env, self._num_zygotes)
        self._zygotes[python] = self._running[zygote.pid] = zygote
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
        child = self._children.get(word.child)
        if child is None:
            return
        match word:
            case Forked():
                self._on_forked(child, word.pid)
            case ForkFailed():
                self._fail(child, "crash", f"could not be started: {word.error}")
            case ChildExited():
                self._end(child, word.code)
                self._close_if_idle(zygote.python)

    def _on_zygote_up(self, zygote: ZygoteHandle, word: ZygoteUp) -> None:
        log.info("event=zygote-up pid=%d python=%s torch=%s", word.pid, zygote.python, word.has_torch)
        zygote.is_up = word.protocol_version == PROTOCOL_VERSION
        for child in [child for child in self._children.values() if child.zygote is zygote]:
            if zygote.is_up:
                self._order(child)
            else:
                versions = f"its unified speaks protocol version {word.protocol_version}, the agent {PROTOCOL_VERSION}"
                text = f"the interpreter {zygote.python} cannot start workers: {versions}; install the same release."
                self._fail(child, "setup", text)
        if not zygote.is_up:  # whoever needs it next shall be told the same, and not wait for it
            self._dismiss(zygote)

    def _order(self, child: _Child) -> None:
        assert child.zygote is not None
        descriptors, child.descriptors = child.descriptors, []
        child.zygote.channel.send(child.order, descriptors)

    def _on_forked(self, child: _Child, pid: int) -> None:
        child.pid = pid
        with contextlib.suppress(ProcessLookupError):
            child.pidfd = os.pidfd_open(pid)
            found = process.facts(pid)
            if child.zygote is None or found is None or found.parent != child.zygote.pid:
                os.close(child.pidfd)  # it has ended, and the number belongs to somebody else
                child.pidfd = -1
        self._on_event(WorkerStarted(life=child.life, pid=pid))
        if child.is_kill_asked:
            self.signal(child.life, "kill")

    def _on_zygote_ended(self, zygote: ZygoteHandle, code: int) -> None:
        self._hear_zygote(zygote)  # its last words may say how a worker ended
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
                self._fail(child, "crash" if code < 0 else "setup", _why_no_zygote(zygote, how))
            elif child.pid:
                self._adopt(child)
            else:
                self._fail(child, "crash", f"could not be started: its zygote was {how}")
        if code == 0:
            zygote.remove_log()
        is_settled = time.monotonic() - zygote.began_at > SETTLED_S
        if zygote.is_up and zygote.python in self._kept and is_settled:
            with contextlib.suppress(OSError):
                self._zygote(zygote.python)

    def _adopt(self, child: _Child) -> None:
        """Kill a child of a dead zygote; the agent reaps it now, unless the zygote has done so unsaid."""
        found = process.facts(child.pid)
        if found is None or found.parent != os.getpid():
            self._end(child, -signal.SIGKILL)
        else:
            process.signal_group(child.pid, signal.SIGKILL)

    def _kill_strays(self) -> None:
        """Kill what workers of a dead zygote have left, now the agent's children, which nobody else will ever end."""
        own = os.getpid()
        process.kill_until_none(
            lambda: [
                found.pid for found in process.every_process() if found.parent == own and found.pid not in self._running
            ]
        )

    def _close_if_idle(self, python: str) -> None:
        zygote = self._zygotes.get(python)
        is_idle = all(child.zygote is not zygote for child in self._children.values())
        if zygote is not None and python not in self._kept and is_idle:
            self._dismiss(zygote)

    def _dismiss(self, zygote: ZygoteHandle) -> None:
        """Send a zygote no more orders; `reap` sees its end."""
        if self._zygotes.get(zygote.python) is zygote:
            del self._zygotes[zygote.python]
        self._loop.unwatch_channel(zygote.channel)
        zygote.close()

    # Workers

    def _hear(self, child: _Child) -> None:
        try:
            for body in child.channel.receive():
                word = worker_to_agent.decode(body)
                if isinstance(word, Hello) and word.inbox is not None:
                    child.routes, child.inbox_id = word.inbox.routes, word.inbox.inbox_id
                self._on_event(WorkerSaid(life=child.life, word=word))
        except (msgspec.DecodeError, ProtocolError) as error:
            log.error("event=worker-killed life=%s reason=%r", child.life, f"it said no message of ours: {error}")
            child.channel.close()
            self.signal(child.life, "kill")
        if not child.channel.is_open:
            self._loop.unwatch_channel(child.channel)

    def _signal_pidfd(self, child: _Child, number: int) -> bool:
        if child.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(child.pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def _fail(self, child: _Child, category: Literal["crash", "setup"], summary: str) -> None:
        self._drop(child)
        self._on_event(WorkerNotStarted(life=child.life, failure=Failure(category=category, summary=summary)))

    def _end(self, child: _Child, code: int) -> None:
        self._hear(child)
        self._drop(child)
        self._on_end(child.life, code)

    def _drop(self, child: _Child) -> None:
        self._loop.unwatch_channel(child.channel)
        child.channel.close()
        for descriptor in child.descriptors:
            os.close(descriptor)
        child.descriptors = []
        if child.pidfd >= 0:
            os.close(child.pidfd)
            child.pidfd = -1
        self._children.pop(child.order.child, None)
        if self._by_life.get(child.life) is child:
            del self._by_life[child.life]
        self._remove_sockets(child)
        self.sweep()

    def _remove_sockets(self, child: _Child) -> None:
        """Remove the file of its inbox, which a worker that was killed leaves behind."""
        for route in child.routes:
            path = Path(route.removeprefix("ipc://"))
            if route.startswith("ipc://") and path.is_relative_to(self._run_dir) and ".." not in path.parts:
                with contextlib.suppress(OSError):
                    path.unlink()


def _ended_child() -> tuple[int, int] | None:
    """Return pid and exit code of a child that has ended; None if there is no other."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def _why_no_zygote(zygote: ZygoteHandle, how: str) -> str:
    words = zygote.last_words()
    hint = ""
    if "No module named 'unified" in words:
        hint = f" Install it there: {zygote.python} -m pip install unified-runtime."
    return f"the interpreter {zygote.python} cannot start workers: {words} ({how}).{hint}"
