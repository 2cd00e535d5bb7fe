"""Transfers of snapshots between the servers of two nodes: one offers, the other reads piece by piece.

So neither server holds more than a few pieces besides the snapshot itself. A partner's copy and the state of a rank
that moved come in the same way. Under a cluster key all traffic is encrypted, and peers without the key are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from unified.protocol import snapshots
from unified.protocol.framing import UNREADABLE
from unified.security.curve import Gatekeeper, read_event
from unified.security.keys import ClusterKey
from unified.snapshot.core.inventory import SnapshotBuffer
from unified.snapshot.server.state import WorkerConnection

PIECES_UNDER_WAY = 4
STALLED_S = 30.0
"""Time after which a transfer that makes no progress is given up."""
ANSWER_S = 5.0
"""Time for another server to say what it holds."""
AVOID_S = 30.0
"""Time for which a failed server gets no request, so that no snapshot waits for it again."""
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
Socket = zmq.Socket[bytes]


@dataclass(eq=False)
class _Peer:
    """Connection to another server."""

    url: str
    socket: Socket
    monitor: Socket


@dataclass(eq=False)
class SnapshotPull:
    """A snapshot on its way here: a copy that another server has offered, or one for workers that asked to open it."""

    wanted: snapshots.OfferSnapshot | snapshots.OpenSnapshot
    source: snapshots.ServerAddress
    buffer: SnapshotBuffer
    descriptor: int
    asker: bytes = b""
    """Address of the server that has offered it."""
    peer: _Peer = field(init=False)
    deadline: float = 0.0
    num_asked: int = 0
    num_received: int = 0


@dataclass(eq=False)
class HeldQuestion:
    """A worker's request for the list of snapshots that another server holds."""

    target: snapshots.ServerAddress
    connection: WorkerConnection
    round: int
    """Last round of the role's workers there, or -1 for a copy node."""
    held: list[snapshots.HeldSnapshot] = field(default_factory=list)
    peer: _Peer = field(init=False)
    deadline: float = 0.0


@dataclass(eq=False)
class SentCopy:
    """A snapshot on its way from here, the source, to another node."""

    target: snapshots.ServerAddress
    source: snapshots.ServerAddress
    buffer: SnapshotBuffer
    needed: snapshots.NeededSnapshots
    peer: _Peer = field(init=False)
    deadline: float = 0.0


class SnapshotTransfers:
    """The network side of a snapshot server; everything runs in its one thread.

    Args:
        listener: where other nodes' servers connect; None: they cannot.
        pair: key of the listener; None: the cluster's key.
        on_read: returns the bytes of a piece; LookupError: there are none for that token.
        on_offer: takes a snapshot that another server offers; `answer_offer` is for the answer.
        on_ask: returns what is held of a role; LookupError: the token is wrong.
        on_end: gets a transfer or a question that has ended, and the error, or "".
    """

    def __init__(
        self,
        listener: socket.socket | None,
        key: ClusterKey | None,
        pair: ClusterKey | None,
        on_read: Callable[[snapshots.ReadPiece], bytes],
        on_offer: Callable[[bytes, snapshots.OfferSnapshot], None],
        on_ask: Callable[[snapshots.AskHeld], list[snapshots.HeldSnapshot]],
        on_end: Callable[[SnapshotPull | HeldQuestion | SentCopy, str], None],
    ) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._gatekeeper = Gatekeeper(self._context, key, name="snapshots")
        self._on_read = on_read
        self._on_offer = on_offer
        self._on_ask = on_ask
        self._on_end = on_end
        self._numbers = itertools.count(1)
        self._peers: dict[str, _Peer] = {}
        self._avoided: dict[str, float] = {}
        self._pulls: dict[int, tuple[SnapshotPull, int, int]] = {}
        """Requested pieces: number of the request → transfer, offset and size."""
        self._offers: dict[int, SentCopy] = {}
        self._questions: dict[int, HeldQuestion] = {}
        self._server = self._context.socket(zmq.ROUTER)
        self._gatekeeper.guard(self._server, pair)
        _prepare(self._server)
        if listener is not None:
            self._server.set(zmq.USE_FD, listener.detach())
            self._server.bind("tcp://0.0.0.0:0")  # libzmq uses the given socket, and ignores this address

    def sockets(self) -> Iterator[Socket]:
        """Yield the sockets to poll for reading."""
        yield self._server
        for peer in self._peers.values():
            yield peer.socket
            yield peer.monitor

    @property
    def next_deadline(self) -> float | None:
        """Time of the monotonic clock at which `tick` is due."""
        pulls = [pull.deadline for pull, _, _ in self._pulls.values()]
        offers = [offer.deadline for offer in self._offers.values()]
        return min([*pulls, *offers, *(question.deadline for question in self._questions.values())], default=None)

    def ready(self, socket: Socket) -> None:
        """Read the messages that have come to one of the sockets."""
        if socket is self._server:
            self._serve()
            return
        for peer in list(self._peers.values()):
            if socket is peer.socket:
                self._hear(peer)
            elif socket is peer.monitor:
                self._look(peer)

    def tick(self) -> None:
        """Give up stalled transfers and questions."""
        now = time.monotonic()
        stalled = [each.peer for each, _, _ in self._pulls.values() if each.deadline <= now]
        stalled += [each.peer for each in self._offers.values() if each.deadline <= now]
        for peer in dict.fromkeys(stalled):
            self._fail(peer, f"the snapshot server at {peer.url} has not answered for {STALLED_S:g} s")
        for number, question in list(self._questions.items()):
            if question.deadline <= now:
                del self._questions[number]
                self._on_end(
                    question, f"the snapshot server at {question.peer.url} has not answered for {ANSWER_S:g} s"
                )

    def offer(self, copy: SentCopy) -> None:
        """Have another server read a snapshot of ours."""
        peer = self._peer(copy.target)
        if peer is None:
            self._on_end(copy, f"the snapshot server at {copy.target.url} cannot be reached, or failed a moment ago")
            return
        number = next(self._numbers)
        copy.peer, copy.deadline = peer, time.monotonic() + STALLED_S
        self._offers[number] = copy
        message = snapshots.OfferSnapshot(
            number=number,
            token=copy.target.token,
            series=copy.buffer.series,
            stamp=copy.buffer.stamp,
            length=copy.buffer.length,
            source=copy.source,
            needed=copy.needed,
        )
        self._send(peer.socket, [snapshots.encode_snapshot_message(message)])

    def answer_offer(self, asker: bytes, number: int, error: str) -> None:
        """Answer another server's offer once its snapshot has been read, or with the error."""
        answer = snapshots.OfferTaken(number=number, error=error)
        self._send(self._server, [asker, snapshots.encode_snapshot_message(answer)])

    def ask_held(self, question: HeldQuestion) -> None:
        """Ask another server what it holds of a role."""
        peer = self._peer(question.target)
        if peer is None:
            self._on_end(question, f"the snapshot server at {question.target.url} has failed before")
            return
        number = next(self._numbers)
        question.peer, question.deadline = peer, time.monotonic() + ANSWER_S
        self._questions[number] = question
        asked = snapshots.AskHeld(number=number, token=question.target.token, series=question.connection.series)
        self._send(peer.socket, [snapshots.encode_snapshot_message(asked)])

    def pull(self, pull: SnapshotPull) -> None:
        """Read a snapshot of another server into a buffer."""
        peer = self._peer(pull.source)
        if peer is None:
            self._on_end(pull, f"the snapshot server at {pull.source.url} cannot be reached, or failed a moment ago")
            return
        pull.peer, pull.deadline = peer, time.monotonic() + STALLED_S
        for _ in range(PIECES_UNDER_WAY):
            self._ask(pull)
        if not pull.wanted.length:
            self._on_end(pull, "")

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._hang_up(peer)
        self._server.close(0)
        self._gatekeeper.close()
        self._context.destroy(0)

    # The side that has snapshots

    def _serve(self) -> None:
        while (frames := self._receive(self._server)) is not None:
            if len(frames) < 2:
                continue
            try:
                message = snapshots.peer_message.decode(frames[1])
            except UNREADABLE:
                continue
            if isinstance(message, snapshots.ReadPiece):
                self._answer_read(frames[0], message)
            elif isinstance(message, snapshots.OfferSnapshot):
                self._on_offer(frames[0], message)
            elif isinstance(message, snapshots.AskHeld):
                with contextlib.suppress(LookupError):  # a wrong token gets no answer
                    answer = snapshots.HeldThere(number=message.number, held=self._on_ask(message))
                    self._send(self._server, [frames[0], snapshots.encode_snapshot_message(answer)])

    def _answer_read(self, asker: bytes, asked: snapshots.ReadPiece) -> None:
        for offer in self._offers.values():
            if (offer.buffer.series, offer.buffer.stamp) == (asked.series, asked.stamp):
                offer.deadline = time.monotonic() + STALLED_S
        try:
            data, error = self._on_read(asked), ""
        except LookupError as reason:
            data, error = b"", str(reason.args[0])
        self._send(
            self._server,
            [asker, snapshots.encode_snapshot_message(snapshots.Piece(number=asked.number, error=error)), data],
        )

    # The side that reads

    def _hear(self, peer: _Peer) -> None:
        while (frames := self._receive(peer.socket)) is not None:
            try:
                message = snapshots.peer_message.decode(frames[0])
            except UNREADABLE:
                self._fail(peer, f"the snapshot server at {peer.url} sent a message that cannot be read")
                return
            if isinstance(message, snapshots.OfferTaken):
                offer = self._offers.pop(message.number, None)
                if offer is not None:
                    self._on_end(offer, message.error)
            elif isinstance(message, snapshots.HeldThere):
                question = self._questions.pop(message.number, None)
                if question is not None:
                    question.held = message.held
                    self._on_end(question, "")
            elif isinstance(message, snapshots.Piece) and message.number in self._pulls:
                pull, offset, nbytes = self._pulls.pop(message.number)
                self._take(pull, offset, nbytes, message, frames[1] if len(frames) > 1 else b"")
            if self._peers.get(peer.url) is not peer:
                return

    def _ask(self, pull: SnapshotPull) -> None:
        offset = pull.num_asked
        nbytes = min(snapshots.PIECE_BYTES, pull.wanted.length - offset)
        if nbytes <= 0:
            return
        number = next(self._numbers)
        pull.num_asked += nbytes
        self._pulls[number] = (pull, offset, nbytes)
        asked = snapshots.ReadPiece(
            number=number,
            token=pull.source.token,
            series=pull.wanted.series,
            stamp=pull.wanted.stamp,
            offset=offset,
            nbytes=nbytes,
        )
        self._send(pull.peer.socket, [snapshots.encode_snapshot_message(asked)])

    def _take(self, pull: SnapshotPull, offset: int, nbytes: int, answer: snapshots.Piece, data: bytes) -> None:
        error = answer.error
        if not error and len(data) != nbytes:
            error = f"the snapshot server at {pull.peer.url} sent {len(data)} bytes instead of {nbytes}"
        if not error:
            try:
                os.pwrite(pull.descriptor, data, offset)
            except OSError as reason:
                error = f"a snapshot cannot be written into memory: {reason.strerror}"
        if error:
            self._drop(pull)
            self._on_end(pull, error)
            return
        pull.num_received += nbytes
        pull.deadline = time.monotonic() + STALLED_S
        if pull.num_received == pull.wanted.length:
            self._on_end(pull, "")
        else:
            self._ask(pull)

    def _drop(self, pull: SnapshotPull) -> None:
        self._pulls = {number: each for number, each in self._pulls.items() if each[0] is not pull}

    # Connections

    def _peer(self, server: snapshots.ServerAddress) -> _Peer | None:
        url = server.url
        known = self._peers.get(url)
        if known is not None:
            return known
        if self._avoided.get(url, 0.0) > time.monotonic():
            return None
        socket = self._gatekeeper.socket(zmq.DEALER, server.listener_key)
        _prepare(socket)
        socket.set(zmq.IPV6, 1 if "[" in url else 0)
        monitor = socket.get_monitor_socket(_BROKEN)
        peer = _Peer(url, socket, monitor)
        try:
            socket.connect(url)
        except zmq.ZMQError:  # `url` is no address
            self._hang_up(peer)
            return None
        self._peers[url] = peer
        return peer

    def _look(self, peer: _Peer) -> None:
        try:
            read_event(peer.monitor)
        except zmq.Again:
            return
        self._fail(peer, f"the snapshot server at {peer.url} is gone, or refuses the connection")

    def _fail(self, peer: _Peer, error: str) -> None:
        """Give up a connection, and all that waits for it."""
        self._avoided[peer.url] = time.monotonic() + AVOID_S
        self._hang_up(peer)
        pulls = dict.fromkeys(pull for pull, _, _ in self._pulls.values() if pull.peer is peer)
        offers = [number for number, offer in self._offers.items() if offer.peer is peer]
        for pull in pulls:
            self._drop(pull)
            self._on_end(pull, error)
        questions = [number for number, question in self._questions.items() if question.peer is peer]
        for number in offers:
            self._on_end(self._offers.pop(number), error)
        for number in questions:
            self._on_end(self._questions.pop(number), error)

    def _hang_up(self, peer: _Peer) -> None:
        self._peers.pop(peer.url, None)
        peer.socket.disable_monitor()
        peer.monitor.close(0)
        peer.socket.close(0)

    def _receive(self, socket: Socket) -> list[bytes] | None:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _send(self, socket: Socket, frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames[-1]) < snapshots.PIECE_BYTES)
        except zmq.Again:  # a peer that reads nothing; the transfer stalls, and is given up
            return


def _prepare(socket: Socket) -> None:
    socket.linger = 0
    socket.set(zmq.MAXMSGSIZE, snapshots.PIECE_BYTES + (64 << 10))
