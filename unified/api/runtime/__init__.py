"""Names for a worker's own code: its identity, calls to other workers, the job. Imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.runtime.batch import FutureSequence as FutureSequence
    from unified.api.runtime.master_api import PrimeMasterApi as PrimeMasterApi
    from unified.api.runtime.proxy import UserRpcProxy as UserRpcProxy
    from unified.api.runtime.proxy import create_rpc_proxy as create_rpc_proxy
    from unified.api.runtime.role_actor import RoleActor as RoleActor
    from unified.api.runtime.role_group import RoleGroup as RoleGroup
    from unified.bus.calls.registry import export_rpc_instance as export_rpc_instance
    from unified.bus.calls.registry import export_rpc_method as export_rpc_method
    from unified.bus.calls.registry import rpc as rpc
    from unified.bus.streams.stream import RpcStream as RpcStream
    from unified.job.job_info import JobInfo as JobInfo
    from unified.loader.dataset import Dataset as Dataset
    from unified.loader.iterator import DataLoaderIter as DataLoaderIter
    from unified.loader.iterator import RayDataLoaderIter as RayDataLoaderIter
    from unified.loader.iterator import patch_dataloader_ray as patch_dataloader_ray
    from unified.queue.client import DataQueue as DataQueue
    from unified.weights.receiver import WeightsReceiver as WeightsReceiver
    from unified.worker.context import ActorInfo as ActorInfo
    from unified.worker.context import Worker as Worker
    from unified.worker.context import current_worker as current_worker
    from unified.worker.shared_arrays import shared_empty as shared_empty

__getattr__, __dir__ = lazy.exports(__name__)
