"""Stop of a run: any rank may be asked; all ranks agree, save one checkpoint together and exit."""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from unified.errors import NotInWorkerError
from unified.values import ClosedOnExit
from unified.worker.context import current_worker
from unified.worker.stop import EXIT_TERMINATED

if TYPE_CHECKING:
    import torch


class TrainingStopped(Exception):
    """The training was stopped, and its checkpoint saved, before its last step.

    Attributes:
        step: steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class StopFlag(ClosedOnExit):
    """Flag that the worker's stop sets, or SIGTERM in a process that is no worker, until the flag is closed.

    Args:
        world_size: ranks that have to agree.
        device: device of the tensors that the ranks' process group reduces.
    """

    def __init__(self, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self._device = device
        self._asked = threading.Event()
        self._before: torch.Tensor | None = None
        self._handler_before: Any = None
        try:
            current_worker().on_stop(self._asked.set)
        except NotInWorkerError:
            if threading.current_thread() is threading.main_thread():
                self._handler_before = signal.signal(signal.SIGTERM, lambda number, frame: self._asked.set())

    def close(self) -> None:
        """Restore the earlier handler of SIGTERM."""
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)

    @property
    def is_asked(self) -> bool:
        """True if this rank was asked to stop; others may not know yet."""
        return self._asked.is_set()

    def agreed(self) -> bool:
        """Return True, on all ranks, if any rank was asked to stop. A collective: every rank calls it each step.

        On an accelerator it returns the answer of the previous step, so that no rank waits for the device.
        """
        if self._world_size == 1:
            return self.is_asked
        import torch
        from torch import distributed

        flag: torch.Tensor | None = torch.full((), float(self.is_asked), device=self._device)
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        if self._device.type != "cpu":
            flag, self._before = self._before, flag
        return flag is not None and bool(flag.item())


def exit_stopped() -> NoReturn:
    """Exit with the code of SIGTERM: the run goes on from its checkpoint when it is started again."""
    sys.exit(EXIT_TERMINATED)
