"""Bus endpoint of one process: composes its listeners, connections, client and server.

Threads: any thread may call, and sends the call itself. A thread that waits for an answer from this host receives the
answer itself. Other threads: the I/O threads and their ticks (`unified.bus.transport.io_threads`), one that receives
from other hosts, one that watches deadlines, one that gives idle memory back, one that sends calls that waited for
their worker, and one that gives up dropped streams. `unified.bus.calls.server` runs handlers.
`unified.bus.calls.pending` makes the decisions; this module is the shell around it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from unified.bus.calls.client import CallClient
from unified.bus.calls.deadlock.monitor import PoolMonitor
from unified.bus.calls.dispatcher import Dispatcher
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.registry import RPC_REGISTRY, MethodRegistry
from unified.bus.calls.sender import OutgoingPayload, Sender
from unified.bus.calls.server import MAX_HANDLER_THREADS, CallServer
from unified.bus.calls.unread import UnreadError, UnreadErrors
from unified.bus.codec.codec import encode_arguments
from unified.bus.executor import HandlerPool, MainThread
from unified.bus.identity import BusIdentity, BusNetwork
from unified.bus.shm.pool import SharedPool, Trimmer
from unified.bus.shm.reader import SharedReader
from unified.bus.streams.stream import Awaited, waited_in_vain
from unified.bus.transport.connections import ConnectionTable
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.listeners import Listeners
from unified.bus.transport.routes import read_policy
from unified.core.directory import Change, WorkerDirectory
from unified.errors import UsageError
from unified.protocol.records import DirectoryEntry, Inbox
from unified.security.curve import Gatekeeper
from unified.threads import CLOSE_WITHIN_S, SerialWorker, after_fork, own_pid

if TYPE_CHECKING:
    from unified.bus.tracing import CallTracer

logger = logging.getLogger(__name__)
LIMIT_BYTES = 256 * 1024 * 1024
LINGER_MS = 500
MAX_METHOD_NAME = 1000
QUIET_S = 0.5
SETTLE_WITHIN_S = 5.0
_held_up: list[zmq.Context[zmq.Socket[bytes]]] = []
"""Contexts with a socket that a thread still uses. Kept, because ending or collecting one could block for ever."""


class BusEndpoint:
    """Bus endpoint of one incarnation of one worker. It opens nothing before `start`: it may be made before a fork.

    Args:
        registry: methods that others may call; None: `RPC_REGISTRY`.
        default_timeout_s: deadline of calls without their own; None: no deadline, only the callee's death ends them.
        limit_bytes: most bytes in flight to one peer.
        tracer: recorder of the calls' spans.
        main: queue of calls for the main thread; None: calls that need it are refused.
    """

    def __init__(
        self,
        identity: BusIdentity,
        network: BusNetwork,
        *,
        registry: MethodRegistry | None = None,
        default_timeout_s: float | None = None,
        limit_bytes: int = LIMIT_BYTES,
        tracer: CallTracer | None = None,
        main: MainThread | None = None,
    ) -> None:
        self.identity = identity
        self.worker = identity.worker
        self.incarnation = identity.incarnation
        self.registry = RPC_REGISTRY if registry is None else registry
        self._network = network
        self._default_timeout_s = default_timeout_s
        self._limit_bytes = limit_bytes
        self._tracer = tracer
        self._main = main or MainThread()
        self._lock = threading.Lock()
        self._pool = HandlerPool("bus-handler", MAX_HANDLER_THREADS)
        self._trimmer = Trimmer("bus-trimmer", self._trim)
        self._sweeper: SerialWorker[Callable[[], object]] = SerialWorker("bus-sweeper", lambda work: work())
        """Gives memory back: that can take a second, and must not delay news and deadlines."""
        self.unread = UnreadErrors(identity.worker)
        """Errors of calls made here that nobody read."""
        self.directory = WorkerDirectory()
        """Directory of the job, as far as this process was told. Only `update_directory` changes it."""
        self._learning = threading.Lock()
        self._directory_listeners: list[Callable[[Sequence[Change]], object]] = []
        self._is_started = False
        self._is_closing = False
        self._pid = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._remote_thread: int | None = None

    @property
    def inbox_id(self) -> str:
        """Id of this incarnation's inbox; empty before `start`."""
        return self.identity.inbox

    @property
    def num_rejected(self) -> int:
        """Number of dropped messages: unreadable, for another inbox or job, or duplicates."""
        return self._dispatcher.admission.num_rejected

    @property
    def num_received(self) -> int:
        """Number of received messages of calls: calls, answers, items of streams."""
        return self._dispatcher.admission.num_read

    def start(self) -> Inbox:
        """Bind the inbox, start to receive, and return the record by which others reach it.

        Raises:
            OptionError: a route that does not exist.
            UsageError: it has started already, or the route is the relay, and there is none.
            ClusterError: no address could be bound.
        """
        if self._context is not None:
            raise UsageError(f"the bus of worker {self.worker} has been started already.")
        policy = read_policy(self._network.route, os.environ)
        if policy == "relay" and not self._network.relay:
            raise UsageError("the bus is to use the relay, but there is no relay: unset UNIFIED_BUS_ROUTE.")
        self._pid = os.getpid()
        # From the kernel: forked siblings share the state of `random`.
        self.identity = me = self.identity._replace(inbox=secrets.token_hex(12))
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._gatekeeper = Gatekeeper(self._context, self._network.key, name=f"worker {self.worker}")
        try:
            self._listeners = Listeners(me, self._network, policy, self._gatekeeper)
        except BaseException:
            self._gatekeeper.close()
            self._context.destroy(0)
            raise
        inbox, limit_bytes = self._listeners.inbox, self._limit_bytes
        self._memory = SharedPool(me.inbox)
        self._reader = SharedReader()
        self._io = IoThreads(self._listeners.unix, limit_bytes)
        self._connections = ConnectionTable(
            me, inbox, policy, self._network.relay, self._gatekeeper, self._io, self._trimmer, limit_bytes
        )
        self._sender = Sender(
            me, self._connections, self._io, self._pool, self._memory, self.directory, self._trimmer, limit_bytes
        )
        tracer = self._tracer
        make_client, make_server = (CallClient, CallServer) if tracer is None else (tracer.client, tracer.server)
        self._client = make_client(
            self,
            self.directory,
            me,
            self._sender,
            self._connections,
            default_timeout_s=self._default_timeout_s,
            limit_bytes=limit_bytes,
        )
        self._pool.on_full = PoolMonitor(self._pool, self._client.outgoing_calls).begin
        self._server = make_server(me, self.registry, self._sender, self._client, self._pool, self._io, self._main)
        self._dispatcher = Dispatcher(
            me, self._client, self._server, self._sender, self._connections, self._io, self._memory, self._reader
        )
        self._dispatcher.bulk.listen(self._listeners.bulk)
        self._sweeper.start()
        self.unread.start()
        self._client.start()
        self._connections.start(self._dispatcher)
        self._io.start(self._dispatcher)
        self._remote_thread = self._listeners.start(self._dispatcher)
        self._is_started = True
        after_fork(self._abandon)
        return inbox

    def update_directory(self, entries: Iterable[DirectoryEntry]) -> None:
        """Merge news of the job's directory, from any thread. The calls of a dead incarnation end before listeners hear
        of its death, and before the next incarnation is called."""
        with self._learning:  # listeners hear of changes in their order
            changes = self._client.learn(entries)
            for listener in [*self._directory_listeners]:
                listener(changes)

    def on_directory(self, listener: Callable[[Sequence[Change]], object]) -> Callable[[], None]:
        """Call `listener(changes)` after later news; return a function that ends this. The listener must not block."""
        self._directory_listeners.append(listener)
        return partial(self._directory_listeners.remove, listener)

    def open(self) -> None:
        """Begin the calls that waited: the exports are complete."""
        self._server.open()

    def call(
        self,
        target: str,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        block: bool = True,
        incarnation: int | None = None,
    ) -> RpcFuture[Any]:
        """Call `method` of the worker `target` (its full name) and return at once.

        Arrays, tensors and large bytes that do not go through shared memory are sent from the caller's memory: do not
        change them before the future has ended. The call waits for a worker that is not up yet.

        Args:
            timeout: seconds from now to the call's deadline; None: the default of this endpoint.
            block: wait while too many bytes are in flight to the target; else raise.
            incarnation: the only one of the target that may get the call; when it is over, the call ends in
                WorkerDiedError. None: the present one, or the next.

        Raises:
            UsageError: an argument cannot be sent, or the bus was not started.
            BusOverloadedError: no room, and `block` is False.
            RpcTimeoutError: no room came before the deadline.
        """
        self._check_may_call(method)
        payload = OutgoingPayload(encode_arguments(args, kwargs, devices=True))
        return self._client.call(target, method, payload, timeout, self._may_wait(block), incarnation)

    def call_many(
        self,
        targets: Sequence[str],
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        timeout: float | None = None,
        incarnations: Sequence[int | None] | None = None,
    ) -> list[RpcFuture[Any]]:
        """Call several workers, or one incarnation of each, as `call` does. Arguments are encoded, and copied to shared
        memory, once."""
        self._check_may_call(method)
        payload = OutgoingPayload(encode_arguments(args, kwargs, devices=True), num_readers=len(targets))
        may_wait = self._may_wait(True)
        bound = [None] * len(targets) if incarnations is None else incarnations
        return [
            self._client.call(target, method, payload, timeout, may_wait, incarnation)
            for target, incarnation in zip(targets, bound, strict=True)
        ]

    def call_each(
        self,
        targets: Sequence[str],
        method: str,
        arguments: Sequence[tuple[Sequence[Any], dict[str, Any]]],
        *,
        timeout: float | None = None,
    ) -> list[RpcFuture[Any]]:
        """Call several workers, each with its own arguments. If one payload cannot be encoded, none is called."""
        self._check_may_call(method)
        payloads = [OutgoingPayload(encode_arguments(args, kwargs, devices=True)) for args, kwargs in arguments]
        may_wait = self._may_wait(True)
        return [
            self._client.call(target, method, payload, timeout, may_wait)
            for target, payload in zip(targets, payloads, strict=True)
        ]

    def num_open(self, worker: str) -> int:
        """Return how many calls of this process to a worker have not ended."""
        return self._client.table.num_open(worker)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory to write to, of which workers of this host get views when it is sent; None: none is available.

        Do not change it after it was sent. See `unified.shared_empty`.
        """
        if not self._is_started or not any(route.startswith("ipc:") for route in self._listeners.inbox.routes):
            return None
        memory = self._memory.allocate(nbytes)
        if memory is not None:
            self._trimmer.soon()
        return memory

    def close(self) -> None:
        """End every open call with RpcCancelledError, close the sockets, remove the Unix socket's file, end the
        threads. Answers that the kernel has not taken get half a second to leave.

        The endpoint waits only briefly for a handler inside user code; its thread ends with the process.
        """
        with self._lock:
            if self._is_closing or not self._is_started or self._pid != os.getpid():
                return
            self._is_closing = self._sender.is_closing = True
        self._io.hand_over()  # a handler may close its own bus
        self._sender.release()
        self._client.close(f"the bus of worker {self.worker} was closed.")
        self._server.close()
        self._pool.close()
        until = time.monotonic() + LINGER_MS / 1000
        for connection in self._io.connections:  # let answers leave that the kernel has not taken yet
            connection.wait_for_room(1, lambda: time.monotonic() >= until)
        self._connections.close(LINGER_MS)
        self._io.close()
        self._dispatcher.bulk.close()
        has_ended = self._listeners.close()
        self._trimmer.close(CLOSE_WITHIN_S)
        self._sweeper.close()
        self.unread.close()
        self._reader.close()
        self._memory.close()
        self._gatekeeper.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._context is not None:
            if has_ended:
                self._context.term()
            else:
                _held_up.append(self._context)

    def before_wait(self, awaited: Awaited, task: int = 0) -> tuple[InboundCall | int, bool, Awaited]:
        """See `unified.bus.calls.future.Host`."""
        self._check_is_ours()
        if self._sender.holding:
            self._sender.release()
        if awaited.link is None and threading.get_ident() == self._remote_thread:
            raise waited_in_vain(awaited)
        self._io.hand_over()
        return self._server.begin_wait(awaited, task), self._pool.waits(), awaited

    def after_wait(self, token: Any) -> None:
        """See `unified.bus.calls.future.Host`."""
        who, is_pooled, awaited = token
        self._server.end_wait(who, awaited)
        if is_pooled:
            self._pool.waited()

    def failed(self, what: str | tuple[str, str], error: BaseException) -> UnreadError | None:
        """See `unified.bus.calls.future.Host`."""
        return self.unread.watch(what, error)

    def settle(self, quiet_s: float = QUIET_S, within_s: float = SETTLE_WITHIN_S) -> int:
        """Wait for answers to users' calls, and log the errors that nobody read; return their number since the start.

        Call it when the worker's own code is done. It waits until no call has ended for `quiet_s` seconds, and at most
        `within_s`: calls whose handlers take longer stay open.
        """
        self._sender.release()
        self._client.settle(quiet_s, within_s)
        return self.unread.tell_all()

    def _check_may_call(self, method: str) -> None:
        if not self._is_started:
            raise UsageError(f"the bus of worker {self.worker} has not been started.")
        self._check_is_ours()
        if len(method) > MAX_METHOD_NAME:
            raise UsageError(f"the method name {method[:40]!r}… has {len(method)} characters.")

    def _check_is_ours(self) -> None:
        self._client.lock.check()
        if self._pid != own_pid():
            raise UsageError(
                f"the bus of worker {self.worker} belongs to process {self._pid}: this one ({os.getpid()}) was forked "
                "from it and cannot call. Call in the worker itself, and hand results to its children."
            )

    def _may_wait(self, block: bool) -> bool:
        """Return whether a call may wait for room on this thread: not if others need the thread to receive."""
        return block and not self._io.is_leader() and threading.get_ident() != self._remote_thread

    def _trim(self) -> None:
        now = time.monotonic()
        parts = (self._memory.trim, self._reader.trim, self._connections.look, self._dispatcher.pieces.trim)
        left = [each(now) for each in parts]
        if any(left):
            self._trimmer.soon()

    def peer_gone(self, inbox_id: str) -> None:
        """Forget the process behind an inbox."""
        self._connections.drop(inbox_id)  # before caller_died, so that later grants see the lost connection
        self._server.caller_died(inbox_id)
        self._dispatcher.admission.forget(inbox_id)
        self._dispatcher.pieces.forget(inbox_id)
        self._dispatcher.bulk.forget(inbox_id)
        self._sweeper.put(partial(self._memory.forget, inbox_id))
        self._sweeper.put(partial(self._reader.forget, inbox_id))

    def _abandon(self) -> None:
        """Close a forked child's copies of the connections, so that peers notice at once when the parent ends."""
        if not self._is_closing:
            self._io.abandon()
            self._listeners.abandon()
