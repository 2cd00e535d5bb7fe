"""`DLConfig` and `JobConfig`: what they take, and the checks of a whole job."""

import argparse
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from unified.errors import JobError
from unified.job import AcceleratorType, DLConfig, ElasticWorkloadDesc, JobConfig, ResourceDesc, SimpleWorkloadDesc
from unified.job.config import device_share


def job(roles: dict[str, dict[str, Any]] | None = None, **fields: Any) -> DLConfig:
    roles = {"a": {}} if roles is None else roles
    workloads = {name: {"entry_point": "m.f", **role} for name, role in roles.items()}
    return DLConfig.model_validate({"workloads": workloads, **fields})


def refusal(roles: dict[str, dict[str, Any]] | None = None, **fields: Any) -> str:
    with pytest.raises(JobError) as error:
        job(roles, **fields)
    return str(error.value)


def test_defaults_of_a_job() -> None:
    made = job()
    assert (made.node_number, made.device_per_node) == (1, 8)
    assert made.accelerator_type is AcceleratorType.GPU
    assert (made.accelerator_type, made.user_config, made.global_envs, made.dl_type) == ("GPU", {}, {}, "SFT")
    assert made.stream_type == "TASK_STREAM"


def test_workloads_are_told_apart_by_backend() -> None:
    made = job({"a": {"backend": "elastic"}, "b": {"backend": "simple"}, "c": {}})
    found = [type(made.workloads[role]) for role in "abc"]
    assert found == [ElasticWorkloadDesc, SimpleWorkloadDesc, SimpleWorkloadDesc]
    assert "elastc" in refusal({"a": {"backend": "elastc"}})


def test_models_are_taken_as_well_as_mappings() -> None:
    workload = ElasticWorkloadDesc.model_validate(
        {"total": 2, "entry_point": "m.f", "resource": ResourceDesc(accelerator=1)}
    )
    made = DLConfig(workloads={"training": workload}, accelerator_type=AcceleratorType.CPU)
    assert made.workloads["training"] == workload


def test_a_dump_can_be_read_back() -> None:
    made = job({"a": {"total": 2}, "b": {"total": 2}}, user_config={"x": 1}, collocations=[{"a", "b"}])
    assert DLConfig.model_validate(made.model_dump()) == made


@pytest.mark.parametrize(
    "given", [{"a": 1, "b": "${a}"}, OmegaConf.create({"a": 1, "b": "${a}"}), argparse.Namespace(a=1, b="${a}")]
)
def test_mappings_become_a_resolved_config(given: object) -> None:
    made = job(user_config=given).user_config
    assert isinstance(made, DictConfig)
    assert made == {"a": 1, "b": 1}
    assert OmegaConf.to_container(made, resolve=False) == {"a": 1, "b": 1}


def test_the_users_own_config_is_not_touched() -> None:
    given = OmegaConf.create({"a": 1, "b": "${a}"})
    job(user_config=given)
    assert OmegaConf.to_container(given, resolve=False) == {"a": 1, "b": "${a}"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"items": 3}, "config: items: workers get a DictConfig, where config.items is a method"),
        (argparse.Namespace(lr=1, copy=True), "copy: workers get a DictConfig, where config.copy is a method"),
        ({"sweep": {"lr": {"values": [1, 2]}}, "get": 1}, "get, sweep.lr.values: workers get"),
        ({"stages": [{"keys": 1}, ({"pop": 2},)]}, "stages.0.keys, stages.1.0.pop: workers get"),
    ],
)
def test_keys_that_are_methods_of_the_workers_config_are_refused(given: object, says: str) -> None:
    with pytest.raises(JobError, match=says):
        job(user_config=given)


def test_a_config_of_omegaconf_and_a_roles_own_may_have_such_keys() -> None:
    """The first is a DictConfig for its author already, the second stays a dict."""
    assert job(user_config=DictConfig({"items": 3})).user_config["items"] == 3
    made = job({"a": {"config": {"items": 3, "values": [1]}}})
    assert made.workloads["a"].config == {"items": 3, "values": [1]}


def test_none_becomes_an_empty_config_and_the_rest_stays() -> None:
    assert isinstance(job(user_config=None).user_config, DictConfig)
    marker = object()
    assert job(user_config=marker).user_config is marker
    assert job(user_config=[1]).user_config == [1]


def test_a_namespace_may_hold_any_object() -> None:
    made = job(user_config=argparse.Namespace(kind=complex, n=1)).user_config
    assert made.kind is complex
    assert made.n == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"roles": {}}, "at least one workload must be defined"),
        ({"roles": {"a/b": {}}}, "role name 'a/b' is not allowed"),
        ({"roles": {"x" * 64: {}}}, "is not allowed"),
        ({"roles": {"a": {"total": "many"}}}, "role 'a': total"),
        ({"roles": {"a": {"totl": 1}}}, "role 'a': a workload has no 'totl'. Did you mean"),
        ({"roles": {"a": {"entry_point": "main"}}}, "role 'a': entry_point"),
        ({"accelerator_type": "mem"}, "device_type is 'mem': it must be"),
        ({"node_number": 0}, "node_num is 0: it must be greater than or equal to 1."),
        ({"device_per_node": 0}, "device_per_node"),
        ({"node_numbr": 1}, "Did you mean 'node_number'?"),
        ({"dl_type": "X"}, "dl_type"),
        ({"collocations": [["a", "b"]]}, "role 'b' is named in a collocation, and is not defined"),
        ({"collocations": [[]]}, "names no role"),
        ({"roles": {"a": {"total": 4, "per_group": 2}, "b": {"total": 3}}, "collocations": [{"a", "b"}]},
         "a makes 2, b makes 3"),
        ({"roles": {"a": {}, "b": {}, "c": {}}, "collocations": [{"a", "b"}, {"b", "c"}]},
         "role 'b' has already been assigned"),
        ({"roles": {"a": {"group": "g"}, "b": {}}, "collocations": [{"a", "b"}]}, "already been assigned"),
        ({"user_config": {"a": "${nowhere}"}}, "nowhere"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(fields.pop("roles", None), **fields)


def test_a_group_must_fit_one_node() -> None:
    roles = {"a": {"total": 4, "per_group": 4}}
    assert job(roles, device_per_node=4)
    said = refusal(roles, device_per_node=3, node_number=2)
    assert "role a needs 4 accelerators on one node" in said
    assert "device_per_node is 3" in said


def test_the_sum_counts_every_worker_and_not_once_a_role() -> None:
    roles = {"a": {"total": 4}, "b": {"total": 5}}
    assert job(roles, node_number=3, device_per_node=3)
    said = refusal(roles, node_number=2, device_per_node=4)
    assert "all roles together (a, b) need 9 accelerators" in said
    assert "2 x 4 = 8" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "role_9 and 490 more) need 500 accelerators"),
        ({"resource": {"accelerator": 9}}, "and 491 more errors."),
        ({"totl": 1}, "and 490 more errors"),
    ],
)
def test_an_error_of_a_job_of_many_roles_is_short(fields: dict[str, Any], said: str) -> None:
    told = refusal({f"role_{number}": fields for number in range(500)})
    assert said in told
    assert "role_11" not in told
    assert len(told) < 6000


def test_workers_without_accelerators_need_no_device() -> None:
    assert job({"a": {"total": 100, "resource": {"cpu": 1}}}, device_per_node=1)


def test_collocated_roles_share_devices_and_a_group() -> None:
    made = job({"a": {"total": 4, "per_group": 2}, "b": {"total": 2}}, collocations=[{"a", "b"}], node_number=2)
    assert {made.workloads[role].group for role in "ab"} == {"collocation_0"}
    assert {made.workloads[role].resource.accelerator for role in "ab"} == {0.5}
    (group,) = made.workload_group
    assert (group.name, group.num, sorted(group.workloads)) == ("collocation_0", 2, ["a", "b"])
    assert group.resource.accelerator == 1.5


def test_collocation_keeps_the_other_resources() -> None:
    made = job({"a": {"resource": {"cpu": 3}}, "b": {}}, collocations=[{"a", "b"}])
    assert made.workloads["a"].resource == ResourceDesc(cpu=3, accelerator=0.5)


def test_a_collocation_takes_another_case_only_where_no_role_has_the_name() -> None:
    made = job({"actor": {}, "ACTOR": {}, "Judge": {}}, collocations=[{"actor", "JUDGE"}])
    assert made.collocations == [{"actor", "Judge"}]
    assert made.workloads["ACTOR"].group is None
    assert "not defined" in refusal({"actor": {}, "ACTOR": {}, "b": {}}, collocations=[{"Actor", "b"}])


@pytest.mark.parametrize("num_roles", range(1, 17))
def test_equal_shares_of_all_roles_are_one_device(num_roles: int) -> None:
    assert num_roles * device_share(round(1 / num_roles, 2), num_roles) <= 1 + 1e-9
    roles = {f"r{number}": {"total": 8, "per_group": 8} for number in range(num_roles)}
    made = job(roles, collocations=[set(roles)], device_per_node=8)
    assert made.workloads["r0"].resource.accelerator == round(1 / num_roles, 2)


def test_defaults_of_a_submission() -> None:
    rest = JobConfig(job_name="x", dl_config=job()).model_dump(exclude={"dl_config"})
    assert rest == {
        "job_name": "x",
        "master": None,
        "wait": True,
        "master_cpu": 2,
        "master_mem": 4096,
        "master_create_timeout": 600,
        "node_max_restart": 10,
        "job_max_restart": 10,
        "master_max_restart": 10,
        "master_isolation_schedule_resource": "",
        "worker_isolation_schedule_resource": "",
        "failover_trigger_strategy": 2,
        "failover_exec_strategy": 1,
        "restart_window": None,
        "hang_timeout": None,
        "restart_backoff": 30,
        "master_state_backend_type": "SQLITE",
        "master_state_backend_config": {},
        "stop_grace_s": 10,
        "save_grace_s": 60,
        "call_timeout_s": None,
        "python": None,
        "start_method": "fork",
        "ship": False,
        "exclude": [],
        "requirements": [],
        "working_dir": None,
        "report_to": "",
    }


@pytest.mark.parametrize("name", ["a/b", "x" * 300, "", "-a"])
def test_job_names_are_checked(name: str) -> None:
    with pytest.raises(JobError, match="job name"):
        JobConfig(job_name=name, dl_config=job())


# What `JobConfig.model_dump_json` of upstream writes for a job of three kinds of roles, two of which are collocated.
UPSTREAMS = """
{"job_name": "dlrover-3f2a", "dl_config": {"user_config": {"lr": 0.1, "nested": {"a": [1]}}, "workloads": {
  "ACTOR": {"total": 2, "resource": {"cpu": 0.0, "memory": 0, "disk": 0, "accelerator": 0.5, "user_defined": {}},
    "envs": {"A": "1", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "true"}, "per_node_max_failure": 3,
    "max_restart": 10, "group": "collocation_0", "per_group": 1, "entry_point": "m.Actor", "config": {"k": 1},
    "rank_based_gpu_selection": false, "is_driver": false,
    "node_group_failover": {"enabled": false, "group_label_key": "", "timeout": 300}, "backend": "elastic",
    "comm_pre_check": true, "comm_auto_setup_process_group": true, "comm_backend": "auto", "comm_timeout_s": null},
  "ROLLOUT": {"total": 2, "resource": {"cpu": 0.0, "memory": 0, "disk": 0, "accelerator": 0.5, "user_defined": {}},
    "envs": {}, "per_node_max_failure": 3, "max_restart": 10, "group": "collocation_0", "per_group": 1,
    "entry_point": "rollout.py --n 1", "config": {}, "rank_based_gpu_selection": false, "is_driver": false,
    "node_group_failover": null, "backend": null},
  "TRAINER": {"total": 1, "resource": {"cpu": 4.0, "memory": 8192, "disk": 0, "accelerator": 0.0, "user_defined": {}},
    "envs": {}, "per_node_max_failure": 3, "max_restart": 10, "group": null, "per_group": 1, "entry_point": "",
    "config": {}, "rank_based_gpu_selection": false, "is_driver": true, "backend": "custom", "module_name": "m",
    "class_name": "Trainer"}},
  "global_envs": {"B": "2"}, "node_number": 1, "accelerator_type": "GPU", "device_per_node": 8},
 "master_cpu": 2, "master_mem": 4096, "master_create_timeout": 600.0, "master_state_backend_type": "RAY_INTERNAL",
 "master_state_backend_config": {}, "node_max_restart": 10, "job_max_restart": 10, "master_max_restart": 10,
 "failover_trigger_strategy": 2, "failover_exec_strategy": 1, "master_isolation_schedule_resource": "",
 "worker_isolation_schedule_resource": ""}
"""


def test_documents_of_upstream_are_read() -> None:
    config = JobConfig.model_validate_json(UPSTREAMS)
    workloads = config.dl_config.workloads
    assert {role: (w.backend, w.entry_point) for role, w in workloads.items()} == {
        "ACTOR": ("elastic", "m.Actor"),
        "ROLLOUT": ("simple", "rollout.py --n 1"),
        "TRAINER": ("custom", "m.Trainer"),
    }
    assert [group.workloads for group in config.dl_config.workload_group] == [["ACTOR", "ROLLOUT"], ["TRAINER"]]
    assert not workloads["ACTOR"].auto_visible_devices, "as its disable_ray_auto_visible_device() says"
    assert workloads["ROLLOUT"].auto_visible_devices
    assert config.dl_config.user_config == {"lr": 0.1, "nested": {"a": [1]}}
    assert JobConfig.model_validate_json(config.model_dump_json()) == config, "ours are read again too"


def test_what_workers_will_know_of_a_job() -> None:
    info = JobConfig(job_name="j", dl_config=job(user_config={"lr": 1})).to_job_info()
    assert (info.name, info.job_id, info.accelerator_type.value) == ("j", "j", "GPU")
    assert info.user_config == {"lr": 1}
