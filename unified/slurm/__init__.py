"""Jobs on SLURM: each allocation has its own cluster. Jobs save at its time limit and go on in the next allocation.

`Slurm` describes an allocation. `unified.slurm.batch` makes the sbatch script of a job from it. The script runs
`unified.slurm.execution`: a master, an agent on each node, and the job's driver.
"""

from __future__ import annotations

from unified.slurm.batch import Slurm
from unified.slurm.job import SlurmJob

__all__ = ["Slurm", "SlurmJob"]
