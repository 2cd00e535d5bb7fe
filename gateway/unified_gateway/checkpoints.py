"""Complete checkpoints in a run's store: the run can be resumed from them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from unified.errors import CheckpointNotFoundError, NotFoundError, StorageUnavailableError
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout
from unified_gateway.schemas import CheckpointInfo

NUM_THREADS = 4
TIMEOUT_S = 20.0


class RunCheckpointReader:
    """Reads checkpoints on threads of its own, each read within a time limit."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="unified-gateway-storage")

    async def read(self, layout: RunLayout, limit: int) -> list[CheckpointInfo]:
        """Return the newest complete checkpoints of a run, the lowest step first.

        Raises:
            StorageError: the store cannot be read.
        """
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._threads, _read, layout, limit), TIMEOUT_S)
        except TimeoutError:
            raise StorageUnavailableError(f"{layout.prefix} was not read within {TIMEOUT_S:g} s.") from None

    def close(self) -> None:
        """Start no more reads; reads under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(layout: RunLayout, limit: int) -> list[CheckpointInfo]:
    found: list[CheckpointInfo] = []
    with RunCheckpointManager(layout) as manager:
        try:
            steps = manager.complete_steps()
        except NotFoundError:  # the first checkpoint makes the bucket or folder
            return []
        for step in steps[-limit:]:
            try:
                mark = manager.read_mark(step)
            except CheckpointNotFoundError:  # deleted meanwhile
                continue
            found.append(
                CheckpointInfo(
                    step=step,
                    uri=f"{layout.checkpoints_uri}/step-{step:06}.json",
                    saved_at=mark.saved_at or None,
                    world_size=mark.world_size,
                    nbytes=mark.nbytes(),
                    files=[file.name for file in mark.files],
                    metrics=mark.metrics,
                )
            )
    return found
