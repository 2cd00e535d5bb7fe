"""The directory of one job, as the agent hands it on to the job's workers."""

from __future__ import annotations

from collections.abc import Iterable

from unified.protocol.records import DirectoryEntry, Reachability

_RANK = {Reachability.ALIVE: 0, Reachability.DEAD: 1, Reachability.ENDED: 2}


class JobDirectory:
    """Entries by worker; merging is idempotent and takes any order."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectoryEntry] = {}

    def merge(self, entries: Iterable[DirectoryEntry]) -> list[DirectoryEntry]:
        """Take in entries; return those that told something new."""
        news: list[DirectoryEntry] = []
        for entry in entries:
            known = self._entries.get(entry.worker)
            if known is None or _weight(entry) > _weight(known):
                self._entries[entry.worker] = entry
                news.append(entry)
        return news

    @property
    def entries(self) -> list[DirectoryEntry]:
        return list(self._entries.values())


def _weight(entry: DirectoryEntry) -> tuple[int, int, bool, int]:
    """Of one life the later state weighs more, an inbox more than none, and the later answer to its claims."""
    return entry.incarnation, _RANK[entry.state], entry.inbox is not None, entry.revision
