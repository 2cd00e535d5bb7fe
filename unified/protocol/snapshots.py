"""Messages about snapshots: between a worker and its node's snapshot server, two servers, or the ranks of a round.

A worker and its server take turns on a Unix packet socket; some messages carry the descriptor of a buffer. Two servers
use ZeroMQ. Every request has a token that the server's agent made for the job, so no job reads another job's snapshots.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, NamedTuple

from msgspec import Meta
from msgspec.msgpack import Decoder, Encoder

from unified.security.keys import ClusterKey
from unified.values import Value

PACKET_BYTES = 1 << 18
"""Most bytes of a packet."""
PIECE_BYTES = 4 << 20
"""Most bytes of a snapshot that one server reads from another at a time."""
LISTENER_NAME = "snapshots"
"""Name of the server's socket in the run folder."""


class SnapshotSeries(NamedTuple):
    """Snapshots of one rank of a role, in rounds of one size."""

    job_id: str
    role: str
    world_size: int
    rank: int


class SnapshotStamp(NamedTuple):
    """Stamp that matching snapshots of all ranks share; the larger stamp is newer."""

    round: int
    """Round in which it was taken: after a rollback, the same step is taken again in a later one."""
    step: int


def token_of(secret: bytes, job_id: str) -> str:
    """Return the token by which a server knows the workers of a job."""
    return hmac.new(secret, job_id.encode(), hashlib.sha256).hexdigest()


NO_STAMP = SnapshotStamp(-1, -1)
MAX_PENDING = 2
NeededSnapshots = Annotated[list[SnapshotStamp], Meta(max_length=1 + MAX_PENDING)]
"""Snapshots of a rank to which all ranks may go back if a node is lost: the floor, and `MAX_PENDING` later ones."""


class HeldSnapshot(Value, frozen=True):
    """One snapshot in the memory of a node."""

    world_size: int
    rank: int
    stamp: SnapshotStamp
    length: int
    is_copy: bool = False
    """True if the rank runs, or ran, on another node, and this is the copy for a partner."""


class StoredSnapshot(Value, frozen=True):
    job_id: str
    """Job that took it, maybe an earlier one."""
    stamp: SnapshotStamp


class ServerAddress(Value, frozen=True):
    """Snapshot server of a node, as other nodes reach it."""

    node: str
    url: str
    """``tcp://host:port``; empty: no other node can reach it."""
    token: str
    """Token of the job there."""
    listener_key: str = ""
    """Public half of its listener's own key pair; empty in a cluster without a key."""


class EarlierNode(Value, frozen=True):
    """A node that workers of a role have left, which may still hold snapshots of the role."""

    role: str
    server: ServerAddress
    """Without a URL if the node, or its agent of that time, is gone."""
    round: int
    """Last round of the role's workers there."""


class HeldElsewhere(Value, frozen=True):
    """Snapshots of a role that another node holds."""

    server: ServerAddress
    held: list[HeldSnapshot] = []
    lost_round: int = -1
    """Last round of the role's workers there if the node does not answer, so that its snapshots are lost."""


class SnapshotHost(Value, frozen=True):
    """Address of a node's snapshot server, and the secret from which its tokens are made; for the master."""

    url: str
    secret: bytes
    listener_key: str = ""

    def address(self, node: str, job_id: str) -> ServerAddress:
        token = token_of(self.secret, job_id)
        return ServerAddress(node=node, url=self.url, token=token, listener_key=self.listener_key)


class StorageTarget(Value, frozen=True):
    """Place of a rank's snapshots on storage, and the environment to open it with."""

    location: str
    """Absolute path, or address, of the job's storage."""
    folder: str
    """Folder of the rank there."""
    env: dict[str, str] = {}


# From the agent to its server


class ServeSnapshots(Value, tag_field="type", tag="serve", frozen=True):
    """First message: all that the server has to know."""

    node: str
    host: SnapshotHost
    quota_bytes: int
    linger_s: float
    """Time for which the server keeps snapshots of a job without workers here."""
    key: ClusterKey | None = None
    pair: ClusterKey | None = None
    """Key pair of its listener; `host` has the public half."""


class ReplaceKey(Value, tag_field="type", tag="key", frozen=True):
    """Order to take the new successor of the cluster's key."""

    key: ClusterKey


class PersistSnapshots(Value, tag_field="type", tag="persist", frozen=True):
    """Order to write to storage the snapshots that it lacks: the workers have ended. Answered by `SnapshotsKept`."""


class NameCopyNodes(Value, tag_field="type", tag="copy-nodes", frozen=True):
    """Servers of copy nodes, which hold copies for jobs without workers there, by job. Other jobs have none."""

    copy_nodes: dict[str, ServerAddress]
    earlier_nodes: dict[str, list[EarlierNode]] = {}
    """Nodes that the job's workers have left, if one of its workers here has to find their snapshots."""


class SnapshotsKept(Value, tag_field="type", tag="kept", frozen=True):
    """Message to the agent: whether the server has snapshots to write to storage when the agent stops."""

    is_to_persist: bool
    num_written: int = 0


# From a worker to its server


class SnapshotRequest(Value, tag_field="type", frozen=True):
    """Base of requests of a worker."""


class AttachSeries(SnapshotRequest, tag="attach", frozen=True):
    """First request, repeated in each round, which says who asks. Answered by `Attached`."""

    token: str
    series: SnapshotSeries
    storage: StorageTarget | None = None


class BeginSnapshot(SnapshotRequest, tag="begin", frozen=True):
    """Ask for a buffer to write. Answered by `Writable`, `BufferWanted` or `SnapshotRefused`."""

    nbytes: int
    needed: NeededSnapshots = []
    """Snapshots of the rank that are not overwritten. The server passes them on to the partner in `OfferSnapshot`."""
    is_sent: bool = False
    """True if this snapshot will be sent to a partner or to storage. The request waits until the last one is sent."""


class AddBuffer(SnapshotRequest, tag="add-buffer", frozen=True):
    """Ask for one more buffer, to be written now or later. Answered by `Writable` or `SnapshotRefused`."""

    nbytes: int
    is_idle: bool = False


class CommitSnapshot(SnapshotRequest, tag="commit", frozen=True):
    """Say that a buffer is written. Answered by `Attached`."""

    buffer: int
    stamp: SnapshotStamp
    length: int
    partner: ServerAddress | None = None
    """Server that gets a copy."""
    to_copy_node: bool = False
    """True if the job's copy node gets a copy, unless the last copy is still on its way there."""
    to_storage: bool = False


class AgreeOn(SnapshotRequest, tag="agree-on", frozen=True):
    """Go back to a snapshot: later snapshots of the role are useless. Answered by `Attached`."""

    stamp: SnapshotStamp


class OpenSnapshot(SnapshotRequest, tag="open", frozen=True):
    """Ask for a snapshot, from another server if one is named. Answered by `Readable` or `SnapshotRefused`."""

    series: SnapshotSeries
    stamp: SnapshotStamp
    length: int = 0
    source: ServerAddress | None = None


class ListElsewhere(SnapshotRequest, tag="list-elsewhere", frozen=True):
    """Ask for the role's snapshots on the job's copy node, and on nodes that its workers have left. Answered by
    `ListedElsewhere`."""


class EndSeries(SnapshotRequest, tag="end", frozen=True):
    """Say that the worker has done its work, and needs no snapshot any more. Answered by `Attached`."""


class SnapshotAnswer(Value, tag_field="type", frozen=True):
    """Base of answers to a worker."""


class Attached(SnapshotAnswer, tag="attached", frozen=True):
    address: ServerAddress
    held: list[HeldSnapshot]
    """Snapshots of the role that this node holds."""
    copy_node: ServerAddress | None = None
    """Server of the job's copy node, which holds copies while all ranks of a role are on one node."""


class ListedElsewhere(SnapshotAnswer, tag="listed-elsewhere", frozen=True):
    nodes: list[HeldElsewhere]


class BufferWanted(SnapshotAnswer, tag="buffer-wanted", frozen=True):
    """Demand for an `AddBuffer`: there is no buffer that could be written."""


class Writable(SnapshotAnswer, tag="writable", frozen=True):
    """Buffer to write, or added buffer. Its descriptor comes with the message."""

    buffer: int
    nbytes: int
    buffers: list[int]
    """Buffers of the series; the worker gives back the memory of all others."""
    confirmed: SnapshotStamp = NO_STAMP
    """Last snapshot of this rank that its partner got."""
    complaint: str = ""
    """Reason why the last snapshot was not sent on."""


class Readable(SnapshotAnswer, tag="readable", frozen=True):
    """Snapshot to read, in the descriptor that comes along."""

    length: int
    buffer: int | None = None
    """Number of the buffer, if it is one of the worker's own."""


class SnapshotRefused(SnapshotAnswer, tag="refused", frozen=True):
    reason: str
    is_quota: bool = False


WorkerSnapshotRequest = (
    AttachSeries | BeginSnapshot | AddBuffer | CommitSnapshot | AgreeOn | OpenSnapshot | ListElsewhere | EndSeries
)
WorkerSnapshotAnswer = Attached | BufferWanted | Writable | Readable | ListedElsewhere | SnapshotRefused


# Of two servers


class PeerMessage(Value, tag_field="type", frozen=True):
    """Base of messages of two servers."""

    number: int
    """Number of a request, which its answer carries, too."""


class OfferSnapshot(PeerMessage, tag="offer", frozen=True):
    """Offer of a snapshot, which the peer reads before it answers with `OfferTaken`."""

    token: str
    series: SnapshotSeries
    stamp: SnapshotStamp
    length: int
    source: ServerAddress
    needed: NeededSnapshots = []


class OfferTaken(PeerMessage, tag="offer-taken", frozen=True):
    error: str = ""


class ReadPiece(PeerMessage, tag="read-piece", frozen=True):
    """Request for a piece of a snapshot; answered by `Piece`, and a second frame with the bytes."""

    token: str
    series: SnapshotSeries
    stamp: SnapshotStamp
    offset: Annotated[int, Meta(ge=0)]
    nbytes: Annotated[int, Meta(ge=0, le=PIECE_BYTES)]


class Piece(PeerMessage, tag="piece", frozen=True):
    error: str = ""


class AskHeld(PeerMessage, tag="ask-held", frozen=True):
    """Question for the snapshots of a role; answered by `HeldThere`."""

    token: str
    series: SnapshotSeries


class HeldThere(PeerMessage, tag="held-there", frozen=True):
    held: list[HeldSnapshot]


_encoder = Encoder()
encode_snapshot_message = _encoder.encode
snapshot_request: Decoder[WorkerSnapshotRequest] = Decoder(WorkerSnapshotRequest)
snapshot_answer: Decoder[WorkerSnapshotAnswer] = Decoder(WorkerSnapshotAnswer)
peer_message: Decoder[OfferSnapshot | OfferTaken | ReadPiece | Piece | AskHeld | HeldThere] = Decoder(
    OfferSnapshot | OfferTaken | ReadPiece | Piece | AskHeld | HeldThere
)
SnapshotOrder = ServeSnapshots | ReplaceKey | NameCopyNodes | PersistSnapshots
agent_to_snapshots: Decoder[SnapshotOrder] = Decoder(SnapshotOrder)
snapshots_to_agent: Decoder[SnapshotsKept] = Decoder(SnapshotsKept)


# Of the ranks of a round


class RankReport(Value, frozen=True):
    """Report of one rank to rank 0 of its round."""

    server: ServerAddress
    held: list[HeldSnapshot] = []
    """Snapshots that its node holds; only one rank of each node reports them."""
    elsewhere: list[HeldElsewhere] = []
    """Other nodes that rank 0 has asked."""
    stored: list[StoredSnapshot] = []


class SnapshotSource(Value, frozen=True):
    """Place from which one rank takes its state."""

    series: SnapshotSeries
    length: int = 0
    is_copy: bool = False
    server: ServerAddress | None = None
    """Server that has it; None: it is on storage."""


class SnapshotAgreement(Value, frozen=True):
    """Answer of rank 0 to all ranks: the newest snapshot that all of them have, and its places."""

    servers: list[ServerAddress]
    """Snapshot server of each rank's node."""
    snapshot: StoredSnapshot | None = None
    """None: there is none that all ranks have."""
    sources: list[SnapshotSource] = []
    """Sources by rank."""
    note: str = ""
    """Part of a sentence on the snapshots that exist instead."""


class SettledCopies(Value, frozen=True):
    """Newest snapshot on which all ranks of a round have voted, and the newest one that all their partners have."""

    newest: SnapshotStamp = NO_STAMP
    floor: SnapshotStamp = NO_STAMP


rank_report: Decoder[RankReport] = Decoder(RankReport)
settled_copies: Decoder[SettledCopies] = Decoder(SettledCopies)
snapshot_agreement: Decoder[SnapshotAgreement] = Decoder(SnapshotAgreement)
