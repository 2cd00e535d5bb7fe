"""All about rpc in one place: the registry, the decorator, exports, proxies, role groups."""

from unified.api.runtime.batch import FutureSequence
from unified.api.runtime.proxy import UserRpcProxy, create_rpc_proxy
from unified.api.runtime.role_actor import RoleActor
from unified.api.runtime.role_group import RoleGroup
from unified.bus.calls.registry import RPC_REGISTRY, export_rpc_instance, export_rpc_method, rpc
from unified.bus.streams.stream import RpcStream

__all__ = [
    "RPC_REGISTRY",
    "FutureSequence",
    "RoleActor",
    "RoleGroup",
    "RpcStream",
    "UserRpcProxy",
    "create_rpc_proxy",
    "export_rpc_instance",
    "export_rpc_method",
    "rpc",
]
