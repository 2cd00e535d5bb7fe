"""Text of ``UNIFIED_REPORT_TO``: what it names, what is refused, and the run that a submission makes."""

from typing import Any

import pytest

from unified.errors import UsageError
from unified.job import DLConfig
from unified.job.driver import Driver
from unified.job.options import submit_options
from unified.job.report_to import parse_targets
from unified.job.spec import JobSpec
from unified.job.to_spec import to_spec


def submitted(keywords: dict[str, Any], env: dict[str, str] | None = None, **job: Any) -> JobSpec:
    roles = {"a": {"entry_point": "m.f"}, "b": {"entry_point": "m.f", "envs": {"UNIFIED_REPORT_TO": ""}}}
    config = submit_options(
        DLConfig.model_validate({"workloads": roles, "device_per_node": 8, **job}), keywords, env or {}
    )
    return to_spec(config, Driver.here({}))


def test_targets() -> None:
    assert parse_targets("") == []
    assert parse_targets("tensorboard:/a:b, mlflow,wandb:team/p,,trackio:x") == [
        ("tensorboard", "/a:b"), ("mlflow", ""), ("wandb", "team/p"), ("trackio", "x"),
    ]  # fmt: skip
    assert parse_targets("mlflow:http://h:5000") == [("mlflow", "http://h:5000")]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tensorbord:x", r"'tensorbord' is no tracker\. Did you mean 'tensorboard'\? There are mlflow\[:URI\], wandb"),
        ("tensorboard", r"='tensorboard': tensorboard needs a folder: tensorboard:DIR\.$"),
        ("wandb,wandb:x", r"names wandb twice: give it once\.$"),
    ],
)
@pytest.mark.parametrize("way", ["option", "environment", "job"])
def test_a_bad_value_is_one_sentence_when_the_job_is_submitted(text: str, told: str, way: str) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        submitted(
            {"report_to": text} if way == "option" else {},
            {"UNIFIED_REPORT_TO": text} if way == "environment" else {},
            global_envs={"UNIFIED_REPORT_TO": text} if way == "job" else {},
        )
    assert "\n" not in str(refused.value)


def test_the_option_becomes_the_variable_of_each_role_that_has_none() -> None:
    spec = submitted({"report_to": ["tensorboard:d", "mlflow"]})
    assert spec.role("a").envs["UNIFIED_REPORT_TO"] == "tensorboard:d,mlflow"
    assert "UNIFIED_REPORT_RUN" not in spec.role("a").envs
    assert spec.role("b").envs == {"UNIFIED_REPORT_TO": ""}
    own = submitted({"report_to": "wandb"}, global_envs={"UNIFIED_REPORT_RUN": "mine"})
    assert own.role("a").envs["UNIFIED_REPORT_RUN"] == "mine"
    assert submitted({}).role("a").envs == {}
