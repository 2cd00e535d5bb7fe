"""The plan of a transfer: tensors cut into buckets, and the tree of workers that pass them on. Pure, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from unified.protocol.records import WorkerIncarnation

BUCKET_BYTES = 32 * 1024 * 1024
ALIGNMENT = 64
"""Alignment of each tensor in a bucket's memory, in bytes."""


class TensorEntry(NamedTuple):
    key: str
    dtype: str
    """Name of the dtype in torch: ``bfloat16``."""
    shape: tuple[int, ...]
    nbytes: int
    is_sharded: bool = False
    """The tensor is spread over several ranks, which gather it together."""


class Bucket(NamedTuple):
    """Tensors that travel together."""

    entries: tuple[TensorEntry, ...]
    rank: int
    """The rank that sends it."""

    @property
    def nbytes(self) -> int:
        """Size of the memory that holds it, each tensor at its `offsets`."""
        return sum(_aligned(entry.nbytes) for entry in self.entries)

    @property
    def offsets(self) -> list[int]:
        return list(accumulate((_aligned(entry.nbytes) for entry in self.entries), initial=0))[:-1]


class TransferPlan(NamedTuple):
    """A description of one version, without the values of its tensors; the sender's first message."""

    session: str
    version: int
    buckets: tuple[Bucket, ...]
    keys: tuple[str, ...]
    """All keys, in the order of the state dict."""
    aliases: Mapping[str, str]
    """Tied tensors: a key, and the key of the entry that has its value."""
    others: Mapping[str, Any]
    """Entries that are no dense tensors, by key."""
    metadata: Any
    """Metadata that torch keeps beside a state dict (the versions of its modules)."""
    senders: tuple[WorkerIncarnation, ...]
    """Workers that will send buckets; the first is in charge of the session. It ends when one of them dies."""
    children: Mapping[str, tuple[WorkerIncarnation, ...]]
    """Workers on a root's node that it passes buckets on to, by root."""
    stays_shared: bool
    """The sender can spare the shared memory of this version until the next one."""
    timeout_s: float
    force: bool
    """The version is accepted even if a newer one is there."""
    is_catch_up: bool = False
    """A member of the role sends the version that it has to a member that a sync has left out. Such a session gives way
    to any other with that version."""

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)


def cut(entries: Iterable[TensorEntry], bucket_bytes: int, num_ranks: int = 1) -> tuple[Bucket, ...]:
    """Return buckets of at most `bucket_bytes`, in the order given; a larger tensor has a bucket of its own.

    The ranks take turns with the buckets of sharded tensors. Rank 0 sends all other buckets.
    """
    entries = list(entries)
    plain = [entry for entry in entries if not entry.is_sharded]
    sharded = [entry for entry in entries if entry.is_sharded]
    buckets = [Bucket(tuple(run), 0) for run in _runs(plain, bucket_bytes)]
    buckets += [Bucket(tuple(run), index % num_ranks) for index, run in enumerate(_runs(sharded, bucket_bytes))]
    return tuple(buckets)


def digest(buckets: Iterable[Bucket], aliases: Mapping[str, str], others: Iterable[str]) -> str:
    """Return a digest, the same for ranks that send the same model in the same way."""
    text = repr((list(buckets), sorted(aliases.items()), sorted(others)))
    return hashlib.sha256(text.encode()).hexdigest()


def tree(
    targets: Iterable[WorkerIncarnation], nodes: Mapping[str, str], here: str
) -> tuple[list[WorkerIncarnation], dict[str, tuple[WorkerIncarnation, ...]]]:
    """Return the roots that the sender sends to, and for each root the children that it passes buckets on to.

    Workers on the sender's own node read one copy in shared memory. On another node, the first worker gets the bytes
    over the network, once, and passes them on through shared memory there.

    Args:
        nodes: node of each target; empty: not known.
        here: the sender's node.
    """
    direct: list[WorkerIncarnation] = []
    by_node: dict[str, list[WorkerIncarnation]] = {}
    for target in targets:
        node = nodes[target.worker]
        if node in ("", here):
            direct.append(target)
        else:
            by_node.setdefault(node, []).append(target)
    children = {receivers[0].worker: tuple(receivers[1:]) for receivers in by_node.values() if len(receivers) > 1}
    return direct + [receivers[0] for receivers in by_node.values()], children


def _runs(entries: Sequence[TensorEntry], bucket_bytes: int) -> list[list[TensorEntry]]:
    runs: list[list[TensorEntry]] = []
    room = 0
    for entry in entries:
        nbytes = _aligned(entry.nbytes)
        if not runs or nbytes > room:
            runs.append([])
            room = bucket_bytes
        runs[-1].append(entry)
        room -= nbytes
    return runs


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
