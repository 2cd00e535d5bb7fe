"""The worker's end of the socket to its agent: orders come in, reports go out.

End of file means that the agent is gone. Nobody could watch or stop this worker then, so the process ends at once, even
while its main thread is busy.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import msgspec
from msgspec import structs

from unified.errors import ProtocolError, RpcTimeoutError, UsageError
from unified.job.shared_spec import map_spec
from unified.protocol import worker_agent
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.framing import StreamBuffer, encode_stream
from unified.protocol.records import DirectoryEntry
from unified.security.keys import learn
from unified.threads import call_guarded, start_thread

_CHUNK = 256 * 1024
PORTS_WITHIN_S = 60.0


class Handlers(NamedTuple):
    """A function for each kind of order, called in the control thread, which it must not block."""

    on_run: Callable[[RunOrder], None]
    on_directory: Callable[[list[DirectoryEntry]], None]
    on_stop: Callable[[worker_agent.Stop], None]
    on_dump: Callable[[worker_agent.DumpStacks], None] = lambda order: None
    on_notice: Callable[[RoundNotice], None] = lambda notice: None
    on_record: Callable[[worker_agent.RecordStep], None] = lambda order: None


class ControlChannel:
    """Reads orders in a thread of its own; `send` may be called from any thread."""

    def __init__(self, control: socket.socket) -> None:
        control.setblocking(True)
        control.set_inheritable(False)  # a program that the user starts must not hold the agent's socket open
        self._socket = control
        self._buffer = StreamBuffer()
        self._waiting: list[worker_agent.AgentToWorker] = []
        self._passed: list[int] = []
        """Descriptors that came with messages."""
        self._sending = threading.Lock()
        self._is_disowned = False
        self._thread: threading.Thread | None = None
        self._asking = threading.Lock()
        self._held: queue.SimpleQueue[worker_agent.PortsHeld] = queue.SimpleQueue()
        self.before_exit: Callable[[], None] = lambda: None
        """Called, from the control thread, when the agent is gone; it must be quick and must not block."""

    def receive_launch(self) -> worker_agent.Launch:
        """Wait for the first order. The process ends if the agent hangs up before."""
        while not self._waiting:
            self._waiting += self._receive()
        first = self._waiting.pop(0)
        if not isinstance(first, worker_agent.Launch):
            self._give_up(f"the first order was {type(first).__name__}, not Launch")
        if first.spec_bytes:
            spec = map_spec(self._passed[0], first.spec_bytes)
            first = structs.replace(first, spec=spec)
        for descriptor in self._passed:
            os.close(descriptor)
        return first

    def start(self, handlers: Handlers) -> None:
        """Hand every further order to `handlers`, in a daemon thread."""
        self._thread = start_thread("unified-control", self._serve, handlers)

    def disown(self) -> None:
        """Close the channel in a process that user code forked: it has no agent, and `send` does nothing."""
        self._is_disowned = True
        self._socket.close()

    def send(self, word: worker_agent.WorkerWord) -> None:
        """Send one word to the agent. Blocks while the socket is full; ends the process if the agent is gone."""
        if self._is_disowned:
            return
        data = encode_stream(word)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError:
            self._give_up(None)

    def hold_ports(self, num: int) -> list[int]:
        """Have the agent hold TCP ports for this worker, `num` in all; return them. `Worker.ports` has the errors."""
        if self._is_disowned or threading.current_thread() is self._thread:
            where = "a process that was forked from a worker" if self._is_disowned else "an on_change callback"
            raise UsageError(
                f"ports({num}): {where} cannot ask the agent. Ask in the worker itself, in another thread."
            )
        with self._asking:
            self.send(worker_agent.PortsWanted(num=num))
            try:
                while (answer := self._held.get(timeout=PORTS_WITHIN_S)).num != num:
                    pass  # it is late
            except queue.Empty:
                text = f"ports({num}): the agent did not answer within {PORTS_WITHIN_S:g} s. See its log."
                raise RpcTimeoutError(text) from None
        if answer.error:
            raise UsageError(answer.error)
        return answer.ports

    def _serve(self, handlers: Handlers) -> None:
        while True:
            for order in self._waiting:
                match order:  # a further Launch is ignored: a worker is launched once
                    case worker_agent.Run():
                        handlers.on_run(order.order)
                    case worker_agent.DirectoryNews():
                        handlers.on_directory(order.entries)
                    case worker_agent.Stop():
                        handlers.on_stop(order)
                    case worker_agent.KeyReplaced():
                        learn(order.key)
                    case worker_agent.DumpStacks():
                        call_guarded("stacks-unread", handlers.on_dump, order)
                    case worker_agent.RecordStep():
                        call_guarded("step-not-recorded", handlers.on_record, order)
                    case worker_agent.PortsHeld():
                        self._held.put(order)
                    case worker_agent.Notice():
                        call_guarded("notice-failed", handlers.on_notice, order.notice)
            self._waiting = self._receive()

    def _receive(self) -> list[worker_agent.AgentToWorker]:
        try:
            data, passed, _, _ = socket.recv_fds(self._socket, _CHUNK, 1)
            self._passed += passed
        except OSError:
            data = b""
        if not data:
            self._give_up(None)
        try:
            return [worker_agent.agent_to_worker.decode(body) for body in self._buffer.feed(data)]
        except (ProtocolError, msgspec.DecodeError) as error:
            self._give_up(f"cannot read an order: {error}")

    def _give_up(self, reason: str | None) -> NoReturn:
        try:
            self.before_exit()
            if reason is not None:
                text = f"this worker ends: it cannot read its agent's messages: {reason}."
                print(f"unified: {text}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
