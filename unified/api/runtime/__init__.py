"""What a worker's own code uses: who it is, calls to other workers, the job. Names are imported at first use."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.api.runtime.future_sequence import FutureSequence
    from unified.api.runtime.master_api import PrimeMasterApi
    from unified.api.runtime.proxy import UserRpcProxy, create_rpc_proxy
    from unified.api.runtime.role_group import RoleActor, RoleGroup
    from unified.bus.registry import export_rpc_instance, export_rpc_method, rpc
    from unified.worker.context import ActorInfo, JobInfo, Worker, current_worker

__all__ = [
    "ActorInfo",
    "FutureSequence",
    "JobInfo",
    "PrimeMasterApi",
    "RoleActor",
    "RoleGroup",
    "UserRpcProxy",
    "Worker",
    "create_rpc_proxy",
    "current_worker",
    "export_rpc_instance",
    "export_rpc_method",
    "rpc",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "unified.api.runtime.future_sequence": ["FutureSequence"],
        "unified.api.runtime.master_api": ["PrimeMasterApi"],
        "unified.api.runtime.proxy": ["UserRpcProxy", "create_rpc_proxy"],
        "unified.api.runtime.role_group": ["RoleActor", "RoleGroup"],
        "unified.bus.registry": ["export_rpc_instance", "export_rpc_method", "rpc"],
        "unified.worker.context": ["ActorInfo", "JobInfo", "Worker", "current_worker"],
    },
)
