"""What ``import dtruntime`` gives. Names are imported at first use: to save checkpoints needs no pyarrow."""

from __future__ import annotations

from unified import lazy

_HOMES = {
    "unified.data": ["DatasetRegistry", "TrainingOrchestrator"],
    "unified.checkpoint": ["CheckpointManager"],
}
__all__ = [name for names in _HOMES.values() for name in names]
__getattr__, __dir__ = lazy.exports(__name__, _HOMES)
