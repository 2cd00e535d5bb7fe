"""The directory of a job as one process knows it: the newest incarnation of each worker, and who holds which name.

Pure: entries in, typed changes out. Entries may come in any order and several times: the state is the same. The higher
incarnation wins; of one incarnation ENDED beats DEAD beats ALIVE, an inbox beats none, and the higher revision wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unified.protocol.records import DirectoryEntry, Inbox, Reachability, WorkerIncarnation

_RANK = {Reachability.ALIVE: 0, Reachability.DEAD: 1, Reachability.ENDED: 2}


class IncarnationStarted(NamedTuple):
    """An incarnation that can be called from now on."""

    worker: str
    incarnation: int
    inbox: Inbox


class IncarnationDied(NamedTuple):
    """The end of an incarnation and of all earlier ones, even of incarnations that this directory never knew."""

    worker: str
    incarnation: int
    reason: str
    node: str
    """Node of the incarnation; empty: not known."""
    inbox: Inbox | None
    """None: no inbox of it was ever known."""


class WorkerEnded(NamedTuple):
    """The end of a worker: no incarnation will follow."""

    worker: str
    incarnation: int
    reason: str


class NameMoved(NamedTuple):
    """A name with a new holder; None: nobody holds it."""

    name: str
    holder: WorkerIncarnation | None


Change = IncarnationStarted | IncarnationDied | WorkerEnded | NameMoved


class WorkerDirectory:
    """The newest known entry of every worker. It may be read while another thread merges."""

    def __init__(self) -> None:
        self._entries: dict[str, DirectoryEntry] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._nodes: dict[str, str] = {}
        self._holders: dict[str, WorkerIncarnation] = {}

    @property
    def entries(self) -> list[DirectoryEntry]:
        return list(self._entries.values())

    def get(self, worker: str) -> DirectoryEntry | None:
        """Return the newest entry of a worker."""
        return self._entries.get(worker)

    def inbox(self, inbox_id: str) -> Inbox | None:
        """Return an inbox of an incarnation that is alive."""
        return self._inboxes.get(inbox_id)

    def node(self, worker: str) -> str:
        """Return the node that a worker was last on; empty: not known."""
        return self._nodes.get(worker, "")

    def holder(self, name: str) -> WorkerIncarnation | None:
        return self._holders.get(name)

    def reachable(self, worker: str) -> Inbox | None:
        """Return the inbox at which the worker can be called now; None: calls wait, or are hopeless (`is_ended`)."""
        entry = self._entries.get(worker)
        return entry.inbox if entry is not None and entry.state is Reachability.ALIVE else None

    def newest_over(self, worker: str) -> int:
        """Return the newest incarnation of a worker that is known to be over, like all earlier ones; -1: none."""
        entry = self._entries.get(worker)
        return -1 if entry is None else _newest_over(entry)

    def is_ended(self, worker: str) -> bool:
        """Return True if no incarnation of the worker will follow."""
        entry = self._entries.get(worker)
        return entry is not None and entry.state is Reachability.ENDED

    def why_waiting(self, worker: str) -> str:
        """Return why a call to a worker waits, as half a sentence."""
        entry = self._entries.get(worker)
        if entry is None:
            return "it has not started yet"
        if entry.state is Reachability.ALIVE:
            return f"its incarnation {entry.incarnation} has no inbox yet"
        reason = entry.reason or "no reason given"
        if entry.state is Reachability.ENDED:
            return f"it has ended for good ({reason})"
        return f"its incarnation {entry.incarnation} ended ({reason}) and the next has not begun"

    def merge(self, entries: Iterable[DirectoryEntry]) -> list[Change]:
        """Take entries in; return the changes, names last and each name once."""
        changes: list[Change] = []
        moved: dict[str, WorkerIncarnation | None] = {}
        for entry in entries:
            self._merge(entry, changes, moved)
        for name, before in moved.items():
            if (holder := self._holders.get(name)) != before:
                changes.append(NameMoved(name, holder))
        return changes

    def accept(self, entries: Iterable[DirectoryEntry]) -> list[DirectoryEntry]:
        """Take entries in; return the new ones, to be passed on."""
        return [entry for entry in entries if self._merge(entry, [], {})]

    def _merge(self, new: DirectoryEntry, changes: list[Change], moved: dict[str, WorkerIncarnation | None]) -> bool:
        """Take one entry in; return whether it was newer."""
        old = self._entries.get(new.worker)
        if old is not None and _weight(new) <= _weight(old):
            return False
        self._entries[new.worker] = new
        if new.node:
            self._nodes[new.worker] = new.node
        if (died := _died(old, new)) is not None:
            if died.inbox is not None:
                self._inboxes.pop(died.inbox.inbox_id, None)
            changes.append(died)
        if new.state is Reachability.ALIVE and new.inbox is not None and new.inbox.inbox_id not in self._inboxes:
            self._inboxes[new.inbox.inbox_id] = new.inbox
            changes.append(IncarnationStarted(new.worker, new.incarnation, new.inbox))
        if new.state is Reachability.ENDED:
            changes.append(WorkerEnded(new.worker, new.incarnation, new.reason))
        self._move_names(old, new, moved)
        return True

    def _move_names(
        self, old: DirectoryEntry | None, new: DirectoryEntry, moved: dict[str, WorkerIncarnation | None]
    ) -> None:
        """Move names to their new holders. If two workers claim a name, the later entry wins."""
        names = _names(new)
        if old is not None:
            for name in _names(old).keys() - names.keys():
                holder = self._holders.get(name)
                if holder is not None and holder.worker == new.worker:
                    moved.setdefault(name, holder)
                    del self._holders[name]
        for name in names:
            moved.setdefault(name, self._holders.get(name))
            self._holders[name] = WorkerIncarnation(new.worker, new.incarnation)


def _weight(entry: DirectoryEntry) -> tuple[int, int, bool, int]:
    return entry.incarnation, _RANK[entry.state], entry.inbox is not None, entry.revision


def _newest_over(entry: DirectoryEntry) -> int:
    return entry.incarnation - 1 if entry.state is Reachability.ALIVE else entry.incarnation


def _names(entry: DirectoryEntry) -> dict[str, int]:
    return entry.names if entry.state is Reachability.ALIVE else {}


def _died(old: DirectoryEntry | None, new: DirectoryEntry) -> IncarnationDied | None:
    over = _newest_over(new)
    if over <= (-1 if old is None else _newest_over(old)):
        return None
    reason = new.reason
    if not reason:
        reason = "no reason given" if over == new.incarnation else f"incarnation {new.incarnation} took its place"
    inbox, node = (new.inbox, new.node) if over == new.incarnation else (None, "")
    if old is not None and old.state is Reachability.ALIVE:
        inbox, node = old.inbox, old.node
    return IncarnationDied(new.worker, over, reason, node, inbox)
