"""The layout of a run: byte for byte as the document has it, and nothing that escapes it."""

import pytest

from unified.errors import UsageError
from unified.training.layout import RunLayout, step_key, step_of


def test_the_layout_is_the_documents() -> None:
    layout = RunLayout("s3://deepfinery-training/runs", "aml_ruleset_v4", "hf")
    prefix = "s3://deepfinery-training/runs/aml_ruleset_v4/framework=hf"
    assert layout.prefix == prefix
    assert layout.checkpoints_uri == f"{prefix}/checkpoints"
    assert layout.logs_uri == f"{prefix}/logs"
    assert layout.config_uri == f"{prefix}/config"
    assert step_key(1) == "step-000001.json"


@pytest.mark.parametrize("base", ["s3://bucket/runs//", "s3://bucket/runs/"])
def test_slashes_at_the_end_are_dropped(base: str) -> None:
    assert RunLayout(base, "r", "meta").prefix == "s3://bucket/runs/r/framework=meta"


def test_parts_may_be_elsewhere() -> None:
    layout = RunLayout("", "r", "meta", own_prefix="file:///data/r/", own_logs_uri="s3://logs/r")
    assert layout.prefix == "file:///data/r"
    assert layout.checkpoints_uri == "file:///data/r/checkpoints"
    assert layout.logs_uri == "s3://logs/r"


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000, 12_345_678])
def test_a_step_has_one_name(step: int) -> None:
    assert step_of(step_key(step)) == step


@pytest.mark.parametrize(
    "name", ["step-00001.json", "step-0000001.json", "step-000001.pt", "x/step-000001.json", "step-000001.json.part"]
)
def test_other_names_are_no_marks(name: str) -> None:
    assert step_of(name) is None


@pytest.mark.parametrize(
    "run_id", ["", "../up", "a/b", "a..b", ".hidden", "-x", "a b", "x" * 101, "ü", "a\n", "a\0", "framework=hf"]
)
def test_a_run_id_cannot_leave_its_folder(run_id: str) -> None:
    with pytest.raises(UsageError, match="run_id"):
        RunLayout("s3://bucket/runs", run_id, "hf")


@pytest.mark.parametrize(
    "base",
    [
        "",
        "/",
        "runs",
        "s3://",
        "s3:///runs",
        "s3://a/b",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "gs://bucket/runs",
        "file://",
        "file://host/path/..",
        "file:runs",
        "/data/./runs",
        "s3://bucket/a\nb",
    ],
)
def test_a_base_is_a_place_for_checkpoints(base: str) -> None:
    with pytest.raises(UsageError, match="base_uri"):
        RunLayout(base, "r", "hf")


def test_the_nearest_framework_is_named() -> None:
    with pytest.raises(UsageError, match=r"no framework 'nemoo'.*Did you mean 'nemo'"):
        RunLayout("s3://bucket/runs", "r", "nemoo")
