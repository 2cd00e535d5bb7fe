"""Jobs on SLURM: a cluster of their own in each allocation, which saves and goes on when its time is over.

`Slurm` says what an allocation is like, `unified.slurm.batch` makes the sbatch script of a job from it, and
`unified.slurm.execution` is what that script runs: a master, an agent on each node, and the job's driver.
"""

from __future__ import annotations

from unified.slurm.batch import Slurm
from unified.slurm.job import SlurmJob

__all__ = ["Slurm", "SlurmJob"]
