"""Assignment of shards to workers without a coordinator: a plain ring, and an even spread that follows workers.

`DatasetRegistry` does this for you. These classes are for programs that keep their own list of workers; all processes
with the same list come to the same answer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from unified.coordinator.core.shards.hash_ring import points_of
from unified.coordinator.core.shards.ledger import Ledger
from unified.coordinator.core.shards.plan import ShardPlan
from unified.errors import DatasetError


class ConsistentHash:
    """A ring of nodes: a shard belongs to the first node at or after its own place.

    A node that joins takes shards, and a node that leaves gives its shards up; no other shard moves. The ring has no
    memory, so it is less even than `ShardManager`: with 256 points a node has the mean ± 6 % (standard deviation), on
    many shards.

    Args:
        nodes: the nodes at the beginning.
        num_points: points of each node on the ring, 1 or more. Four times as many halve the unevenness.
    """

    def __init__(self, nodes: Iterable[str] = (), *, num_points: int = 256) -> None:
        if num_points < 1:
            raise DatasetError(f"A ring needs 1 point or more for each node, not {num_points}.")
        self._num_points = num_points
        self._nodes = set(nodes)
        self._ring: tuple[list[int], list[str]] | None = None
        """The sorted ring, made at the first look-up after a change: often many nodes are added together."""

    @property
    def nodes(self) -> Sequence[str]:
        """The nodes in the order of their names."""
        return sorted(self._nodes)

    def add_node(self, node: str) -> None:
        """Add a node; a known node changes nothing."""
        self._nodes.add(node)
        self._ring = None

    def remove_node(self, node: str) -> None:
        """Remove a node; an unknown node changes nothing."""
        self._nodes.discard(node)
        self._ring = None

    def get_node_for_shard(self, dataset_id: str, shard_id: int) -> str:
        """Return the node that this shard of this dataset belongs to.

        Raises:
            DatasetError: there are no nodes.
        """
        if not self._nodes:
            raise DatasetError(
                f"Shard {shard_id} of {dataset_id!r} belongs to no node: the ring is empty. Add one first."
            )
        if self._ring is None:
            points = sorted((point, node) for node in self._nodes for point in points_of(node, self._num_points))
            self._ring = [point for point, _ in points], [node for _, node in points]
        positions, nodes = self._ring
        place = int.from_bytes(blake2b(f"{shard_id}/{dataset_id}".encode(), digest_size=4).digest(), "little")
        return nodes[bisect_left(positions, place) % len(nodes)]


class ShardManager:
    """The shards of one dataset, spread evenly over workers that come and go.

    Before any shard is reported, each worker has the mean number of shards, rounded down or up. When a worker joins,
    the workers with most shards give it its share. When a worker leaves, the workers with fewest shards get its shards.
    Nothing else moves.

    Args:
        dataset_id: the dataset's name, on which the spread depends.
        num_shards: 0 to a million.
        workers: the workers at the beginning.
        shuffle: spread the shards anew in each epoch, and read them in an order that depends only on the seed, the
            dataset and the epoch. Default: each worker reads the same shards in each epoch, by rising number.
        seed: the seed of that order.
    """

    def __init__(
        self, dataset_id: str, num_shards: int, workers: Iterable[str] = (), *, shuffle: bool = False, seed: int = 0
    ) -> None:
        plan = ShardPlan(dataset_id=dataset_id, total_samples=num_shards, shard_size=1, shuffle=shuffle, seed=seed)
        self._ledger = Ledger(plan, workers)

    @property
    def workers(self) -> Sequence[str]:
        """The workers in the order of their names."""
        return self._ledger.workers

    def add_worker(self, worker: str) -> None:
        """Add a worker; a known worker changes nothing."""
        self._ledger.set_workers([*self._ledger.workers, worker])

    def remove_worker(self, worker: str) -> None:
        """Remove a worker: its unfinished shards go to others. An unknown worker changes nothing."""
        self._ledger.set_workers([name for name in self._ledger.workers if name != worker])

    def assign_shards(self, epoch: int, worker: str) -> list[int]:
        """Return this worker's unread shards of an epoch, in the order of reading. A new worker joins the others.

        Raises:
            DatasetError: the epoch is past or below 0.
        """
        if worker not in self._ledger.workers:
            self.add_worker(worker)
        return self._ledger.shards_of(worker, epoch)

    def mark_done(self, epoch: int, worker: str, shard_ids: Iterable[int]) -> list[int]:
        """Mark shards as read by this worker, so that nobody reads them again; return its own shards among them, which
        count.

        Raises:
            DatasetError: there is no such shard, or the epoch is below 0.
        """
        return self._ledger.mark_done(epoch, worker, shard_ids)

    def advance_epoch(self, epoch: int) -> None:
        """Forget the epochs before this one, with their unfinished shards. A past epoch changes nothing.

        Raises:
            DatasetError: the epoch is below 0.
        """
        self._ledger.advance(epoch)
