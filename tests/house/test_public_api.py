"""The names that users import. Adding one is a decision; taking one away breaks somebody's script."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import unified

RUNTIME = [
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
BUILDER = ["DLJob", "DLJobBuilder", "RLJob", "RLJobBuilder", "RLRoleType"]
PUBLIC = {
    "unified": sorted(
        [*RUNTIME, *BUILDER[:4], "ClusterClient", "JobHandle", "UnifiedError", "connect", "local_cluster"]
    ),
    "unified.api.builder": BUILDER,
    "unified.api.runtime": RUNTIME,
    "unified.job": [
        "ACCELERATOR_TYPE",
        "AcceleratorType",
        "BaseWorkloadDesc",
        "CustomWorkloadDesc",
        "DLConfig",
        "DLStreamType",
        "DLType",
        "ElasticWorkloadDesc",
        "ExecutionResultType",
        "FailoverExec",
        "FailoverTrigger",
        "JobConfig",
        "JobSpec",
        "MasterStage",
        "MasterStateBackendType",
        "NodeGroupFailoverDesc",
        "RLRoleType",
        "ResourceDesc",
        "RoleSpec",
        "SimpleWorkloadDesc",
        "WorkloadDesc",
        "WorkloadEntrypointType",
        "WorkloadGroup",
        "get_entrypoint_type",
    ],
}
DOORS = {
    "unified.api.builder.rl": ["RLJob", "RLJobBuilder"],
    "unified.api.runtime.worker": ["ActorInfo", "JobInfo", "Worker", "current_worker"],
    "unified.api.runtime.queue": ["DataQueue", "QueueStats"],
    "unified.api.runtime.rpc_helper": ["RPC_REGISTRY", "create_rpc_proxy", "export_rpc_instance", "rpc"],
}
"""Deeper modules that the reference documents import from."""


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_exactly_these(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == sorted(PUBLIC[package])
    assert set(PUBLIC[package]) <= set(dir(module))


@pytest.mark.parametrize("package", [*PUBLIC, *DOORS])
def test_each_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    for name in {**PUBLIC, **DOORS}[package]:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", PUBLIC)
def test_each_public_class_and_function_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in PUBLIC[package]}
    bare = [name for name, thing in things.items() if callable(thing) and not (thing.__doc__ or "").strip()]
    assert not bare


@pytest.mark.parametrize("package", PUBLIC)
def test_a_misspelt_name_is_told_its_neighbour(package: str) -> None:
    name = PUBLIC[package][-1]
    with pytest.raises(AttributeError, match=name):
        getattr(importlib.import_module(package), f"{name}s")


def test_each_public_name_is_in_the_reference() -> None:
    text = (Path(__file__).parents[2] / "docs/reference.md").read_text()
    told = set(re.findall(r"^(?:###|\s*-) `(?:async |class )?(\w+)", text, re.MULTILINE))
    packages = [*PUBLIC, *(f"unified.{found.name}" for found in pkgutil.iter_modules(unified.__path__) if found.ispkg)]
    missing = {
        f"{package}.{name}"
        for package in packages
        for name in getattr(importlib.import_module(package), "__all__", [])
        if name not in told
    }
    assert not missing
