"""The agent's handles on one zygote, a child that has everything imported and forks workers, and on each of these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from unified import process
from unified.protocol.agent_zygote import Fork, ZygoteToAgent, zygote_to_agent
from unified.protocol.records import JobWorkerIncarnation
from unified_agent.child_channel import ChildChannel
from unified_agent.helper_process import HelperProcess
from unified_agent.spawn import Spawned

SETTLED_S = 10.0
"""Age below which a zygote that ends is not replaced before a worker needs one: what ended it may end the next."""
IMPORT_NICE = 10
"""Nice value of imports that no worker waits for: beside a rank that computes they get a tenth of a core."""

HURRY_AGAIN_S = 0.1
"""Time after which a session's nice value is set again that the kernel has refused."""


class ZygoteHandle(HelperProcess):
    """A running zygote process, made and forgotten by `Processes`, which also reaps it."""

    def __init__(self, spawned: Spawned) -> None:
        super().__init__(spawned)
        self.python = spawned.python
        self.is_up = False
        self.is_given_up = False
        """True if it hangs: it is sent no more orders, and lives on for the sake of its workers."""
        self._owed: set[int | None] = set()
        """Children of which it has to tell the fork or the end."""
        self._silent_since = 0.0
        self._is_niced = False
        self.hurry_at: float | None = None
        """Time at which it is to be hurried again, on the monotonic clock; None: that was done, or need not be."""

    def receive(self) -> list[ZygoteToAgent]:
        """Return the messages that have come."""
        return [zygote_to_agent.decode(body) for body in self.channel.receive()]

    def import_at_leisure(self) -> None:
        """Let it import after those who compute, until a worker is wanted of it."""
        self._is_niced = True
        process.nice_session(IMPORT_NICE, self.pid)

    def hurry(self) -> None:
        """Let it import like everybody else, as a worker is wanted of it."""
        if self._is_niced:
            self._is_niced = not process.nice_session(0, self.pid)
        self.hurry_at = time.monotonic() + HURRY_AGAIN_S if self._is_niced else None

    def expect(self, child: int) -> None:
        """Note that it has to tell of a child, from now on."""
        if not self._owed:
            self._silent_since = time.monotonic()
        self._owed.add(child)

    def was_heard(self, child: int | None = None) -> None:
        """Note that it has reported a child, and so does not hang; None: its time begins anew."""
        self._owed.discard(child)
        self._silent_since = time.monotonic()

    @property
    def silent_since(self) -> float | None:
        """Time since which it has told nothing although it has to, on the monotonic clock; None: it has not to."""
        return self._silent_since if self._owed else None

    @property
    def is_settled(self) -> bool:
        """True if it has lived for so long that another in its place may live, too."""
        return self.age_s > SETTLED_S

    def why_useless(self, how: str) -> str:
        """Return why its interpreter cannot start workers, from what it has written; `how`: the way it ended."""
        words = self.last_words()
        hint = ""
        if "No module named 'unified" in words:
            hint = f" Install it there: {self.python} -m pip install unified-runtime."
        return f"the interpreter {self.python} cannot start workers: {words} ({how}).{hint}"


@dataclass(eq=False)
class ForkedWorker:
    """A worker's process, from the wish for it to its end."""

    incarnation: JobWorkerIncarnation
    channel: ChildChannel
    order: Fork
    descriptors: list[int]
    zygote: ZygoteHandle | None = None
    """None while the order waits for a zygote that is up."""
    pid: int = 0
    pidfd: int = -1
    held_for: str = ""
    """Interpreter that is to run it once what its job needs is there; empty: it is not held."""
    is_kill_asked: bool = False
    killed_for: str = ""
    """Reason for which it is killed here, rather than by the core."""
    memory_mb: float = 0.0
    """Memory that its role asks for; 0: any."""
    routes: Sequence[str] = ()
    """Routes to its inbox, since its hello."""
    inbox_id: str = ""
