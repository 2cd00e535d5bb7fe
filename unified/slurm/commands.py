"""SLURM's own commands. Each has a deadline, and its failure is raised as `SlurmError`.

Output of ``--json`` and of ``sacct`` is not read: the first differs between releases, the second comes late or never.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from unified.errors import ClusterError, UsageError
from unified.values import Value

TIMEOUT_S = 60.0
FOLDER = ".unified"
"""Folder below the working directory of a SLURM job, with a subfolder for each job."""
ADDRESS_NAME = "master.address"
KEY_NAME = "cluster.key"
_NO_LIMIT = "365-00:00:00"
"""Time limit that SLURM's backfill scheduler gives a job for which nobody set one."""
_FACT = re.compile(r"(\S+?)=(.*?)(?=\s[\w/:]+=|\s*$)")


class SlurmError(ClusterError):
    """SLURM refused a request, or its commands are missing."""


class JobFacts(Value, frozen=True, kw_only=True):
    """A job, a job of an array, or a component of a heterogeneous job, as SLURM shows it."""

    slurm_id: str
    """Id of the job; for a component, of the whole heterogeneous job."""
    state: str
    """State such as ``PENDING`` or ``RUNNING``."""
    exit_code: int
    ends_at: float | None
    """Time at which it ends, in seconds since 1970; None: unknown."""
    folder: Path
    """Folder of its cluster."""

    @property
    def is_over(self) -> bool:
        return self.state not in _UNFINISHED


_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "RESIZING", "STOPPED")


def call(words: Sequence[str], *, stdin: str = "") -> str:
    """Run one of SLURM's commands and return what it printed.

    Raises:
        SlurmError: the command is missing, failed, or took too long; the message has its own words.
    """
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{words[0]} is not on the path: this needs SLURM's commands, as a login node has them."
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{words[0]} does not answer: {error}.") from None
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        plain = (re.sub(rf"^{re.escape(words[0])}: (?:error: )?", "", line) for line in said)
        reason = "; ".join(dict.fromkeys(plain)) or f"exit code {done.returncode}"
        raise SlurmError(f"{words[0]} refused: {reason.rstrip('.')}.")
    return done.stdout


def submit(script: str) -> str:
    """Submit a script; return the id that SLURM gave it."""
    return call(["sbatch", "--parsable"], stdin=script).strip().partition(";")[0]


def jobs(slurm_id: str) -> list[JobFacts]:
    """Return a job, or all of an array, also for some minutes after the end; none if SLURM does not know the id."""
    try:
        text = call(["scontrol", "show", "job", slurm_id, "--oneliner"])
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return [_facts(line) for line in text.splitlines() if line.strip()]


def ends_at(slurm_id: str) -> float | None:
    """Return when a job ends, in seconds since 1970; None: it has no time limit, or SLURM does not say."""
    with contextlib.suppress(SlurmError):
        return next((job.ends_at for job in jobs(slurm_id) if job.slurm_id == slurm_id), None)
    return None


def partitions() -> tuple[dict[str, int], str]:
    """Return the number of nodes of each partition, and the name of the default one, as far as sinfo says."""
    sizes, default = Counter[str](), ""
    with contextlib.suppress(SlurmError):
        for line in call(["sinfo", "--noheader", "--all", "--noconvert", "--format=%P|%D"]).splitlines():
            shown, _, number = line.strip().rpartition("|")
            name = shown.removesuffix("*")
            default = name if name != shown else default
            if number.isdecimal():
                sizes[name] += int(number)
    return dict(sizes), default


def _facts(line: str) -> JobFacts:
    found = dict(_FACT.findall(line))
    slurm_id = found.get("HetJobId") or found["JobId"]
    state = found["JobState"]
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    ended_by = int(number or 0)
    if state.startswith("CANCELLED"):  # the exit code of the driver does not count
        code, ended_by = "0", ended_by or signal.SIGTERM
    ends_at = found.get("EndTime", "") if found.get("TimeLimit") != _NO_LIMIT else ""
    return JobFacts(
        slurm_id=slurm_id,
        state=state,
        exit_code=int(code) or (128 + ended_by if ended_by else 0),
        ends_at=datetime.fromisoformat(ends_at).timestamp() if ends_at[:1].isdecimal() else None,
        folder=Path(found.get("WorkDir", ".")) / FOLDER / slurm_id,
    )


def folder_of(slurm_id: str) -> Path:
    """Return the folder with the address and the key of a job's cluster; UsageError: there is none."""
    found = jobs(slurm_id)
    folder = found[0].folder if found else Path.cwd() / FOLDER / slurm_id
    try:
        if folder.is_dir():
            return folder
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}.") from None
    state = f" It is {found[0].state}." if found else ""
    raise UsageError(f"job {slurm_id} of SLURM has no cluster of ours: {folder} is not there.{state}")


def hostnames(nodes: str) -> list[str]:
    """Return the names in a list of nodes such as ``n[1-3]``."""
    return call(["scontrol", "show", "hostnames", nodes]).split()


def node_address(node: str) -> str:
    match = re.search(r"\bNodeAddr=(\S+)", call(["scontrol", "show", "node", node, "--oneliner"]))
    return match[1] if match else node


def requeue(slurm_id: str, tries: int = 5) -> None:
    """Put a running job back into the queue; SlurmError: each of `tries` attempts failed."""
    for number in range(tries):
        try:
            call(["scontrol", "requeue", slurm_id])
            return
        except SlurmError:
            if number == tries - 1:
                raise
            time.sleep(2.0)
