"""Upstream's public names, module by module, with our counterpart of each, or advice on a name without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UPSTREAM = "dlrover.python.unified"
_API = f"{UPSTREAM}.api"
_COMMON = f"{UPSTREAM}.common"
_UTIL = f"{UPSTREAM}.util"
_HERE = "unified.compat.upstream"


class Counterpart(NamedTuple):
    """A module of upstream that is made of several of ours."""

    names: Mapping[str, str] = {}
    """Our ``module:name`` by upstream's name."""
    rest: str = ""
    """Our module that has the other names."""
    instead: Mapping[str, str] = {}
    """Advice by name without a counterpart."""
    is_kept: bool = False
    """True to use a real module of that name if there is one, even if the aliases are forced."""


ALIASES = {
    _API: "unified.api",
    f"{_API}.runtime.ray_dataloader_iter": "unified.api.runtime",
    f"{UPSTREAM}.driver.main": "unified.api.driver",
    "dtruntime": "unified.compat.dtruntime",
}
"""Our module by upstream's. Any other module below ``…unified.api`` has the same name below our `unified.api`."""

PACKAGES = {
    *("dlrover", "dlrover.python", "dlrover.python.common", UPSTREAM, _COMMON, _UTIL),
    *(f"{UPSTREAM}.driver", f"{UPSTREAM}.controller"),
}
"""Upstream's packages above the modules with a counterpart; as aliases they are empty."""

_ACTORS = "workers are processes, not Ray actors: write a class or function as the entry point, and current_worker()"
_MASTER = (
    "unified.api.runtime.PrimeMasterApi asks the master about the job; `unified status` and `unified explain` show it"
)
_INFOS = {name: f"unified.api.runtime:{name}" for name in ("ActorInfo", "JobInfo")}
_CONSTANTS = {
    name: f"{_HERE}.constant:{name}" for name in ("JOB_OPTIONS_ENV_PREFIX", "DLWorkloadEnv", "InternalDLWorkloadRole")
}
_BASE = Counterpart(
    {**_INFOS, "MasterStage": "unified.job:MasterStage", "ExecutionResultType": "unified.job:ExecutionResultType"},
    instead={
        "ActorBase": _ACTORS,
        "NodeInfo": "current_worker().actor_info.node is the node's id; `unified nodes` shows all",
        "ExecutionResult": "JobHandle.wait() and PrimeMasterApi.get_status() give the exit code",
        "DiagnosticInfo": "`unified explain JOB` says why a job failed",
        "WorkerStage": "`unified status JOB` shows the states of workers",
    },
)

COUNTERPARTS: Mapping[str, Counterpart] = {
    f"{_API}.builder.base": Counterpart(
        {
            "RoleBuilder": "unified.api.builder.roles:RoleBuilder",
            "ElasticTrainBuilder": "unified.api.builder.roles:ElasticRoleBuilder",
            "SimpleWorkloadBuilder": "unified.api.builder.roles:SimpleRoleBuilder",
            "DLRoverRunBuilder": "unified.api.builder.roles:ElasticRoleBuilder",
            "WorkloadBuilder": "unified.api.builder.roles:SimpleRoleBuilder",
            "submit": "unified.api.driver:submit",
            "read_dict_from_envs": f"{_HERE}.config_util:read_dict_from_envs",
            **_CONSTANTS,
            **{
                name: f"unified.job:{name}"
                for name in (
                    *("DLConfig", "JobConfig", "DLStreamType", "WorkloadDesc", "ElasticWorkloadDesc"),
                    *("SimpleWorkloadDesc", "ResourceDesc", "NodeGroupFailoverDesc"),
                )
            },
        },
        rest="unified.api.builder",
        instead={"parse_run_cmd_argument": "DLJobBuilder().by_dlrover_run_cmd(command) reads such a command line"},
    ),
    f"{_COMMON}.config": Counterpart({"JobInfo": "unified.api.runtime:JobInfo"}, rest="unified.job"),
    f"{_COMMON}.workload_desc": Counterpart(rest="unified.job"),
    f"{_COMMON}.enums": Counterpart(
        rest="unified.job",
        instead={
            "ExecutionResult": "unified.job.ExecutionResultType has the same words",
            "ExecutionResultPriority": "`unified explain JOB` names the root cause of a failure",
            "DiagnosticInfoType": "`unified explain JOB` says why a job failed",
            "WorkerStage": "`unified status JOB` shows the states of workers",
        },
    ),
    f"{_COMMON}.constant": Counterpart(
        _CONSTANTS,
        rest="unified.job",
        instead={
            "MASTER_STATE_KEY_PREFIX": "the master keeps its state in a file, `unified-master --state`",
            "RAY_HANG_CHECK_INTERVAL": "the options of `submit` say when a call or a worker counts as lost",
            "RAY_SINGLE_NODE_RELAUNCH_WAIT_TIME": "a lost node's workers start elsewhere at once",
        },
    ),
    f"{_COMMON}.actor_base": _BASE,
    f"{_COMMON}.workload_base": _BASE,
    f"{UPSTREAM}.controller.api": Counterpart(
        {name: f"unified.api.runtime.master_api:{name}" for name in ("PrimeMasterApi", "MasterStatus")},
        instead={"MASTER_ACTOR_NAME": "the master is a daemon, `unified-master`, and no actor"},
    ),
    f"{_UTIL}.config_util": Counterpart(
        {"get_entrypoint_type": "unified.job:get_entrypoint_type"},
        rest=f"{_HERE}.config_util",
        instead=dict.fromkeys(("MODULE_FUNC_PATTERN", "COMMAND_PATTERN"), "unified.job.get_entrypoint_type(text)"),
    ),
    "dlrover.python.common.log": Counterpart(rest=f"{_HERE}.log", is_kept=True),
}
"""Modules of upstream that are not just another name of one of our modules."""

INSTEAD = {
    f"{UPSTREAM}.controller": _MASTER,
    f"{UPSTREAM}.master": _MASTER,
    f"{UPSTREAM}.prime": _MASTER,
    f"{UPSTREAM}.backend": _ACTORS,
    f"{_UTIL}.actor_helper": "unified.api.runtime.RoleGroup calls workers, create_rpc_proxy makes stubs of them",
    f"{_UTIL}.actor_proxy": "unified.api.runtime.create_rpc_proxy",
    f"{_UTIL}.async_helper": "asyncio.run(coroutine), outside an event loop",
    f"{_UTIL}.decorators": "it only served upstream's own code; `logging` and `contextlib.suppress` do the same",
    f"{_UTIL}.extension_util": "unified has no extensions of its master",
    f"{_UTIL}.node_helper": "current_worker().actor_info.node, and `unified nodes`",
    f"{_UTIL}.test_hooks": "unified.testing has a cluster for tests",
    f"{UPSTREAM}.tests": "unified.testing has a cluster for tests",
    "dlrover.trainer": "`unified run` starts scripts as torchrun does, and unified.checkpoint saves and loads",
    "dlrover.python": "of this package only dlrover.python.unified has counterparts",
}
"""Advice by module without a counterpart, also for the modules below it. The longest name that fits counts."""


def advice(module: str) -> str | None:
    """Return the advice on a module of upstream that has no counterpart; None for any other module."""
    name = module
    while name:
        if name in INSTEAD:
            return INSTEAD[name]
        name = name.rpartition(".")[0]
    return None
