"""What spreading shards over workers costs, and how even it is: the coordinator's pure part, without any process."""

from __future__ import annotations

import time
import tracemalloc

from unified.core.shards.ledger import Ledger
from unified.core.shards.plan import ShardPlan

SHARDS = 100_000
MANY = 1_000
"""Workers, to see what it costs."""
SOME = 100
"""Workers, to see how even it is: of so many a join has to move 1 %."""


def assign_ms(*, shuffle: bool) -> float:
    """From nothing to each of `MANY` workers' list of shards."""
    workers = _names(MANY)
    began = time.perf_counter()
    held = _assign(workers, shuffle=shuffle)
    seconds = time.perf_counter() - began
    del held  # not before the clock was read
    return seconds * 1e3


def peak_mb() -> float:
    """The most that Python had allocated for that at once (tracemalloc), shuffled; in 10**6 bytes."""
    workers = _names(MANY)
    tracemalloc.start()
    try:
        _assign(workers, shuffle=True)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def unevenness_percent() -> float:
    """How far the worker that has most, or least, is from the mean."""
    loads = [len(shards) for shards in _assign(_names(SOME), shuffle=True)[1].values()]
    mean = SHARDS / SOME
    return max(abs(load - mean) for load in loads) / mean * 100


def moved_percent() -> float:
    """How many shards have another owner when one worker more has joined."""
    ledger, before = _assign(_names(SOME), shuffle=True)
    owner = {shard: name for name, shards in before.items() for shard in shards}
    ledger.set_workers(_names(SOME + 1))
    moved = sum(owner[shard] != name for name in ledger.workers for shard in ledger.shards_of(name, 0))
    return moved / SHARDS * 100


def _assign(workers: list[str], *, shuffle: bool) -> tuple[Ledger, dict[str, list[int]]]:
    plan = ShardPlan(dataset_id="corpus", total_samples=SHARDS, shard_size=1, shuffle=shuffle, seed=1)
    ledger = Ledger(plan, workers)
    return ledger, {name: ledger.shards_of(name, 0) for name in workers}


def _names(number: int) -> list[str]:
    return [f"worker-{rank:04d}" for rank in range(number)]
