"""The module ``dtruntime``. Names are imported at first use: to save checkpoints needs no pyarrow."""

from unified import lazy

__path__: list[str] = []  # a package: modules of a real one, where the aliases are forced, are found by their own path
__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "CheckpointInfo": "unified.checkpoint:Manifest",  # results of `latest_checkpoint()`
        "CheckpointManager": "unified.checkpoint:CheckpointManager",
        "DatasetRegistry": "unified.data:DatasetRegistry",
        "ShardInfo": "unified.protocol.coordinator:ShardAssignment",  # results of `get_assignment`
        "TrainingOrchestrator": "unified.data:TrainingOrchestrator",
        "WorkerConfig": "unified.protocol.coordinator:WorkerRegistration",  # the coordinator's answer to a registration
    },
)
