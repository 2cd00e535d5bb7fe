"""Options of a submission: where they come from, and which source wins."""

import re
from collections.abc import Callable
from datetime import timedelta
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest

from unified.api.builder import DLJob
from unified.errors import JobNameError, OptionError
from unified.job import DLConfig, JobConfig
from unified.job.description import field_of
from unified.job.options import SubmitOptions, submit_options

JOB = DLConfig.model_validate({"workloads": {"a": {"entry_point": "m.f"}}})


def options(keywords: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> JobConfig:
    return submit_options(JOB, keywords or {}, env or {})


def test_sources_in_rising_order() -> None:
    old, new = {"DLROVER_UNIFIED_JOB_MAX_RESTART": "1"}, {"UNIFIED_JOB_MAX_RESTART": "2"}
    assert options().job_max_restart == 10
    assert options(env=old).job_max_restart == 1
    assert options(env=old | new).job_max_restart == 2
    assert options({"job_max_restart": 3}, old | new).job_max_restart == 3


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("JOB_NAME", "x", "job_name", "x"),
        ("MASTER_CPU", "3", "master_cpu", 3),
        ("MASTER_MEM", "5", "master_mem", 5),
        ("MASTER_MEMORY", "5", "master_mem", 5),
        ("MASTER_CREATE_TIMEOUT", "5", "master_create_timeout", 5),
        ("NODE_MAX_RESTART", "5", "node_max_restart", 5),
        ("JOB_MAX_RESTART", "5", "job_max_restart", 5),
        ("MASTER_MAX_RESTART", "5", "master_max_restart", 5),
        ("MASTER_ISOLATION_SCHEDULE_RESOURCE", "MR", "master_isolation_schedule_resource", "MR"),
        ("WORKER_ISOLATION_SCHEDULE_RESOURCE", "WR", "worker_isolation_schedule_resource", "WR"),
        ("FAILOVER_TRIGGER_STRATEGY", "0", "failover_trigger_strategy", 0),
        ("FAILOVER_EXEC_STRATEGY", "2", "failover_exec_strategy", 2),
        ("MASTER_STATE_BACKEND_TYPE", "HDFS", "master_state_backend_type", "HDFS"),
        ("MASTER_STATE_BACKEND_CONFIG", '{"path": "/x"}', "master_state_backend_config", {"path": "/x"}),
        ("MASTER", "tcp://h:1", "master", "tcp://h:1"),
        ("WAIT", "false", "wait", False),
        ("STOP_GRACE_S", "1.5", "stop_grace_s", 1.5),
        ("CALL_TIMEOUT_S", "3", "call_timeout_s", 3),
        ("PYTHON", "/usr/bin/python3", "python", "/usr/bin/python3"),
        ("START_METHOD", "spawn", "start_method", "spawn"),
        ("WORKING_DIR", "/w", "working_dir", "/w"),
    ],
)
@pytest.mark.parametrize("prefix", ["DLROVER_UNIFIED_", "UNIFIED_"])
def test_every_option_has_its_variables(prefix: str, variable: str, text: str, field: str, value: object) -> None:
    assert getattr(options(env={prefix + variable: text}), field) == value


def test_aliases_of_keywords() -> None:
    assert options({"master_memory": 128}).master_mem == 128
    assert options({"timeout": timedelta(minutes=1)}).master_create_timeout == 60
    with pytest.raises(OptionError, match="two names of one option"):
        options({"master_memory": 1, "master_mem": 1})


def test_a_job_without_a_name_gets_one_of_its_own() -> None:
    names = {options().job_name for _ in range(8)}
    assert all(re.fullmatch(r"unified-[0-9a-f]{4}", name) for name in names)
    assert len(names) > 1


@pytest.mark.parametrize(
    ("keywords", "env", "said"),
    [
        ({"job_max_restrt": 1}, {}, "submit has no option 'job_max_restrt'. Did you mean 'job_max_restart'?"),
        ({"dl_config": 1}, {}, "submit has no option 'dl_config'"),
        ({}, {"DLROVER_UNIFIED_JOB_NAM": "x"}, "DLROVER_UNIFIED_JOB_NAM is no option of a job. Did you mean 'DLROVER"),
        ({}, {"UNIFIED_JOB_MAX_RESTRT": "1"}, "Did you mean 'UNIFIED_JOB_MAX_RESTART'?"),
        ({}, {"UNIFIED_JOB_MAX_RESTART": "x"}, "option UNIFIED_JOB_MAX_RESTART='x': Input should be a valid integer"),
        ({"failover_exec_strategy": 3}, {}, "option failover_exec_strategy=3: Input should be 0, 1 or 2"),
        ({"start_method": "thread"}, {}, "'fork' or 'spawn'"),
        ({}, {"UNIFIED_MASTER_STATE_BACKEND_CONFIG": "{"}, "is not JSON"),
        ({"job_max_restart": -1}, {}, "greater than or equal to 0"),
        ({"job_name": 3.5}, {}, "option job_name=3.5"),
    ],
)
def test_wrong_options_are_named_with_their_source(keywords: dict[str, Any], env: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        options(keywords, env)


def test_settings_of_the_installation_and_empty_values_are_left_alone() -> None:
    env = {"UNIFIED_HOME": "/h", "UNIFIED_LEASE_S": "3", "UNIFIED_RUN_DIR": "/r", "UNIFIED_MASTER": "", "PATH": "/bin"}
    assert options(env=env).master is None


@pytest.mark.parametrize("name", ["a/b", "n" * 300, ""])
def test_job_names_are_checked(name: str) -> None:
    with pytest.raises(JobNameError, match="job name"):
        options({"job_name": name})


def test_type_checkers_know_the_options_by_all_their_names() -> None:
    """`make types` runs mypy over this file: an ignored error that is none fails there."""
    known = field_of(JobConfig)
    hints = get_type_hints(SubmitOptions)
    assert hints.keys() == known.keys() - {"dl_config"}
    for name, hint in hints.items():
        field = JobConfig.model_fields[known[name]].annotation
        assert alternatives(hint) >= alternatives(field), name
    job = DLJob.model_validate(JOB.model_dump())
    calls: list[Callable[[], object]] = [
        lambda: job.submit("name", job_max_restrt=3),  # type: ignore[call-overload]
        lambda: job.submit("name", blocking=False, job_max_restart="none"),  # type: ignore[call-overload]
        lambda: job.submit("name", failover_exec_strategy=7),  # type: ignore[call-overload]
    ]
    for wrong in calls:
        with pytest.raises(OptionError):
            wrong()


def alternatives(hint: Any) -> set[Any]:
    """The types of a union, without what is annotated to them."""
    if get_origin(hint) is Annotated:
        return alternatives(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return set().union(*(alternatives(each) for each in get_args(hint)))
    return {hint}
