"""Describe a job and submit it. Names are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.builder.builder import DLJobBuilder as DLJobBuilder
    from unified.api.builder.dljob import DLJob as DLJob
    from unified.api.builder.rl import RLJob as RLJob
    from unified.api.builder.rl import RLJobBuilder as RLJobBuilder
    from unified.job.enums import RLRoleType as RLRoleType

__getattr__, __dir__ = lazy.exports(__name__)
