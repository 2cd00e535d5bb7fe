"""Unified runs distributed training and reinforcement learning jobs, without Ray.

The names below are imported at first use: `import unified` loads nothing.
"""

import os
from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.builder import DLJob as DLJob
    from unified.api.builder import DLJobBuilder as DLJobBuilder
    from unified.api.builder import RLJob as RLJob
    from unified.api.builder import RLJobBuilder as RLJobBuilder
    from unified.api.runtime import *  # noqa: F403  # all of its names
    from unified.client.handle import JobHandle as JobHandle
    from unified.errors import UnifiedError as UnifiedError

__getattr__, __dir__ = lazy.exports(__name__)

if os.environ.get("UNIFIED_COMPAT"):  # most processes do without, and need not load it
    from unified import compat

    compat.apply(os.environ)
