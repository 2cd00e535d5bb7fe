"""Description of a role with an engine: what it takes, what it refuses, and the record that is sent."""

from typing import Any

import pytest

from tests.unit.job.test_to_spec import DRIVER, spec_of
from unified.api.builder import DLJobBuilder
from unified.errors import JobError
from unified.job import DLConfig, JobConfig, SimpleWorkloadDesc
from unified.job.from_spec import workload_of
from unified.job.spec import EngineOptions, EntryPoint, RoleSpec
from unified.job.to_spec import to_spec
from unified.job.workloads import EngineDesc

WORDS = ["vllm", "serve", "my model", "--port", "{port}"]
ENTRY_POINT = EntryPoint(
    kind="attribute", target="unified.engine.worker", attribute="EngineWorker", argv=["python", "s.py", "{port}"]
)


def role_of(**engine: Any) -> RoleSpec:
    """The record of a role that is described by its engine alone, as in a file."""
    job = DLConfig.model_validate({"workloads": {"judge": {"engine": {"command": "python s.py {port}", **engine}}}})
    return to_spec(JobConfig(job_name="j", dl_config=job), DRIVER).role("judge")


def refusal(**engine: Any) -> str:
    with pytest.raises(JobError) as error:
        SimpleWorkloadDesc.model_validate({"engine": {"command": "serve {port}", **engine}})
    return str(error.value)


@pytest.mark.parametrize("command", [WORDS, tuple(WORDS), "vllm serve 'my model' --port {port}"])
def test_a_command_is_a_list_or_one_text(command: Any) -> None:
    job = DLJobBuilder().role("judge").engine(command, start_timeout=60).total(2).build()
    workload = job.get_workload("judge")
    assert isinstance(workload, SimpleWorkloadDesc)
    assert workload.engine == EngineDesc(command=WORDS, start_timeout=60)
    assert (workload.total, workload.is_service, workload.restart_alone) == (2, True, True)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"command": "vllm serve m --port 8000"}, "write {port} where the server is told its port"),
        ({"command": ["sh", "-c", "serve ${port}"]}, "write {port} where the server is told its port"),
        ({"command": ""}, "engine.command"),
        ({"command": "serve 'my model --port {port}"}, "No closing quotation"),
        ({"ready": "health"}, "engine.ready"),
        ({"start_timeout": 0}, "engine.start_timeout"),
        ({"unhealthy_timeout": -1}, "engine.unhealthy_timeout"),
        ({"helth": "/health"}, "helth"),
    ],
)
def test_what_is_refused(engine: dict[str, Any], said: str) -> None:
    assert said in refusal(**engine)


def test_an_engine_needs_a_role() -> None:
    with pytest.raises(
        JobError, match=r"engine\(\) does not know which role it describes: call role\(name\) before it\."
    ):
        DLJobBuilder().engine("serve {port}")


def test_an_engine_alone_describes_a_role() -> None:
    role = role_of(ready="/up", stall_timeout=0)
    options = EngineOptions(command=["python", "s.py", "{port}"], ready="/up", stall_timeout=0.0)
    assert role.engine == options
    assert role.entry_point == ENTRY_POINT
    assert (role.is_service, role.restart_alone) == (True, True)


def test_the_description_is_found_in_the_record() -> None:
    workload = workload_of(role_of(ready="/up"))
    assert isinstance(workload, SimpleWorkloadDesc)
    assert workload.engine == EngineDesc(command=["python", "s.py", "{port}"], ready="/up")
    assert SimpleWorkloadDesc.model_validate(workload.model_dump()).engine == workload.engine


def test_a_role_without_an_engine_has_none() -> None:
    (role,) = spec_of({"a": {}}).roles
    assert role.engine is None
    assert "engine" not in {name for name, value in workload_of(role).model_dump().items() if value is not None}


def test_an_engine_takes_the_place_of_an_entry_point() -> None:
    with pytest.raises(JobError, match=r"a role has an engine or an entry point \(m\.f\), not both\."):
        SimpleWorkloadDesc.model_validate({"entry_point": "m.f", "engine": {"command": "serve {port}"}})
