"""From a payload to an attempt: names, environment, and what is kept of a payload."""

import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.unit.gateway.test_gateway_schemas import LEAST
from unified.errors import OptionError
from unified.job.payload import decode
from unified.training.arguments import parse_arguments
from unified.training.options import TrainingOptions
from unified_gateway.backend import REQUEST_ANNOTATION, RunPlan
from unified_gateway.master_backend import job_spec
from unified_gateway.plan import Difference, StoredRequest, job_name, plan_run
from unified_gateway.schemas import ResumeRequest, TrainingRequest


def request(**fields: Any) -> TrainingRequest:
    return TrainingRequest.model_validate({**LEAST, **fields})


def plan(**fields: Any) -> RunPlan:
    return plan_run(request(**fields), attempt_id="a1", salt="s", namespace="default")


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("nightly-3", "train-nightly-3"),
        ("a", "train-a"),
        ("Nightly", "train-nightly-ab6b5a"),
        ("aml_ruleset_v4", "train-aml-ruleset-v4-1e46b9"),
        ("a-", "train-a-9baf44"),
    ],
)
def test_the_name_of_a_job_is_that_of_its_run(run_id: str, name: str) -> None:
    assert job_name(request(run_id=run_id)) == name


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9_-]|\.(?!\.)){0,99}", fullmatch=True).filter(lambda s: ".." not in s))
def test_any_run_id_makes_a_name_that_is_a_label(run_id: str) -> None:
    made = job_name(request(run_id=run_id))
    assert job_name(request(job_name=made)) == made
    assert len(made) <= 52


def test_run_ids_that_look_alike_have_other_names() -> None:
    alike = ["ab", "AB", "aB", "a_b", "a.b", "a-b", "a-b-", "x" * 46, "x" * 47, "x" * 99, "x" * 98 + "y"]
    assert len({job_name(request(run_id=each)) for each in alike}) == len(alike)


def test_a_name_that_is_given_is_taken() -> None:
    assert job_name(request(job_name="mine")) == "mine"


def test_the_program_gets_the_variables_of_the_document() -> None:
    made = plan(extra_args={"lr": 3e-5, "dataset_text_field": "ü"}, env={"A": "b"}, resume_from_checkpoint=True)
    assert made.environment == {"A": "b"}
    env = made.options.as_environment()
    assert json.loads(env.pop("EXTRA_ARGS_JSON")) == {"lr": 3e-5, "dataset_text_field": "ü"}
    prefix = "s3://deepfinery-training/runs/aml_ruleset_v4/framework=hf"
    assert env == {
        "FRAMEWORK": "hf",
        "RUN_ID": "aml_ruleset_v4",
        "CHECKPOINT_BASE_URI": "s3://deepfinery-training/runs",
        "CHECKPOINT_PREFIX": prefix,
        "DATASET_URI": "s3://deepfinery-datasets/fraud/aml_ruleset.jsonl",
        "LOGS_URI": f"{prefix}/logs",
        "CONFIG_URI": f"{prefix}/config",
        "MODEL_ID": "meta-llama/Llama-3-8B",
        "CONFIG_PATH": "",
        "RESUME_FROM_CHECKPOINT": "true",
        "ATTEMPT_ID": "a1",
    }
    assert TrainingOptions.parse([], made.options.as_environment()).as_config() == made.options.as_config()


def test_ranks_of_our_own_master_get_the_record_itself() -> None:
    made = plan(extra_args={"lr": 3e-5}, env={"A": "b"})
    spec = job_spec(made)
    assert TrainingOptions.of_job(decode(spec.user_config)) == made.options
    assert spec.roles[0].envs == {"A": "b"}
    assert spec.roles[0].entry_point.argv == []
    assert not set(spec.roles[0].envs) & set(made.options.as_environment())
    assert [name for name, kind in get_type_hints(TrainingOptions).items() if "str]" in str(kind)] == []
    assert TrainingOptions.of_job(None) is None
    assert TrainingOptions.of_job({"other": 1}) is None


@pytest.mark.parametrize(
    ("framework", "extra_args"),
    [
        ("hf", {"learning_rate": 1, "warmup_steps": 0.1, "save_steps": 50.0, "adam_beta2": 0.9}),
        ("meta", {"lr": 5e-5, "lr_scheduler_type": "linear"}),
        ("nemo", {}),
    ],
)
def test_ranks_use_the_arguments_that_the_gateway_checked(
    framework: str, extra_args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(framework=framework, extra_args=extra_args)
    assert made.options.arguments == parse_arguments(framework, extra_args)
    assert made.options.arguments is made.request.arguments
    config = decode(job_spec(made).user_config)
    monkeypatch.setattr("unified.training.options.parse_arguments", lambda *_: pytest.fail("parsed again"))
    assert TrainingOptions.of_job(config) == made.options
    assert "arguments" not in made.request.model_dump()


def test_a_rank_merges_the_file_that_it_alone_can_read(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("learning_rate: 0.1\nbatch_size: 2\nseed: 7")
    made = plan(framework="meta", extra_args={"lr": 0.2, "batch_size": 4}, config_path=str(tmp_path / "config"))
    assert made.options.arguments.seed == 42
    found = TrainingOptions.of_job(decode(job_spec(made).user_config))
    assert found is not None
    assert (found.arguments.lr, found.arguments.batch_size, found.arguments.seed) == (0.2, 4, 7)
    assert found.extra_args == {"lr": 0.2, "batch_size": 4, "seed": 7}
    (tmp_path / "config").write_text("seed: many")
    with pytest.raises(OptionError, match="extra_args: seed='many' is not allowed"):
        TrainingOptions.of_job(decode(job_spec(made).user_config))


def test_a_rank_refuses_an_argument_that_only_a_later_gateway_has() -> None:
    config = plan(extra_args={"lr": 3e-5}).options.as_job_config()
    config["training_run"]["arguments"]["newer"] = 1
    with pytest.raises(OptionError, match=r"unknown field `newer`.*install its release"):
        TrainingOptions.of_job(config)


def test_the_job_has_a_rank_for_each_device_and_a_share_of_its_node_for_each_rank() -> None:
    spec = job_spec(plan(num_nodes=2, gpus_per_node=8, cpus_per_node=48, memory_per_node_gb=512))
    (role,) = spec.roles
    assert (role.total, role.per_group, spec.node_num, spec.device_per_node) == (16, 8, 2, 8)
    assert (role.resources.accelerator, role.resources.cpu, role.resources.memory_mb) == (1, 6, 65536)
    assert (role.kind, role.entry_point.kind, role.entry_point.target) == ("elastic", "module", "unified.training")
    assert spec.labels["unified/run-id"] == "aml_ruleset_v4"
    assert job_spec(plan(), shares_host=True).roles[0].resources.cpu == 0


def test_what_is_kept_of_a_payload_has_no_value_of_its_environment() -> None:
    text = plan(env={"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI"}).annotations[REQUEST_ANNOTATION]
    assert "wJalrXUtnFEMI" not in text
    assert "AWS_SECRET_ACCESS_KEY" in text


def stored(**fields: Any) -> StoredRequest:
    found = StoredRequest.read(plan(**fields).annotations)
    assert found is not None
    return found


def test_the_same_payload_has_no_differences_whatever_is_said_of_defaults_and_resume() -> None:
    kept = stored(env={"A": "1"})
    assert kept.differences(request(env={"A": "1"}, num_nodes=1, resume_from_checkpoint=True)) == {}


def test_differences_name_fields_with_both_values_and_variables_without() -> None:
    kept = stored(env={"A": "1", "B": "2", "C": "3"}, num_nodes=2)
    found = kept.differences(request(env={"A": "1", "B": "x", "D": "4"}, dataset_uri="/data"))
    assert found == {
        "num_nodes": Difference(2, 1),
        "dataset_uri": Difference(LEAST["dataset_uri"], "/data"),
        "env.B": Difference("set", "set to another value"),
        "env.C": Difference("set", "not set"),
        "env.D": Difference("not set", "set"),
    }


def test_a_field_that_an_older_release_did_not_know_had_its_default() -> None:
    kept = stored(num_nodes=2)
    older = StoredRequest({name: each for name, each in kept.fields.items() if name != "num_nodes"}, {}, "s")
    assert older.differences(request()) == {}
    assert older.differences(request(num_nodes=3)) == {"num_nodes": Difference(1, 3)}


def test_a_resume_keeps_what_it_does_not_change() -> None:
    kept = stored(extra_args={"lr": 1e-4, "max_steps": 5}, env={"A": "1", "B": "2"}, labels={"team": "x"})
    changed, env = kept.resumed(ResumeRequest(extra_args={"max_steps": 9}, env={"B": "3", "C": "4"}))
    assert changed.extra_args == {"lr": 1e-4, "max_steps": 9}
    assert (changed.env, set(env)) == ({"B": "3", "C": "4"}, {"A"})
    assert changed.resume_from_checkpoint
    again = plan_run(changed, attempt_id="a2", salt=kept.salt, namespace="default", kept=env)
    assert again.kept_env == ("A",)
    after = StoredRequest.read(again.annotations)
    assert after is not None
    whole = request(extra_args={"lr": 1e-4, "max_steps": 9}, env={"A": "1", "B": "3", "C": "4"}, labels={"team": "x"})
    assert after.differences(whole) == {}


def test_a_resume_is_checked_as_a_payload() -> None:
    with pytest.raises(ValidationError, match="max_steps is not allowed: Expected"):
        stored(framework="meta").resumed(ResumeRequest(extra_args={"max_steps": "many"}))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{not json"])
def test_annotations_of_others_are_no_payload(text: str) -> None:
    assert StoredRequest.read({REQUEST_ANNOTATION: text} if text else {}) is None
