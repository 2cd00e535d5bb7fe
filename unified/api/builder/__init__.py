"""Describe a job and submit it. Names are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.builder.builder import DLJobBuilder
    from unified.api.builder.dljob import DLJob
    from unified.api.builder.rl import RLJob, RLJobBuilder
    from unified.job.enums import RLRoleType

__all__ = ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder", "RLRoleType"]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.api.builder.builder": ["DLJobBuilder"],
        "unified.api.builder.dljob": ["DLJob"],
        "unified.api.builder.rl": ["RLJob", "RLJobBuilder"],
        "unified.job.enums": ["RLRoleType"],
    },
)
