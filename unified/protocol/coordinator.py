"""What workers ask of the master as coordinator of their data, barriers and checkpoints. A request has one answer.

Names and fields are those of the reference document's ``coordinator.proto``; what it lacks is marked by its docstring.
They travel on the control socket of the master, as other requests of clients do. `space` is new everywhere: what is
asked in one space is not seen in another. Workers of a job use the job's id, scripts outside a job ``UNIFIED_SPACE``,
or the empty one.
"""

from __future__ import annotations

from typing import Literal

from unified.protocol.client_master import ClientRequest, Done, MasterAnswer, Refused
from unified.protocol.framing import Codec
from unified.values import Value

ReleasedBy = Literal["arrived", "lost", "timeout", "closed"]
WorkerEvent = Literal["checkpoint-failed", "checkpoint-damaged"]
"""What a worker can put into the event log: none of the words in which the master tells its own decisions."""


class CoordinatorRequest(ClientRequest, frozen=True, kw_only=True):
    """From a worker."""

    space: str = ""


class CoordinatorAnswer(MasterAnswer, frozen=True, kw_only=True):
    """To a worker. What cannot be done is answered by `unified.protocol.client_master.Refused`."""


class RegisterWorker(CoordinatorRequest, tag="register-worker", frozen=True, kw_only=True):
    """Again with the same `worker_id` and `session`: the same answer. Another session: a new life of that worker."""

    worker_id: str
    session: str
    """Of this life of the worker; chosen at random."""
    hostname: str = ""
    port: int = 0
    gpu_count: int = 0
    memory_bytes: int = 0
    metadata: dict[str, str] = {}
    rank: int = -1
    world_size: int = 0
    """Of this worker; 0: it takes part in no barrier."""
    timeout_s: float | None = None
    """It is lost when it was not heard of for so long; None: as the coordinator has it."""
    member: str = ""
    """New: the name of its rank, by which datasets have it, whatever the worker calls itself: in a job the name of the
    worker there. Empty: its `worker_id`."""


class WorkerRegistration(CoordinatorAnswer, tag="worker-registration", frozen=True, kw_only=True):
    assigned_id: str
    heartbeat_interval_s: float
    incarnation: int
    """How many lives of this worker were registered before."""
    timeout_s: float = 30.0
    """New: it is lost when it was not heard of for so long."""


class WorkerHeartbeat(CoordinatorRequest, tag="coordinator-heartbeat", frozen=True, kw_only=True):
    worker_id: str
    session: str


class HeartbeatResponse(CoordinatorAnswer, tag="heartbeat-response", frozen=True, kw_only=True):
    is_known: bool
    """False: it was lost, or a new life took its place: register again, or end."""
    revision: int = 0
    """Counts up with each change of who is there."""


class DeregisterWorker(CoordinatorRequest, tag="deregister-worker", frozen=True, kw_only=True):
    worker_id: str
    session: str


class FileRun(Value, frozen=True, kw_only=True):
    """Rows of one file, in the order of the dataset."""

    path: str
    num_samples: int


class RegisterDataset(CoordinatorRequest, tag="register-dataset", frozen=True, kw_only=True):
    """Again with the same values: nothing happens. With others: refused, with what differs."""

    dataset_id: str
    path: str
    format: str
    total_samples: int
    shard_size: int = 10_000
    shuffle: bool = False
    seed: int = 0
    metadata: dict[str, str] = {}
    files: list[FileRun] = []
    """Of which the dataset consists, in order, as its registrar found them. Empty: the files are not known."""


class DatasetRegistration(CoordinatorAnswer, tag="dataset-registration", frozen=True, kw_only=True):
    dataset_id: str
    num_shards: int
    epoch: int
    """The current one."""


class ShardAssignment(Value, frozen=True, kw_only=True):
    """One shard: samples ``start_sample`` to ``end_sample`` (not included) of the dataset, in its own order."""

    shard_id: int
    file_paths: list[str]
    start_sample: int
    end_sample: int
    first_row: int = 0
    """New: the row of the first of these files at which the shard begins (see `unified.core.file_layout`); it goes on
    through the rest of that file and the files after it, until it has as many rows as samples."""


class DataRequest(CoordinatorRequest, frozen=True, kw_only=True):
    """About the shards of a worker: by itself, or by somebody else."""

    dataset_id: str
    worker_id: str
    """The name of its rank (`RegisterWorker.member`), or with `is_id` what it calls itself."""
    is_id: bool = False
    """New."""
    session: str = ""
    """New: of the life that asks, which is refused when another one took its place. Empty: somebody else asks, or the
    worker registered nowhere."""
    life: int = -1
    """New: in a job, which life of its worker asks, from 0: the master knows the newest whether it registered or not.
    -1: somebody else asks."""


class GetDataShard(DataRequest, tag="get-data-shard", frozen=True, kw_only=True):
    """Which unfinished shards of an epoch are this worker's now."""

    epoch: int
    limit: int = 0
    """New: so many at most, those that are to be read first; 0: all."""


class DataShards(CoordinatorAnswer, tag="data-shards", frozen=True, kw_only=True):
    shards: list[ShardAssignment]
    """In the order in which they are to be read."""
    revision: int
    """Ask again when the heartbeat, or `ShardsDone`, tells of another one."""
    num_left: int = 0
    """New: unfinished shards of the epoch, whoever has them. What was asked without a limit may be a little behind."""


class GetRankFiles(DataRequest, tag="get-rank-files", frozen=True, kw_only=True):
    """New: which files of a dataset are a rank's in an epoch, of files that are each given to one rank as a whole.
    Answered by `RankFiles`."""

    epoch: int
    rank: int = -1
    """-1: as the worker registered."""
    world_size: int = 0
    """Over how many ranks the files are spread; 0: as workers have registered."""


class RankFiles(CoordinatorAnswer, tag="rank-files", frozen=True, kw_only=True):
    """New."""

    file_paths: list[str]
    """In the order in which they are to be read."""
    num_files: int
    """Number of files in the dataset."""
    idle: list[int] = []
    """Ranks that are given no file."""


class MarkDone(DataRequest, tag="mark-done", frozen=True, kw_only=True):
    """New: these shards were read to their end, and are served to nobody again in this epoch. Answered by `ShardsDone`.

    A worker reports each shard before it begins the next: the first unfinished one of its list is its own as long as it
    is there, those after it may go to others. Nobody else does it for a worker that is registered."""

    epoch: int
    shard_ids: list[int]


class ShardsDone(CoordinatorAnswer, tag="shards-done", frozen=True, kw_only=True):
    """New."""

    shard_ids: list[int]
    """Of those reported, which count. Reported twice, or read by somebody else after this worker was lost: not."""
    revision: int
    """If it is not that of the worker's `DataShards`, it asks again before it begins another shard."""


class RestorePosition(DataRequest, tag="restore-position", frozen=True, kw_only=True):
    """New: the data go on from exactly this position: what was read of it is done, and all else comes again.

    All who train together load the same one. The first of them sets the dataset back; for the others, as long as one
    that has loaded is there, nothing happens. Another position is refused then."""

    epoch: int
    done: list[int]
    begun: list[tuple[int, int]] = []
    """Shards that are partly read, each with how many of its samples: the readers pass over those by themselves."""
    world: list[str] = []
    """All who read from now on, as far as it is known: others of whom nobody knows that they run are taken out."""
    process: str
    """Of the reader; chosen at random."""
    number: int
    """Counts up from 1 with each position that this process loads, so that one that is asked again is known. 0: only
    if it has loaded none yet."""


class SetDataWorker(DataRequest, tag="set-data-worker", frozen=True, kw_only=True):
    """New: a worker joins those that a dataset's shards are spread over, or leaves them."""

    is_member: bool = True
    is_awaited: bool = False
    """Somebody else names it as one that will read: if nothing is heard from it for the coordinator's time-out, its
    shards go to others. False: it is the worker itself that asks."""


class AdvanceEpoch(CoordinatorRequest, tag="advance-epoch", frozen=True, kw_only=True):
    """New: make `epoch` the current one; an epoch that is past stays past."""

    dataset_id: str
    epoch: int


class GetDatasets(CoordinatorRequest, tag="get-datasets", frozen=True, kw_only=True):
    """New. Answered by `Datasets`."""


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
    """Shards of the current epoch."""
    workers: list[str]
    """Over which its shards are spread, in order; each by what it calls itself, as far as it has registered."""
    metadata: dict[str, str] = {}


class Datasets(CoordinatorAnswer, tag="datasets", frozen=True, kw_only=True):
    datasets: list[DatasetStatus]
    workers: list[str]
    """That are registered and not lost, in order."""


class WaitBarrier(CoordinatorRequest, tag="wait-barrier", frozen=True, kw_only=True):
    """Answered by `BarrierResponse` when it is released. Again with the same `arrival`: the same arrival."""

    barrier_id: str
    worker_id: str
    session: str
    arrival: int
    """Counts up with each arrival of this session."""
    world_size: int
    timeout_s: float | None = None
    on_loss: Literal["fail", "shrink"] = "fail"


class LeaveBarrier(CoordinatorRequest, tag="leave-barrier", frozen=True, kw_only=True):
    """New: who arrived waits no more, so that nobody is released by an arrival behind which there is nobody. What it
    asked is answered as ``closed``; the others wait on. If it does not wait there, nothing happens."""

    barrier_id: str
    worker_id: str
    session: str
    arrival: int
    """Others of this worker at the same barrier wait on."""


class BarrierResponse(CoordinatorAnswer, tag="barrier-response", frozen=True, kw_only=True):
    released_by: ReleasedBy
    generation: int
    """How often this barrier was released before."""
    arrived: list[str] = []
    missing: list[str] = []
    """Who had not arrived, as far as it is known who should."""
    lost: list[str] = []
    reason: str = ""


class NotifyCheckpoint(CoordinatorRequest, tag="notify-checkpoint", frozen=True, kw_only=True):
    """A checkpoint is complete; answered by `CheckpointResponse`."""

    worker_id: str
    step: int
    path: str
    """Of its manifest."""
    name: str = "default"
    """Of the series that it belongs to."""
    size_bytes: int = 0
    checksum: str = ""
    world_size: int = 1
    metadata: dict[str, str] = {}
    goes_back: bool = False
    """Training went back to this one: later steps of the series, which were told of before, count no more."""


class CheckpointResponse(CoordinatorAnswer, tag="checkpoint-response", frozen=True, kw_only=True):
    is_latest: bool


class GetLatestCheckpoint(CoordinatorRequest, tag="get-latest-checkpoint", frozen=True, kw_only=True):
    """Answered by `RecoveryInfo`."""

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
    """New: something that people should find in the event log of the job. Beyond a bound it is not kept, and the answer
    `unified.protocol.client_master.Done` has a note that says so."""

    worker_id: str
    event: WorkerEvent
    reason: str
    """A sentence; what is too long of it is cut off."""


WorkerToCoordinator = (
    RegisterWorker
    | WorkerHeartbeat
    | DeregisterWorker
    | RegisterDataset
    | GetDataShard
    | GetRankFiles
    | MarkDone
    | RestorePosition
    | SetDataWorker
    | AdvanceEpoch
    | GetDatasets
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
    | BarrierResponse
    | CheckpointResponse
    | RecoveryInfo
)
worker_to_coordinator: Codec[WorkerToCoordinator] = Codec(WorkerToCoordinator)
coordinator_to_worker: Codec[CoordinatorToWorker] = Codec(CoordinatorToWorker)
