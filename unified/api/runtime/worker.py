"""The worker that this process is: `current_worker()` and what it returns."""

from unified.job.job_info import JobInfo
from unified.worker.context import ActorInfo, Worker, current_worker

__all__ = ["ActorInfo", "JobInfo", "Worker", "current_worker"]
