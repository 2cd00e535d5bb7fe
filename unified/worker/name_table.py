"""Who holds which name, as one worker knows it, and what became of its own claims. Pure: news in, changes out.

A claim has a number, and the master's answer carries it, so that an answer that is late, doubled or meant for an
earlier claim of the same name is never taken for this one's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unified.errors import UsageError
from unified.protocol.records import (
    MAX_NAME_LENGTH,
    MAX_NAMES,
    DirectoryEntry,
    NameClaims,
    Reachability,
    WorkerIncarnation,
)

_RANK = {Reachability.ALIVE: 0, Reachability.DEAD: 1, Reachability.ENDED: 2}


class NameChanged(NamedTuple):
    """A name has another holder than before; None: it has none."""

    name: str
    holder: WorkerIncarnation | None


class Claim:
    """One claim of this worker. Neither granted nor refused: there is no answer yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_granted = False
        self.refusal = ""
        """Why there will be no grant, as half a sentence."""
        self.num_waiting = 0
        """Threads that wait for the answer."""

    @property
    def is_answered(self) -> bool:
        return self.is_granted or bool(self.refusal)


class _Life(NamedTuple):
    """What is remembered of a directory entry."""

    weight: tuple[int, int, int]
    names: dict[str, int]


class NameTable:
    """The names of one job.

    Args:
        worker, incarnation: the life that this is the table of.
    """

    def __init__(self, worker: str, incarnation: int) -> None:
        self._self = WorkerIncarnation(worker, incarnation)
        self._lives: dict[str, _Life] = {}
        self._holders: dict[str, WorkerIncarnation] = {}
        self._claims: dict[str, Claim] = {}
        self._number = 0
        self._end = ""
        """Why nothing can be claimed any more."""

    @property
    def claims(self) -> NameClaims:
        """The set to tell the agent: a higher number than before means that it changed."""
        return NameClaims(number=self._number, names={name: claim.number for name, claim in self._claims.items()})

    def holder(self, name: str) -> WorkerIncarnation | None:
        return self._holders.get(name)

    def claim(self, name: str) -> Claim:
        """The claim of a name, made now unless it stands already. An answer comes with `learn`.

        Raises:
            UsageError: the name is empty or too long, or there are too many.
        """
        if name in self._claims:
            return self._claims[name]
        if not name or len(name) > MAX_NAME_LENGTH:
            raise UsageError(
                f"worker {self._self.worker} cannot claim the name {name[:40]!r}{'…' if name[40:] else ''}: "
                f"a name has 1 to {MAX_NAME_LENGTH} characters, this one {len(name)}."
            )
        if len(self._claims) >= MAX_NAMES:
            raise UsageError(
                f"worker {self._self.worker} cannot claim the name {name!r}: it has {len(self._claims)} already, and "
                "no worker may have more. Release some."
            )
        self._number += 1
        claim = self._claims[name] = Claim(self._number)
        claim.refusal = self._end
        return claim

    def withdraw(self, name: str, why: str = "") -> bool:
        """Claim or hold the name no longer; whether it was claimed or held. `why` is told to whoever waits for it."""
        claim = self._claims.pop(name, None)
        if claim is None:
            return False
        self._number += 1
        if not claim.is_answered:
            claim.refusal = why
        return True

    def learn(self, entries: Iterable[DirectoryEntry]) -> list[NameChanged]:
        """Take news of the directory in: in any order, and again, they lead to the same.

        A claim that was refused or ended is withdrawn here, so that the name can be claimed anew.
        """
        touched: dict[str, WorkerIncarnation | None] = {}
        for entry in entries:
            old = self._lives.get(entry.worker)
            weight = (entry.incarnation, _RANK[entry.state], entry.revision)
            if old is not None and weight <= old.weight:
                continue
            names = entry.names if entry.state is Reachability.ALIVE else {}
            self._lives[entry.worker] = _Life(weight, names)
            for name in {*names, *(old.names if old is not None else ())}:
                touched.setdefault(name, self._holders.get(name))
                self._move(name, WorkerIncarnation(entry.worker, entry.incarnation), holds=name in names)
            if (entry.worker, entry.incarnation) == self._self:
                self._answer(entry)
        return [
            NameChanged(name, holder)
            for name, before in touched.items()
            if (holder := self._holders.get(name)) != before
        ]

    def _move(self, name: str, life: WorkerIncarnation, *, holds: bool) -> None:
        """Of two that seem to hold it, because one was told before the other's loss, the one told last does."""
        if holds:
            self._holders[name] = life
        elif name in self._holders and self._holders[name].worker == life.worker:
            del self._holders[name]

    def _answer(self, entry: DirectoryEntry) -> None:
        if entry.state is not Reachability.ALIVE and not self._end:
            why = entry.reason or "no reason given"
            self._end = f"the master has ended life {entry.incarnation} of this worker ({why})"
        for name, claim in list(self._claims.items()):
            refusal = entry.refused.get(name)
            if self._end:
                claim.refusal = claim.refusal or self._end
            elif entry.names.get(name) == claim.number:
                claim.is_granted = True
            elif refusal is not None and refusal.number == claim.number:
                claim.refusal = f"it is held by worker {refusal.holder}"
            if claim.refusal:
                self.withdraw(name)
