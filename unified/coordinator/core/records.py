"""The coordinator's records. Waiting requests are not persisted: they come again when the coordinator is back."""

from __future__ import annotations

import msgspec

from unified.coordinator.core.messages import Token
from unified.protocol.coordinator import BarrierResponse, NotifyCheckpoint, RegisterWorker

WORKER, BARRIER, CHECKPOINT = "coordinator-worker", "coordinator-barrier", "coordinator-checkpoint"
DATASET, LEDGER, MARK = "coordinator-dataset", "coordinator-ledger", "coordinator-mark"
POSITION, AWAITED = "coordinator-position", "coordinator-awaited"
"""Kinds of rows."""
MAX_GONE = 1000
"""Most gone workers of a space that are remembered; the oldest are forgotten."""
MAX_BARRIERS = 1000
"""Most remembered barriers of a space; then barriers without waiting workers go, the least recently used first."""
MAX_RELEASES = 4
"""Most remembered releases of a barrier: the answer to a worker that has not arrived since may be lost."""
MAX_EVENTS, EVENTS_WINDOW_S = 20, 60.0
"""Most events that the workers of a space can log in so many seconds."""
MAX_PAST_SESSIONS = 8
"""Most remembered sessions of a worker that are over because another one began."""


def row_key(space: str, name: str) -> str:
    """Return a key that is unique for any space and name."""
    return f"{len(space)}/{space}/{name}"


class RegisteredWorker(msgspec.Struct, eq=False, kw_only=True):
    """One incarnation of a worker, present or gone."""

    info: RegisterWorker
    incarnation: int
    came_at: int
    """Revision of the space when it registered."""
    timeout_s: float = 30.0
    """Silence after which the worker is lost."""
    gone_at: int = 0
    """Revision of the space when it went; 0: the worker is present."""
    reason: str = ""
    """Reason of its end, as a clause."""
    end: str = ""
    """Event of its end: ``worker-lost``, ``worker-replaced`` or ``worker-left``."""
    past_sessions: list[str] = []
    datasets: list[str] = []
    """Datasets that a lost worker joins again when it comes back."""

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def member(self) -> str:
        """Name of the worker's rank, by which datasets know it."""
        return self.info.member or self.info.worker_id

    @property
    def rank_slot(self) -> tuple[int, int]:
        """World size and rank."""
        return (self.info.world_size, self.info.rank)


class Presence(msgspec.Struct, eq=False):
    """State of a present incarnation that is not persisted."""

    worker: RegisteredWorker
    session: str
    seen_at: float
    grace_at: float = -1.0
    """Value of `seen_at` when a silence was last forgiven (lease grace)."""
    waits_at: set[str] = set()
    """Ids of barriers."""


class Release(msgspec.Struct, eq=False, kw_only=True):
    """The answer of a release, and the workers that may need it again."""

    response: BarrierResponse
    arrivals: dict[str, tuple[str, int]]
    """Session and latest answered arrival, by worker."""


class PastReleases(msgspec.Struct, eq=False, kw_only=True):
    """The persisted part of a barrier."""

    space: str
    barrier_id: str
    number: int
    """Number of its last release, counted in the space."""
    generation: int
    releases: list[Release] = []


class Waiting(msgspec.Struct, eq=False):
    """A worker that has arrived. It counts once, even if it asked several times."""

    presence: Presence
    tokens: dict[int, Token]
    """Request ids by arrival. A repeated arrival is answered at its last request."""
    deadlines: dict[int, float] = {}
    """Deadlines by arrival; an arrival that waits without an end has none."""


class Barrier(msgspec.Struct, eq=False, kw_only=True):
    """A barrier, and the workers that wait for its next release."""

    past: PastReleases
    world_size: int = 0
    on_loss: str = "fail"
    opened_by: str = ""
    oldest_came_at: int = 0
    """Revision at which the oldest waiting incarnation came: earlier losses do not count here."""
    deadline: float | None = None
    """The earliest deadline of the waiting workers."""
    waiting: dict[str, Waiting] = {}
    """Waiting workers, in the order of arrival."""

    @property
    def barrier_id(self) -> str:
        return self.past.barrier_id


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's load of a position."""

    process: str
    number: int
    incarnation: int
    session: str


class LoadedPosition(msgspec.Struct, kw_only=True):
    """The position that a dataset was last set back to."""

    space: str
    dataset_id: str
    digest: str
    """Digest of the position: equal for equal positions."""
    loads: dict[str, Load]
    """Loads of the position since then, by worker."""


class AwaitedMembers(msgspec.Struct, kw_only=True):
    """Members of a dataset that others have named, and that were not heard yet."""

    space: str
    dataset_id: str
    members: list[str]


class Checkpoint(msgspec.Struct, eq=False, kw_only=True, frozen=True):
    """The latest checkpoint of a series."""

    notice: NotifyCheckpoint
    saved_at: float
    reported_at: float = 0.0
    """Time of the last checkpoint of the series in the event log."""
