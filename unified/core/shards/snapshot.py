"""A ledger as records for a store; lists of shards are bytes, 4 to a number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from unified.core.shards.assignment import Owners
from unified.core.shards.hash_ring import little_endian
from unified.core.shards.plan import ShardPlan
from unified.errors import InvariantError
from unified.values import Value


class OwnersSnapshot(Value, frozen=True, kw_only=True):
    """Who has which unfinished shards of one epoch."""

    epoch: int
    """-1: of no epoch, but what each begins with."""
    lists: list[bytes]
    """Of each of the ledger's workers, in their order: its shards as they are to be read."""
    orphans: bytes = b""
    """Shards that nobody has, as there is no worker."""
    is_moved: bool = False
    """Workers came or went since it was opened."""


class LedgerSnapshot(Value, frozen=True, kw_only=True):
    """A whole `unified.core.shards.ledger.Ledger`."""

    plan: ShardPlan
    workers: list[str]
    epoch: int
    revision: int
    complete: list[int]
    """Epochs from the current one on of which everything is done."""
    epochs: list[OwnersSnapshot]
    homes: OwnersSnapshot | None = None
    """Without `shuffle`: what each epoch begins with."""


def taken(owners: Owners, workers: Iterable[str], epoch: int = -1) -> OwnersSnapshot:
    return OwnersSnapshot(
        epoch=epoch,
        lists=[_packed(owners.lists[name][::-1]) for name in workers],
        orphans=_packed(owners.orphans),
        is_moved=owners.is_moved,
    )


def restore(owners: Owners, snapshot: OwnersSnapshot, workers: Sequence[str]) -> None:
    """Fill empty `owners` with what they had.

    Raises:
        InvariantError: the snapshot is not of so many shards and these workers.
    """
    if len(snapshot.lists) != len(workers) or any(len(each) % 4 for each in [*snapshot.lists, snapshot.orphans]):
        raise InvariantError("A snapshot of a dataset's shards is not whole: the store is damaged.")
    owners.lists = {
        name: little_endian("I", packed)[::-1] for name, packed in zip(workers, snapshot.lists, strict=True)
    }
    owners.orphans = little_endian("I", snapshot.orphans)
    owners.is_moved = snapshot.is_moved
    if broken := owners.broken_rules():
        raise InvariantError(f"A snapshot of a dataset's shards is none: {'; '.join(broken)}.")


def _packed(shard_ids: array[int]) -> bytes:
    return little_endian("I", shard_ids.tobytes()).tobytes()
