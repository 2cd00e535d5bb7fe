"""From the description to the record that is sent."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import DictConfig

from unified.errors import UsageError
from unified.job import DLConfig, JobConfig
from unified.job.driver import Driver
from unified.job.from_spec import workload_of
from unified.job.payload import decode
from unified.job.spec import Communication, EntryPoint, JobSpec, Resources
from unified.job.to_spec import to_spec

DRIVER = Driver(working_dir="/here", sys_path=["/scripts", "/here"], submitted_by="me@host:1")
ROLES: dict[str, dict[str, Any]] = {
    "elastic": {
        "backend": "elastic",
        "entry_point": "train.py --x 'a b'",
        "nnodes": "1:2",
        "nproc_per_node": 2,
        "resource": {"cpu": 1, "mem": 2, "disk": 3, "gpu": 1, "user_defined": {"u": 4}},
        "envs": {"A": "role"},
        "config": {"c": [1]},
        "is_driver": False,
        "max_restart": 5,
        "per_node_max_failure": 6,
        "rank_based_gpu_selection": True,
        "auto_visible_devices": False,
        "node_group_failover": {"enabled": True, "group_label_key": "rack", "timeout": 90},
        "sub_stage": ["x"],
        "comm_pre_check": False,
        "comm_auto_setup_process_group": False,
        "comm_backend": "gloo",
        "comm_timeout_s": 8,
    },
    "simple": {"entry_point": "-m pkg.mod --lr 1", "restart_alone": True},
    "custom": {"module_name": "pkg.mod", "class_name": "C", "resource": {"cpu": 1}},
    **{f"shared{number}": {} for number in range(3)},
}


def spec_of(roles: dict[str, dict[str, Any]], options: dict[str, Any] | None = None, **fields: Any) -> JobSpec:
    workloads = {name: {"entry_point": "m.f", **role} for name, role in roles.items()}
    job = DLConfig.model_validate({"workloads": workloads, **fields})
    return to_spec(JobConfig(job_name="j", dl_config=job, **(options or {})), DRIVER)


def test_all_of_a_job_arrives() -> None:
    spec = spec_of(
        {"a": {}},
        {
            "node_max_restart": 1,
            "job_max_restart": 2,
            "master_max_restart": 3,
            "master_cpu": 4,
            "master_mem": 5,
            "master_isolation_schedule_resource": "MR",
            "worker_isolation_schedule_resource": "WR",
            "failover_trigger_strategy": 1,
            "failover_exec_strategy": 2,
            "restart_window": 8,
            "restart_backoff": 9,
            "stop_grace_s": 6,
            "call_timeout_s": 7,
            "python": "/py",
            "start_method": "spawn",
        },
        node_number=2,
        device_per_node=3,
        accelerator_type="TPU",
        dl_type="PRE",
        stream_type="DATA_STREAM",
        user_config={"k": 1},
        preload=["transformers"],
    )
    assert spec.preload == ["transformers"]
    assert (spec.name, spec.node_num, spec.device_per_node, spec.accelerator_type) == ("j", 2, 3, "TPU")
    assert (spec.dl_type, spec.stream_type) == ("PRE", "DATA_STREAM")
    assert (spec.node_max_restart, spec.job_max_restart, spec.master_max_restart) == (1, 2, 3)
    assert (spec.master_cpu, spec.master_memory_mb) == (4, 5)
    assert (spec.master_isolation_resource, spec.worker_isolation_resource) == ("MR", "WR")
    assert (spec.failover_trigger, spec.failover_exec) == (1, 2)
    assert (spec.restart_window_s, spec.restart_backoff_s) == (8, 9)
    assert (spec.stop_grace_s, spec.call_timeout_s, spec.python, spec.start_method) == (6, 7, "/py", "spawn")
    assert (spec.working_dir, spec.sys_path, spec.submitted_by) == ("/here", ["/scripts", "/here"], "me@host:1")
    config = decode(spec.user_config)
    assert isinstance(config, DictConfig)
    assert config == {"k": 1}


@pytest.mark.parametrize(("described", "option", "window_s"), [(0, None, 0), (5, None, 5), (5, 7, 7), (5, 0, 0)])
def test_the_option_goes_before_the_description(described: float, option: float | None, window_s: float) -> None:
    spec = spec_of({"a": {}}, {"restart_window": option}, restart_window=described)
    assert spec.restart_window_s == window_s


def test_all_of_a_role_arrives() -> None:
    spec = spec_of({"t": ROLES["elastic"]}, global_envs={"A": "job", "B": "job"})
    (role,) = spec.roles
    assert (role.name, role.kind, role.total, role.per_group) == ("t", "elastic", 4, 2)
    assert (role.min_nodes, role.max_nodes) == (1, 2)
    assert role.entry_point == EntryPoint(kind="script", target="train.py", argv=["--x", "a b"])
    assert role.resources == Resources(cpu=1, memory_mb=2, disk_mb=3, accelerator=1, user_defined={"u": 4})
    assert role.envs == {"A": "role", "B": "job"}
    assert decode(role.config) == {"c": [1]}
    assert (role.is_driver, role.max_restart, role.per_node_max_failure) == (False, 5, 6)
    assert (role.rank_based_gpu_selection, role.auto_visible_devices) == (True, False)
    assert role.communication == Communication(pre_check=False, auto_setup=False, backend="gloo", timeout_s=8)
    assert (role.failover_label, role.failover_timeout_s, role.sub_stage) == ("rack", 90, ["x"])
    assert role.workers == ["t_4-0_2-0", "t_4-1_2-1", "t_4-2_2-0", "t_4-3_2-1"]


def test_simple_and_custom_roles() -> None:
    spec = spec_of(
        {"s": {}, "c": {"module_name": "pkg.mod", "class_name": "C"}}, user_config=[(1, 2)], global_envs={"A": "1"}
    )
    assert [role.kind for role in spec.roles] == ["simple", "custom"]
    assert spec.role("c").entry_point == EntryPoint(kind="attribute", target="pkg.mod", attribute="C")
    assert spec.role("s").collocation is None
    assert decode(spec.user_config) == [(1, 2)]


def test_collocated_roles_get_exact_equal_shares() -> None:
    roles: dict[str, dict[str, Any]] = {f"r{number}": {} for number in range(6)}
    spec = spec_of(roles, collocations=[set(roles)])
    assert {role.collocation for role in spec.roles} == {"collocation_0"}
    assert sum(role.resources.accelerator for role in spec.roles) <= 1 + 1e-9
    assert spec.roles[0].resources.accelerator == pytest.approx(1 / 6)


def test_a_spec_survives_the_wire() -> None:
    spec = spec_of({"a": {"backend": "elastic", "total": 2, "per_group": 2}, "b": {"resource": {"cpu": 1}}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec) == spec


def test_the_nearest_working_directory_wins() -> None:
    variable = "DLROVER_WORKING_DIR"
    assert spec_of({"a": {}}).working_dir == "/here"
    assert spec_of({"a": {}}, global_envs={variable: "/job"}).working_dir == "/job"
    spec = spec_of(
        {"a": {"envs": {variable: "/role"}}, "b": {}}, {"working_dir": "/option"}, global_envs={variable: "/job"}
    )
    assert spec.working_dir == "/option"
    assert spec.role("a").envs == {variable: "/role"}
    assert spec.role("b").envs == {}


def test_a_config_that_cannot_travel_is_refused() -> None:
    with pytest.raises(UsageError, match="the user config"):
        spec_of({"a": {}}, user_config=threading.Lock())


def test_the_driver_tells_where_it_works_and_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(scripts), "/elsewhere"])
    here = Driver.here(env={})
    assert (here.working_dir, here.sys_path) == (str(tmp_path), [str(scripts), str(tmp_path)])
    assert here.submitted_by.endswith(f"@{os.uname().nodename}:{os.getpid()}")
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    there = Driver.here(env={"DLROVER_WORKING_DIR": "/w"})
    assert (there.sys_path, there.working_dir) == ([str(tmp_path)], "/w")


def test_description_of_a_role_is_read_back_from_its_record() -> None:
    """What a worker has as `current_worker().actor_info.spec`, after the record went over the wire."""
    workloads = {name: {"entry_point": "m.f", **role} for name, role in ROLES.items()}
    collocations = [{f"shared{number}" for number in range(3)}]
    job = DLConfig.model_validate({"workloads": workloads, "collocations": collocations})
    spec = to_spec(JobConfig(job_name="j", dl_config=job), DRIVER)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec)
    assert {role.name: workload_of(role) for role in sent.roles} == job.workloads


def test_description_of_a_role_has_the_environment_of_its_job() -> None:
    (role,) = spec_of({"a": {"envs": {"A": "role"}}}, global_envs={"A": "job", "B": "job"}).roles
    assert workload_of(role).envs == {"A": "role", "B": "job"}


def test_only_what_is_given_is_reserved_for_the_store_host() -> None:
    job = DLConfig(workloads={"a": {"entry_point": "m.f"}})
    spec = to_spec(JobConfig(job_name="j", dl_config=job))
    assert (spec.master_cpu, spec.master_memory_mb) == (0, 0)
    spec = to_spec(JobConfig(job_name="j", dl_config=job, master_cpu=2, master_mem=512))
    assert (spec.master_cpu, spec.master_memory_mb) == (2, 512)
