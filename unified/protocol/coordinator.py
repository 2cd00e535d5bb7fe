"""Messages between workers and the master as coordinator of data, barriers and checkpoints. A request has one answer.

Names and fields are those of the reference document's ``coordinator.proto``; additions are marked as new.
The messages travel on the control socket of the master, as other requests of clients do. `space` is new everywhere:
one space sees nothing of another. Workers of a job use the job's id; scripts outside a job use ``UNIFIED_SPACE``,
or the empty space.
"""

from __future__ import annotations

from typing import Literal

from unified.protocol.client_master import ClientRequest, Done, MasterAnswer, Refused
from unified.protocol.framing import Codec
from unified.values import Value

ReleasedBy = Literal["arrived", "lost", "timeout", "closed"]
WorkerEvent = Literal["checkpoint-failed", "checkpoint-damaged"]
"""Events that a worker can log; the master has other names for its own decisions."""


class CoordinatorRequest(ClientRequest, frozen=True, kw_only=True):
    """Base of requests from a worker."""

    space: str = ""


class CoordinatorAnswer(MasterAnswer, frozen=True, kw_only=True):
    """Base of answers to a worker. A refusal is a `unified.protocol.client_master.Refused`."""


class RegisterWorker(CoordinatorRequest, tag="register-worker", frozen=True, kw_only=True):
    """Registration. The same `worker_id` and `session` get the same answer; another session is a new incarnation."""

    worker_id: str
    session: str
    """Session of this incarnation, chosen at random."""
    hostname: str = ""
    port: int = 0
    gpu_count: int = 0
    memory_bytes: int = 0
    metadata: dict[str, str] = {}
    rank: int = -1
    world_size: int = 0
    """World size of the worker; 0: it takes part in no barrier."""
    timeout_s: float | None = None
    """Silence after which the worker is lost; None: the coordinator's default."""
    member: str = ""
    """New: name of its rank, by which datasets know it (not by its id): in a job, the worker's name there. Empty:
    its `worker_id`."""


class WorkerRegistration(CoordinatorAnswer, tag="worker-registration", frozen=True, kw_only=True):
    assigned_id: str
    heartbeat_interval_s: float
    incarnation: int
    """Number of this worker's incarnations that were registered before."""
    timeout_s: float = 30.0
    """New: silence after which the worker is lost."""


class Heartbeat(CoordinatorRequest, tag="coordinator-heartbeat", frozen=True, kw_only=True):
    worker_id: str
    session: str


class HeartbeatResponse(CoordinatorAnswer, tag="heartbeat-response", frozen=True, kw_only=True):
    is_known: bool
    """False if the worker was lost, or a new incarnation took its place: register again, or end."""
    revision: int = 0
    """Number that grows with each change of the present workers."""


class DeregisterWorker(CoordinatorRequest, tag="deregister-worker", frozen=True, kw_only=True):
    worker_id: str
    session: str


class FileRun(Value, frozen=True, kw_only=True):
    """Rows of one file, in the order of the dataset."""

    path: str
    num_samples: int


class RegisterDataset(CoordinatorRequest, tag="register-dataset", frozen=True, kw_only=True):
    """Registration of a dataset. A second one with the same values does nothing; with other values it is refused."""

    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int = 10_000
    shuffle: bool = False
    seed: int = 0
    metadata: dict[str, str] = {}
    files: list[FileRun] = []
    """Files of the dataset, in order, as its registrar found them. Empty: the files are not known."""


class DatasetRegistration(CoordinatorAnswer, tag="dataset-registration", frozen=True, kw_only=True):
    dataset_id: str
    num_shards: int
    epoch: int


class ShardAssignment(Value, frozen=True, kw_only=True):
    """One shard: samples ``start_sample`` to ``end_sample`` (not included) of the dataset, in its own order."""

    shard_id: int
    file_paths: list[str]
    start_sample: int
    end_sample: int
    first_row: int = 0
    """New: row at which the shard begins in the first of these files (see `file_layout.py` of the core). It goes on
    through that file and the next ones, until it has as many rows as samples."""


class DataRequest(CoordinatorRequest, frozen=True, kw_only=True):
    """Base of requests about the shards of a worker, from that worker or somebody else."""

    dataset_id: str
    worker_id: str
    """Name of the worker's rank (`RegisterWorker.member`), or with `is_id` its own id."""
    is_id: bool = False
    """New: see `worker_id`."""
    session: str = ""
    """New: session of the incarnation that asks; it is refused if another one took its place. Empty: somebody else
    asks, or the worker registered nowhere."""
    incarnation: int = -1
    """New: in a job, number of the incarnation that asks, from 0: the master knows the newest, even if it never
    registered. -1: somebody else asks."""


class GetDataShard(DataRequest, tag="get-data-shard", frozen=True, kw_only=True):
    """Request for the unfinished shards of an epoch that a worker has now."""

    epoch: int
    limit: int = 0
    """New: most shards in the answer, the first ones to read; 0: all."""


class DataShards(CoordinatorAnswer, tag="data-shards", frozen=True, kw_only=True):
    shards: list[ShardAssignment]
    """Shards in the order of reading."""
    revision: int
    """Revision of the space: ask again when a heartbeat, or `ShardsDone`, tells of another one."""
    num_left: int = 0
    """New: unfinished shards of the epoch, of all workers. In an answer without a limit it may be slightly old."""


class GetRankFiles(DataRequest, tag="get-rank-files", frozen=True, kw_only=True):
    """New: request for the `RankFiles` of a rank in an epoch, where each file goes to one rank as a whole."""

    epoch: int
    rank: int = -1
    """Rank; -1: that of the worker's registration."""
    world_size: int = 0
    """Number of ranks that the files are spread over; 0: the world size that workers registered."""


class RankFiles(CoordinatorAnswer, tag="rank-files", frozen=True, kw_only=True):
    """New: files of a rank."""

    file_paths: list[str]
    """Paths in the order of reading."""
    num_files: int
    """Number of files in the dataset."""
    idle: list[int] = []
    """Ranks without a file."""


class MarkDone(DataRequest, tag="mark-done", frozen=True, kw_only=True):
    """New: shards that were read to their end; nobody gets them again in this epoch. Answered by `ShardsDone`.

    A worker reports each shard before it begins the next. The first unfinished shard of its list stays its own while
    the worker is present; the later ones may go to others. Nobody else reports for a registered worker."""

    epoch: int
    shard_ids: list[int]


class ShardsDone(CoordinatorAnswer, tag="shards-done", frozen=True, kw_only=True):
    """New: answer to `MarkDone`."""

    shard_ids: list[int]
    """Reported shards that count: not those reported twice, or read by somebody else after this worker was lost."""
    revision: int
    """Revision of the space. A worker whose `DataShards` has another one asks again before it begins another shard."""


class RestorePosition(DataRequest, tag="restore-position", frozen=True, kw_only=True):
    """New: position from which the data go on exactly: its read shards are done, and all other samples come again.

    All workers that train together load the same position. The first request sets the dataset back. While a worker
    that has loaded it is present, further requests change nothing, and another position is refused."""

    epoch: int
    done: list[int]
    begun: list[tuple[int, int]] = []
    """Partly read shards, each with its number of read samples, which readers skip by themselves."""
    world: list[str] = []
    """All workers that read from now on, if known. Others are removed, unless they are known to run."""
    process: str
    """Id of the reader's process, chosen at random."""
    number: int
    """Number of the position among those that this process loads, from 1, to recognize a repeated request.
    0: load it only if the process has loaded none yet."""


class SetDataWorker(DataRequest, tag="set-data-worker", frozen=True, kw_only=True):
    """New: request that a worker join, or leave, the workers that share a dataset's shards."""

    is_member: bool = True
    is_awaited: bool = False
    """True if somebody else names a worker that will read. If it is silent for the coordinator's time-out, its
    shards go to others. False if the worker itself asks."""


class AdvanceEpoch(CoordinatorRequest, tag="advance-epoch", frozen=True, kw_only=True):
    """New: request to make `epoch` the current one; a past epoch changes nothing."""

    dataset_id: str
    epoch: int


class GetDatasets(CoordinatorRequest, tag="get-datasets", frozen=True, kw_only=True):
    """New: request for `Datasets`."""


class DatasetStatus(Value, frozen=True, kw_only=True):
    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int
    shuffle: bool
    seed: int
    num_shards: int
    epoch: int
    num_done: int
    """Shards of the current epoch that were read."""
    workers: list[str]
    """Workers that share its shards, in order; each by its id, if it has registered."""
    metadata: dict[str, str] = {}


class Datasets(CoordinatorAnswer, tag="datasets", frozen=True, kw_only=True):
    datasets: list[DatasetStatus]
    workers: list[str]
    """Workers that are registered and not lost, in order."""


class DescribeSpaces(CoordinatorRequest, tag="describe-spaces", frozen=True, kw_only=True):
    """New: request for a `SpaceList`, to show to people."""

    is_every_space: bool = False
    """True for all spaces, up to a bound; False for `space` alone."""


class BarrierStatus(Value, frozen=True, kw_only=True):
    """A barrier at which somebody waits."""

    barrier_id: str
    generation: int
    world_size: int
    arrived: list[str]
    missing: list[str]
    """Workers that are registered and have not arrived."""


class CheckpointStatus(Value, frozen=True, kw_only=True):
    """The latest checkpoint of a series."""

    name: str
    step: int
    path: str
    size_bytes: int
    world_size: int
    saved_at: float
    """Seconds since 1970, by the coordinator's clock."""


class PresentWorker(Value, frozen=True, kw_only=True):
    """A worker that is registered and not lost."""

    worker_id: str
    hostname: str
    rank: int
    """Rank; -1: not given."""


class SpaceStatus(Value, frozen=True, kw_only=True):
    """Everything in one space that is worth showing."""

    space: str
    datasets: list[DatasetStatus]
    barriers: list[BarrierStatus]
    checkpoints: list[CheckpointStatus]
    workers: list[PresentWorker]


class SpaceList(CoordinatorAnswer, tag="space-list", frozen=True, kw_only=True):
    spaces: list[SpaceStatus]


class WaitBarrier(CoordinatorRequest, tag="wait-barrier", frozen=True, kw_only=True):
    """Arrival at a barrier, answered by `BarrierResponse` at its release. A repeated request has the same `arrival`."""

    barrier_id: str
    worker_id: str
    session: str
    arrival: int
    """Number of the arrival in its session."""
    world_size: int
    timeout_s: float | None = None
    on_loss: Literal["fail", "shrink"] = "fail"


class LeaveBarrier(CoordinatorRequest, tag="leave-barrier", frozen=True, kw_only=True):
    """New: end of a wait, so that the arrival of an absent worker releases no barrier. The waiting request is answered
    as ``closed``; the others wait on. If the worker does not wait there, nothing happens."""

    barrier_id: str
    worker_id: str
    session: str
    arrival: int
    """Number of the arrival; others of this worker at the same barrier wait on."""


class BarrierResponse(CoordinatorAnswer, tag="barrier-response", frozen=True, kw_only=True):
    released_by: ReleasedBy
    generation: int
    """Number of the barrier's earlier releases."""
    arrived: list[str] = []
    missing: list[str] = []
    """Expected workers that had not arrived, as far as they are known."""
    lost: list[str] = []
    reason: str = ""


class NotifyCheckpoint(CoordinatorRequest, tag="notify-checkpoint", frozen=True, kw_only=True):
    """Notice of a complete checkpoint; answered by `CheckpointResponse`."""

    worker_id: str
    step: int
    path: str
    """Path of its manifest."""
    name: str = "default"
    """Name of the series that it belongs to."""
    size_bytes: int = 0
    checksum: str = ""
    world_size: int = 1
    metadata: dict[str, str] = {}
    goes_back: bool = False
    """True if training went back to this one: earlier notices of later steps in the series count no more."""


class CheckpointResponse(CoordinatorAnswer, tag="checkpoint-response", frozen=True, kw_only=True):
    is_latest: bool


class GetLatestCheckpoint(CoordinatorRequest, tag="get-latest-checkpoint", frozen=True, kw_only=True):
    """Request for `RecoveryInfo`."""

    name: str = "default"


class RecoveryInfo(CoordinatorAnswer, tag="recovery-info", frozen=True, kw_only=True):
    is_found: bool
    step: int = -1
    path: str = ""
    size_bytes: int = 0
    checksum: str = ""
    world_size: int = 0
    worker_id: str = ""
    metadata: dict[str, str] = {}
    saved_at: float = 0.0
    """Seconds since 1970, by the coordinator's clock."""


class TellEvent(CoordinatorRequest, tag="tell-event", frozen=True, kw_only=True):
    """New: an event for the log of the job. Beyond a bound it is not kept, and the answer
    `unified.protocol.client_master.Done` has a note that says so."""

    worker_id: str
    event: WorkerEvent
    reason: str
    """Sentence, cut off if it is too long."""


WorkerToCoordinator = (
    RegisterWorker
    | Heartbeat
    | DeregisterWorker
    | RegisterDataset
    | GetDataShard
    | GetRankFiles
    | MarkDone
    | RestorePosition
    | SetDataWorker
    | AdvanceEpoch
    | GetDatasets
    | DescribeSpaces
    | WaitBarrier
    | LeaveBarrier
    | NotifyCheckpoint
    | GetLatestCheckpoint
    | TellEvent
)
CoordinatorToWorker = (
    Done
    | Refused
    | WorkerRegistration
    | HeartbeatResponse
    | DatasetRegistration
    | DataShards
    | RankFiles
    | ShardsDone
    | Datasets
    | SpaceList
    | BarrierResponse
    | CheckpointResponse
    | RecoveryInfo
)
worker_to_coordinator: Codec[WorkerToCoordinator] = Codec(WorkerToCoordinator)
coordinator_to_worker: Codec[CoordinatorToWorker] = Codec(CoordinatorToWorker)
