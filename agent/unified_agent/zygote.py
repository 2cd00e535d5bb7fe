"""The agent's handles on a zygote, a child that has imported everything and forks workers, and on each worker."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from unified.protocol.agent_zygote import Fork, ZygoteToAgent, zygote_to_agent
from unified.protocol.records import JobWorkerIncarnation
from unified_agent.child_channel import ChildChannel
from unified_agent.environment import ZygoteKey
from unified_agent.helper_process import HelperProcess
from unified_agent.spawn import Spawned

SETTLED_S = 10.0
"""A zygote that ends younger than this is replaced only for the next worker: the cause may end its successor, too."""


class ZygoteHandle(HelperProcess):
    """A running zygote process; `Processes` starts, reaps and forgets it."""

    def __init__(self, spawned: Spawned, key: ZygoteKey) -> None:
        super().__init__(spawned)
        self.key, self.python = key, key.python
        self.cause = f"zygote {self.pid} of {time.time():.6f}"
        """Id of its end or hang, unique in the cluster: a fault of its workers that is charged once."""
        self.is_up = False
        self.is_given_up = False
        """True if the zygote hangs: it gets no more orders, and goes on only for its workers."""
        self._owed: set[int | None] = set()
        """Children whose fork or end the zygote still has to report."""
        self._silent_since = 0.0

    def receive(self) -> list[ZygoteToAgent]:
        return [zygote_to_agent.decode(body) for body in self.channel.receive()]

    def expect(self, child: int) -> None:
        """Note that the zygote has to report a child, from now on."""
        if not self._owed:
            self._silent_since = time.monotonic()
        self._owed.add(child)

    def was_heard(self, child: int | None = None) -> None:
        """Note that the zygote reported a child; None: only restart the time of its silence."""
        self._owed.discard(child)
        self._silent_since = time.monotonic()

    @property
    def silent_since(self) -> float | None:
        """Time (monotonic) since which a report is due and none has come; None: no report is due."""
        return self._silent_since if self._owed else None

    @property
    def is_settled(self) -> bool:
        """True if the zygote has run for so long that a successor may run, too."""
        return self.age_s > SETTLED_S

    def why_useless(self, how: str) -> str:
        """Return why the interpreter cannot start workers, from the zygote's output; `how`: the way it ended."""
        words = self.last_words()
        hint = ""
        if "No module named 'unified" in words:
            hint = f" Install it there: {self.python} -m pip install unified-runtime."
        elif self.key.modules:
            hint = f" It was told to preload {', '.join(self.key.modules)}."
        return f"the interpreter {self.python} cannot start workers: {words} ({how}).{hint}"


@dataclass(eq=False)
class ForkedWorker:
    """A worker's process, from its order to its end."""

    incarnation: JobWorkerIncarnation
    channel: ChildChannel
    order: Fork
    descriptors: list[int]
    zygote: ZygoteHandle | None = None
    """None while the worker is held."""
    pid: int = 0
    pidfd: int = -1
    held_for: ZygoteKey | None = None
    """Zygote that will fork the worker once its job's needs are met; None: it is not held."""
    is_kill_asked: bool = False
    killed_for: str = ""
    """Reason of a kill by `Processes` rather than by the core."""
    memory_mb: float = 0.0
    """Memory that its role asks for; 0: any."""
    routes: Sequence[str] = ()
    """Routes to its inbox, since its hello."""
    inbox_id: str = ""
