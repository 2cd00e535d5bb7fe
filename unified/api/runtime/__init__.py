"""Names for a worker's own code: its identity, calls to other workers, the job. Imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.runtime.batch import FutureSequence
    from unified.api.runtime.master_api import PrimeMasterApi
    from unified.api.runtime.proxy import UserRpcProxy, create_rpc_proxy
    from unified.api.runtime.role_actor import RoleActor
    from unified.api.runtime.role_group import RoleGroup
    from unified.bus.calls.registry import export_rpc_instance, export_rpc_method, rpc
    from unified.bus.streams.stream import RpcStream
    from unified.job.job_info import JobInfo
    from unified.loader.dataset import Dataset
    from unified.loader.iterator import DataLoaderIter, RayDataLoaderIter, patch_dataloader_ray
    from unified.queue.client import DataQueue
    from unified.weights.receiver import WeightsReceiver
    from unified.worker.context import ActorInfo, Worker, current_worker
    from unified.worker.shared_arrays import shared_empty

__all__ = [
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
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.api.runtime.batch": ["FutureSequence"],
        "unified.api.runtime.master_api": ["PrimeMasterApi"],
        "unified.api.runtime.proxy": ["UserRpcProxy", "create_rpc_proxy"],
        "unified.api.runtime.role_actor": ["RoleActor"],
        "unified.api.runtime.role_group": ["RoleGroup"],
        "unified.bus.calls.registry": ["export_rpc_instance", "export_rpc_method", "rpc"],
        "unified.bus.streams.stream": ["RpcStream"],
        "unified.job.job_info": ["JobInfo"],
        "unified.loader.iterator": ["DataLoaderIter", "RayDataLoaderIter", "patch_dataloader_ray"],
        "unified.loader.dataset": ["Dataset"],
        "unified.queue.client": ["DataQueue"],
        "unified.weights.receiver": ["WeightsReceiver"],
        "unified.worker.context": ["ActorInfo", "Worker", "current_worker"],
        "unified.worker.shared_arrays": ["shared_empty"],
    },
)
