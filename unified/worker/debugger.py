"""Breakpoints of a worker: pdb, driven by ``unified attach`` through calls over the bus, or debugpy."""

from __future__ import annotations

import io
import os
import pdb
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from unified.bus.calls.registry import RPC_REGISTRY
from unified.errors import EntryPointError, UsageError
from unified.job.driver import DEBUGPY
from unified.protocol.worker_agent import Launch
from unified.worker.stop import StopState

LOOK_S = 0.25
POLL_S = 20.0


class DebugTerminal:
    """Terminal of this worker's pdb. `wait_for` gets what the worker waits for, and "" once it goes on."""

    def __init__(self, launch: Launch, stop: StopState, wait_for: Callable[[str], None]) -> None:
        self.who = f"job={launch.job_id} worker={launch.name}"
        self.command = f"unified attach {launch.job_id} {launch.role}-{launch.place.rank}"
        self.wait_for = wait_for
        self.turn = threading.RLock()  # one thread at a time is at the prompt; threads at no breakpoint answer calls
        self.state = "running"
        """`running`; `busy` until the first prompt, and while pdb carries out a line; `asking`; `off` after `q`."""
        self.output = io.StringIO()  # since the program ran last
        self.num_left = self._first = launch.incarnation << 32  # plus one for each breakpoint left
        self._typed = ""
        self._stop, self._pid = stop, os.getpid()
        self._changed = threading.Condition()
        RPC_REGISTRY.register("unified.attach", self._attach)
        if "PYTHONBREAKPOINT" not in os.environ and not os.isatty(0):  # else the user has a debugger, or types here
            sys.breakpointhook = pdb.set_trace = self.on_breakpoint
            plain = pdb.Pdb.set_trace

            def set_trace(debugger: pdb.Pdb, frame: FrameType | None = None, **named: Any) -> None:
                """Stop the caller of a debugger without own streams, such as that of `torch.distributed.breakpoint`."""
                stop: Any = self._stop_at if debugger.use_rawinput else partial(plain, debugger, **named)
                stop(frame or sys._getframe(1))

            pdb.Pdb.set_trace = set_trace  # type: ignore[assignment, method-assign]

    def on_breakpoint(self, *_: object, **__: object) -> None:
        """Stop the calling thread."""
        self._stop_at(sys._getframe(1))

    def _stop_at(self, frame: FrameType) -> None:
        if os.getpid() != self._pid:  # a forked child has neither bus nor agent
            print("unified: a child of the worker passes over its breakpoint()", file=sys.stderr)
        elif not (self.state == "off" or self._stop.is_asked):
            _WorkerPdb(self).set_trace(frame)  # last: pdb traces every call from here on

    def readline(self, *_: object) -> str:
        """Wait for a line; return ``quit`` if the program has to end."""
        with self._changed:
            self.become("asking")
            may_end = threading.current_thread() is not threading.main_thread()  # only the main thread is interrupted
            while not (self._typed or (self._stop.is_asked and (may_end or not self._stop.is_interrupt))):
                self._changed.wait(LOOK_S)
            line, self._typed, self.state = self._typed or "quit\n", "", "busy"
        return line

    def become(self, state: str) -> None:
        """Change the state, and wake up the attached callers."""
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def _attach(self, after: int, typed: str = "", num_left: int = 0) -> tuple[str, int, str, int]:
        """Give pdb the typed line, if any. Return the output from `after` on, the length of all output, the state, and
        the `num_left` to pass next time. After `POLL_S` pdb may still be busy."""
        with self._changed:
            if typed and num_left < self._first:
                raise UsageError(f"{self.who} was restarted since: attach to it once more.")
            if typed and self.state == "asking":
                self._typed = typed
                self.become("busy")
            same = (num_left,) if typed else (num_left, self.num_left)
            self._changed.wait_for(
                lambda: self.num_left not in same or (self.state != "busy" and after != len(self.output.getvalue())),
                POLL_S,
            )
            if self.num_left not in same and self.state != "off":  # the program may have stopped again by now
                return "--running--\n", 0, "running", self.num_left
            text = self.output.getvalue()
            return text[max(0, after) :] or f"--{self.state}--\n", len(text), self.state, self.num_left


class _WorkerPdb(pdb.Pdb):
    set_trace = pdb.Pdb.set_trace  # Python's own

    def __init__(self, terminal: DebugTerminal) -> None:
        super().__init__(stdin=terminal, stdout=terminal.output, nosigint=True)  # type: ignore[arg-type]
        self._terminal = terminal

    def interaction(self, frame: Any, *error: Any) -> None:
        caller = frame
        while caller.f_globals.get("__name__") == "torch.distributed":  # in its breakpoint()
            caller = caller.f_back
        terminal, place = self._terminal, f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
        with terminal.turn:
            if terminal.state == "running":
                print(f"event=breakpoint {terminal.who} at={place} waits for: {terminal.command}", file=sys.stderr)
            terminal.state = "busy"
            terminal.wait_for(f"`{terminal.command}`, at the breakpoint {place}")
            super().interaction(frame, *error)

    def do_continue(self, arg: str, state: str = "running") -> bool | None:
        """c(ont(inue)): go on to the next breakpoint."""
        self._terminal.wait_for("")
        self._terminal.output.truncate(self._terminal.output.seek(0))
        self._terminal.num_left += 1
        self._terminal.become(state)
        return super().do_continue(arg)

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool | None:
        """q(uit): leave the debugger. The program goes on, and no breakpoint stops it any more."""
        self.clear_all_breaks()
        return self.do_continue(arg, "off")

    do_q = do_exit = do_EOF = do_quit
    _cmdloop = pdb.Pdb.cmdloop  # an interrupt goes to the program, not to pdb


def await_debugpy(launch: Launch, wait_for: Callable[[str], None]) -> None:
    """Wait for a client of debugpy, if the job says so. EntryPointError: there is no debugpy, or no such port."""
    if not (given := os.environ.pop(DEBUGPY, "")):  # popped: not for jobs that this worker submits
        return
    everybody = [name for role in launch.spec.roles for name in role.workers]
    port = int(given) + everybody.index(launch.name) if given.isdecimal() else 0
    if not 0 < port < 2**16:
        raise EntryPointError(f"{DEBUGPY}={given} leaves no port to {launch.name}: give a lower number.")
    try:
        import debugpy
    except ImportError as error:
        remedy = "pip install 'unified-runtime[debug]' there."
        raise EntryPointError(f"--debugpy needs debugpy, and {sys.executable} has none: {remedy}") from error
    debugpy.listen(("127.0.0.1", port))
    awaited = f"a client of debugpy at 127.0.0.1:{port} (ssh -L {port}:127.0.0.1:{port} {launch.address})"
    print(f"event=debugpy job={launch.job_id} worker={launch.name} waits for: {awaited}", file=sys.stderr)
    wait_for(awaited)
    debugpy.wait_for_client()
    wait_for("")
