"""Unified runs distributed training and reinforcement learning jobs, without Ray.

The names below are imported at first use: `import unified` loads nothing.
"""

import os
from typing import TYPE_CHECKING

from unified import lazy
from unified.api import runtime as _runtime

if TYPE_CHECKING:
    from unified.api.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder
    from unified.api.runtime import *  # noqa: F403  # all of its names
    from unified.client.cluster_client import ClusterClient, connect
    from unified.client.handle import JobHandle
    from unified.client.local_cluster import local_cluster
    from unified.errors import UnifiedError

__all__ = ["ClusterClient", "DLJob", "DLJobBuilder", "JobHandle", "RLJob", "RLJobBuilder", "UnifiedError", "connect"]
__all__ += ["local_cluster"]
__all__ += _runtime.__all__

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.api.builder": ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder"],
        "unified.api.runtime": _runtime.__all__,
        "unified.client.cluster_client": ["ClusterClient", "connect"],
        "unified.client.handle": ["JobHandle"],
        "unified.client.local_cluster": ["local_cluster"],
        "unified.errors": ["UnifiedError"],
    },
)

if os.environ.get("UNIFIED_COMPAT"):  # most processes do not set it, and need not load this
    from unified import compat

    compat.apply(os.environ)
