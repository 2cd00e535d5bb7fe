"""Checkpoints, saved in the background and never half written. Names are imported at first use."""

from typing import TYPE_CHECKING

from unified.lazy import exports

if TYPE_CHECKING:
    from unified.checkpoint.checkpoint_manager import CheckpointManager
    from unified.checkpoint.load import CheckpointFallbackWarning, LoadReport
    from unified.checkpoint.manifest import CheckpointUnverifiedWarning, Manifest, Part

__all__ = [
    "CheckpointFallbackWarning",
    "CheckpointManager",
    "CheckpointUnverifiedWarning",
    "LoadReport",
    "Manifest",
    "Part",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "unified.checkpoint.load": ["CheckpointFallbackWarning", "LoadReport"],
        "unified.checkpoint.checkpoint_manager": ["CheckpointManager"],
        "unified.checkpoint.manifest": ["CheckpointUnverifiedWarning", "Manifest", "Part"],
    },
)
