"""torch's flight record of one rank: the collectives that it has entered, by process group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unified.protocol.stacks import Collective, GroupCollectives

MAX_RECENT = 32
"""Most reported collectives of a group: the last ones."""


class FlightRecord(NamedTuple):
    """Record of one rank: its collectives of the current round."""

    groups: list[GroupCollectives]
    is_cut: bool
    """True if the oldest collectives are missing."""


def read(text: str | bytes, members: Mapping[str, Sequence[int]], since_ns: int, now_ns: int) -> FlightRecord:
    """Read the JSON of the recorder; ValueError: it is something else.

    Args:
        members: ranks of each current process group, by its name.
        since_ns: beginning of the round, on the recorder's clock; entries before it are of groups of earlier rounds,
            whose names are used again.
        now_ns: the current time.
    """
    try:
        entries = json.loads(text).get("entries", [])
        found = {name: _GroupRecord(ranks) for name, ranks in members.items()}
        for entry in entries:
            if entry["time_created_ns"] >= since_ns and not entry["is_p2p"]:
                found.setdefault(str(entry["process_group"][0]), _GroupRecord(())).add(entry, now_ns)
        is_cut = bool(entries) and min(entry["record_id"] for entry in entries) > 0
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(f"torch's flight record has an unknown format: {error!r}") from None
    known = {name: group for name, group in found.items() if group.collectives or not is_cut}
    return FlightRecord([group.reported(name) for name, group in known.items()], is_cut)


class _GroupRecord:
    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.collectives: dict[int, Collective] = {}

    def add(self, entry: Mapping[str, Any], now_ns: int) -> None:
        number = int(entry["collective_seq_id"])
        self.collectives[number] = Collective(
            number=number,
            operation=str(entry["profiling_name"]).rpartition(":")[2],
            age_s=round(max(0, now_ns - int(entry["time_created_ns"])) / 1e9, 3),
            is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
        )

    def reported(self, name: str) -> GroupCollectives:
        ordered = [self.collectives[number] for number in sorted(self.collectives)]
        is_open = [each for each in ordered if not each.is_done] or ordered[-1:]
        return GroupCollectives(
            group=name,
            ranks=self.ranks,
            entered=ordered[-1].number if ordered else 0,
            recent=is_open[-MAX_RECENT:],
        )
