"""Work whose cost grows with the cluster, and which every message of a large one would ask for again."""

from __future__ import annotations

from unified_master.core.state import TimerKey
from unified_master.core.step import Turn

BATCH_FROM = 64
"""Nodes; a smaller cluster has everything done at once."""
BATCH_S = 0.05


def may_pass(turn: Turn, key: TimerKey) -> bool:
    """Whether to do it now. If not, the timer `key` comes when it is due, and whoever waits is found then.

    The first of a burst is served at once, so that a single event costs no delay; the others are served together.
    """
    cluster = turn.cluster
    if len(cluster.nodes) < BATCH_FROM:
        return True
    last = cluster.batched_at.get(key)
    if last is not None and last <= turn.now < last + BATCH_S:
        if key not in cluster.timers:
            cluster.timers.arm(key, last + BATCH_S)
        return False
    cluster.timers.cancel(key)
    cluster.batched_at[key] = turn.now
    return True
