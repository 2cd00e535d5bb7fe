"""What workers tell each other of complete checkpoints, through their coordinator."""

from __future__ import annotations

import asyncio

from unified.data.coordinator_client import Coordinator
from unified.protocol.coordinator import CheckpointResponse, GetLatestCheckpoint, NotifyCheckpoint, RecoveryInfo


class CheckpointNotices:
    """Of one space. Made by `TrainingOrchestrator`."""

    def __init__(self, coordinator: Coordinator, space: str, worker_id: str, world_size: int) -> None:
        self._coordinator = coordinator
        self._space = space
        self._worker_id = worker_id
        self._world_size = world_size

    async def notify(
        self,
        step: int,
        path: str,
        *,
        name: str = "default",
        size_bytes: int = 0,
        checksum: str = "",
        **metadata: object,
    ) -> bool:
        """Say that a checkpoint is complete, so that all know from where to go on. `CheckpointManager` says it by
        itself: this is for checkpoints that something else wrote.

        Args:
            path: of its manifest.
            name: of the series that it belongs to.
            metadata: anything else, kept as text.

        Returns:
            Whether it is the latest of its series.

        Raises:
            CoordinatorError: refused.
        """
        request = NotifyCheckpoint(
            space=self._space,
            worker_id=self._worker_id,
            step=step,
            path=path,
            name=name,
            size_bytes=size_bytes,
            checksum=checksum,
            world_size=self._world_size,
            metadata={key: str(value) for key, value in metadata.items()},
        )
        answer = await asyncio.wrap_future(self._coordinator.submit(request, CheckpointResponse))
        return answer.is_latest

    async def latest(self, name: str = "default") -> RecoveryInfo | None:
        """The latest complete checkpoint of a series that anybody told of; None if nobody did."""
        request = GetLatestCheckpoint(space=self._space, name=name)
        answer = await asyncio.wrap_future(self._coordinator.submit(request, RecoveryInfo))
        return answer if answer.is_found else None
