"""Upstream's public names, module by module: each is one of ours under the aliases, or says what to use instead."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import DictConfig

from unified import compat
from unified.compat.names import COUNTERPARTS

UNIFIED = "dlrover.python.unified"
NAMES = {
    "dtruntime": """
        DatasetRegistry ShardInfo CheckpointManager CheckpointInfo TrainingOrchestrator WorkerConfig""",
    "dlrover.python.common.log": "default_logger",
    f"{UNIFIED}.api.builder": "DLJob DLJobBuilder RLJobBuilder RLRoleType",
    f"{UNIFIED}.api.builder.base": """
        DLJob DLJobBuilder RoleBuilder ElasticTrainBuilder SimpleWorkloadBuilder DLConfig JobConfig DLStreamType
        ElasticWorkloadDesc SimpleWorkloadDesc WorkloadDesc ResourceDesc NodeGroupFailoverDesc DLWorkloadEnv
        InternalDLWorkloadRole JOB_OPTIONS_ENV_PREFIX submit read_dict_from_envs""",
    f"{UNIFIED}.api.builder.rl": "RLJob RLJobBuilder RLRoleType DLStreamType DLJob DLJobBuilder",
    f"{UNIFIED}.api.runtime": """
        DataQueue RayDataLoaderIter patch_dataloader_ray Worker current_worker rpc export_rpc_method
        export_rpc_instance UserRpcProxy create_rpc_proxy RoleActor RoleGroup FutureSequence ActorInfo JobInfo
        PrimeMasterApi""",
    f"{UNIFIED}.api.runtime.queue": "DataQueue",
    f"{UNIFIED}.api.runtime.ray_dataloader_iter": "RayDataLoaderIter patch_dataloader_ray",
    f"{UNIFIED}.api.runtime.rpc_helper": """
        RPC_REGISTRY rpc export_rpc_method export_rpc_instance UserRpcProxy create_rpc_proxy RoleActor RoleGroup
        FutureSequence""",
    f"{UNIFIED}.api.runtime.worker": "ActorInfo JobInfo Worker current_worker",
    f"{UNIFIED}.common.config": """
        WorkloadGroup DLConfig JobConfig JobInfo ACCELERATOR_TYPE MasterStateBackendType ResourceDesc WorkloadDesc""",
    f"{UNIFIED}.common.workload_desc": """
        get_entrypoint_type ResourceDesc NodeGroupFailoverDesc BaseWorkloadDesc ElasticWorkloadDesc SimpleWorkloadDesc
        CustomWorkloadDesc WorkloadDesc""",
    f"{UNIFIED}.common.enums": """
        MasterStage ExecutionResultType ACCELERATOR_TYPE DLStreamType RLRoleType MasterStateBackendType
        WorkloadEntrypointType DLType""",
    f"{UNIFIED}.common.constant": "InternalDLWorkloadRole DLWorkloadEnv JOB_OPTIONS_ENV_PREFIX",
    f"{UNIFIED}.common.actor_base": "JobInfo ActorInfo",
    f"{UNIFIED}.common.workload_base": "JobInfo ActorInfo MasterStage",
    f"{UNIFIED}.controller.api": "PrimeMasterApi MasterStatus",
    f"{UNIFIED}.driver.main": "main submit",
    f"{UNIFIED}.util.config_util": """
        args_2_omega_conf omega_conf_2_args convert_str_values read_dict_from_envs get_entrypoint_type""",
}
INSTEAD = {
    f"{UNIFIED}.api.builder.base": {"parse_run_cmd_argument": "by_dlrover_run_cmd"},
    f"{UNIFIED}.common.enums": {
        "ExecutionResult": "unified.job.ExecutionResultType",
        "ExecutionResultPriority": "`unified explain JOB`",
        "DiagnosticInfoType": "`unified explain JOB`",
        "WorkerStage": "`unified status JOB`",
    },
    f"{UNIFIED}.common.constant": {
        "MASTER_STATE_KEY_PREFIX": "unified-master",
        "RAY_HANG_CHECK_INTERVAL": "options of `submit`",
        "RAY_SINGLE_NODE_RELAUNCH_WAIT_TIME": "start elsewhere",
    },
    f"{UNIFIED}.common.actor_base": {
        "ActorBase": "current_worker()",
        "NodeInfo": "current_worker().actor_info.node",
        "ExecutionResult": "JobHandle.wait()",
        "DiagnosticInfo": "`unified explain JOB`",
    },
    f"{UNIFIED}.controller.api": {"MASTER_ACTOR_NAME": "unified-master"},
    f"{UNIFIED}.util.config_util": {
        "MODULE_FUNC_PATTERN": "unified.job.get_entrypoint_type",
        "COMMAND_PATTERN": "unified.job.get_entrypoint_type",
    },
}
MODULES = {
    f"{UNIFIED}.controller.manager": "PrimeMasterApi",
    f"{UNIFIED}.controller.master": "PrimeMasterApi",
    f"{UNIFIED}.controller.schedule.scheduler": "PrimeMasterApi",
    f"{UNIFIED}.controller.extension": "PrimeMasterApi",
    f"{UNIFIED}.backend.elastic.worker.worker": "current_worker()",
    f"{UNIFIED}.backend.common.base_worker": "current_worker()",
    f"{UNIFIED}.util.actor_helper": "RoleGroup",
    f"{UNIFIED}.util.actor_proxy": "create_rpc_proxy",
    f"{UNIFIED}.util.async_helper": "asyncio.run",
    f"{UNIFIED}.util.decorators": "`logging`",
    f"{UNIFIED}.util.extension_util": "no extensions",
    f"{UNIFIED}.util.node_helper": "unified nodes",
    f"{UNIFIED}.util.test_hooks": "unified.testing",
    "dlrover.trainer.torch.elastic": "`unified run`",
    "dlrover.python.master.main": "only dlrover.python.unified has counterparts",
}


@pytest.fixture(autouse=True)
def aliases() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module].split()])
def test_name_has_a_counterpart(module: str, name: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from {module} import {name}", found)
    assert found[name] is not None


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in INSTEAD for name in INSTEAD[module]])
def test_name_without_a_counterpart_says_what_to_use(module: str, name: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(f"from {module} import {name}")
    assert f"cannot import name {name!r} from {module!r}" in str(error.value)
    assert INSTEAD[module][name] in str(error.value)


@pytest.mark.parametrize("module", MODULES)
def test_module_without_a_counterpart_says_what_to_use(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="unified has no counterpart of 'dlrover") as error:
        importlib.import_module(module)
    assert MODULES[module] in str(error.value)


@pytest.mark.parametrize("module", COUNTERPARTS)
def test_all_names_of_a_module_can_be_imported_at_once(module: str) -> None:
    found: dict[str, Any] = {}
    exec(f"from {module} import *", found)
    assert {*COUNTERPARTS[module].names} <= {*found}


def test_a_name_that_nobody_has_is_an_ordinary_error() -> None:
    assert not hasattr(importlib.import_module(f"{UNIFIED}.common.enums"), "Nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {UNIFIED}.common.enums import Nothing")


def test_classes_are_ours_under_each_name() -> None:
    import unified
    from unified.api.builder.roles import ElasticRoleBuilder
    from unified.job import JobConfig

    base = importlib.import_module(f"{UNIFIED}.api.builder.base")
    assert base.DLJobBuilder is unified.DLJobBuilder
    assert base.ElasticTrainBuilder is ElasticRoleBuilder
    assert isinstance(base.DLJobBuilder().train("m.f"), base.ElasticTrainBuilder)
    assert importlib.import_module(f"{UNIFIED}.common.config").JobConfig is base.JobConfig is JobConfig
    assert importlib.import_module(f"{UNIFIED}.common.actor_base").ActorInfo is unified.ActorInfo


def test_records_of_dtruntime() -> None:
    import dtruntime  # type: ignore[import-not-found]

    from unified.checkpoint import Manifest
    from unified.protocol.coordinator import ShardAssignment, WorkerRegistration

    assert (dtruntime.ShardInfo, dtruntime.CheckpointInfo) == (ShardAssignment, Manifest)
    assert dtruntime.WorkerConfig is WorkerRegistration
    assert {"ShardInfo", "CheckpointInfo", "WorkerConfig"} <= {*dir(dtruntime)}


def test_constants_are_those_of_our_workers() -> None:
    from unified.api.builder import DLJobBuilder

    constant = importlib.import_module(f"{UNIFIED}.common.constant")
    env = constant.DLWorkloadEnv
    assert (env.RANK, env.LOCAL_WORLD_SIZE, env.WORKING_DIR) == ("RANK", "LOCAL_WORLD_SIZE", "DLROVER_WORKING_DIR")
    assert constant.InternalDLWorkloadRole.ELASTIC_ROLE in DLJobBuilder().train("m.f").build().workloads
    job = DLJobBuilder().workload("r", "m.f").env(env.RAY_NOSET_VISIBLE_DEVICES_ENVS).build()
    assert not job.get_workload("r").auto_visible_devices


def test_configs_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    util = importlib.import_module(f"{UNIFIED}.util.config_util")
    config = util.args_2_omega_conf(Namespace(lr="1e-3", steps="12", name="a", nested={"x": ["None", "4"]}, old="None"))
    assert isinstance(config, DictConfig)
    assert util.omega_conf_2_args(config).name == "a"
    util.convert_str_values(config)
    assert config == {"lr": 1e-3, "steps": 12, "name": "a", "nested": {"x": [None, 4]}, "old": None}
    texts = DictConfig({"a": "None", "b": "1"})
    util.convert_str_values(texts, convert_none=False, convert_digit=False)
    assert texts == {"a": "None", "b": "1"}
    monkeypatch.setenv("DLROVER_UNIFIED_JOB_NAME", "mine")
    assert util.read_dict_from_envs("DLROVER_UNIFIED_")["job_name"] == "mine"


def test_nothing_is_loaded_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unified.compat.upstream.config_util", raising=False)
    importlib.import_module(f"{UNIFIED}.common.constant")
    assert "unified.compat.upstream.config_util" not in sys.modules
