"""Files spread over ranks, each as a whole to one: for readers that take lists of files and no rows of them."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def spread_files(sizes: Sequence[int], world_size: int, order: Sequence[int]) -> list[list[int]]:
    """The numbers of the files of each rank, in the order of reading. Files without rows are nobody's.

    The largest files are given out first, each to the rank that has fewest rows (of equal ones, fewest files). So files
    of one size go round the ranks, and no rank has more than one file more than another.

    Args:
        sizes: rows of each file.
        world_size: how many ranks there are, 1 or more.
        order: every file once, as the epoch reads them.
    """
    places: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, 0, rank) for rank in range(world_size)]
    heapify(loads)
    for place in sorted(range(len(order)), key=lambda place: -sizes[order[place]]):  # stable: equal ones in order
        num_rows, num_files, rank = loads[0]
        if not sizes[order[place]]:
            break
        places[rank].append(place)
        heapreplace(loads, (num_rows + sizes[order[place]], num_files + 1, rank))
    return [[order[place] for place in sorted(mine)] for mine in places]
