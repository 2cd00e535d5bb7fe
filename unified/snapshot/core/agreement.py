"""Agreement of the ranks of a round: the newest snapshot that every rank can find, and the ones they keep for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unified.protocol.snapshots import (
    MAX_PENDING,
    NO_STAMP,
    HeldSnapshot,
    RankReport,
    ServerAddress,
    SettledCopies,
    SnapshotAgreement,
    SnapshotSeries,
    SnapshotSource,
    SnapshotStamp,
    StoredSnapshot,
)


@dataclass
class CopyVotes:
    """Snapshots that a rank keeps for all ranks: the *floor*, of which all have copies, and `MAX_PENDING` later ones.

    All ranks vote on each snapshot that is due to be copied, and keep it until all have voted: it is the new floor if
    all have a copy. A rank without room is ahead of the others: until they have voted, it makes no more copies.
    """

    floor: SnapshotStamp = NO_STAMP
    last: SnapshotStamp = NO_STAMP
    """Newest snapshot that was due to be copied."""
    pending: list[SnapshotStamp] = field(default_factory=list)
    """Snapshots above the floor on which not all ranks have voted."""

    @property
    def has_room(self) -> bool:
        return len(self.pending) < MAX_PENDING

    def settle(self, settled: SettledCopies) -> None:
        """Take the result of the votes of all ranks."""
        self.floor = max(self.floor, settled.floor)
        self.pending = [stamp for stamp in self.pending if stamp > settled.newest]

    def begin_copy(self, stamp: SnapshotStamp) -> None:
        """Note a snapshot that is due to be copied, and is copied if there is room."""
        self.pending += [stamp] * self.has_room
        self.last = stamp

    def end_copy(self, confirmed: SnapshotStamp) -> None:
        """Drop the last snapshot unless it is the one that the partner got last."""
        self.pending = [stamp for stamp in self.pending if stamp != self.last or stamp == confirmed]


def agree(
    reports: Sequence[RankReport], job_id: str, role: str, *, step: int | None = None, is_replicated: bool = False
) -> SnapshotAgreement:
    """Choose a snapshot for all ranks.

    Prefer snapshots of this job to those of earlier jobs, then later rounds, then later steps. Each rank takes the
    snapshot from its own node's memory, else from another node's, else from storage.

    Args:
        reports: of all ranks, by rank.
        step: the only step to choose; None: any.
        is_replicated: all ranks have the same state, so that any rank's snapshot fits each, of any world size.
    """
    servers = [report.server for report in reports]
    by_rank = [_sources(rank, reports, job_id, role, is_replicated) for rank in range(len(reports))]
    common = set(by_rank[0]).intersection(*by_rank[1:])
    if step is not None:
        common = {each for each in common if each.stamp.step == step}
    if not common:
        return SnapshotAgreement(servers=servers, note=_what_there_is(by_rank, reports))
    best = max(common, key=lambda each: _age(each, job_id))
    sources = [found[best] for found in by_rank]
    later = best.stamp.round if best.job_id == job_id else -1
    lost = sorted({each.server.node for report in reports for each in report.elsewhere if each.lost_round > later})
    notes = []
    if lost:
        notes.append(f"{', '.join(lost)} had workers in a later round, and does not answer: a newer one may be lost")
    others = {held.world_size for _, snapshots in _answers(reports) for held in snapshots if held.stamp.round > later}
    if others := others - {len(reports)} if not is_replicated else set():
        notes.append(
            f"a newer one was taken by {', '.join(map(str, sorted(others)))} ranks, and now there are {len(reports)}"
        )
    return SnapshotAgreement(servers=servers, snapshot=best, sources=sources, note="; ".join(notes))


def partner_of(rank: int, servers: Sequence[ServerAddress]) -> ServerAddress | None:
    """Return the server of the next node, in the order of their first ranks; None: there is no other node."""
    # A node that others cannot reach can neither receive a copy nor give one.
    nodes = {server.node: server for server in servers}
    names, own = [name for name, server in nodes.items() if server.url], servers[rank].node
    if own not in names or len(names) < 2:
        return None
    return nodes[names[(names.index(own) + 1) % len(names)]]


def _sources(
    rank: int, reports: Sequence[RankReport], job_id: str, role: str, is_replicated: bool
) -> dict[StoredSnapshot, SnapshotSource]:
    """Return where a rank finds each snapshot; of several places the nearest."""
    own = reports[rank].server
    found: dict[StoredSnapshot, SnapshotSource] = {}
    for stored in reports[0 if is_replicated else rank].stored:
        series = SnapshotSeries(job_id, role, len(reports), 0 if is_replicated else rank)
        found[stored] = SnapshotSource(series=series)
    for server, snapshots in sorted(_answers(reports), key=lambda answer: answer[0].node == own.node):
        if not server.url and server.node != own.node:
            continue
        for held in sorted(snapshots, key=lambda held: not held.is_copy):
            if is_replicated or (held.rank == rank and held.world_size == len(reports)):
                series = SnapshotSeries(job_id, role, held.world_size, held.rank)
                found[StoredSnapshot(job_id=job_id, stamp=held.stamp)] = SnapshotSource(
                    series=series, length=held.length, is_copy=held.is_copy, server=server
                )
    return found


def _age(snapshot: StoredSnapshot, job_id: str) -> tuple[bool, SnapshotStamp]:
    if snapshot.job_id == job_id:
        return True, snapshot.stamp
    return False, SnapshotStamp(0, snapshot.stamp.step)


def _what_there_is(by_rank: Sequence[Mapping[StoredSnapshot, SnapshotSource]], reports: Sequence[RankReport]) -> str:
    """Return why the ranks have no snapshot in common; empty if there is none at all."""
    without = [rank for rank, sources in enumerate(by_rank) if not sources]
    sizes = {held.world_size for _, snapshots in _answers(reports) for held in snapshots} - {len(reports)}
    if any(by_rank):
        steps = {rank: sorted({each.stamp.step for each in sources}) for rank, sources in enumerate(by_rank)}
        some = ", ".join(f"rank {rank}: {found or 'none'}" for rank, found in list(steps.items())[:8])
        more = f" ({len(without)} ranks have none)" if without else ""
        return f"no step is held for every rank; there are {some}{more}"
    if sizes:
        return f"what is held was taken by {', '.join(map(str, sorted(sizes)))} ranks, and now there are {len(reports)}"
    return ""


def _answers(reports: Sequence[RankReport]) -> list[tuple[ServerAddress, list[HeldSnapshot]]]:
    elsewhere = [(each.server, each.held) for report in reports for each in report.elsewhere]
    return [(report.server, report.held) for report in reports] + elsewhere


def describe_source(source: SnapshotSource, own: ServerAddress) -> str:
    """Return where a state comes from, in a word: ``memory``, ``partner`` or ``storage``."""
    if source.server is None:
        return "storage"
    return "memory" if source.server.node == own.node and not source.is_copy else "partner"
