"""Resources and workloads on their own: names, aliases, defaults, refusals."""

import re
from argparse import Namespace
from datetime import timedelta
from typing import Any

import pytest
from omegaconf import DictConfig

from unified import DLJobBuilder
from unified.errors import JobError
from unified.job import (
    CustomWorkloadDesc,
    ElasticWorkloadDesc,
    NodeGroupFailoverDesc,
    ResourceDesc,
    SimpleWorkloadDesc,
    WorkloadEntrypointType,
)
from unified.job.names import parse_nnodes


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"mem": 5}, "memory", 5),
        ({"memory": 5}, "memory", 5),
        ({"gpu": 2}, "accelerator", 2),
        ({"acc": 0.5}, "accelerator", 0.5),
        ({"accelerator": 1}, "accelerator", 1),
        ({"user_defined": {"MR": 1}}, "user_defined", {"MR": 1}),
        ({"ud_resource": {"MR": 1}}, "user_defined", {"MR": 1}),
        ({"cpu": 1.5}, "cpu", 1.5),
        ({"disk": 7}, "disk", 7),
    ],
)
def test_resources_have_these_names(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(ResourceDesc.model_validate(given), field) == value


def test_resources_add_and_multiply() -> None:
    one = ResourceDesc(cpu=1, memory=10, disk=3, accelerator=0.5, user_defined={"a": 1})
    two = ResourceDesc(cpu=2, user_defined={"a": 1, "b": 2})
    assert one + two == ResourceDesc(cpu=3, memory=10, disk=3, accelerator=0.5, user_defined={"a": 2, "b": 2})
    assert one * 2 == ResourceDesc(cpu=2, memory=20, disk=6, accelerator=1, user_defined={"a": 2})


@pytest.mark.parametrize("given", [{}, {"cpu": 0, "memory": 0}, {"user_defined": {}}, {"user_defined": {"MR": 0}},
                                   {"mem": 5}, {"disk": 7}, {"mem": 5, "disk": 7}])  # fmt: skip
def test_a_resource_that_names_no_processor_has_one_accelerator(given: dict[str, Any]) -> None:
    wanted = ResourceDesc(accelerator=1, memory=given.get("mem", 0), disk=given.get("disk", 0))
    assert ResourceDesc.get_or_default(given) == wanted
    assert SimpleWorkloadDesc.model_validate({"entry_point": "m.f", "resource": given}).resource == wanted


def test_node_group_failover_has_defaults() -> None:
    failover = NodeGroupFailoverDesc()
    assert (failover.enabled, failover.group_label_key, failover.timeout) == (False, "", 300)
    assert SimpleWorkloadDesc.model_validate({"entry_point": "m.f"}).node_group_failover == failover
    given = {"entry_point": "m.f", "node_group_failover": None}
    assert SimpleWorkloadDesc.model_validate(given).node_group_failover == failover
    with pytest.raises(JobError, match="name the label of nodes"):
        NodeGroupFailoverDesc(enabled=True)


@pytest.mark.parametrize(
    ("config", "read"),
    [
        (None, {}),
        ({"a": 1}, {"a": 1}),
        (Namespace(a=1), {"a": 1}),
        (DictConfig({"a": "${b}", "b": [1]}), {"a": [1], "b": [1]}),
    ],
)
def test_config_of_a_role_is_a_plain_dict(config: Any, read: dict[str, Any]) -> None:
    workload = SimpleWorkloadDesc.model_validate({"entry_point": "m.f", "config": config})
    assert workload.config == read
    assert type(workload.config) is dict


@pytest.mark.parametrize("pair", [("pkg.mod", "Cls"), ["pkg.mod", "Cls"]])
def test_entry_point_as_a_pair(pair: Any) -> None:
    assert SimpleWorkloadDesc.model_validate({"entry_point": pair}).entry_point == "pkg.mod.Cls"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpus": 1}, "has no 'gpus'. Did you mean 'gpu'?"),
        ({"MEM": 1}, "Did you mean 'mem'?"),
        ({"licence": 1}, "user_defined={name: amount}"),
        ({"mem": 1, "memory": 2}, "two names of one field"),
        ({"cpu": -1}, "greater than or equal to 0"),
        ({"user_defined": {"x": -1}}, "user_defined.x"),
    ],
)
def test_resources_that_do_not_exist_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        ResourceDesc.model_validate(given)


def test_defaults_of_a_workload() -> None:
    workload = ElasticWorkloadDesc.model_validate({"entry_point": "m.f"})
    assert workload.model_dump() == {
        "backend": "elastic",
        "total": 1,
        "resource": ResourceDesc(accelerator=1).model_dump(),
        "envs": {},
        "per_node_max_failure": 3,
        "max_restart": 10,
        "group": None,
        "per_group": 1,
        "entry_point": "m.f",
        "config": {},
        "rank_based_gpu_selection": False,
        "is_driver": True,
        "is_service": False,
        "node_group_failover": {"enabled": False, "group_label_key": "", "timeout": 300},
        "hang_timeout": None,
        "sub_stage": [],
        "auto_visible_devices": True,
        "comm_pre_check": True,
        "comm_auto_setup_process_group": True,
        "comm_backend": "auto",
        "comm_timeout_s": None,
        "comm_port": 0,
        "comm_run_id": "",
        "role_max_restart": None,
        "output_files": None,
        "min_nodes": None,
        "max_nodes": None,
    }
    assert SimpleWorkloadDesc.model_validate({"entry_point": "m.f"}).backend == "simple"


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"num": 3}, "total", 3),
        ({"number": 3}, "total", 3),
        ({"total": 0}, "total", 0),
        ({"res": {"cpu": 1}}, "resource", ResourceDesc(cpu=1)),
        ({"env": {"A": "1"}}, "envs", {"A": "1"}),
        ({"environment": {"A": "1"}}, "envs", {"A": "1"}),
        ({"envs": {"A": 4, "B": 0.5}}, "envs", {"A": "4", "B": "0.5"}),
        ({"envs": None}, "envs", {}),
        ({"comm_timeout_s": timedelta(minutes=1)}, "comm_timeout_s", 60.0),
        ({"total": 4, "per_group": 2, "rank_based_gpu_selection": True}, "rank_based_gpu_selection", True),
    ],
)
def test_workload_fields_have_these_names(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(ElasticWorkloadDesc.model_validate({"entrypoint": "m.f", **given}), field) == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"total": 3, "per_group": 2}, "total=3 is not divisible by per_group=2"),
        ({"total": -1}, "total"),
        ({"per_group": 0}, "per_group"),
        ({"max_restart": -1}, "max_restart"),
        ({"rank_based_gpu_selection": True}, "needs per_group above 1"),
        (
            {"rank_based_gpu_selection": True, "total": 2, "per_group": 2, "resource": {"gpu": 2}},
            "at most one accelerator",
        ),
        ({"max_restarts": 1}, "Did you mean 'max_restart'?"),
        ({"nnodes": "x"}, "nnodes='x' is neither a number of nodes nor a range"),
        ({"nproc_per_node": "gpu"}, "nproc_per_node='gpu' must be a whole number"),
        ({"comm_timeout_s": 0}, "comm_timeout_s"),
        *(({"config": config}, "config") for config in ("text", [1], DictConfig({"a": "${b}"}))),
        *(({"entry_point": pair}, "entry_point") for pair in [("m",), ("m", 3), ("m", "c", "d"), ("m", "no name")]),
    ],
)
def test_workloads_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        ElasticWorkloadDesc.model_validate({"entry_point": "m.f", **given})


@pytest.mark.parametrize(
    ("given", "total", "per_group", "nodes"),
    [
        ({"nnodes": 2, "nproc_per_node": 4}, 8, 4, (None, None)),
        ({"nnodes": 2}, 2, 1, (None, None)),
        ({"nproc_per_node": 4}, 4, 4, (None, None)),
        ({"nproc_per_node": 2, "total": 6}, 6, 2, (None, None)),
        ({"nnodes": "3", "per_group": 2}, 6, 2, (None, None)),
        ({"nnodes": "2:8", "nproc_per_node": 2}, 16, 2, (2, 8)),
        ({"nnodes": "2:2"}, 2, 1, (None, None)),
    ],
)
def test_nodes_become_workers(
    given: dict[str, Any], total: int, per_group: int, nodes: tuple[int | None, int | None]
) -> None:
    workload = ElasticWorkloadDesc.model_validate({"entry_point": "m.f", **given})
    assert (workload.total, workload.per_group) == (total, per_group)
    assert (workload.min_nodes, workload.max_nodes) == nodes


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"": "1"}, "'' is no name of a variable"),
        ({"A=B": "1"}, "'A=B' is no name of a variable"),
        ({"A\0": "1"}, r"'A\\x00' is no name of a variable"),
        ({"A": "x\0y"}, r"the value of A has the character NUL\.$"),
        ({"A": "\ud800"}, r"the variable 'A' or its value is not UTF-8"),
    ],
)
def test_variables_that_no_process_can_have_are_refused_by_build(env: dict[str, str], said: str) -> None:
    for builder in (
        DLJobBuilder().global_env(env).train("m.f").total(1),
        DLJobBuilder().train("m.f").total(1).env(env),
    ):
        with pytest.raises(ValueError, match=said):
            builder.build()


@pytest.mark.parametrize("wrong", ["", "a", "1:2:3", "2:1", "0", "0:2", "-1", ":", "1:"])
def test_ranges_of_nodes_that_are_none(wrong: str) -> None:
    with pytest.raises(ValueError, match="nnodes="):
        parse_nnodes(wrong)


def test_a_custom_workload_names_its_class() -> None:
    workload = CustomWorkloadDesc.model_validate({"module_name": "pkg.mod", "class_name": "Thing"})
    assert (workload.backend, workload.entry_point) == ("custom", "pkg.mod.Thing")
    assert workload.entry_point_type is WorkloadEntrypointType.MODULE_FUNC


def test_a_node_may_stay_lost_for_a_minute_at_least() -> None:
    assert NodeGroupFailoverDesc(group_label_key="rack").timeout == 300
    assert NodeGroupFailoverDesc(group_label_key="rack", timeout=60).timeout == 60
    with pytest.raises(JobError, match="greater than or equal to 60"):
        NodeGroupFailoverDesc(group_label_key="rack", timeout=59)
