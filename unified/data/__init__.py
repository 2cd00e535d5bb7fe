"""Datasets in shards: assigning them to workers, and reading them. The names below are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.coordinator.client import Coordinator, RemoteCoordinator
    from unified.coordinator.embedded import EmbeddedCoordinator
    from unified.coordinator.hashing import ConsistentHash, ShardManager
    from unified.coordinator.orchestrator import TrainingOrchestrator
    from unified.data.position import merge_positions
    from unified.data.reading import ShardReader, find_runs, iter_samples
    from unified.data.registry import DatasetRegistry
    from unified.data.sharded_dataset import ShardedDataset, ShardSource

__all__ = [
    "ConsistentHash",
    "Coordinator",
    "DatasetRegistry",
    "EmbeddedCoordinator",
    "RemoteCoordinator",
    "ShardManager",
    "ShardReader",
    "ShardSource",
    "ShardedDataset",
    "TrainingOrchestrator",
    "find_runs",
    "iter_samples",
    "merge_positions",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.coordinator.client": ["Coordinator", "RemoteCoordinator"],
        "unified.coordinator.hashing": ["ConsistentHash", "ShardManager"],
        "unified.coordinator.embedded": ["EmbeddedCoordinator"],
        "unified.coordinator.orchestrator": ["TrainingOrchestrator"],
        "unified.data.registry": ["DatasetRegistry"],
        "unified.data.reading": ["ShardReader", "find_runs", "iter_samples"],
        "unified.data.position": ["merge_positions"],
        "unified.data.sharded_dataset": ["ShardSource", "ShardedDataset"],
    },
)
