"""The zygote: a process that has imported everything a worker needs, and forks on demand.

    python -m unified.worker.zygote FD [--parent PID] [--entry MODULE:FUNCTION] [--preload MODULE,…]

`FD` is a Unix stream socket to the agent. The zygote has one thread and never touches an accelerator. When its agent
goes away (end of file, or SIGTERM by parent-death signal), it kills every worker's process group and exits. If the
zygote is killed, the kernel kills its workers.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NoReturn

from unified import process
from unified.errors import ProtocolError
from unified.protocol.agent_zygote import ChildExited, Fork, Forked, ForkFailed, ZygoteUp, ZygoteWord, agent_to_zygote
from unified.protocol.framing import PROTOCOL_VERSION, StreamBuffer, encode_stream
from unified.worker import fork_setup
from unified.worker.exit import exit_process
from unified.worker.fork_setup import give_back_idle, open_output
from unified.worker.stop import flush_output

QUIET_S = 1.0
"""After this time without a fork or an exit, the zygote does work that is useful but not worth a wait."""
SPARE_S = 5.0
"""After this time without any order, the zygote prepares, too: its node may be a spare for a lost one."""
DEFAULT_ENTRY = "unified.worker.main:main"
FDS_PER_FORK = 3
_PASSED_BYTES = socket.CMSG_SPACE(FDS_PER_FORK * array.array("i").itemsize)
_OWN_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
_SOCKET_FAILED = "zygote: the agent's socket failed: {}"


class _EndRequested(BaseException):
    """SIGTERM came in the middle of an import, or the agent went away."""


class Zygote:
    """Serves one agent until it goes away."""

    def __init__(
        self, control: socket.socket, entry: str, agent: int | None = None, preloaded: Sequence[tuple[str, bool]] = ()
    ) -> None:
        self._control = control
        self._preloaded = preloaded
        """For each named module, a line on what went wrong with it, and whether it started threads."""
        self._agent = agent
        self._module, _, self._function = entry.partition(":")
        self._buffer = StreamBuffer()
        self._descriptors: deque[int] = deque()
        self._children: dict[int, Fork] = {}
        self._later = fork_setup.preload_later(self._module)
        """Modules to import after the first fork, or after `SPARE_S`: a starting cluster has more urgent work."""
        self._idle_work: deque[Callable[[], object]] = deque([give_back_idle])
        self._is_quiet = False
        self._is_importing = False
        self._is_reaping = False
        self._must_look = False
        """A signal came, perhaps during a reap."""
        self._is_asked_to_end = False
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    def serve(self) -> None:
        """Fork and reap until the agent goes away; then kill all workers and their children."""
        for number in _OWN_SIGNALS:
            signal.signal(number, self._note_signal)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        try:
            has_torch = "torch" in sys.modules
            self._send(ZygoteUp(pid=os.getpid(), has_torch=has_torch, protocol_version=PROTOCOL_VERSION))
            while not self._is_asked_to_end:
                self._is_quiet = not poll.poll(self._poll_timeout_ms())
                if self._is_quiet:
                    if not self._idle_work:
                        self._plan_imports()
                    self._do_idle_work()
                    continue
                self._empty_wake_up()
                self._reap([-1])
                if not self._take_orders():
                    break
        except (OSError, ProtocolError) as error:
            print(_SOCKET_FAILED.format(error), file=sys.stderr)
        finally:
            self._kill_all()

    def _poll_timeout_ms(self) -> float | None:
        if self._idle_work:
            return 0 if self._is_quiet else QUIET_S * 1000
        return SPARE_S * 1000 if self._later else None

    def _do_idle_work(self) -> None:
        self._is_importing = True
        try:
            self._reap_during_import()  # for a signal that came just before the import
            self._idle_work.popleft()()
        except _EndRequested:
            return
        finally:
            self._is_importing = False

    def _plan_imports(self) -> None:
        """Plan the imports for later jobs, to be done when it is quiet."""
        self._idle_work.extend(partial(fork_setup.import_if_there, name) for name in self._later)
        if self._later:
            self._idle_work.append(self._settle)
            self._later = []

    def _settle(self) -> None:
        """Drop what imports no longer need, and freeze the rest, so that children copy none of it."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        give_back_idle()

    def _note_signal(self, number: int, _frame: object) -> None:
        """Note a signal. The byte in the wake-up socket wakes the poll; a signal without a handler would write none.

        During an import nobody reads the wake-up socket, for seconds where many processes share a core. The handler
        then reaps workers itself: they must not outlive their agent so long, and news of their death must not wait.
        """
        if number == signal.SIGTERM:
            # Ignored while the agent runs: SLURM sends SIGTERM to each process of a step, and workers save then.
            self._is_asked_to_end |= self._agent is None or os.getppid() != self._agent
        self._must_look = True
        if self._is_importing and not self._is_reaping:
            self._reap_during_import()

    def _reap_during_import(self) -> None:
        """Reap only workers: an import may wait for a program that it has started."""
        self._must_look = True
        while self._must_look and not self._is_asked_to_end:
            self._must_look, self._is_reaping = False, True
            try:
                self._reap(self._children)
            except OSError as error:  # the import might take the error for its own
                print(_SOCKET_FAILED.format(error), file=sys.stderr)
                self._is_asked_to_end = True
            finally:
                self._is_reaping = False
        if self._is_asked_to_end:
            raise _EndRequested

    def _send(self, word: ZygoteWord) -> None:
        self._control.sendall(encode_stream(word))

    def _take_orders(self) -> bool:
        """Carry out what has arrived. False at end of file."""
        while True:
            try:
                data, passed, _, _ = self._control.recvmsg(65536, _PASSED_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            for _, _, numbers in passed:
                self._descriptors.extend(array.array("i", numbers))
            if not data:
                return False
            for body in self._buffer.feed(data):
                order = agent_to_zygote.decode(body)
                given = [self._descriptors.popleft() for _ in range(FDS_PER_FORK)]
                self._fork(order, given)

    def _fork(self, order: Fork, descriptors: list[int]) -> None:
        has_threads = process.num_threads() > 1  # locks that one of them holds would stay locked in a forked child
        sys.stdout.flush()
        sys.stderr.flush()
        own_pid = os.getpid()
        # A signal meant for the child must not meet the zygote's handlers, which would swallow it.
        mask = {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, _OWN_SIGNALS)}
        try:
            pid = os.fork()
            if pid == 0:
                self._run_child(order, descriptors, own_pid, mask, has_threads=has_threads)
        except OSError as error:
            self._send(ForkFailed(child=order.child, error=f"fork: {error.strerror}"))
        else:
            self._children[pid] = order
            self._plan_imports()
            self._send(Forked(child=order.child, pid=pid))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for descriptor in descriptors:
                os.close(descriptor)

    def _run_child(
        self, order: Fork, descriptors: list[int], zygote: int, mask: set[int], *, has_threads: bool
    ) -> NoReturn:
        """Go on as the forked child, or as a new interpreter. Never returns, because none of the zygote's code may run
        afterwards."""
        code = 1
        try:
            os.setsid()
            process.die_with_parent(signal.SIGKILL, zygote)
            process.become_subreaper()  # its orphans go to the zygote only when it ends
            for number in _OWN_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            control = self._keep_only(descriptors)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if order.fresh or not self._can_fork(has_threads=has_threads):
                self._exec(control, order.env)
            code = self._run_entry(control)
        except BaseException:
            traceback.print_exc()
        finally:
            exit_process(code)

    def _keep_only(self, descriptors: list[int]) -> int:
        """Close the zygote's descriptors, set up the child's own streams, and return the control descriptor."""
        # The socket objects first: if one were collected later, it would close a number that is in use again.
        for end in (self._control, self._wake_read, self._wake_write):
            end.close()
        control, out, err = descriptors
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        process.close_all_but([control])
        return control

    def _can_fork(self, *, has_threads: bool) -> bool:
        """Print, in the child, what went wrong with the preload. False: the child must be a new interpreter."""
        notes = [note for note, is_of_threads in self._preloaded if note and (has_threads or not is_of_threads)]
        if has_threads and not any(is_of_threads for _, is_of_threads in self._preloaded):
            notes.append("an import of the zygote started threads, so workers start as new interpreters.")
        for note in (*notes, *fork_setup.OPENED):
            os.write(2, f"unified: {note}\n".encode(errors="backslashreplace"))
        return not (has_threads or fork_setup.OPENED)

    def _exec(self, control: int, env: dict[str, str]) -> NoReturn:
        if control != FDS_PER_FORK:
            os.dup2(control, FDS_PER_FORK)
            os.close(control)
        os.set_inheritable(FDS_PER_FORK, True)
        os.environ.update(env)
        os.environ["UNIFIED_CONTROL_FD"] = str(FDS_PER_FORK)
        os.execv(sys.executable, [sys.executable, "-m", self._module])

    def _run_entry(self, control: int) -> int:
        open_output()  # the zygote's own streams assume a file that can seek
        entry = getattr(importlib.import_module(self._module), self._function)
        try:
            entry(socket.socket(fileno=control))
        except SystemExit as error:
            if error.code is None or isinstance(error.code, int):
                return error.code or 0
            print(error.code, file=sys.stderr)
            return 1
        return 0

    def _empty_wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _reap(self, pids: Iterable[int]) -> None:
        """Report which of these children (-1: any) ended, and kill what they left."""
        ended: dict[int, ChildExited] = {}
        for wanted in list(pids):
            with contextlib.suppress(ChildProcessError):
                while (found := os.wait4(wanted, os.WNOHANG))[0]:
                    pid, status, usage = found
                    if (order := self._children.pop(pid, None)) is not None:  # else an orphan that we had adopted
                        code = os.waitstatus_to_exitcode(status)
                        ended[pid] = ChildExited(child=order.child, pid=pid, code=code, peak_kb=usage.ru_maxrss)
        if ended:
            files = process.tracked_files(lambda: self._remains(ended))  # the agent may kill after the report, too
            for pid, report in ended.items():
                process.signal_group(pid, signal.SIGKILL)
                self._send(report)
            process.kill_until_none(lambda: self._remains(ended), files)

    def _kill_all(self) -> None:
        ended, self._children = self._children, {}
        process.kill_until_none(lambda: self._remains(ended))
        own = os.getpid()
        process.kill_until_none(lambda: [found.pid for found in process.every_process() if found.parent == own])

    def _remains(self, workers: Collection[int]) -> list[int]:
        """Return processes that dead workers left: in their sessions, and orphans in sessions of their own.

        Each worker adopts the orphans of its descendants, so the zygote has only orphans of dead workers. Processes
        that an import of the zygote started are in the zygote's session.
        """
        own, session = os.getpid(), os.getsid(0)
        return [
            found.pid
            for found in process.every_process()
            if found.session in workers
            or (found.parent == own and found.session != session and found.pid not in self._children)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m unified.worker.zygote", description="Forks workers for an agent.")
    parser.add_argument("fd", type=int, metavar="FD", help="socket to the agent")
    parser.add_argument("--parent", type=int, help="pid of the agent")
    parser.add_argument("--preload", default="", metavar="MODULE,…", help="modules to import besides the entry's")
    parser.add_argument("--entry", default=DEFAULT_ENTRY, metavar="MODULE:FUNCTION", help="what a child runs")
    arguments = parser.parse_args()
    process.die_with_parent(signal.SIGTERM, arguments.parent)
    process.become_subreaper()
    process.set_title("unified-zygote")
    control = socket.socket(fileno=arguments.fd)
    control.set_inheritable(False)
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # put there by `-m`: workers must not import from the agent's working directory
    gc.disable()  # nearly all imported objects stay: collections would take a tenth of the import of torch
    fork_setup.preload(arguments.entry.partition(":")[0])
    preloaded = [fork_setup.preload_named(name) for name in arguments.preload.split(",") if name]
    gc.freeze()  # a collection in a child must not touch, and so copy, shared pages
    gc.enable()
    Zygote(control, arguments.entry, arguments.parent, preloaded).serve()
    flush_output(within_s=1.0)
    os._exit(0)  # the end of an interpreter with torch takes 0.2 s


if __name__ == "__main__":
    main()
