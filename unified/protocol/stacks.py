"""Stacks of a job's workers, and the collectives that each has entered, to diagnose a worker that hangs.

Many workers have equal stacks, so each stack is written once and referred to by its index.
"""

from __future__ import annotations

from typing import Literal

from unified.values import Value

StackSource = Literal["interpreter", "faulthandler", "py-spy", "none"]


class ThreadStack(Value, frozen=True, kw_only=True):
    name: str
    """Name of the thread; the system's thread id if its interpreter could not be asked."""
    stack: int
    """Index in `StackReport.stacks`."""
    is_main: bool = False


class Collective(Value, frozen=True, kw_only=True):
    """One collective operation of one rank, as torch's flight recorder has it."""

    number: int
    """Number in its process group, from 1; the same on all ranks of the group."""
    operation: str
    """Name without the backend's name: ``all_reduce``."""
    age_s: float
    """Seconds since the rank entered it."""
    is_done: bool = False


class GroupCollectives(Value, frozen=True, kw_only=True):
    """The collectives of one rank in one process group."""

    group: str
    """Name that torch gave the group; the default one is called ``0``."""
    ranks: list[int] = []
    """Ranks of its members in the role; empty if that is not known."""
    entered: int = 0
    """Number of the last collective that the rank has entered."""
    recent: list[Collective] = []
    """Last collectives that it entered, oldest first: all unfinished ones, and at least one."""


class WorkerStacks(Value, frozen=True, kw_only=True):
    worker: str
    """Full name."""
    incarnation: int
    rank: int
    """Rank in the role's round."""
    node: str = ""
    pid: int = 0
    source: StackSource = "none"
    """`interpreter`: its own control thread answered. `faulthandler`: something held the interpreter, so a signal
    handler wrote the stacks. `py-spy`: read from outside. `none`: no stacks; the note says why."""
    note: str = ""
    """Further findings: why its interpreter did not answer, or why there are no stacks."""
    threads: list[ThreadStack] = []
    groups: list[GroupCollectives] | None = None
    """Process groups of the worker; None: not known, because only its interpreter knows them."""
    handles: str = ""
    """Exception that its main thread handles now, and the place where it was raised; empty: none."""
    has_ended: bool = False
    """True if its program has ended, so that it enters no further collective."""
    is_cut: bool = False
    """True if its flight recorder has forgotten its oldest entries: it may have used groups that are not listed."""


class StackReport(Value, frozen=True, kw_only=True):
    """The stacks of several workers."""

    stacks: list[str] = []
    """Each stack once, one line per frame, ``file:line in function``, the innermost last."""
    workers: list[WorkerStacks] = []
