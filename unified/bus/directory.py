"""Who lives where: the job's directory as one worker knows it. Pure: news in, changes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unified.protocol.records import DirectoryEntry, Inbox, Reachability

_RANK = {Reachability.ALIVE: 0, Reachability.DEAD: 1, Reachability.ENDED: 2}


class LifeBegan(NamedTuple):
    """A life can be called from now on."""

    entry: DirectoryEntry
    inbox: Inbox


class LifeEnded(NamedTuple):
    """A life is over; `old` is what was known of it."""

    old: DirectoryEntry
    reason: str


class WorkerEnded(NamedTuple):
    """No life of this worker will follow."""

    entry: DirectoryEntry


Change = LifeBegan | LifeEnded | WorkerEnded


class Directory:
    """The newest known life of every worker. Entries merge in any order, and again, to the same state."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectoryEntry] = {}
        self._inboxes: dict[str, Inbox] = {}

    def get(self, worker: str) -> DirectoryEntry | None:
        return self._entries.get(worker)

    def inbox(self, inbox_id: str) -> Inbox | None:
        """Of a life that is alive."""
        return self._inboxes.get(inbox_id)

    def reachable(self, worker: str) -> Inbox | None:
        """Where the worker can be called now, or None if a call has to wait, or is hopeless (`is_ended`)."""
        entry = self._entries.get(worker)
        return entry.inbox if entry is not None and entry.state is Reachability.ALIVE else None

    def is_ended(self, worker: str) -> bool:
        entry = self._entries.get(worker)
        return entry is not None and entry.state is Reachability.ENDED

    def why_waiting(self, worker: str) -> str:
        """Why a call to it waits, as half a sentence."""
        entry = self._entries.get(worker)
        if entry is None:
            return "it has not started yet"
        if entry.state is Reachability.ALIVE:
            return f"its life {entry.incarnation} has no inbox yet"
        return f"its life {entry.incarnation} ended ({entry.reason or 'no reason given'}) and the next has not begun"

    def merge(self, entries: Iterable[DirectoryEntry]) -> list[Change]:
        """Take news in: the higher incarnation wins; of one incarnation, ENDED beats DEAD beats ALIVE."""
        return [change for entry in entries for change in self._merge(entry)]

    def _merge(self, new: DirectoryEntry) -> list[Change]:
        old = self._entries.get(new.worker)
        if old is not None and not _is_newer(old, new):
            return []
        self._entries[new.worker] = new
        changes: list[Change] = []
        if old is not None and old.state is Reachability.ALIVE and not _same_life(old, new):
            if old.inbox is not None:
                self._inboxes.pop(old.inbox.inbox_id, None)
            changes.append(LifeEnded(old, new.reason or f"life {new.incarnation} took its place"))
        elif new.state is not Reachability.ALIVE and new.inbox is not None:  # its birth was never told
            changes.append(LifeEnded(new, new.reason))
        if new.state is Reachability.ALIVE and new.inbox is not None:
            self._inboxes[new.inbox.inbox_id] = new.inbox
            changes.append(LifeBegan(new, new.inbox))
        if new.state is Reachability.ENDED:
            changes.append(WorkerEnded(new))
        return changes


def _is_newer(old: DirectoryEntry, new: DirectoryEntry) -> bool:
    if new.incarnation != old.incarnation:
        return new.incarnation > old.incarnation
    if new.state is not old.state:
        return _RANK[new.state] > _RANK[old.state]
    return new.inbox is not None and old.inbox is None


def _same_life(old: DirectoryEntry, new: DirectoryEntry) -> bool:
    return new.incarnation == old.incarnation and new.state is Reachability.ALIVE
