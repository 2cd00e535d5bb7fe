"""The payload of POST /train: its fields, their defaults and checks."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from unified.training.arguments import parse_arguments
from unified_gateway.schemas import ResumeRequest, TrainingRequest

LEAST = {
    "framework": "hf",
    "model_id": "meta-llama/Llama-3-8B",
    "run_id": "aml_ruleset_v4",
    "checkpoint_base_uri": "s3://deepfinery-training/runs",
    "dataset_uri": "s3://deepfinery-datasets/fraud/aml_ruleset.jsonl",
}


def refusal(**fields: Any) -> str:
    """Return the error of the payload with these fields, as `field: text`."""
    with pytest.raises(ValidationError) as found:
        TrainingRequest.model_validate({**LEAST, **fields})
    (error,) = found.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"


def test_only_five_fields_are_needed_and_the_others_have_the_defaults_of_the_document() -> None:
    request = TrainingRequest.model_validate(LEAST)
    assert (request.num_nodes, request.gpus_per_node, request.cpus_per_node, request.memory_per_node_gb) == (
        1,
        1,
        32,
        256,
    )
    assert (request.image, request.config_path, request.namespace, request.job_name) == (None, None, None, None)
    assert (request.extra_args, request.env, request.labels, request.annotations) == ({}, {}, {}, {})
    assert request.resume_from_checkpoint is False


@pytest.mark.parametrize("field", LEAST)
def test_each_of_the_five_is_needed(field: str) -> None:
    with pytest.raises(ValidationError, match="Field required") as found:
        TrainingRequest.model_validate({name: value for name, value in LEAST.items() if name != field})
    assert found.value.errors()[0]["loc"] == (field,)


def test_slashes_at_the_end_of_places_are_dropped() -> None:
    places = {"checkpoint_base_uri": "s3://bucket/runs///", "dataset_uri": "file:///data/x.jsonl/"}
    request = TrainingRequest.model_validate({**LEAST, **places})
    assert (request.checkpoint_base_uri, request.dataset_uri) == ("s3://bucket/runs", "file:///data/x.jsonl")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"framework": "jax"}, "framework: Input should be 'nemo', 'hf' or 'meta'"),
        ({"run_id": "../../etc"}, "run_id: Value error, run_id '../../etc' is not allowed"),
        ({"run_id": "a/b"}, "run_id: "),
        ({"run_id": "a..b"}, "run_id: "),
        ({"run_id": ""}, "run_id: "),
        ({"run_id": "a" * 101}, "run_id: "),
        ({"run_id": "a\n"}, "run_id: "),
        ({"checkpoint_base_uri": "runs"}, "checkpoint_base_uri: "),
        ({"checkpoint_base_uri": "s3://"}, "checkpoint_base_uri: "),
        ({"checkpoint_base_uri": "s3://bucket/../other"}, "checkpoint_base_uri: "),
        ({"checkpoint_base_uri": "s3://bucket/*"}, "checkpoint_base_uri: "),
        ({"checkpoint_base_uri": "/"}, "checkpoint_base_uri: "),
        ({"checkpoint_base_uri": "gs://b/x"}, "checkpoint_base_uri: "),
        ({"dataset_uri": "http://host/x.jsonl"}, "dataset_uri: "),
        ({"dataset_uri": "file:///a/../b"}, "dataset_uri: "),
        ({"dataset_uri": "s3://bucket/a\x00"}, "dataset_uri: "),
        ({"model_id": "a\x07"}, "model_id: Value error, control characters"),
        ({"model_id": "\ud800"}, "model_id: "),
        ({"num_nodes": 0}, "num_nodes: "),
        ({"gpus_per_node": 0}, "gpus_per_node: "),
        ({"cpus_per_node": 0}, "cpus_per_node: "),
        ({"memory_per_node_gb": 0}, "memory_per_node_gb: "),
        ({"num_nodes": 10**18}, "num_nodes: "),
        ({"num_nodes": "two"}, "num_nodes: "),
        ({"resume_from_checkpoint": "maybe"}, "resume_from_checkpoint: "),
        ({"extra_args": []}, "extra_args: "),
        ({"extra_args": {"a": float("nan")}}, "extra_args"),
        ({"extra_args": {"a": "\ud800"}}, "extra_args"),
        ({"extra_args": {"a": "x" * 70_000}}, "extra_args: Value error, it has 70009 bytes"),
        ({"framework": "meta", "extra_args": {"learing_rate": 1}}, ": Value error, extra_args: meta has no argument"),
        (
            {"framework": "meta", "extra_args": {"max_steps": "many"}},
            ": Value error, extra_args: max_steps is not allowed",
        ),
        ({"env": {"1A": "x"}}, "env: Value error, '1A' is no name of a variable"),
        ({"env": {"A=B": "x"}}, "env: Value error, 'A=B' is no name"),
        ({"env": {"A": "x\x00"}}, "env: Value error, the value of A has the character NUL"),
        ({"env": {"RUN_ID": "x"}}, "env: Value error, RUN_ID is set by the service"),
        ({"env": {"MASTER_ADDR": "x"}}, "env: Value error, MASTER_ADDR is set by the service"),
        ({"env": {f"A{number}": "x" * 90_000 for number in range(3)}}, "env: Value error, at most 262144"),
        ({"env": {"A": ["x"]}}, "env.A: "),
        ({"env": {"A": "\ud800"}}, "env"),
        ({"annotations": {"a": "\ud800"}}, "annotations"),
        ({"env": {"UNIFIED_HOME": "/"}}, "env: Value error, UNIFIED_HOME is reserved for the runtime"),
        ({"env": {"A": "x" * 100_001}}, "env: Value error, the value of A has"),
        ({"extra_args": {"hub_token": "x"}}, "extra_args: Value error, hub_token looks like a credential"),
        ({"dataset_uri": "s3://user:secret@bucket/x"}, "dataset_uri: Value error, it has a password in it"),
        ({"model_id": "https://user:secret@host/x"}, "model_id: Value error, it has a password in it"),
        ({"labels": {f"l{number}": "x" for number in range(65)}}, "labels: Value error, at most 64 labels"),
        ({"labels": {f"l{number}": "x" * 63 for number in range(64)}}, "labels: Value error, at most 64 labels of"),
        ({"labels": {"a b": "x"}}, "labels: Value error, 'a b' is no key"),
        ({"labels": {"a": "-"}}, "labels: Value error, the value of 'a'"),
        ({"labels": {"a": "x" * 64}}, "labels: Value error, the value of 'a'"),
        ({"labels": {"unified/kind": "x"}}, "labels: Value error, 'unified/kind' begins with unified/"),
        ({"annotations": {"/a": "x"}}, "annotations: Value error, '/a' is no key"),
        ({"annotations": {"a": "x" * 300_000}}, "annotations: Value error, at most"),
        ({"namespace": "Team_A"}, "namespace: "),
        ({"namespace": "a" * 64}, "namespace: "),
        ({"job_name": "../x"}, "job_name: "),
        ({"job_name": "Upper"}, "job_name: "),
        ({"job_name": "a" * 53}, "job_name: "),
        ({"image": "a\nb"}, "image: "),
        ({"gpus": 8}, "gpus: Extra inputs are not permitted"),
    ],
)
def test_a_field_that_is_not_allowed_is_named(fields: dict[str, Any], text: str) -> None:
    assert refusal(**fields).startswith(text)


def test_the_runtimes_own_settings_that_are_for_jobs_may_be_set() -> None:
    env = {"UNIFIED_STORAGE_ENDPOINT": "http://minio:9000", "UNIFIED_LOG_LEVEL": "debug"}
    assert TrainingRequest.model_validate({**LEAST, "env": env}).env == env


@pytest.mark.parametrize("secret", ["s3://x/my-secret/../y", "hunter2-my-secret"])
def test_an_error_repeats_no_value_that_may_be_a_secret(secret: str) -> None:
    for fields in ({"dataset_uri": secret}, {"framework": "meta", "extra_args": {"lr": secret}}):
        assert "my-secret" not in refusal(**fields)


def test_all_fields_of_the_document_are_taken() -> None:
    request = TrainingRequest.model_validate(
        {
            **LEAST,
            "num_nodes": 2,
            "gpus_per_node": 8,
            "cpus_per_node": 48,
            "memory_per_node_gb": 512,
            "image": "ghcr.io/deepfinery/trainer:latest",
            "resume_from_checkpoint": True,
            "config_path": "s3://bucket/config.yaml",
            "extra_args": {"max_steps": 50000, "lr": 3e-5, "batch_size": 128, "gradient_accumulation": 2},
            "env": {"OMP_NUM_THREADS": 4},
            "labels": {"team": "fraud", "example.com/cost": ""},
            "annotations": {"note": "any text"},
            "namespace": "ml",
            "job_name": "aml-4",
        }
    )
    assert request.env == {"OMP_NUM_THREADS": "4"}
    assert request.extra_args["lr"] == 3e-5


def test_a_resume_changes_arguments_and_environment_alone() -> None:
    assert ResumeRequest.model_validate({"extra_args": {"max_steps": 9}}).env == {}
    with pytest.raises(ValidationError, match="model_id"):
        ResumeRequest.model_validate({"model_id": "x"})


def test_a_dataset_is_a_uri_or_a_list_of_weighted_ones() -> None:
    given = ["s3://bucket/a.jsonl/", {"uri": "/data/b", "weight": 0.5}]
    wanted = [{"uri": "s3://bucket/a.jsonl", "weight": 1.0}, {"uri": "/data/b", "weight": 0.5}]
    for each in (given, json.dumps(given)):
        assert TrainingRequest.model_validate({**LEAST, "dataset_uri": each}).dataset_uri == wanted
    extra_args = {"eval_dataset_uri": given}
    assert TrainingRequest.model_validate({**LEAST, "extra_args": extra_args}).arguments.eval_dataset_uri == given


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"eval_dataset_uri": ["b/c"]}, "a local path is absolute"),
        ({"eval_dataset_uri": [{"uri": "/a", "weight": 0}]}, "weight"),
        ({"eval_dataset_uri": "s3://user:secret@host/a"}, "looks like a credential"),
        ({"eval_dataset_uri": "/a", "eval_fraction": 0.1}, "both eval_dataset_uri and eval_fraction"),
    ],
)
def test_a_dataset_to_evaluate_on_is_checked_as_well(extra_args: dict[str, object], message: str) -> None:
    said = refusal(extra_args=extra_args)
    assert message in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "names no dataset"),
        ([{"uri": "/a", "weight": 0}], "weight"),
        ([{"uri": "/a", "wight": 1}], "part 0 is not"),
        (["b/c"], "a local path is absolute"),
        (["s3://user:secret@host/a"], "it has a password in it"),
        (["/a"] * 101, "at most 100 parts"),
    ],
)
def test_a_list_that_is_no_dataset(given: list[object], message: str) -> None:
    said = refusal(dataset_uri=given)
    assert said.startswith("dataset_uri: ")
    assert message in said


def test_tokens_of_a_text_are_no_credentials() -> None:
    extra_args = {"method": "sft", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    arguments = TrainingRequest.model_validate({**LEAST, "framework": "hf", "extra_args": extra_args}).arguments
    assert arguments == parse_arguments("hf", extra_args)
    assert "looks like a credential" in refusal(framework="hf", extra_args={"eos_token": "s3://user:secret@host"})


def test_a_misspelt_argument_of_hf_is_refused_at_the_post() -> None:
    said = refusal(framework="hf", extra_args={"lora_rankk": 8})
    assert "hf has no argument 'lora_rankk'. Did you mean 'lora_rank'?" in said


def test_a_file_may_say_the_method_of_an_argument() -> None:
    extra_args = {"beta": 0.5}
    assert "hf has no argument 'beta'" in refusal(framework="hf", extra_args=extra_args)
    TrainingRequest.model_validate({**LEAST, "framework": "hf", "extra_args": extra_args, "config_path": "/a.yaml"})
