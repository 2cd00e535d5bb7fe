"""The descriptions of this agent's jobs, in memory that it shares with their workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

from msgspec import structs

from unified.job.shared_spec import SharedSpec
from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredJob, DesiredWorkers
from unified.protocol.worker_agent import Launch

log = logging.getLogger("unified_agent")


class Descriptions:
    """Files in memory with the descriptions of jobs, by job id."""

    def __init__(self) -> None:
        self._shared: dict[str, SharedSpec] = {}

    def share(self, message: DesiredWorkers) -> DesiredWorkers:
        """Return the message with its descriptions in shared memory, as far as there is enough."""
        return structs.replace(message, jobs=[self._with_shared(job) for job in message.jobs])

    def _with_shared(self, job: DesiredJob) -> DesiredJob:
        if job.spec is None:
            return job
        self._forget(job.job_id)
        try:
            shared = self._shared[job.job_id] = SharedSpec(job.spec)
        except OSError as error:
            log.warning("event=description-copied job=%s reason=%r", job.job_id, f"no shared memory: {error.strerror}")
            return job
        return structs.replace(job, spec=shared.spec)

    def keep(self, job_ids: Collection[str]) -> None:
        """Forget the descriptions of all other jobs."""
        for job_id in self._shared.keys() - job_ids:
            self._forget(job_id)

    def without_spec(self, launch: Launch) -> tuple[Launch, list[int]]:
        """Return a launch that refers to the shared description, and the descriptor to send with the launch.

        OSError: there is no descriptor left.
        """
        shared = self._shared.get(launch.job_id)
        if shared is None:
            return launch, []
        stand_in = JobSpec(name=launch.spec.name, roles=[])
        return structs.replace(launch, spec=stand_in, spec_bytes=shared.num_bytes), [os.dup(shared.descriptor)]

    def close(self) -> None:
        self.keep(())

    def _forget(self, job_id: str) -> None:
        shared = self._shared.pop(job_id, None)
        if shared is not None:
            shared.close()
