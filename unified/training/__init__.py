"""The training program behind `POST /train`: one run of a framework (hf, nemo or meta), from a store to a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unified.lazy import exports

if TYPE_CHECKING:
    from unified.training.checkpoints import CheckpointManager, RunCheckpointManager
    from unified.training.layout import RunLayout
    from unified.training.options import TrainingOptions
    from unified.training.program import main

__all__ = ["CheckpointManager", "RunCheckpointManager", "RunLayout", "TrainingOptions", "main"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "unified.training.checkpoints": ["CheckpointManager", "RunCheckpointManager"],
        "unified.training.layout": ["RunLayout"],
        "unified.training.options": ["TrainingOptions"],
        "unified.training.program": ["main"],
    },
)
