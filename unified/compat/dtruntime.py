"""The module ``dtruntime``. Names are imported at first use: saving checkpoints needs no pyarrow."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from unified import lazy

_MODULES = {
    "unified.data": ["DatasetRegistry", "TrainingOrchestrator"],
    "unified.checkpoint": ["CheckpointManager"],
}
_RECORDS = {
    "ShardInfo": "unified.protocol.coordinator:ShardAssignment",
    "CheckpointInfo": "unified.checkpoint:Manifest",
    "WorkerConfig": "unified.protocol.coordinator:WorkerRegistration",
}
"""Records: results of `get_assignment` and `latest_checkpoint()`, and the coordinator's answer to a registration."""
__path__: list[str] = []  # a package; if the aliases are forced, its real modules are found by their own path
__all__ = [*(name for names in _MODULES.values() for name in names), *_RECORDS]
_find, __dir__ = lazy.exports(__name__, {**_MODULES, __name__: _RECORDS})


def __getattr__(name: str) -> Any:
    if name not in _RECORDS:
        return _find(name)
    module, _, ours = _RECORDS[name].partition(":")
    return getattr(import_module(module), ours)
