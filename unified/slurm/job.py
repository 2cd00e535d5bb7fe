"""A job in SLURM's queue, for the process that submitted it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from unified.client.connection import MasterConnection
from unified.client.handle import JobHandle
from unified.errors import UnifiedError, UsageError
from unified.job.spec import JobSpec
from unified.security.keys import load_key
from unified.slurm import batch, commands
from unified.slurm.batch import Slurm

POLL_S, SLOW_POLL_S = 2.0, 30.0
SILENT_S = 600.0
"""Seconds for which a wait tolerates that SLURM does not answer."""
T = TypeVar("T")


class SlurmJob:
    """A job that was submitted to SLURM, or an array of them.

    Attributes:
        slurm_id: the id that SLURM gave it.
        name: the name of the job in its cluster.
    """

    def __init__(self, slurm_id: str, name: str) -> None:
        self.slurm_id = slurm_id
        self.name = name

    def __repr__(self) -> str:
        return f"<SlurmJob {self.slurm_id} {self.name}>"

    @property
    def state(self) -> str:
        """State as SLURM has it, such as ``PENDING`` or ``RUNNING``; SlurmError: SLURM does not know the job now."""
        return self._facts()[0].state

    def handle(self, timeout_s: float | None = None) -> JobHandle:
        """Wait until the job's cluster is up, and return a handle on the job; close it after use.

        Args:
            timeout_s: seconds to wait; None: for ever.

        Raises:
            SlurmError: the job has ended.
            TimeoutError: the cluster was not up in time.
        """
        return self._poll(self._try_handle, timeout_s)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the job has ended, through all its requeues, and return its exit code; 143 if it was cancelled. Of
        an array it is the first code that is not 0.

        Raises:
            SlurmError: SLURM has forgotten the job, which it does some minutes after the end.
            TimeoutError: the job has not ended in time.
        """

        def ended() -> int | None:
            found = self._facts()
            return next((each.exit_code for each in found if each.exit_code), 0) if _are_over(found) else None

        return self._poll(ended, timeout_s)

    def cancel(self) -> None:
        """Remove the job from SLURM's queue, or end it."""
        commands.call(["scancel", self.slurm_id])

    def _facts(self) -> list[commands.JobFacts]:
        if found := commands.jobs(self.slurm_id):
            return found
        raise commands.SlurmError(f"SLURM does not know job {self.slurm_id}: it has ended, and its output says how.")

    def _try_handle(self) -> JobHandle | None:
        found = self._facts()
        if _are_over(found):
            raise commands.SlurmError(f"job {self.slurm_id} has ended: its output says how.")
        folder = found[0].folder
        try:
            address = (folder / commands.ADDRESS_NAME).read_text().strip()
            connection = MasterConnection(address, key=load_key(folder / commands.KEY_NAME))
        except (OSError, UnifiedError):  # the job waits, starts, or ends
            return None
        handle = JobHandle(connection, self.name)
        try:
            handle.status()
        except UnifiedError:
            handle.close()
            return None
        return handle

    def _poll(self, look: Callable[[], T | None], timeout_s: float | None) -> T:
        """Call `look`, less and less often, until it finds something, and return that."""
        began = heard_at = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                if (found := look()) is not None:
                    return found
                heard_at = now
            except commands.SlurmError as error:
                if " refused: " not in str(error) or now - heard_at > SILENT_S:
                    raise
            if timeout_s is not None and now - began > timeout_s:
                raise TimeoutError(f"job {self.slurm_id} of SLURM is {self.state}.")
            time.sleep(min(SLOW_POLL_S, max(POLL_S, (now - began) / 20)))


def _are_over(found: Sequence[commands.JobFacts]) -> bool:
    return all(each.is_over for each in found)


def send(spec: JobSpec, slurm: Slurm, unified: Sequence[str], command: Sequence[str]) -> SlurmJob:
    """Submit a job to SLURM.

    Args:
        unified: the words that run the command line of this installation.
        command: the driver that submits the job to its cluster.
    """
    needs = batch.demand(spec, slurm)
    text = batch.script(spec.name, needs, slurm, unified, command)
    batch.check_sizes(needs, slurm, *commands.partitions(), os.environ)
    return SlurmJob(commands.submit(text), spec.name)


def this_program(name: str) -> list[str]:
    """Return the command that runs this program again, with this job name; UsageError: the program is in no file."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or sys.argv[:1] in ([""], ["-c"], ["-"]):
        raise UsageError("SLURM runs this program again, on the first node: it has to be in a file of its own.")
    return ["env", f"UNIFIED_JOB_NAME={name}", sys.executable, *sys.orig_argv[1:]]
