"""The snapshot server of a node: a process of its own that keeps workers' snapshots, and decodes none of them.

The agent starts it when the first worker connects. Its memory has no name in any file system, so the kernel frees it
after any crash. The process ends with its agent.
"""

from __future__ import annotations

import hmac
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from typing import assert_never

import zmq

from unified.core.timers import earliest
from unified.protocol import snapshots as protocol
from unified.protocol.framing import UNREADABLE
from unified.snapshot.core.inventory import OverQuotaError, SnapshotBuffer, SnapshotInventory
from unified.snapshot.memory import make_buffer
from unified.snapshot.server.state import JobState, SentState, WorkerConnection
from unified.snapshot.server.transfers import HeldQuestion, SentCopy, SnapshotPull, SnapshotTransfers
from unified.snapshot.server.writers import StorageWriter, StorageWriters, WriteOrder
from unified.snapshot.storage import name_of

log = logging.getLogger("unified.snapshot")


class SnapshotServer:
    """Serves the workers of one node, and the servers of others, in one thread."""

    def __init__(
        self,
        order: protocol.ServeSnapshots,
        listener: socket.socket,
        peers: socket.socket | None,
        on_kept: Callable[[protocol.SnapshotsKept], None],
    ) -> None:
        """Make the server; it serves nothing before `step`.

        Args:
            listener: where workers connect.
            peers: where the servers of other nodes connect; None: they cannot.
            on_kept: tells the agent whether there is something to be persisted when it stops.
        """
        self._order = order
        self._on_kept = on_kept
        self._writers = StorageWriters(self._on_end)
        self._num_written = 0
        self._is_persisting = False
        self._listener = listener
        self._inventory = SnapshotInventory(order.quota_bytes)
        self._memory: dict[int, int] = {}
        """Descriptors of buffers, by number."""
        self._connections: dict[int, WorkerConnection] = {}
        self._jobs: dict[str, JobState] = {}
        self._copy_nodes: dict[str, protocol.ServerAddress] = {}
        self._earlier_nodes: dict[str, list[protocol.EarlierNode]] = {}
        self._transfers = SnapshotTransfers(
            peers, order.key, order.pair, self._read_piece, self._take_offer, self._held, self._on_end
        )

    def step(self, agent: int) -> bool:
        """Wait for events, and handle them; return True if the agent's descriptor can be read."""
        poller = zmq.Poller()
        sources: dict[object, object] = {agent: agent, self._listener.fileno(): self._listener}
        sources.update((*self._writers.watched().items(), *self._connections.items()))
        sources.update((each, each) for each in self._transfers.sockets())
        for source in sources:
            poller.register(source, zmq.POLLIN)
        drops = (job.drop_at for job in self._jobs.values())
        due = earliest(self._transfers.next_deadline, self._writers.next_deadline, *drops)
        timeout_ms = None if due is None else max(0, math.ceil((due - time.monotonic()) * 1000))
        readable = [sources[source] for source, _ in poller.poll(timeout_ms)]
        for each in readable:
            match each:
                case socket.socket():
                    self._accept()
                case WorkerConnection():
                    self._hear(each)
                case StorageWriter():
                    self._writers.end(each)
                case zmq.Socket(closed=False):  # else an earlier event of this step has closed it
                    self._transfers.ready(each)
        self._transfers.tick()
        self._writers.tick()
        self._drop_idle_jobs()
        self._close_dropped()
        return agent in readable

    def persist(self) -> None:
        """Write missing snapshots to storage, the newest of every rank first; tell the agent when that is done."""
        self._is_persisting = True
        for buffer in self._inventory.to_persist():
            self._store(buffer)
        self._tell_when_persisted()

    def name_copy_nodes(self, order: protocol.NameCopyNodes) -> None:
        """Send copies to these nodes from now on, for jobs that run only on this node."""
        self._copy_nodes, self._earlier_nodes = order.copy_nodes, order.earlier_nodes

    def close(self) -> None:
        self._writers.close()
        self._transfers.close()
        self._listener.close()

    # Workers

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        accepted.setblocking(False)
        self._connections[accepted.fileno()] = WorkerConnection(accepted)

    def _hear(self, connection: WorkerConnection) -> None:
        if connection.socket.fileno() < 0:
            return
        try:
            data = connection.socket.recv(protocol.PACKET_BYTES)
            request = protocol.snapshot_request.decode(data) if data else None
        except BlockingIOError:
            return
        except (OSError, *UNREADABLE):
            request = None
        if request is None:
            self._part(connection)
        elif connection.attached is None and not isinstance(request, protocol.AttachSeries):
            self._answer(connection, protocol.SnapshotRefused(reason="the first request is to attach"))
        else:
            self._perform(connection, request)

    def _perform(self, connection: WorkerConnection, request: protocol.WorkerSnapshotRequest) -> None:
        try:
            match request:
                case protocol.AttachSeries():
                    self._attach(connection, request)
                case protocol.BeginSnapshot():
                    self._begin(connection, request)
                case protocol.AddBuffer():
                    self._add(connection, request)
                case protocol.CommitSnapshot():
                    self._commit(connection, request)
                case protocol.AgreeOn():
                    self._inventory.go_back(connection.series, request.stamp)
                    self._sent(connection.series).confirmed = protocol.NO_STAMP
                    self._say_attached(connection)
                case protocol.OpenSnapshot():
                    self._open(connection, request)
                case protocol.ListElsewhere():
                    self._list_elsewhere(connection)
                case protocol.EndSeries():
                    connection.is_done = True
                    self._say_attached(connection)
        except OverQuotaError as error:
            self._answer(connection, protocol.SnapshotRefused(reason=str(error), is_quota=True))
        except OSError as error:
            self._answer(
                connection, protocol.SnapshotRefused(reason=f"the node has no memory for it: {error.strerror}")
            )

    def _attach(self, connection: WorkerConnection, request: protocol.AttachSeries) -> None:
        if not hmac.compare_digest(request.token, self._token(request.series.job_id)):
            self._answer(connection, protocol.SnapshotRefused(reason=f"it is no worker of job {request.series.job_id}"))
            self._part(connection)
            return
        if connection.attached is not None:
            self._detach(connection)
            connection.attached = None
        for other in list(self._connections.values()):  # an earlier incarnation, on its way out
            if other.attached is not None and other.series == request.series:
                self._part(other)
        connection.attached = request
        job = self._job(request.series)
        job.come(request.series)
        if request.storage is not None:
            job.targets[request.series] = request.storage
            self._on_kept(protocol.SnapshotsKept(is_to_persist=True))
        self._inventory.attached[request.series.job_id] += 1
        self._say_attached(connection)

    def _say_attached(self, connection: WorkerConnection) -> None:
        address = self._address(connection.series.job_id)
        held, copy_node = self._inventory.held(connection.series), self._copy_nodes.get(connection.series.job_id)
        self._answer(connection, protocol.Attached(address=address, held=held, copy_node=copy_node))

    def _list_elsewhere(self, connection: WorkerConnection) -> None:
        job_id = connection.series.job_id
        asked = [each for each in self._earlier_nodes.get(job_id, []) if each.role == connection.series.role]
        copy_node = self._copy_nodes.get(job_id)
        if copy_node is not None and copy_node not in [each.server for each in asked]:
            asked.append(protocol.EarlierNode(connection.series.role, copy_node, -1))
        connection.listed, connection.num_asked = [], len(asked)
        if not asked:
            self._answer(connection, protocol.ListedElsewhere(nodes=[]))
        for node in asked:
            question = HeldQuestion(node.server, connection, node.round)
            if node.server.url:
                self._transfers.ask_held(question)
            else:
                self._on_listed(question, "it is gone")

    def _on_listed(self, question: HeldQuestion, error: str) -> None:
        connection, target = question.connection, question.target
        if error:
            log.warning("event=snapshot-node-silent node=%s reason=%r", target.node, error)
        lost_round = question.round if error else -1
        connection.listed.append(protocol.HeldElsewhere(target, question.held, lost_round))
        if len(connection.listed) == connection.num_asked:
            self._answer(connection, protocol.ListedElsewhere(nodes=connection.listed))

    def _begin(self, connection: WorkerConnection, request: protocol.BeginSnapshot) -> None:
        sent = self._sent(connection.series)
        if request.is_sent and sent.num_under_way:
            connection.waiting = request
            return
        connection.needed = request.needed
        if request.needed and request.needed[0] != protocol.NO_STAMP:
            self._inventory.settle_floor(connection.series, request.needed[0])
        buffer = self._inventory.begin(connection.series, request.nbytes, request.needed)
        if buffer is not None:
            self._give(connection, buffer)
        elif self._inventory.is_full(connection.series):
            connection.waiting = request  # until a transfer ends
        else:
            self._answer(connection, protocol.BufferWanted())

    def _add(self, connection: WorkerConnection, request: protocol.AddBuffer) -> None:
        buffer = self._new_buffer(connection.series, request.nbytes, is_copy=False)
        if request.is_idle:
            buffer.state = "free"
        self._give(connection, buffer)

    def _give(self, connection: WorkerConnection, buffer: SnapshotBuffer) -> None:
        sent = self._sent(connection.series)
        answer = protocol.Writable(
            buffer=buffer.number,
            nbytes=buffer.nbytes,
            buffers=[each.number for each in self._inventory.of(connection.series)],
            confirmed=sent.confirmed,
            complaint=sent.complaint,
        )
        sent.complaint = ""
        self._answer(connection, answer, self._memory[buffer.number])

    def _commit(self, connection: WorkerConnection, request: protocol.CommitSnapshot) -> None:
        buffer = self._inventory.buffers.get(request.buffer)
        if buffer is None or buffer.series != connection.series or buffer.state != "writing":
            self._answer(connection, protocol.SnapshotRefused(reason=f"buffer {request.buffer} is not being written"))
            return
        self._inventory.commit(buffer, request.stamp, min(request.length, buffer.nbytes))
        self._say_attached(connection)
        target = request.partner
        if request.to_copy_node and not self._sent(connection.series).num_under_way:
            target = self._copy_nodes.get(connection.series.job_id)
        if target is not None:
            self._begin_sending(buffer)
            self._transfers.offer(SentCopy(target, self._address(buffer.series.job_id), buffer, connection.needed))
        if request.to_storage:
            self._store(buffer)

    def _on_copied(self, buffer: SnapshotBuffer, error: str) -> None:
        if not error:
            self._sent(buffer.series).confirmed = buffer.stamp
        self._end_sending(buffer, error and f"the snapshot was not copied to another node: {error}")

    def _store(self, buffer: SnapshotBuffer) -> None:
        target = self._job(buffer.series).targets.get(buffer.series)
        if target is None:
            return
        buffer.is_stored = True
        name = name_of(buffer.series.job_id, buffer.stamp)
        self._begin_sending(buffer)
        self._writers.write(WriteOrder(buffer, self._memory[buffer.number], target, name))

    def _on_stored(self, buffer: SnapshotBuffer, error: str) -> None:
        buffer.is_stored = not error
        self._num_written += not error
        if error:
            log.error("event=snapshot-not-stored step=%d reason=%r", buffer.stamp.step, error)
        self._tell_when_persisted()
        self._end_sending(buffer, error and f"the snapshot was not written to storage: {error}")

    def _begin_sending(self, buffer: SnapshotBuffer) -> None:
        """Count a snapshot as on its way until `_end_sending`. Buffer and job stay for so long."""
        self._sent(buffer.series).num_under_way += 1
        buffer.num_uses += 1

    def _end_sending(self, buffer: SnapshotBuffer, complaint: str) -> None:
        sent = self._sent(buffer.series)
        sent.num_under_way -= 1
        buffer.num_uses -= 1
        sent.complaint = complaint or sent.complaint
        self._go_on(buffer.series)

    def _tell_when_persisted(self) -> None:
        if self._is_persisting and self._writers.is_idle:
            self._on_kept(protocol.SnapshotsKept(is_to_persist=False, num_written=self._num_written))

    def _go_on(self, series: protocol.SnapshotSeries) -> None:
        for connection in list(self._connections.values()):
            if connection.waiting is not None and connection.series == series:
                request, connection.waiting = connection.waiting, None
                self._perform(connection, request)

    def _open(self, connection: WorkerConnection, request: protocol.OpenSnapshot) -> None:
        if request.series.job_id != connection.series.job_id:
            self._answer(connection, protocol.SnapshotRefused(reason="the snapshot belongs to another job"))
            return
        held = self._inventory.find(request.series, request.stamp)
        if held is not None:
            self._say_readable(connection, held)
            return
        if request.source is None:
            self._answer(connection, protocol.SnapshotRefused(reason="this node no longer has the snapshot"))
            return
        arriving, key = self._job(request.series).arriving, (request.series, request.stamp)
        if key in arriving:
            arriving[key].append(connection)
            return
        is_copy = request.series != connection.series  # one copy for all ranks here with this state
        buffer = self._writable(request.series, request.length, [], is_copy=is_copy)
        arriving[key] = [connection]
        self._pull(SnapshotPull(request, request.source, buffer, self._memory[buffer.number]))

    def _on_arrived(self, buffer: SnapshotBuffer, request: protocol.OpenSnapshot, error: str) -> None:
        for each in self._job(request.series).arriving.pop((request.series, request.stamp)):
            if error:
                self._answer(each, protocol.SnapshotRefused(reason=error))
            else:
                self._say_readable(each, buffer)

    def _say_readable(self, connection: WorkerConnection, buffer: SnapshotBuffer) -> None:
        is_own = buffer.series == connection.series and not buffer.is_copy
        answer = protocol.Readable(length=buffer.length, buffer=buffer.number if is_own else None)
        self._answer(connection, answer, self._memory[buffer.number])

    def _part(self, connection: WorkerConnection) -> None:
        """Close a connection, and forget its worker."""
        if self._connections.pop(connection.socket.fileno(), None) is None:
            return
        connection.socket.close()
        if connection.attached is None:
            return
        self._detach(connection)
        is_last = not self._inventory.attached[connection.series.job_id]
        self._job(connection.series).leave(connection, self._order.linger_s, is_last=is_last)

    def _detach(self, connection: WorkerConnection) -> None:
        connection.waiting = None
        self._inventory.abandon(connection.series)
        self._inventory.attached[connection.series.job_id] -= 1

    def _answer(
        self, connection: WorkerConnection, answer: protocol.SnapshotAnswer, descriptor: int | None = None
    ) -> None:
        if connection.socket.fileno() < 0:
            return
        descriptors = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(connection.socket, [protocol.encode_snapshot_message(answer)], descriptors)
        except OSError:  # the worker is gone, or reads nothing
            self._part(connection)

    # Other servers

    def _read_piece(self, asked: protocol.ReadPiece) -> bytes:
        buffer = self._inventory.find(self._checked(asked), asked.stamp)
        if buffer is None:
            raise LookupError(f"node {self._order.node} no longer has the snapshot of step {asked.stamp.step}")
        nbytes = max(0, min(asked.nbytes, buffer.length - asked.offset))
        return os.pread(self._memory[buffer.number], nbytes, asked.offset)

    def _checked(
        self, asked: protocol.ReadPiece | protocol.AskHeld | protocol.OfferSnapshot
    ) -> protocol.SnapshotSeries:
        """Return the series that another server asks about. LookupError: its token is not that of the job here."""
        if not hmac.compare_digest(asked.token, self._token(asked.series.job_id)):
            raise LookupError(f"the token is not that of job {asked.series.job_id} on node {self._order.node}")
        return asked.series

    def _held(self, asked: protocol.AskHeld) -> list[protocol.HeldSnapshot]:
        return self._inventory.held(self._checked(asked))

    def _take_offer(self, asker: bytes, offer: protocol.OfferSnapshot) -> None:
        try:
            self._checked(offer)
            if not self._inventory.attached[offer.series.job_id]:
                self._job(offer.series).drop_at = time.monotonic() + self._order.linger_s
            buffer = self._writable(offer.series, offer.length, offer.needed, is_copy=True)
        except LookupError as reason:
            error = str(reason.args[0])
        except OverQuotaError as reason:
            error = f"node {self._order.node} takes no copy: {reason}"
        except OSError as reason:
            error = f"node {self._order.node} has no memory for a copy: {reason.strerror}"
        else:
            self._pull(SnapshotPull(offer, offer.source, buffer, self._memory[buffer.number], asker))
            return
        self._transfers.answer_offer(asker, offer.number, error)

    def _pull(self, pull: SnapshotPull) -> None:
        pull.buffer.num_uses += 1
        pull.buffer.state = "writing"
        self._transfers.pull(pull)

    def _on_pulled(self, pull: SnapshotPull, error: str) -> None:
        pull.buffer.num_uses -= 1
        if error:
            pull.buffer.state = "free"
        else:
            self._inventory.commit(pull.buffer, pull.wanted.stamp, pull.wanted.length)
        match pull.wanted:
            case protocol.OfferSnapshot(number=number):
                self._transfers.answer_offer(pull.asker, number, error)
            case protocol.OpenSnapshot():
                self._on_arrived(pull.buffer, pull.wanted, error)
        self._go_on(pull.buffer.series)

    def _on_end(self, ended: WriteOrder | SentCopy | SnapshotPull | HeldQuestion, error: str) -> None:
        """Go on after a write, a transfer or a question; `error` is "" if it succeeded."""
        match ended:
            case WriteOrder():
                self._on_stored(ended.buffer, error)
            case SentCopy():
                self._on_copied(ended.buffer, error)
            case SnapshotPull():
                self._on_pulled(ended, error)
            case HeldQuestion():
                self._on_listed(ended, error)
            case _:
                assert_never(ended)

    # Memory

    def _writable(
        self, series: protocol.SnapshotSeries, nbytes: int, needed: protocol.NeededSnapshots, *, is_copy: bool
    ) -> SnapshotBuffer:
        buffer = self._inventory.begin(series, nbytes, needed, is_copy=is_copy)
        return buffer or self._new_buffer(series, nbytes, is_copy=is_copy)

    def _new_buffer(self, series: protocol.SnapshotSeries, nbytes: int, *, is_copy: bool) -> SnapshotBuffer:
        buffer = self._inventory.add(series, nbytes, is_copy=is_copy)
        self._close_dropped()
        try:
            self._memory[buffer.number] = make_buffer(nbytes)
        except OSError:
            del self._inventory.buffers[buffer.number]
            raise
        return buffer

    def _close_dropped(self) -> None:
        for number in self._memory.keys() - self._inventory.buffers.keys():
            os.close(self._memory.pop(number))

    def _drop_idle_jobs(self) -> None:
        now = time.monotonic()
        for job_id, job in list(self._jobs.items()):
            if job.drop_at is not None and job.drop_at <= now:
                self._inventory.drop_job(job_id)
                if self._inventory.has_job(job_id):  # a transfer is under way, which ends or is given up
                    job.drop_at = now + 1.0
                else:
                    del self._jobs[job_id]

    def _job(self, series: protocol.SnapshotSeries) -> JobState:
        return self._jobs.setdefault(series.job_id, JobState())

    def _sent(self, series: protocol.SnapshotSeries) -> SentState:
        return self._job(series).sent.setdefault(series, SentState())

    def _address(self, job_id: str) -> protocol.ServerAddress:
        return self._order.host.address(self._order.node, job_id)

    def _token(self, job_id: str) -> str:
        return protocol.token_of(self._order.host.secret, job_id)
