"""What a coordinator remembers. All of it is persisted but what waits: those who wait ask again when it comes back."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unified.core.coordinator.messages import Token
from unified.protocol.coordinator import BarrierResponse, NotifyCheckpoint, RegisterWorker

WORKER, BARRIER, CHECKPOINT = "coordinator-worker", "coordinator-barrier", "coordinator-checkpoint"
DATASET, LEDGER, MARK = "coordinator-dataset", "coordinator-ledger", "coordinator-mark"
POSITION, AWAITED = "coordinator-position", "coordinator-awaited"
"""Kinds of rows."""
MAX_GONE = 1000
"""Workers of a space that are gone and still remembered; the oldest are forgotten."""
MAX_BARRIERS = 1000
"""Barriers of a space that are remembered; of more, those that were used longest ago are not, if nobody waits there."""
MAX_RELEASES = 4
"""Releases of a barrier of which some answer may have been lost: those of workers that have not arrived since."""
MAX_EVENTS, EVENTS_WINDOW_S = 20, 60.0
"""Events that the workers of a space can tell in so many seconds."""
MAX_PAST_SESSIONS = 8
"""Of a worker: whose lives are over because another one began."""


def row_key(space: str, name: str) -> str:
    """Unique whatever the two contain."""
    return f"{len(space)}/{space}/{name}"


class RegisteredWorker(msgspec.Struct, eq=False, kw_only=True):
    """One life of a worker, there or gone."""

    info: RegisterWorker
    incarnation: int
    came_at: int
    """Revision of the space."""
    timeout_s: float = 30.0
    """It is lost when it was not heard of for so long."""
    gone_at: int = 0
    """Revision of the space; 0: it is there."""
    reason: str = ""
    """Why it is gone, as a clause."""
    end: str = ""
    """As the event of its going is called: ``worker-lost``, ``worker-replaced`` or ``worker-left``."""
    past_sessions: list[str] = []
    datasets: list[str] = []
    """That it is in again when it comes back, as it left them by being lost."""

    @property
    def worker_id(self) -> str:
        return self.info.worker_id

    @property
    def member(self) -> str:
        """The name of its rank, by which datasets have it."""
        return self.info.member or self.info.worker_id

    @property
    def rank_slot(self) -> tuple[int, int]:
        """Its world and its rank there."""
        return (self.info.world_size, self.info.rank)


class Presence(msgspec.Struct, eq=False):
    """What is known of a life without being persisted."""

    worker: RegisteredWorker
    session: str
    seen_at: float
    grace_at: float = -1.0
    """`seen_at` when a silence was first forgiven."""
    waits_at: set[str] = set()
    """Barriers."""


class Release(msgspec.Struct, eq=False, kw_only=True):
    """The answer of a release, and to whom it may have to be given again."""

    response: BarrierResponse
    arrivals: dict[str, tuple[str, int]]
    """By worker: session, and its latest arrival that was answered."""


class PastReleases(msgspec.Struct, eq=False, kw_only=True):
    """What is persisted of a barrier."""

    space: str
    barrier_id: str
    number: int
    """Of its last release, counted in the space."""
    generation: int
    releases: list[Release] = []


class Waiting(msgspec.Struct, eq=False):
    """A worker that has arrived; whichever way it asked, and however often, it counts once."""

    presence: Presence
    tokens: dict[int, Token]
    """By arrival. Asked again, an arrival is answered where it was asked last."""
    deadlines: dict[int, float] = {}
    """By arrival, of those that do not wait without an end."""


class Barrier(msgspec.Struct, eq=False, kw_only=True):
    """A barrier, and those who wait for its next release."""

    past: PastReleases
    world_size: int = 0
    on_loss: str = "fail"
    opened_by: str = ""
    oldest_came_at: int = 0
    """Revision at which the oldest life of those who wait came: losses before that concern nobody here."""
    deadline: float | None = None
    """The first of those who wait."""
    waiting: dict[str, Waiting] = {}
    """By worker, in the order of arrival."""

    @property
    def barrier_id(self) -> str:
        return self.past.barrier_id


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A reader loaded a position."""

    process: str
    number: int
    life: int
    session: str


class LoadedPosition(msgspec.Struct, kw_only=True):
    """The position that a dataset was last set back to."""

    space: str
    dataset_id: str
    digest: str
    """Of the position: two that are the same have the same."""
    loads: dict[str, Load]
    """By worker: who has loaded it since."""


class AwaitedMembers(msgspec.Struct, kw_only=True):
    """Members of a dataset of which nothing was heard yet: others have named them."""

    space: str
    dataset_id: str
    members: list[str]


class Checkpoint(msgspec.Struct, eq=False, kw_only=True, frozen=True):
    """The latest of its series."""

    notice: NotifyCheckpoint
    saved_at: float
    reported_at: float = 0.0
    """When one of its series was last put into the event log."""


def names(items: Iterable[str], limit: int = 20) -> str:
    """``w1, w2 and w3``; of many the first, and how many more."""
    listed = list(items)
    if len(listed) > limit:
        return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"
    return " and ".join([", ".join(listed[:-1]), listed[-1]]) if len(listed) > 1 else "".join(listed)
