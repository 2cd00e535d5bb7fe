"""Consistent hashing with bounded load: a shard goes to the worker at its place on a ring, or to the next with room."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import blake2b, shake_128

POINTS = 4
"""Points of a worker on the ring. More points would even out the loads, but the capacities do that already."""
ROWS = 2048
"""Rows of a large dataset, or up to twice as many: sorted in a millisecond, and enough for a random-like spread."""


def spread(
    salt: str, shard_ids: Sequence[int], num_shards: int, capacities: Mapping[str, int]
) -> dict[str, array[int]]:
    """Return the shards of each worker with capacity, in no particular order. Together the workers can take all shards.

    Args:
        salt: makes one spread differ from another.
        shard_ids: each once, below `num_shards`; their order does not matter.
        num_shards: places on the ring.
    """
    names = sorted(name for name, capacity in capacities.items() if capacity)
    if len(names) < 2:
        return {name: array("I", shard_ids) for name in names}
    points = sorted(point << 32 | index for index, name in enumerate(names) for point in points_of(name))
    in_order, positions = along_the_ring(salt, shard_ids, num_shards)
    lists = [array("I") for _ in names]
    left = [capacities[name] for name in names]
    # Each point's worker takes, within its capacity, the shards since the previous point, and shards left over there.
    # After at most two rounds all shards are taken.
    begin = 0
    for is_second_round in (False, True):
        for point in points:
            index = point & 0xFFFFFFFF
            if capacity := left[index]:
                end = begin + capacity
                if not is_second_round:
                    stop = ((point >> 32) * num_shards >> 32) + 1  # the place after this point
                    end = min(end, stop if positions is None else bisect_left(positions, stop, begin))
                if begin < end:
                    lists[index] += in_order[begin:end]
                    left[index] = capacity - (end - begin)
                    begin = end
        if begin >= len(in_order):
            break
    return dict(zip(names, lists, strict=True))


def points_of(worker: str, num_points: int = POINTS) -> array[int]:
    """Return the places of a worker on a ring of 2**32 places: the same on any machine."""
    digests = (blake2b(f"{block}/{worker}".encode()).digest() for block in range(-(-num_points // 16)))
    return little_endian("I", b"".join(digests)[: 4 * num_points])


def tie_break(dataset_id: str, worker: str) -> bytes:
    """Return the hash that decides between equal workers. It differs by dataset, so that no worker always has more."""
    return blake2b(f"{worker}/{dataset_id}".encode(), digest_size=8).digest()


def little_endian(typecode: str, content: bytes) -> array[int]:
    """Return numbers from bytes, the same on any machine."""
    numbers = array(typecode, content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def along_the_ring(salt: str, shard_ids: Sequence[int], num_shards: int) -> tuple[array[int], list[int] | None]:
    """Return shards in the order of their places on a ring of `num_shards`, and these places; None for all places.

    The salt determines the order. Many shards are ordered by rows; a row is every n-th shard. To join rows is a hundred
    times as fast as to sort shards.
    """
    draw = shake_128(salt.encode())
    num_rows = min(ROWS + int.from_bytes(draw.digest(4), "little") % ROWS, num_shards)
    rows = sorted(range(num_rows), key=little_endian("I", draw.digest(4 * num_rows)).__getitem__)
    if len(shard_ids) == num_shards:
        in_order, every = array("I"), array("I", range(num_shards))
        for row in rows:
            in_order += every[row::num_rows]
        return in_order, None
    first_place = [0] * num_rows
    place = 0
    for row in rows:
        first_place[row] = place
        place += len(range(row, num_shards, num_rows))
    standing = sorted((first_place[shard_id % num_rows] + shard_id // num_rows, shard_id) for shard_id in shard_ids)
    return array("I", [shard_id for _, shard_id in standing]), [place for place, _ in standing]
