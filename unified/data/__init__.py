"""Datasets in shards: assigning them to workers, and reading them. The names below are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.data.coordinator_client import Coordinator as Coordinator
    from unified.data.coordinator_client import RemoteCoordinator as RemoteCoordinator
    from unified.data.hashing import ConsistentHash as ConsistentHash
    from unified.data.hashing import ShardManager as ShardManager
    from unified.data.local_coordinator import EmbeddedCoordinator as EmbeddedCoordinator
    from unified.data.orchestrator import TrainingOrchestrator as TrainingOrchestrator
    from unified.data.position import merge_positions as merge_positions
    from unified.data.reading import ShardReader as ShardReader
    from unified.data.reading import find_runs as find_runs
    from unified.data.reading import iter_samples as iter_samples
    from unified.data.registry import DatasetRegistry as DatasetRegistry
    from unified.data.sharded_dataset import ShardedDataset as ShardedDataset
    from unified.data.sharded_dataset import ShardSource as ShardSource

__getattr__, __dir__ = lazy.exports(__name__)
