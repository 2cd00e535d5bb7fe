"""Scripts of upstream catch pydantic's `ValidationError` for a wrong description of a job; it is a `JobError`, too."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from unified import DLJobBuilder, RLJobBuilder
from unified.bus.calls.remote_errors import describe, rebuild
from unified.errors import JobError, RemoteError
from unified.job import DLConfig, ElasticWorkloadDesc, JobConfig, SimpleWorkloadDesc


def rl() -> Any:
    return RLJobBuilder().node_num(1).device_per_node(1).config({"k1": "v1"})


WRONG: dict[str, Callable[[], object]] = {
    "no role": lambda: DLJobBuilder().build(),
    "device type": lambda: DLJobBuilder().device_type("mem").workload("a", "m.a").build(),
    "no actor": lambda: rl().trainer("m0.c0").build(),
    "empty entry point": lambda: rl().trainer("").end().build(),
    "entry point": lambda: DLJobBuilder().role("test").run("main").end().build(),
    "total": lambda: DLJobBuilder().role("test").run("test.main").total(-1).end().build(),
    "role not defined": lambda: rl().actor("m.a").end().with_collocation("ACTOR", "ROLLOUT").build(),
    "a desc": lambda: SimpleWorkloadDesc(total=5, per_group=3, entry_point="a.b"),
    "an elastic desc": lambda: ElasticWorkloadDesc(entry_point="a_b_c"),
    "a document": lambda: DLConfig.model_validate_json("{}"),
    "a model": lambda: DLConfig.model_validate({"workloads": {}}),
    "options": lambda: JobConfig(job_name="j", dl_config=DLJobBuilder().workload("a", "m.a").build(), master_cpu=-1),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_description_is_an_error_of_pydantic_and_a_job_error(case: str) -> None:
    with pytest.raises(ValidationError) as caught:
        WRONG[case]()
    assert isinstance(caught.value, JobError)
    assert caught.value.errors()
    assert "validation error" not in f"{caught.value} {caught.value!r}"


def test_errors_have_pydantics_places_and_kinds() -> None:
    with pytest.raises(ValidationError) as caught:
        DLJobBuilder().node_num(0).role("r").run("m.r").total("many").end().build()  # type: ignore[arg-type]
    found = {(".".join(map(str, each["loc"])), each["type"]) for each in caught.value.errors()}
    assert found == {("workloads.r.simple.total", "int_parsing"), ("node_number", "greater_than_equal")}


def test_an_error_that_leaves_the_process_is_a_job_error() -> None:
    """Its text goes along, but not the values in it, which may refuse a pickle."""
    with pytest.raises(JobError) as caught:
        DLJobBuilder().workload("r", "m.r").env({"A": lambda: None}).build()
    sent = pickle.loads(pickle.dumps(caught.value))
    assert (type(sent), str(sent)) == (JobError, str(caught.value))
    far = rebuild(describe(caught.value, worker="w", node="n", ours=globals()), "f()")
    assert isinstance(far, JobError)
    assert isinstance(far, RemoteError)
    assert str(far) == str(caught.value)
