"""The way in: one PULL bound on `ipc` and `tcp`, and one DEALER to the relay, each with a thread that waits on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from unified.bus.outlet import HEARTBEAT_MS
from unified.bus.routes import Policy, ipc_address
from unified.bus.tensors import Buffer
from unified.errors import ClusterError
from unified.protocol.records import Inbox
from unified.settings import make_private

logger = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
_PULL_BELL = "inproc://bell"
_DEALER_BELL = "inproc://relay-bell"


class Mail(NamedTuple):
    """One message as it came; its frames are views of what ZeroMQ received."""

    envelope: memoryview
    body: Buffer
    buffers: list[Buffer]
    is_relayed: bool


class InboxSockets:
    """Binds the addresses of one life, then receives until closed.

    Args:
        inbox_id: unique for each life; also the DEALER's identity at the relay.
        run_dir: a directory for the ipc socket, made 0700.
        address: of this host, for others; empty for none.

    Raises:
        ClusterError: nobody could reach this inbox.
    """

    def __init__(
        self,
        context: Context,
        *,
        inbox_id: str,
        host_id: str,
        run_dir: str,
        address: str,
        relay: str,
        policy: Policy,
    ) -> None:
        self._context = context
        self._ipc_path: Path | None = None
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._pull = context.socket(zmq.PULL)
        self._pull.set(zmq.IPV6, ":" in address)  # with it, IPv4 addresses would be shown in a mapped form
        self._pull.bind(_PULL_BELL)
        routes = [] if policy == "relay" else [*self._bind_ipc(run_dir, inbox_id, policy), *self._bind_tcp(address)]
        self._dealer = _dealer(context, inbox_id, relay) if relay else None
        self.inbox = Inbox(inbox_id=inbox_id, routes=routes, host_id=host_id)
        if not routes and not relay:
            self.close()
            raise ClusterError(
                f"the inbox of this worker has no address: neither a socket in {run_dir} nor one on {address!r} "
                "could be bound, and there is no relay. The log says why."
            )

    def start(self, on_mail: Callable[[Mail], None], on_relay_lost: Callable[[], None]) -> list[int | None]:
        """Begin to receive; the idents of the threads that call back."""
        targets = [lambda: self._receive_direct(on_mail)]
        if self._dealer is not None:
            dealer = self._dealer
            targets.append(lambda: self._receive_relayed(dealer, on_mail, on_relay_lost))
        for name, target in zip(("bus-io", "bus-relay-io"), targets, strict=False):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return [thread.ident for thread in self._threads]

    def close(self) -> None:
        """End the threads, close all and remove the ipc socket's file."""
        self._is_closing = True
        for bell, thread in zip((_PULL_BELL, _DEALER_BELL), self._threads, strict=False):
            striker = self._context.socket(zmq.PUSH)
            striker.connect(bell)
            striker.send(b"")
            if thread is not threading.current_thread():
                thread.join()
            striker.close(0)
        self._pull.close(0)
        if self._dealer is not None:
            self._dealer.close(0)
        if self._ipc_path is not None:
            self._ipc_path.unlink(missing_ok=True)

    def _receive_direct(self, on_mail: Callable[[Mail], None]) -> None:
        while not self._is_closing:
            mail = _receive(self._pull, False)
            if not self._is_closing:
                on_mail(mail)

    def _receive_relayed(
        self, dealer: Socket, on_mail: Callable[[Mail], None], on_relay_lost: Callable[[], None]
    ) -> None:
        bell = self._context.socket(zmq.PULL)
        bell.bind(_DEALER_BELL)
        lost = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        for each in (dealer, lost, bell):
            poller.register(each, zmq.POLLIN)
        while not self._is_closing:
            ready = dict(poller.poll())
            if dealer in ready:
                on_mail(_receive(dealer, True))
            if lost in ready:
                lost.recv_multipart()
                on_relay_lost()
        dealer.disable_monitor()
        lost.close(0)
        bell.close(0)

    def _bind_ipc(self, run_dir: str, inbox_id: str, policy: Policy) -> list[str]:
        if policy == "tcp" or not run_dir:
            return []
        address, why_not = ipc_address(run_dir, inbox_id)
        if not why_not:
            try:
                make_private(Path(run_dir))
                self._pull.bind(address)
            except (OSError, zmq.ZMQError) as error:
                why_not = str(error)
        if why_not:
            logger.warning("event=no-ipc-route run_dir=%s reason=%r (tcp is used on this host too)", run_dir, why_not)
            return []
        self._ipc_path = Path(address.removeprefix("ipc://"))
        return [address]

    def _bind_tcp(self, address: str) -> list[str]:
        if not address:
            return []
        host = f"[{address}]" if ":" in address and not address.startswith("[") else address
        try:
            self._pull.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            logger.warning("event=no-tcp-route address=%s reason=%r", address, str(error))
            return []
        return [self._pull.get_string(zmq.LAST_ENDPOINT)]


def _dealer(context: Context, inbox_id: str, relay: str) -> Socket:
    dealer = context.socket(zmq.DEALER)
    dealer.set(zmq.IDENTITY, inbox_id.encode())
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.IPV6, "[" in relay)
    dealer.set(zmq.RECONNECT_IVL, 50)
    dealer.set(zmq.RECONNECT_IVL_MAX, 2_000)
    dealer.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    dealer.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    dealer.connect(relay)
    return dealer


def _receive(source: Socket, is_relayed: bool) -> Mail:
    frame = source.recv(copy=False)
    envelope = frame.buffer
    body: Buffer = b""
    buffers: list[Buffer] = []
    if frame.more:
        frame = source.recv(copy=False)
        body = frame.buffer
    while frame.more:
        frame = source.recv(copy=False)
        buffers.append(frame.buffer)
    return Mail(envelope, body, buffers, is_relayed)
