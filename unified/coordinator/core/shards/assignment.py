"""The assignment of an epoch's unfinished shards to workers, and of whole files to ranks.

Loads are balanced by water-filling: shards go to the workers with fewest shards, or come from the workers with most.
Few shards move when workers come and go.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heapify, heapreplace

from unified.coordinator.core.shards.hash_ring import spread


def fill_lowest(loads: Mapping[str, int], num_more: int, tie_breaks: Mapping[str, bytes]) -> dict[str, int]:
    """Return how many of `num_more` items each holder gets if each item goes to a holder with fewest items.

    Args:
        loads: items of each holder; at least one holder, unless `num_more` is 0.
        tie_breaks: hash of each holder; the lowest is first among holders with equal loads.
    """
    rising = sorted(loads, key=lambda name: (loads[name], tie_breaks[name]))
    level = total = 0
    num_below = 0
    for num_below, name in enumerate(rising, 1):
        total += loads[name]
        level, _ = divmod(total + num_more, num_below)
        if num_below == len(rising) or level < loads[rising[num_below]]:
            break
    below = rising[:num_below]
    more = {name: max(level - loads[name], 0) for name in below}
    if rest := num_more - sum(more.values()):
        for name in sorted((name for name in below if loads[name] <= level), key=tie_breaks.__getitem__)[:rest]:
            more[name] += 1
    return {name: count for name, count in more.items() if count}


def drain_highest(loads: Mapping[str, int], num_less: int, tie_breaks: Mapping[str, bytes]) -> dict[str, int]:
    """Return how many of `num_less` items each holder gives if each item comes from a holder with most items.

    The loads sum to `num_less` or more. The tie-breaks are as in `fill_lowest`.
    """
    ceiling = max(loads.values(), default=0)
    return fill_lowest({name: ceiling - load for name, load in loads.items()}, num_less, tie_breaks)


class Owners:
    """The unfinished shards of an epoch: a list for each worker, or orphans if there are no workers.

    Args:
        salt: makes this spreading over the ring different from others.
        num_shards: shards of the whole dataset.
        sort_keys: key of each shard; a list is read by key, then by number. None: by number.
        is_read: True if somebody may be reading the first shard of each list, which then stays there.
    """

    def __init__(self, salt: str, num_shards: int, sort_keys: Sequence[int] | None, *, is_read: bool) -> None:
        self._salt = salt
        self._num_shards = num_shards
        self._key = None if sort_keys is None else sort_keys.__getitem__
        self._is_read = is_read
        self.is_moved = False
        """True if workers came or went since this was new."""
        self.lists: dict[str, array[int]] = {}
        """Shards of each worker backwards: the shard to read first is at the end, where removal costs nothing."""
        self.orphans: array[int] = array("I")
        """Shards without an owner; empty if there are workers."""

    def begin(self, tie_breaks: Mapping[str, bytes]) -> None:
        """Spread all shards of an epoch over these workers."""
        self.lists = {name: array("I") for name in tie_breaks}
        if tie_breaks:
            self._hand_out(range(self._num_shards), fill_lowest(self._loads(), self._num_shards, tie_breaks))
        else:
            self.orphans = array("I", range(self._num_shards))

    def shards_of(self, worker: str, limit: int = 0) -> list[int]:
        """Return a worker's shards in the order of reading; the first `limit`, or with 0 all."""
        return self.lists[worker][-limit:][::-1].tolist()

    def copy_from(self, other: Owners) -> None:
        """Begin with the lists of `other`, which has the same order, and whose first shards nobody is reading."""
        self.lists = {name: shards[:] for name, shards in other.lists.items()}
        self.orphans = other.orphans[:]

    def remove(self, worker: str, shard_ids: Collection[int]) -> None:
        shards = self.lists[worker]
        if len(shard_ids) == 1 and shards[-1] in shard_ids:
            shards.pop()
            return
        gone = set(shard_ids)
        self.lists[worker] = array("I", [shard for shard in shards if shard not in gone])

    def discard(self, shard_ids: Collection[int]) -> None:
        """Remove shards from all lists."""
        for name, shards in self.lists.items():
            self.lists[name] = array("I", [shard for shard in shards if shard not in shard_ids])
        self.orphans = array("I", [shard for shard in self.orphans if shard not in shard_ids])

    def all_shards(self) -> list[int]:
        return [shard_id for shards in [*self.lists.values(), self.orphans] for shard_id in shards]

    def change(self, tie_breaks: Mapping[str, bytes]) -> None:
        """Give all shards to these workers, each with a hash that decides ties.

        Shards without an owner go to the workers with fewest shards. A new worker is filled up to the mean, rounded
        down: the workers with most shards give it the shards that they would read last.
        """
        self.is_moved = True
        freed = self.orphans
        for name in [name for name in self.lists if name not in tie_breaks]:
            freed += self.lists.pop(name)
        new = [name for name in tie_breaks if name not in self.lists]
        for name in new:
            self.lists[name] = array("I")
        self.orphans = array("I")
        if not self.lists:
            self.orphans = freed
            return
        self._hand_out(freed, fill_lowest(self._loads(), len(freed), tie_breaks))

        mean = sum(map(len, self.lists.values())) // len(self.lists)
        lacking = {name: mean - len(self.lists[name]) for name in new if len(self.lists[name]) < mean}
        given = array("I")
        if lacking:
            for name, count in drain_highest(self._loads(), sum(lacking.values()), tie_breaks).items():
                given += self.lists[name][:count]
                del self.lists[name][:count]
        self._hand_out(given, lacking)

    def broken_rules(self) -> list[str]:
        """Return the rules that these lists break; none, unless there is a defect."""
        held = self.all_shards()
        broken = []
        if len(set(held)) < len(held):
            broken.append("a shard has two owners")
        if held and max(held) >= self._num_shards:
            broken.append(f"shard {max(held)} is none of {self._num_shards}")
        if self.lists and self.orphans:
            broken.append(f"{len(self.orphans)} shards have no owner, although there are workers")
        return broken

    def _loads(self) -> dict[str, int]:
        return {name: len(shards) for name, shards in self.lists.items()}

    def _hand_out(self, shard_ids: Sequence[int], capacities: Mapping[str, int]) -> None:
        for name, more in spread(self._salt, shard_ids, self._num_shards, capacities).items():
            shards = self.lists[name]
            first = array("I", [shards.pop()]) if self._is_read and shards else array("I")
            self.lists[name] = self._ordered([*more, *shards] if shards else more) + first

    def _ordered(self, shard_ids: Iterable[int]) -> array[int]:
        backwards = sorted(shard_ids, reverse=True)
        if self._key is not None:
            backwards.sort(key=self._key, reverse=True)
        return array("I", backwards)


def spread_files(sizes: Sequence[int], world_size: int, order: Sequence[int]) -> list[list[int]]:
    """Return the numbers of each rank's files, in the order of reading. Files without rows are left out.

    Each file goes as a whole to one rank, for readers that take files and not rows. The largest files go first, each to
    the rank with fewest rows (of equal ranks, fewest files). So files of equal size go round the ranks, which then
    differ by one file at most.

    Args:
        sizes: rows of each file.
        world_size: the number of ranks, 1 or more.
        order: every file once, in the order of the epoch.
    """
    positions: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0, rank) for rank in range(world_size)]
    heapify(loads)
    for place in sorted(range(len(order)), key=lambda place: -sizes[order[place]]):  # stable: equal ones in order
        num_rows, num_files, rank = loads[0]
        if not sizes[order[place]]:
            break
        positions[rank].append(place)
        heapreplace(loads, (num_rows + sizes[order[place]], num_files + 1, rank))
    return [[order[place] for place in sorted(mine)] for mine in positions]
