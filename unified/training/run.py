"""The run that a framework gets: options, ranks, device, store, and the function for reports."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from unified.errors import NonFiniteLossError, UsageError
from unified.protocol.records import SAVE_STEP, SAVE_WAIT_S
from unified.rounds.together import RankWork
from unified.threads import start_thread
from unified.training.arguments import CommonArguments
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout
from unified.training.options import TrainingOptions
from unified.training.stopping import StopFlag
from unified.worker.context import saving_here

if TYPE_CHECKING:
    from pathlib import Path

    import torch

LOOK_EVERY_S = 2.0
TELL_AFTER_S = 5.0
"""Seconds within which a working store takes a part of a save."""


class FrameworkModule(Protocol):
    """`unified.training.hf`, `nemo` or `meta`."""

    def run(self, run: TrainingRun) -> None:
        """Train from `run.resume_step`, or from the beginning, to the end.

        Raises:
            TrainingStopped: a stop was asked for, and the checkpoint is saved.
        """


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    options: TrainingOptions
    work: RankWork
    """Runs work on rank 0, on each node or on all ranks; all ranks get its errors."""
    local_rank: int
    device: torch.device
    checkpoints: RunCheckpointManager
    """Store of the checkpoints; rank 0 alone writes marks and the configuration."""
    resume_step: int | None
    """The complete step to go on from, the same on all ranks; None: from the beginning."""
    stop: StopFlag
    report: Callable[..., None]
    """``report(step=, total=, loss=, lr=, tokens_per_s=, eval_loss=, …)``: progress; only rank 0 reports it."""
    scratch: Path
    """Folder of this process for temporary files, deleted at the end of the run."""

    @property
    def arguments(self) -> CommonArguments:
        """Arguments of the framework, checked."""
        return self.options.arguments

    @property
    def layout(self) -> RunLayout:
        return self.options.layout

    @property
    def rank(self) -> int:
        return self.work.ranks.rank

    @property
    def world_size(self) -> int:
        return self.work.ranks.size

    @property
    def precision(self) -> str:
        """``bf16``, ``fp16`` or ``fp32``: the requested one, or the best of the device.

        Raises:
            UsageError: the device does not have the requested one.
        """
        import torch

        wanted = self.arguments.precision
        is_cuda = self.device.type == "cuda"
        has_bf16 = is_cuda and torch.cuda.is_bf16_supported()
        if wanted == "auto":
            return "bf16" if has_bf16 else "fp32"
        if (wanted == "fp16" and not is_cuda) or (wanted == "bf16" and is_cuda and not has_bf16):
            raise UsageError(f"{self.device} does not support precision={wanted}: give 'auto', or 'fp32'.")
        return wanted

    def resuming(self, step: int | None) -> TrainingRun:
        return replace(self, resume_step=step)

    def check_losses(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raise NonFiniteLossError if a loss is NaN or infinite, unless the run allows that."""
        for name in ("loss", "eval_loss"):
            if not math.isfinite(metrics.get(name, 0.0)) and not self.arguments.allow_non_finite_loss:
                raise NonFiniteLossError(
                    f"{name} is {metrics[name]} at step {step}, which was not saved: check the rows and lr, then "
                    "resume the run. If it fails again at once, the last checkpoint is bad, too: delete its "
                    f"step-*.json in {self.layout.checkpoints_uri}. extra_args.allow_non_finite_loss=true trains on."
                )

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Delay a stop while the block saves a step, and report if the store takes nothing for some time."""
        has_ended = threading.Event()

        def watch() -> None:
            waited_s = 0.0
            while not has_ended.wait(LOOK_EVERY_S):
                before_s, waited_s = waited_s, time.monotonic() - self.checkpoints.moved_at
                if waited_s < TELL_AFTER_S:
                    waited_s = 0.0
                elif not before_s:
                    self.log(f"the save of step {step} has waited for the store for {waited_s:.0f} s")
                if waited_s or before_s:
                    self.report(**{SAVE_STEP: step, SAVE_WAIT_S: round(waited_s, 1)})
            if waited_s:
                self.report(**{SAVE_WAIT_S: 0})

        self.checkpoints.moved_at = time.monotonic()
        thread = start_thread("unified-save-watch", watch)
        try:
            with saving_here():
                yield
        finally:
            has_ended.set()
            thread.join()

    def log(self, message: str, **values: Any) -> None:
        """Print one line, from rank 0."""
        if self.rank == 0:
            text = " ".join(f"{name}={_short(value)}" for name, value in values.items())
            print(f"{message} {text}".strip(), flush=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
