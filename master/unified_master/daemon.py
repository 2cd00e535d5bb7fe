"""The master's shell: wait, step, record, perform. The only loop of the process; every decision is the core's."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from unified.config.addresses import HostPort, split_address
from unified.config.logging import LogOnce
from unified.config.ports import bind_address
from unified.config.settings import Intervals
from unified.coordinator.core.workers import HEARTBEAT_TIMES, HeartbeatTimes
from unified.core.timers import earliest
from unified.errors import ClusterError, CoordinatorError, ProtocolError, UnifiedError, UsageError, VersionMismatchError
from unified.probes import Probes
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentPulse,
    AgentToMaster,
    LogRead,
    OutputTails,
    StacksRead,
)
from unified.protocol.client_master import (
    Changes,
    ClientRequest,
    ClientToCodeStore,
    ClientToMaster,
    CodeRequest,
    Explain,
    GetDirectory,
    GetJob,
    GetStacks,
    ListJobs,
    ListNodes,
    PutCode,
    ReadLog,
    Refused,
    SignalWorkers,
    StopJob,
    SuspendJob,
    WatchCluster,
)
from unified.protocol.coordinator import CoordinatorRequest, WorkerToCoordinator
from unified.protocol.framing import UNREADABLE, Codec
from unified.protocol.records import EventRecord, Stage
from unified.sd_notify import ServiceNotifier
from unified.security.curve import Gatekeeper
from unified.security.frames import Buffer, cut
from unified.security.keys import ClusterKey, KeyWatch, current
from unified_master.code_store import CodeReceived, CodeStore
from unified_master.coordinator_service import CoordinatorReceived, CoordinatorService
from unified_master.core import messages
from unified_master.core.master import MasterCore
from unified_master.core.restore import RestoreError, newest_time
from unified_master.core.state import Cluster
from unified_master.gateway_process import GatewayAddress, GatewayProcess
from unified_master.relay import BusRelay
from unified_master.store import OtherStoreError, Store, UnwritableStoreError

_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send
_COPIED_BYTES = 65_536
"""Size below which a copy is cheaper than keeping the memory until ZeroMQ has sent it."""
MAX_BATCH = 512
"""Most messages of a batch; the results of a batch are committed and sent together."""
MAX_DEFECTS = 5
DEFECT_WINDOW_S = 60.0
FAREWELL_S = 1.0
"""Time to wait for an answer of each agent to `MasterStopping`. Agents that miss it would end their workers."""
FULL_POLL_S = 0.5
"""Time between two attempts to write to a disk that is full."""
MAX_DEFERRED = 10_000
_HARMLESS = (
    *(AgentHeartbeat, AgentPulse, LogRead, OutputTails, StacksRead),
    *(GetJob, ListJobs, ListNodes, Explain, ReadLog, GetStacks, GetDirectory, WatchCluster, SignalWorkers),
)
"""Messages that need no record."""
_log = logging.getLogger("unified.master")
_codec: Codec[AgentToMaster | ClientToMaster | ClientToCodeStore | WorkerToCoordinator] = Codec(
    AgentToMaster | ClientToMaster | ClientToCodeStore | WorkerToCoordinator
)
DaemonEvent = messages.MasterEvent | CoordinatorReceived | CodeReceived
_loose_header = msgspec.msgpack.Decoder(tuple[int, int])


class MasterOptions(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    """``tcp://HOST:PORT``; port 0 takes any free one."""
    state_dir: Path
    intervals: Intervals = Intervals()
    worker_heartbeats: HeartbeatTimes = HEARTBEAT_TIMES
    """Heartbeats of workers to their coordinator."""
    relay_bind: str | None = None
    """Address of the relay. Default: the host of `bind`, any free port."""
    address_file: Path | None = None
    key: ClusterKey | None = None
    """The cluster's key; None: anyone who reaches the ports is let in."""
    find_key: Callable[[], ClusterKey | None] | None = None
    """Reads the file of `key` anew."""
    http: GatewayAddress | None = None
    """Address of the training API; None: this master starts none."""
    advertise: str | None = None
    """Host by which others reach this master and its relay. Default: that of `bind`."""
    health_bind: HostPort | None = None
    """Address of the probes; None: none are answered."""


class MasterDaemon:
    """One master: its socket, its store, its core."""

    def __init__(self, options: MasterOptions, notifier: ServiceNotifier | None = None) -> None:
        self.options = options
        self._clock_offset = time.time() - time.monotonic()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, options.key, name="control")
        self._keys = KeyWatch(options.key, options.find_key)
        self._defects: list[float] = []
        self._refusals = LogOnce()
        self._code = CodeStore(options.state_dir / "code")
        self._probes = Probes(options.health_bind, "the master does not take requests yet")
        self._is_stopping = False
        self._deferred: list[DaemonEvent] = []
        """Events that came while nothing could be recorded."""
        self._notifier = notifier or ServiceNotifier({})

    def _now(self) -> float:
        """Return seconds since 1970 that never go back, also across terms: the wall clock at the daemon's start, or the
        newest record's time if that is later, plus monotonic time."""
        return time.monotonic() + self._clock_offset

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code. UnifiedError: the store or a port cannot be used."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._probes.close)
            self._probes.start()
            store = Store(self.options.state_dir)
            stack.callback(store.close)
            stack.callback(self._context.destroy, linger=200)
            router = self._bind()
            stack.callback(router.close, linger=200)
            stack.callback(self._gatekeeper.close)
            address = self._advertised(router.get_string(zmq.LAST_ENDPOINT))
            relay, relay_address = self._start_relay(address, store)
            stack.callback(relay.close)
            if self.options.http is not None:
                stack.callback(GatewayProcess(address, self.options.http).close)
            self._serve(router, store, address, relay_address)
        return 0

    def _bind(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.set(zmq.SNDHWM, 10_000)
        router.set(zmq.RCVHWM, 10_000)
        router.set(zmq.TCP_KEEPALIVE, 1)
        router.set(zmq.TCP_KEEPALIVE_IDLE, 30)
        router.set(zmq.IPV6, 1 if "[" in self.options.bind else 0)
        self._gatekeeper.guard(router)
        try:
            bind_address(router.bind, self.options.bind)
        except (zmq.ZMQError, UsageError) as error:
            self._gatekeeper.close()
            router.close(linger=0)
            if isinstance(error, UsageError):
                raise
            raise ClusterError(_why_not_bound(self.options.bind, error)) from None
        return router

    def _start_relay(self, address: str, store: Store) -> tuple[BusRelay, str]:
        """Start the relay, on the port of the last term if it is free: workers that still run know no other port."""
        shown = split_address(address).host
        where = self.options.relay_bind or split_address(self.options.bind)._replace(port=0).url
        last_port = store.note("relay-port")
        if where.endswith(":0") and last_port:
            relay = BusRelay(where.removesuffix("0") + last_port, host=shown, key=self.options.key)
            try:
                return relay, relay.start()
            except UnifiedError as error:
                _log.warning("event=relay-moved reason=%r", str(error))
        relay = BusRelay(where, host=shown, key=self.options.key)
        relay_address = relay.start()
        store.write_note("relay-port", str(split_address(relay_address).port))
        return relay, relay_address

    def _advertised(self, endpoint: str) -> str:
        """Return the address for others: a wildcard becomes an address of this host."""
        found = split_address(endpoint)
        if self.options.advertise is not None:
            return found._replace(host=self.options.advertise).url
        is_wildcard = found.host in ("0.0.0.0", "[::]", "*")
        return found._replace(host=first_address()).url if is_wildcard else endpoint

    def _serve(self, router: zmq.Socket[bytes], store: Store, address: str, relay: str) -> None:
        core = self._begin_term(store, relay)
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        previous = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._announce(address, relay)
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(wake, zmq.POLLIN)
            while not self._is_stopping:
                if (look_at := self._keys.next_deadline) is not None and time.monotonic() >= look_at:
                    self._keys.look()
                due = earliest(core.next_deadline, self._coordinator.next_deadline)
                self._notifier.beat(True, functools.partial(_status, core.cluster))
                longest_s = self._probes.longest_wait_s
                wait_s = longest_s if due is None else min(longest_s, max(0.0, due - self._now()))
                if (wakes_at := earliest(self._notifier.next_deadline, self._keys.next_deadline)) is not None:
                    wait_s = min(wait_s, max(0.0, wakes_at - time.monotonic()))
                poller.poll(math.ceil(wait_s * 1000))
                self._probes.turned()
                events = [*self._deferred, *self._take_in(router)]
                self._deferred.clear()
                if due is not None and self._now() >= due:
                    events.append(messages.MasterTick(is_behind=len(events) >= MAX_BATCH))
                core = self._handle(core, events, router, store)
            self._notifier.stopping()
            actions = core.stop(self._now())
            self._record(actions, store)
            self._perform(actions, router)
            _hear_all(router, {action.peer for action in actions if isinstance(action, messages.Send)})
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            wake.close()
            waker.close()
        _log.info("event=master-stopped reason=%r", "asked to stop; workers run on under their agents")

    def _begin_term(self, store: Store, relay: str) -> MasterCore:
        core = MasterCore(self.options.intervals, relay, secrets.token_hex(5))
        records, events = store.records(), store.events()
        if (behind_s := newest_time(records, events) - self._now()) > 0:
            self._clock_offset += behind_s
            text = f"this host's clock is {behind_s:.3f} s behind the newest record, from which times go on"
            _log.warning("event=clock-behind reason=%r", text)
        now = self._now()
        try:
            actions = core.restore(now, records, events)
            self._coordinator = CoordinatorService(core, self.options.worker_heartbeats)
            self._coordinator.restore(now, records)
        except (RestoreError, CoordinatorError) as error:
            raise OtherStoreError(f"{store.path}: {error}") from error
        self._record(actions, store)
        return core

    def _announce(self, address: str, relay: str) -> None:
        key = current(self.options.key).fingerprint if self.options.key is not None else "none"
        _log.info("event=master-ready address=%s relay=%s key=%s state=%s", address, relay, key, self.options.state_dir)
        if self.options.address_file is not None:
            write_atomically(self.options.address_file, f"{address}\n")
        self._probes.unready = ""

    def _take_in(self, router: zmq.Socket[bytes]) -> list[DaemonEvent]:
        """Receive all messages that are there, up to a limit, and validate them."""
        events: list[DaemonEvent] = []
        for _ in range(MAX_BATCH):
            received = _receive(router)
            if received is None:
                break
            peer, frames = received
            try:
                request_id, message = _codec.decode(frames)
            except ProtocolError as error:
                self._refuse(router, peer, frames, error)
                continue
            if isinstance(message, CoordinatorRequest):
                events.append(CoordinatorReceived(peer=peer, request_id=request_id, request=message))
            elif isinstance(message, CodeRequest):
                events.append(CodeReceived(peer=peer, request_id=request_id, request=message))
            else:
                events.append(messages.Received(peer=peer, request_id=request_id, message=message))
        return events

    def _refuse(self, router: zmq.Socket[bytes], peer: bytes, frames: Sequence[bytes], error: ProtocolError) -> None:
        """Tell the sender what is wrong, in the sender's protocol version if that can be read."""
        code = "version" if isinstance(error, VersionMismatchError) else "bad-request"
        try:
            version, request_id = _loose_header.decode(frames[0] if frames else b"")
        except UNREADABLE:
            version, request_id = 1, 0
        _send(router, peer, *_codec.encode(Refused(code=code, reason=str(error)), request_id, version=version))
        text = str(error)[:300]
        if self._refusals.is_new(time.monotonic(), text):
            _log.warning("event=message-refused reason=%r refused_so_far=%d", text, self._refusals.total)

    def _handle(
        self,
        core: MasterCore,
        events: Sequence[DaemonEvent],
        router: zmq.Socket[bytes],
        store: Store,
    ) -> MasterCore:
        """Step through a batch of events; commit everything, then send. Return the core to go on with."""
        actions: list[messages.MasterAction] = []
        meanwhile = functools.partial(self._wait_for_disk, core, router)
        for event in events:
            if _begins_something(event) and not _ends_something(event) and (reason := store.shortage()):
                self._refuse_for_now(router, event, reason)
                continue
            try:
                self._step(core, event, actions)
            except Exception:  # any defect of ours: the core may be half changed, and is replaced
                self._record(actions, store, meanwhile)
                self._perform(actions, router)
                actions = []
                core = self._after_defect(core, event, router, store)
                meanwhile = functools.partial(self._wait_for_disk, core, router)
        self._record(actions, store, meanwhile)
        self._perform(actions, router)
        return core

    def _step(self, core: MasterCore, event: DaemonEvent, actions: list[messages.MasterAction]) -> None:
        """Handle one event. Add each action to `actions` at once, so that a defect later on does not lose it."""
        now = self._now()
        if isinstance(event, CoordinatorReceived):
            actions += self._coordinator.answer(now, event)
            return
        if isinstance(event, CodeReceived):
            found = self._code.answer(event.request, core)
            actions.append(messages.Send(peer=event.peer, request_id=event.request_id, message=found))
            return
        decided = core.step(now, event)
        actions += decided
        actions += self._coordinator.hear(now, decided)
        if isinstance(event, messages.MasterTick):
            actions += self._coordinator.time_passed(now)

    def _after_defect(
        self, core: MasterCore, event: DaemonEvent, router: zmq.Socket[bytes], store: Store
    ) -> MasterCore:
        """Go on from the saved state, as after a restart. Too many defects in a short time end the process."""
        _log.exception("event=defect reason=%r", f"while handling {str(event)[:500]}")
        now = time.monotonic()
        self._defects = [at for at in self._defects if now - at < DEFECT_WINDOW_S] + [now]
        if len(self._defects) > MAX_DEFECTS:
            raise UnifiedError(
                f"{len(self._defects)} defects within {DEFECT_WINDOW_S:g} s (see the log): the master gives up. "
                "Workers run on; start it again with the same --state-dir, and please report the traceback."
            )
        if isinstance(event, messages.Received | CoordinatorReceived | CodeReceived):
            reason = "the master met a defect of its own while handling this; its log has the traceback."
            _send(router, event.peer, *_codec.encode(Refused(code="defect", reason=reason), event.request_id))
        return self._begin_term(store, core.cluster.relay)

    def _record(
        self,
        actions: list[messages.MasterAction],
        store: Store,
        meanwhile: Callable[[list[messages.MasterAction], str], None] | None = None,
    ) -> None:
        """Commit the records of the actions. While the disk is full, call `meanwhile`, which may add actions."""
        is_full = False
        while True:
            saves = [action for action in actions if isinstance(action, messages.SaveRecord)]
            reports = [action for action in actions if isinstance(action, messages.ReportEvent)]
            try:
                if saves or reports:
                    store.commit(saves, reports)
                break
            except UnwritableStoreError as error:
                if meanwhile is None or self._is_stopping:
                    raise
                if not is_full:
                    _log.error("event=state-not-written reason=%r", str(error))
                is_full = True
                meanwhile(actions, str(error))
        if is_full:
            _log.info("event=state-written reason=%r", "there is room again")
        for report in reports:
            _log.info("%s", describe(report.record))

    def _wait_for_disk(
        self, core: MasterCore, router: zmq.Socket[bytes], actions: list[messages.MasterAction], reason: str
    ) -> None:
        """Serve for a moment while nothing can be recorded: nodes stay alive, and clients may read.

        Nothing is decided. Watches are answered with the reason, without what is not recorded. Other requests of
        clients are refused, and all other events are deferred.
        """
        until = time.monotonic() + FULL_POLL_S
        parked = [each for watches in core.cluster.watches.values() for each in watches.values()]
        watches = {(each.peer, each.request_id) for each in parked}
        for each in actions:  # answers that wait for their records
            if isinstance(each, messages.Send) and isinstance(each.message, Changes) and not each.message.is_whole:
                watches.add((each.peer, each.request_id))
        while not self._is_stopping and (left_s := until - time.monotonic()) > 0:
            router.poll(math.ceil(left_s * 1000))
            self._notifier.beat(True, lambda: f"its state cannot be written: {reason}")
            self._probes.turned()
            for event in self._take_in(router):
                match event:
                    case messages.Received(message=WatchCluster(after_version=after)) if after >= 0:
                        watches.add((event.peer, event.request_id))
                    case messages.Received() if isinstance(event.message, _HARMLESS):
                        decided = core.step(self._now(), event)
                        if any(isinstance(each, messages.SaveRecord | messages.ReportEvent) for each in decided):
                            actions += decided
                        else:
                            self._perform(decided, router)
                    case _ if _begins_something(event):
                        self._refuse_for_now(router, event, reason)
                    case _ if len(self._deferred) < MAX_DEFERRED:
                        self._deferred.append(event)
        for peer, request_id in watches:
            _send(router, peer, *_codec.encode(Changes(version=-1, at=self._now(), problem=reason), request_id))

    def _refuse_for_now(self, router: zmq.Socket[bytes], event: DaemonEvent, reason: str) -> None:
        if isinstance(event, messages.Received | CodeReceived):
            refusal = Refused(code="unavailable", reason=f"the master can record nothing: {reason}")
            _send(router, event.peer, *_codec.encode(refusal, event.request_id))

    def _perform(self, actions: Sequence[messages.MasterAction], router: zmq.Socket[bytes]) -> None:
        message: object = None
        body = b""
        for action in actions:
            if isinstance(action, messages.Send):
                if action.message is not message:  # all peers that a barrier releases get one message
                    message = action.message
                    body = _codec.encode_body(message)
                _send(router, action.peer, _codec.encode_header(action.request_id), *cut(body))

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stopping = True


def _begins_something(event: DaemonEvent) -> bool:
    """Return True if a client asks for something that has to be recorded."""
    if isinstance(event, CodeReceived):
        return isinstance(event.request, PutCode)
    if not isinstance(event, messages.Received):
        return False
    return isinstance(event.message, ClientRequest) and not isinstance(event.message, _HARMLESS)


def _ends_something(event: DaemonEvent) -> bool:
    return isinstance(event, messages.Received) and isinstance(event.message, StopJob | SuspendJob)


def _status(cluster: Cluster) -> str:
    """Return a line for `systemctl status`."""
    jobs = [job for job in cluster.jobs.values() if job.stage is not Stage.STOPPED]
    nodes, workers = len(cluster.alive_nodes()), sum(len(job.workers) for job in jobs)
    return f"{len(jobs)} jobs of {workers} workers; {nodes} of {len(cluster.nodes)} nodes alive"


def _hear_all(router: zmq.Socket[bytes], peers: set[bytes]) -> None:
    """Wait a moment for a message of each peer: closing a connection too soon may lose what was sent on it."""
    deadline = time.monotonic() + FAREWELL_S
    while peers and (left_s := deadline - time.monotonic()) > 0:
        router.poll(math.ceil(left_s * 1000))
        while (received := _receive(router)) is not None:
            peers.discard(received[0])


def describe(record: EventRecord) -> str:
    """Return one line of the log: ``event=… job=… reason=…``."""
    known = [(name, getattr(record, name)) for name in ("event", "job", "role", "worker", "node")]
    fields = [f"{name}={value}" for name, value in known if value]
    return " ".join([*fields, f"reason={record.reason!r}"])


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def first_address() -> str:
    """Return an address of this host that others can reach; the loopback one if there is no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only asks the routing table.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _why_not_bound(bind: str, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        port = split_address(bind).port
        return (
            f"port {port} is taken: another process listens on {bind}. "
            f"Stop it (`ss -ltnp 'sport = :{port}'` shows it), or choose another port with --bind."
        )
    if error.errno == errno.ENODEV:
        host = split_address(bind).host
        return f"cannot listen on {bind}: {host} is no address, name or network interface of this host."
    return f"cannot listen on {bind}: {error.strerror}. Write --bind tcp://HOST:PORT with an address of this host."


def _receive(router: zmq.Socket[bytes]) -> tuple[bytes, list[bytes]] | None:
    """Return the next message: the connection that it came on, and its frames. None if none is there.

    The master receives thousands of messages a second, so each call of ZeroMQ counts.
    """
    try:
        peer = router.recv(_NOBLOCK)
    except zmq.Again:
        return None
    frames: list[bytes] = []
    has_more = True
    while has_more:
        frame = router.recv(_NOBLOCK, copy=False)  # has `more`; asking the socket costs as much as a receive
        frames.append(frame.bytes)
        has_more = frame.more
    return peer, frames


def _send(router: zmq.Socket[bytes], peer: bytes, *frames: Buffer) -> None:
    """Queue a message to a connection. If its peer is gone or does not read, the message is dropped."""
    try:
        router.send(peer, _MORE)
        for frame in frames[:-1]:
            router.send(frame, _MORE, copy=len(frame) < _COPIED_BYTES)
        router.send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _COPIED_BYTES)
    except zmq.ZMQError as error:  # agents and clients ask again
        _log.debug("event=not-sent reason=%r", str(error))
