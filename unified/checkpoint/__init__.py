"""Checkpoints, saved in the background and never half written. Names are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.checkpoint.checkpoint_manager import CheckpointManager as CheckpointManager
    from unified.checkpoint.load import CheckpointFallbackWarning as CheckpointFallbackWarning
    from unified.checkpoint.load import LoadReport as LoadReport
    from unified.checkpoint.manifest import CheckpointUnverifiedWarning as CheckpointUnverifiedWarning
    from unified.checkpoint.manifest import Manifest as Manifest
    from unified.checkpoint.manifest import Part as Part

__getattr__, __dir__ = lazy.exports(__name__)
