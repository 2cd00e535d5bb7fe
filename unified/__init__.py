"""Unified runs distributed training and reinforcement learning jobs, without Ray.

The names below are imported at first use: `import unified` loads nothing.
"""

import os
from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.builder import DLJob, DLJobBuilder, RLJob, RLJobBuilder
    from unified.api.runtime import (
        ActorInfo,
        DataLoaderIter,
        DataQueue,
        Dataset,
        FutureSequence,
        JobInfo,
        PrimeMasterApi,
        RayDataLoaderIter,
        RoleActor,
        RoleGroup,
        RpcStream,
        UserRpcProxy,
        WeightsReceiver,
        Worker,
        create_rpc_proxy,
        current_worker,
        export_rpc_instance,
        export_rpc_method,
        patch_dataloader_ray,
        rpc,
        shared_empty,
    )
    from unified.client.handle import JobHandle
    from unified.errors import UnifiedError

__all__ = [
    "ActorInfo",
    "DLJob",
    "DLJobBuilder",
    "DataLoaderIter",
    "DataQueue",
    "Dataset",
    "FutureSequence",
    "JobHandle",
    "JobInfo",
    "PrimeMasterApi",
    "RLJob",
    "RLJobBuilder",
    "RayDataLoaderIter",
    "RoleActor",
    "RoleGroup",
    "RpcStream",
    "UnifiedError",
    "UserRpcProxy",
    "WeightsReceiver",
    "Worker",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "patch_dataloader_ray",
    "rpc",
    "shared_empty",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.api.builder": ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder"],
        "unified.api.runtime": [
            "ActorInfo",
            "DataLoaderIter",
            "DataQueue",
            "Dataset",
            "FutureSequence",
            "JobInfo",
            "PrimeMasterApi",
            "RayDataLoaderIter",
            "RoleActor",
            "RoleGroup",
            "RpcStream",
            "UserRpcProxy",
            "WeightsReceiver",
            "Worker",
            "create_rpc_proxy",
            "current_worker",
            "export_rpc_instance",
            "export_rpc_method",
            "patch_dataloader_ray",
            "rpc",
            "shared_empty",
        ],
        "unified.client.handle": ["JobHandle"],
        "unified.errors": ["UnifiedError"],
    },
)

if os.environ.get("UNIFIED_COMPAT"):  # most processes do without, and need not load it
    from unified import compat

    compat.apply(os.environ)
