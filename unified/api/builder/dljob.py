"""A job that is fully described and checked, ready to be submitted."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, overload

from unified.config import settings
from unified.errors import OptionError, UsageError, nearest
from unified.job.config import DLConfig, JobConfig
from unified.job.driver import STORY_FOLDER
from unified.job.enums import AcceleratorType
from unified.job.options import SubmitOptions, submit_options
from unified.job.to_spec import to_spec
from unified.job.workloads import WorkloadDesc

if TYPE_CHECKING:
    from unified.client.handle import JobHandle
    from unified.slurm import Slurm, SlurmJob


class DLJob(DLConfig):
    """A job that `DLJobBuilder.build` has made: a checked description, to be submitted."""

    thing: ClassVar[str] = "job"

    @property
    def node_num(self) -> int:
        return self.node_number

    @property
    def device_type(self) -> AcceleratorType:
        return self.accelerator_type

    @property
    def config(self) -> Any:
        return self.user_config

    @property
    def env(self) -> Mapping[str, str]:
        return self.global_envs

    def get_workload(self, role: str) -> WorkloadDesc:
        """Return the workload of a role; KeyError, with the nearest role's name, if there is none."""
        if role not in self.workloads:
            raise KeyError(f"this job has no role {role!r}.{nearest(role, self.workloads)}")
        return self.workloads[role]

    @overload
    def submit(
        self, job_name: str | None = None, /, blocking: Literal[True] = True, **options: Unpack[SubmitOptions]
    ) -> int: ...
    @overload
    def submit(
        self, job_name: str | None = None, /, *, blocking: Literal[False], **options: Unpack[SubmitOptions]
    ) -> JobHandle: ...
    @overload
    def submit(
        self, job_name: str | None, /, blocking: Literal[False], **options: Unpack[SubmitOptions]
    ) -> JobHandle: ...
    @overload
    def submit(
        self, job_name: str | None = None, /, blocking: bool = True, **options: Unpack[SubmitOptions]
    ) -> int | JobHandle: ...
    @overload
    def submit(
        self,
        job_name: str | None = None,
        /,
        blocking: bool = True,
        *,
        on: Slurm,
        **options: Unpack[SubmitOptions],
    ) -> int | JobHandle | SlurmJob: ...
    def submit(
        self,
        job_name: str | None = None,
        /,
        blocking: bool = True,
        *,
        on: Slurm | None = None,
        **options: Unpack[SubmitOptions],
    ) -> int | JobHandle | SlurmJob:
        """Run the job on the cluster of `master`; without a master, on its own cluster on this host.

        Args:
            job_name: letters, digits and ``._-``; by default `UNIFIED_JOB_NAME`, or ``unified-`` and four digits.
            blocking: True: show progress and logs until the job ends. False: return at once.
            on: submit it to SLURM, which runs this program again in an allocation. There, `submit` uses a cluster of
                its own. With ``blocking=False`` a `SlurmJob` is returned here.
            options: the fields of `unified.job.JobConfig`, such as ``master="tcp://HOST:PORT"`` or
                ``job_max_restart=0``. Each may come from the environment instead, as `UNIFIED_JOB_MAX_RESTART`
                or `DLROVER_UNIFIED_JOB_MAX_RESTART`; keywords win.

        Returns:
            The exit code, 0 for success; with ``blocking=False`` a `JobHandle`.

        Raises:
            OptionError: an option does not exist, or its value is of the wrong kind.
            JobNameError: the name is not allowed.
            ClusterError: the master cannot be reached, or refuses the job.
            UsageError: it is called in a rank above 0 of an elastic role: each rank would submit a job.
        """
        if job_name is not None:
            if "job_name" in options:
                raise OptionError(f"the job has two names, {job_name!r} and {options['job_name']!r}: give one of them.")
            options["job_name"] = job_name
        config = submit_options(self, options, os.environ)
        if on is None or STORY_FOLDER in os.environ:  # the allocation has a cluster for this program
            return submit(config, blocking)
        from unified.slurm.job import send, this_program

        spec = to_spec(config)
        sent = send(spec, on, settings.command_line(), this_program(spec.name))
        return sent.wait() if blocking else sent


@overload
def submit(config: JobConfig, blocking: Literal[True] = True) -> int: ...
@overload
def submit(config: JobConfig, blocking: Literal[False]) -> JobHandle: ...
@overload
def submit(config: JobConfig, blocking: bool = True) -> int | JobHandle: ...
def submit(config: JobConfig, blocking: bool = True) -> int | JobHandle:
    """Run a job that is described together with its options; see `DLJob.submit`."""
    from unified.client.submission import run_job, submit_job

    _report_rank(os.environ)
    call, spec = run_job if blocking else submit_job, to_spec(config)
    if config.ship is False:
        return call(spec, master=config.master, wait=config.wait)
    from unified.client.code.archive import pack

    with pack(config.ship, config.exclude, spec.working_dir) as archive:
        return call(spec, master=config.master, wait=config.wait, archive=archive)


def _report_rank(env: Mapping[str, str]) -> None:
    """Say that this is a rank, as with `unified run submit.py`. UsageError in a rank above 0."""
    if not {"UNIFIED_JOB_ID", "TORCHELASTIC_RUN_ID"} <= env.keys():
        return
    script, rank = os.path.basename(sys.argv[0]), env.get("RANK", "0")
    text = (
        f"submit() is called in rank {rank} of job {env['UNIFIED_JOB_ID']}, and each rank that calls it submits a job. "
        f"Start a script that only submits a job with `python {script}`, not with `unified run {script}`."
    )
    if rank != "0":
        raise UsageError(text)
    print(f"unified: {text}", file=sys.stderr)
