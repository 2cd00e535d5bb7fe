"""One connection to a master: requests from any thread, each with exactly one answer or one error.

A thread of its own owns a DEALER socket; callers hand requests to the thread and wait. When the master is silent,
requests that may safely arrive twice are sent again, because a master that restarts loses messages in transit. A
request waits in this process (not in ZeroMQ) until the master is really connected, so that no request arrives after it
timed out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from socket import getaddrinfo
from typing import Any, Self, TypeVar

import zmq

from unified import process
from unified.config import settings
from unified.config.addresses import MASTER_VARIABLE, find_master, parse_address, split_address
from unified.config.clusters import living_clusters
from unified.errors import (
    ClusterError,
    KeyRefusedError,
    MasterUnreachableError,
    ProtocolError,
    RefusedError,
    UnifiedError,
    UsageError,
    VersionMismatchError,
)
from unified.protocol.client_master import (
    ClientRequest,
    MasterAnswer,
    ReadLog,
    Refused,
    RestartWorkers,
    SubmitJob,
    WatchCluster,
    client_to_master,
    master_to_client,
)
from unified.protocol.framing import MAX_MESSAGE, UNWRITABLE, Codec, unsendable
from unified.security.curve import secure_client
from unified.security.handshakes import EVENTS, Handshakes, KeyChoice
from unified.security.keys import KEY_VARIABLE, ClusterKey, find_key
from unified.threads import start_thread
from unified.values import ClosedOnExit

RESEND_S = 2.0
_FOREVER_MS = 3_600_000
A = TypeVar("A")


class Dealer:
    """A DEALER that reconnects by itself until the master refuses it. It belongs to one thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: ClusterKey | None, listener: str = ""
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.immediate = True  # queue nothing for a master that is not connected
        self.socket.ipv6 = "[" in address
        self.socket.reconnect_ivl = 50
        self.socket.reconnect_ivl_max = 1000
        self.socket.heartbeat_ivl = 2000  # notices a broken network that TCP does not notice
        self.socket.heartbeat_timeout = 6000
        secure_client(self.socket, key, listener)
        self.monitor = self.socket.get_monitor_socket(EVENTS)
        self._handshakes = Handshakes(address, key)
        self.socket.connect(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    @property
    def num_broken(self) -> int:
        """Number of handshakes that the master ended without a reason, since the last success."""
        return self._handshakes.num_broken

    @property
    def num_failed(self) -> int:
        """Number of handshakes that failed in any way, since the last success."""
        return self._handshakes.num_failed

    @property
    def refusal(self) -> KeyRefusedError | None:
        """Reason why this socket will never get a message through; libzmq does not always try again then."""
        reason = self._handshakes.refusal
        return None if reason is None else KeyRefusedError(reason)

    def watch(self) -> bool:
        """Read the events of the monitor; return whether a handshake succeeded."""
        is_well = False
        with contextlib.suppress(zmq.Again):
            while True:
                is_well |= self._handshakes.read(self.monitor)
        return is_well


class PendingReply:
    """The answer to one request, once it is there."""

    def __init__(
        self,
        request_id: int,
        message: ClientRequest,
        timeout_s: float,
        when_done: Callable[[PendingReply], None] | None = None,
        after: Callable[[float], ClientRequest] | None = None,
    ) -> None:
        self.request_id = request_id
        self.message = message
        self._after = after
        self._asked_at = time.monotonic()
        self.timeout_s = timeout_s
        self.resend_after_s = RESEND_S + (message.wait_s if isinstance(message, WatchCluster) else 0.0)
        if isinstance(message, ReadLog) and message.take:
            self.resend_after_s = float("inf")  # a second request would take another profile
        self.deadline = self._asked_at + timeout_s
        self.resend_at = float("inf")
        self.is_sent = False
        self._done = threading.Event()
        self._answer: MasterAnswer | None = None
        self._error: UnifiedError | None = None
        self._when_done = when_done

    def message_now(self) -> ClientRequest:
        """Return the message to send now, for the first time or again."""
        return self.message if self._after is None else self._after(time.monotonic() - self._asked_at)

    def resolve(self, answer: MasterAnswer | None, error: UnifiedError | None = None) -> None:
        """End the wait. The connection calls this once."""
        self._answer, self._error = answer, error
        self._done.set()
        if self._when_done is not None:
            self._when_done(self)

    def is_answered(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the answer or an error; return True if it is there."""
        return self._done.wait(timeout_s)

    def result(self) -> MasterAnswer:
        """Wait for the answer and return it, or raise the errors of `MasterConnection.request`."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        answer = self._answer
        if answer is None:
            raise ProtocolError("a request ended without an answer and without an error.")
        if isinstance(answer, Refused):
            if answer.code == "version":
                raise VersionMismatchError(answer.reason)
            raise RefusedError(answer.code, answer.reason)
        return answer


class MasterConnection(ClosedOnExit):
    """A client's connection to one master. Any thread may use it; `close` it, or use it as a context manager.

    It has a thread and sockets (10 descriptors) from its first request until it is closed, or told to `rest`.

    Args:
        address: ``tcp://HOST:PORT`` of the master.
        key: key of the cluster, from `unified.security.keys.find_key`, which also finds its successors; None: no key.
        timeout_s: seconds that a request waits for its answer if it has no time of its own.
        answers: codec of the master's answers.

    Raises:
        UsageError: `address` is not an address. Only the first request shows whether a master listens there.
    """

    def __init__(
        self,
        address: str,
        *,
        key: ClusterKey | None = None,
        timeout_s: float = 10.0,
        answers: Codec[Any] = master_to_client,
    ) -> None:
        self.address = parse_address(address)
        self.key = key
        self.timeout_s = timeout_s
        self.owner = 0  # pid of the process with which the cluster ends, if it is one of `living_clusters`
        self._answers = answers
        self._lock = threading.Lock()
        self._next_id = 1
        self._outbox: deque[PendingReply] = deque()
        self._waiting: dict[int, PendingReply] = {}
        self._is_closed = False
        self._ended_by: UnifiedError | None = None
        self._thread: threading.Thread | None = None
        self._rests = False
        self._num_broken = 0
        self._choice = KeyChoice(key, functools.partial(find_key, self.address))
        self._wake = -1  # eventfd of the thread

    def check(self) -> None:
        """Raise `ClusterError` if the process that kept the cluster has ended: the master will not come back."""
        if self.owner and not process.is_alive(self.owner):
            raise ClusterError(
                f"the cluster at {self.address} has ended with its jobs; `unified logs JOB` shows their output."
            )

    @property
    def is_open(self) -> bool:
        """False after `close` or an error of the socket: no request will be answered any more."""
        return not self._is_closed and self._ended_by is None

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def request(self, message: ClientRequest, *, timeout_s: float | None = None) -> MasterAnswer:
        """Send one request and wait for its answer.

        Args:
            timeout_s: seconds to wait; None means the connection's own. The `wait_s` of a `WatchCluster` or
                `ReadLog` is added.

        Raises:
            RefusedError: the master refused the request; the error carries its code and reason.
            UsageError: the request is larger than the master takes (64 MiB), or has a value that cannot be sent.
            KeyRefusedError: this side and the master have different cluster keys.
            MasterUnreachableError: nobody answered in time.
            VersionMismatchError: the master is of another release.
            ProtocolError: something that is not a master answered.
        """
        return self.send(message, timeout_s=timeout_s).result()

    def ask(self, message: ClientRequest, expected: type[A], *, timeout_s: float | None = None) -> A:
        """Send a `request` and return its answer of the expected kind; any other is a `ProtocolError`."""
        return self.take(self.send(message, timeout_s=timeout_s), expected)

    def take(self, reply: PendingReply, expected: type[A]) -> A:
        """Wait for the answer to a request sent with `send`, and return it as `ask` does."""
        answer = reply.result()
        if not isinstance(answer, expected):
            raise ProtocolError(
                f"the master at {self.address} answered {type(reply.message).__name__} with {type(answer).__name__}, "
                f"not with {expected.__name__}: install the same release of unified-runtime on both."
            )
        return answer

    def send(
        self,
        message: ClientRequest,
        *,
        timeout_s: float | None = None,
        when_done: Callable[[PendingReply], None] | None = None,
        after: Callable[[float], ClientRequest] | None = None,
    ) -> PendingReply:
        """Send one request without waiting for its answer; many may be in flight together.

        Args:
            when_done: called when there is an answer or an error, mostly in the connection's own thread.
            after: makes the message from the seconds since this call, for a request that says how long it may wait.
                Called in the connection's thread each time the request is sent. None: `message` each time.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        if isinstance(message, WatchCluster | ReadLog):
            seconds += message.wait_s
        with self._lock:
            reply = PendingReply(self._next_id, message, seconds, when_done, after)
            self._next_id += 1
            error = self._ended_by or (self._closed() if self._is_closed else None)
            if error is None:
                self._outbox.append(reply)
                self._waiting[reply.request_id] = reply
                self._rests = False
                if self._thread is None:
                    settings.check_descriptors()
                    self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    self._thread = start_thread("unified-connection", self._serve, self._wake)
                os.eventfd_write(self._wake, 1)
        if error is not None:
            reply.resolve(None, error)
        return reply

    def abandon(self, reply: PendingReply) -> None:
        """Give up an answer: its request is not sent again, and the answer is dropped if it comes."""
        with self._lock:
            self._waiting.pop(reply.request_id, None)

    def rest(self) -> None:
        """Give back the thread and its sockets once no request waits; the next request takes new ones."""
        with self._lock:
            self._rests = True
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the socket. Requests still waiting fail; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            thread = self._thread
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if thread is not None:
            thread.join()

    def _is_over(self) -> bool:
        """Return True if the thread is to end: closed, or told to rest while no request waits."""
        with self._lock:
            if self._rests and not self._waiting:
                self._thread, self._wake = None, -1  # the next request starts a new thread
            return self._is_closed or self._thread is not threading.current_thread()

    def _serve(self, wake: int) -> None:
        error: UnifiedError = self._closed()
        try:
            with zmq.Context() as context:
                is_known = False
                while not self._is_over():
                    unknown = None if is_known else self._unknown_name()
                    if unknown is None:
                        is_known = True  # from now on ZeroMQ resolves the name at each reconnect
                        with Dealer(context, self.address, self.key, self._choice.pick()) as dealer:
                            self._talk(dealer, wake)
                    else:
                        self._fail_all(unknown)
                    self._await_request(wake)
        except zmq.ZMQError as problem:  # for example, no descriptors left
            error = MasterUnreachableError(f"the socket to the master at {self.address} cannot be used: {problem}.")
        finally:
            with self._lock:
                if is_last := self._thread is threading.current_thread():
                    self._ended_by, self._wake = error, -1
                os.close(wake)
            if is_last:
                self._fail_all(error)

    def _unknown_name(self) -> MasterUnreachableError | None:
        """Return an error if this host cannot resolve the host name of the address."""
        host = split_address(self.address).bare_host
        try:
            getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
            return MasterUnreachableError(
                f"the host {host!r} of the master's address {self.address} is not known here ({reason}): check the "
                "name. Another address is given with --master or UNIFIED_MASTER."
            )
        return None

    def _talk(self, dealer: Dealer, wake: int) -> None:
        """Serve requests until the thread has to end, the master refuses this socket, or other keys are to be tried."""
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        poller.register(dealer.monitor, zmq.POLLIN)
        while not self._is_over():
            self._turn(dealer, poller, wake)
            if dealer.num_failed and self._choice.failed():
                return
            if dealer.refusal is not None:
                self._fail_all(dealer.refusal)
                return

    def _await_request(self, wake: int) -> None:
        """Wait for the next request. It gets a new socket, because somebody may have corrected the key."""
        while not (self._outbox or self._waiting or self._is_over()):
            select.select([wake], [], [])
            os.eventfd_read(wake)

    def _turn(self, dealer: Dealer, poller: zmq.Poller, wake: int) -> None:
        socket = dealer.socket
        poller.register(socket, zmq.POLLIN | zmq.POLLOUT if self._outbox else zmq.POLLIN)
        ready = dict(poller.poll(self._poll_timeout_ms()))
        if wake in ready:
            os.eventfd_read(wake)
        if dealer.monitor in ready:
            if dealer.watch():
                self._choice.succeeded()
            self._num_broken = dealer.num_broken
        if ready.get(socket, 0) & zmq.POLLIN:
            self._receive(socket)
        self._look_at_clock(time.monotonic())
        self._choice.read_file()  # for the bus endpoint of a driver: new workers call it with the new key
        if self._outbox:
            self._flush(socket)

    def _poll_timeout_ms(self) -> int:
        """Return the milliseconds until a request must be sent again or given up."""
        with self._lock:
            moments = [min(reply.deadline, reply.resend_at) for reply in self._waiting.values()]
        if not moments:
            return _FOREVER_MS
        return max(0, int((min(moments) - time.monotonic()) * 1000)) + 1

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            reply = self._outbox[0]
            if reply.request_id in self._waiting:
                try:
                    frames = client_to_master.encode(reply.message_now(), reply.request_id)
                except UNWRITABLE as error:
                    self.abandon(reply)
                    reply.resolve(None, unsendable(reply.message, error))
                    self._outbox.popleft()
                    continue
                if (nbytes := sum(map(len, frames))) > MAX_MESSAGE:
                    self.abandon(reply)
                    reply.resolve(None, _too_large(reply.message, nbytes))
                else:
                    try:
                        socket.send_multipart(frames, zmq.DONTWAIT)
                    except zmq.Again:
                        return
                    reply.is_sent = True
                    if _may_be_sent_again(reply.message):
                        reply.resend_at = time.monotonic() + reply.resend_after_s
            self._outbox.popleft()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: Sequence[bytes]) -> None:
        try:
            request_id = master_to_client.read_header(frames[0])
        except VersionMismatchError as error:
            self._fail_all(VersionMismatchError(f"the master at {self.address}: {error}"))
            return
        except ProtocolError as error:
            self._fail_all(self._not_a_master(error))
            return
        with self._lock:
            reply = self._waiting.pop(request_id, None)
        if reply is None:
            return
        try:
            reply.resolve(self._answers.decode(frames).message)
        except ProtocolError as error:
            reply.resolve(None, self._not_a_master(error))

    def _look_at_clock(self, now: float) -> None:
        with self._lock:
            late = [reply for reply in self._waiting.values() if reply.deadline <= now]
            for reply in late:
                del self._waiting[reply.request_id]
            silent = [reply for reply in self._waiting.values() if reply.resend_at <= now]
            for reply in silent:
                reply.resend_at = float("inf")
                self._outbox.append(reply)
        for reply in late:
            reply.resolve(None, self._unreachable(reply))

    def _fail_all(self, error: UnifiedError) -> None:
        with self._lock:
            replies = list(self._waiting.values())
            self._waiting.clear()
            self._outbox.clear()
        for reply in replies:
            reply.resolve(None, error)

    def _closed(self) -> MasterUnreachableError:
        return MasterUnreachableError(f"the connection to the master at {self.address} is closed.")

    def _unreachable(self, reply: PendingReply) -> MasterUnreachableError:
        if reply.is_sent and not _may_be_sent_again(reply.message):
            return MasterUnreachableError(
                f"the master at {self.address} got {type(reply.message).__name__} and did not answer within "
                f"{reply.timeout_s:g} s. It may have done it: look with `unified jobs` before you try again."
            )
        if self._num_broken:
            return MasterUnreachableError(
                f"what listens at {self.address} closed {self._num_broken} connections during the handshake: it is no "
                f"master, or its cluster has a key and {KEY_VARIABLE} must name a copy of the key here."
            )
        return MasterUnreachableError(
            f"no master answers at {self.address} after {reply.timeout_s:g} s: is `unified-master` running there? "
            "Another address is given with --master or UNIFIED_MASTER."
        )

    def _not_a_master(self, error: ProtocolError) -> ProtocolError:
        return ProtocolError(
            f"what answers at {self.address} is not a master of this release ({error}): check the address, "
            "and that unified-runtime is the same release on both sides."
        )


def connect_to(address: str) -> MasterConnection:
    """Connect to the master at this address, with the key and the time limit of this process's environment."""
    connection = MasterConnection(address, key=find_key(address), timeout_s=settings.intervals().connect_s)
    connection.owner = next((found.pid for found in living_clusters() if found.address == address), 0)
    return connection


def connect_master(master: str | None) -> MasterConnection:
    """Connect to the master that was named, else to that of ``UNIFIED_MASTER`` or of ``unified up``, else to that of
    this user's only driver with a cluster of its own on this host."""
    address = find_master(master)
    if address is None:
        own = [] if os.environ.get(MASTER_VARIABLE) == "" else living_clusters()
        drivers = [found for found in own if found.idle_s is None]
        if len(drivers) > 1:
            each = "".join(f"\n  --master {found.address}  (its driver has pid {found.pid})" for found in drivers)
            raise UsageError(f"which master? {len(drivers)} jobs run in clusters of their own here, so name one:{each}")
        if drivers:
            return connect_to(drivers[0].address)
        raise UsageError(
            f"which master? You run none on this host: `unified up` starts one. Elsewhere, give its address with "
            f"--master tcp://HOST:PORT (in Python: master=), or once with `export {MASTER_VARIABLE}=tcp://HOST:PORT`."
        )
    return connect_to(address)


def _may_be_sent_again(message: ClientRequest) -> bool:
    """Return True if the message has no further effect when the master gets it twice."""
    if isinstance(message, SubmitJob):
        return message.follows is not None
    return not isinstance(message, RestartWorkers)


def _too_large(message: ClientRequest, nbytes: int) -> UsageError:
    return UsageError(
        f"{type(message).__name__} has {nbytes / 2**20:.1f} MiB, and the master takes {MAX_MESSAGE >> 20} at most: put "
        "large values into a file and pass its path; register a dataset in parts, or with fewer, larger files."
    )
