"""Consistent hashing with bounded load: each shard goes to its place on a ring of workers, or to the next with room."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b, shake_128

PLACES = 1 << 16
"""Of the ring: few enough for a table of them all, and many enough for thousands of workers."""
POINTS = 8
"""Of a worker on the ring. More of them even out what its places hold; the limit on its load does the rest."""
BLOCK = 4096
"""Shards whose places are taken from one digest, which costs a hundredth of a digest for each."""
TABLE_PAYS = 4096
"""From so many shards on it is quicker to make a table of all places than to search for that of each shard."""


def spread(salt: str, shard_ids: Sequence[int], rooms: Mapping[str, int]) -> dict[str, list[int]]:
    """Give shards to workers with room for all of them. The salt tells one spreading from another.

    Returns:
        Of each worker with room its shards, in no particular order. It depends on the order of `shard_ids`.
    """
    names = sorted(name for name, room in rooms.items() if room)
    if len(names) < 2:
        return {name: list(shard_ids) for name in names}
    points = sorted(point << 32 | index for index, name in enumerate(names) for point in points_of(name))
    lists: list[list[int]] = [[] for _ in names]
    # `lists[…].append(shard_id)` for each shard, as a pipeline without a loop of ours: half of the whole time saved.
    deque(map(list.append, _owners(salt, shard_ids, points, lists), shard_ids), maxlen=0)

    left = [rooms[name] - len(owned) for name, owned in zip(names, lists, strict=True)]
    surplus: list[int] = []
    for room, owned in zip(left, lists, strict=True):
        if room < 0:
            surplus += owned[room:]
            del owned[room:]
    # What found its worker full goes on along the ring, from its own place: once round takes all of it up, and nearly
    # once more takes it to any room that there is.
    waiting = sorted(place << 32 | shard_id for place, shard_id in zip(places(salt, surplus), surplus, strict=True))
    in_order = [each & 0xFFFFFFFF for each in waiting]
    begin = 0
    for is_second_round in (False, True):
        for point in points:
            if begin == len(waiting):
                break
            index = point & 0xFFFFFFFF
            if left[index] > 0:
                end = min(begin + left[index], len(waiting))
                if not is_second_round:  # only those whose place is not beyond this point
                    end = bisect_left(waiting, (point >> 48) + 1 << 32, begin, end)
                lists[index] += in_order[begin:end]
                left[index] -= end - begin
                begin = end
    return dict(zip(names, lists, strict=True))


def points_of(worker: str, num_points: int = POINTS) -> array[int]:
    """Where this worker stands on a ring of 2**32 places: the same on any machine."""
    digests = (blake2b(f"{block}/{worker}".encode()).digest() for block in range(-(-num_points // 16)))
    return little_endian("I", b"".join(digests)[: 4 * num_points])


def places(salt: str, shard_ids: Sequence[int]) -> Iterable[int]:
    """Where these shards stand on a ring of 2**16 places, which depends on the salt and each shard's number alone."""
    if not shard_ids:
        return ()
    is_whole = shard_ids == range(len(shard_ids))
    num_blocks = (len(shard_ids) - 1 if is_whole else max(shard_ids)) // BLOCK + 1
    if num_blocks <= len(shard_ids) // BLOCK + 64:
        dense = array("H")
        for block in range(num_blocks):
            dense += _block(salt, block)
        return dense[: len(shard_ids)] if is_whole else map(dense.__getitem__, shard_ids)
    blocks = {block: _block(salt, block) for block in {shard_id // BLOCK for shard_id in shard_ids}}
    return (blocks[shard_id // BLOCK][shard_id % BLOCK] for shard_id in shard_ids)


def ticket(dataset_id: str, worker: str) -> bytes:
    """Decides between workers that are equal otherwise: differently for each dataset, so that none has always more."""
    return blake2b(f"{worker}/{dataset_id}".encode(), digest_size=8).digest()


def little_endian(typecode: str, content: bytes) -> array[int]:
    """Numbers from bytes, the same on any machine."""
    numbers = array(typecode, content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _block(salt: str, block: int) -> array[int]:
    return little_endian("H", shake_128(f"{block}/{salt}".encode()).digest(2 * BLOCK))


def _owners(
    salt: str, shard_ids: Sequence[int], points: Sequence[int], lists: Sequence[list[int]]
) -> Iterable[list[int]]:
    """Of each shard the list of the worker at its place, or at the next place that has one."""
    standing = [point >> 48 for point in points]
    if len(shard_ids) < TABLE_PAYS:
        owner = [lists[point & 0xFFFFFFFF] for point in points] + [lists[points[0] & 0xFFFFFFFF]]
        return (owner[bisect_left(standing, place)] for place in places(salt, shard_ids))
    table: list[list[int]] = []
    for place, point in zip(standing, points, strict=True):
        table += [lists[point & 0xFFFFFFFF]] * (place + 1 - len(table))
    table += [lists[points[0] & 0xFFFFFFFF]] * (PLACES - len(table))
    return map(table.__getitem__, places(salt, shard_ids))
