"""Options of the training program: flags above variables, and one line for what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from unified.errors import OptionError, UsageError
from unified.training.options import TrainingOptions

ENVIRONMENT = {
    "FRAMEWORK": "hf",
    "RUN_ID": "from-environment",
    "CHECKPOINT_BASE_URI": "s3://bucket/runs/",
    "DATASET_URI": "s3://data/a.jsonl",
    "MODEL_ID": "gpt2",
    "EXTRA_ARGS_JSON": '{"lr": 0.1}',
    "RESUME_FROM_CHECKPOINT": "true",
    "ATTEMPT_ID": "attempt-1",
}
ROOT = Path(__file__).parents[3]


def test_the_environment_is_enough() -> None:
    options = TrainingOptions.parse([], ENVIRONMENT)
    assert (options.framework, options.run_id, options.model_id) == ("hf", "from-environment", "gpt2")
    assert options.layout.prefix == "s3://bucket/runs/from-environment/framework=hf"
    assert options.resume
    assert options.attempt_id == "attempt-1"
    assert options.arguments.lr == 0.1


def test_flags_win() -> None:
    argv = ["--framework", "meta", "--run-id=r2", "--resume=false", "--extra-args-json", '{"lr": 0.2}']
    argv += ["--checkpoint-prefix", "file:///data/r2", "--logs-uri", "file:///logs/"]
    options = TrainingOptions.parse(argv, ENVIRONMENT)
    assert (options.framework, options.run_id, options.resume, options.arguments.lr) == ("meta", "r2", False, 0.2)
    assert options.layout.prefix == "file:///data/r2"
    assert options.layout.logs_uri == "file:///logs"


@pytest.mark.parametrize(
    ("flags", "resume"), [(["--resume"], True), (["--resume", "no"], False), ([], True), (["--resume=1"], True)]
)
def test_resume_is_a_flag_with_or_without_a_value(flags: list[str], resume: bool) -> None:
    assert TrainingOptions.parse(flags, ENVIRONMENT).resume is resume


@pytest.mark.parametrize("text", ["lr: 3e-4\nbatch_size: 2\n", '{"lr": 3e-4, "batch_size": 2}'])
def test_a_config_file_has_defaults_of_extra_args(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    argv = ["--config", str(tmp_path / "config"), "--extra-args-json", '{"batch_size": 4}']
    arguments = TrainingOptions.parse(argv, ENVIRONMENT).arguments
    assert (arguments.lr, arguments.batch_size) == (3e-4, 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model-id", "", "--run"], "unrecognized arguments: --run"),
        (["--resume", "maybe"], "--resume .RESUME_FROM_CHECKPOINT. is true or false, not 'maybe'"),
        (["--extra-args-json", "{"], "EXTRA_ARGS_JSON. is not JSON"),
        (["--extra-args-json", "[1]"], "is a JSON list, not an object"),
        (["--config", "/nowhere/at/all.yaml"], "--config /nowhere/at/all.yaml cannot be read"),
        (["--run-id", "../x"], "run_id '../x' is not allowed"),
        (["--framework", "jax"], "there is no framework 'jax'"),
        (["--checkpoint-base-uri", "ftp://x/y"], "base_uri 'ftp://x/y' is not allowed: ftp:// is not supported"),
    ],
)
def test_what_is_wrong_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        TrainingOptions.parse(argv, ENVIRONMENT)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "a: ${b}"])
def test_a_config_file_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(OptionError, match="--config") as caught:
        TrainingOptions.parse(["--config", str(tmp_path / "config")], ENVIRONMENT)
    assert "\n" not in str(caught.value)


def test_missing_options_are_named_with_their_variables() -> None:
    with pytest.raises(OptionError, match=r"missing: --framework \(FRAMEWORK\), .*--checkpoint-base-uri"):
        TrainingOptions.parse([], {})


@pytest.mark.parametrize("command", [["-m", "unified.training"], [str(ROOT / "train.py")]], ids=["module", "train.py"])
def test_help_needs_no_torch(command: list[str]) -> None:
    code = "import sys, runpy; sys.modules['torch'] = None; sys.argv = ['train', '--help']; "
    if command[0] == "-m":
        code += f"runpy.run_module({command[1]!r}, run_name='__main__')"
    else:
        code += f"runpy.run_path({command[0]!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "--checkpoint-base-uri" in done.stdout
    assert "[EXTRA_ARGS_JSON]" in done.stdout


def test_extra_args_win_over_another_name_of_the_same_in_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("learning_rate: 0.1")
    argv = ["--config", str(tmp_path / "config"), "--extra-args-json", '{"lr": 0.2}']
    assert TrainingOptions.parse(argv, ENVIRONMENT).arguments.lr == 0.2


def test_a_config_file_reads_no_variable_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "secret-value")
    (tmp_path / "config").write_text("tokenizer_name: ${oc.env:A_SECRET}")
    with pytest.raises(OptionError, match="has a reference") as caught:
        TrainingOptions.parse(["--config", str(tmp_path / "config")], ENVIRONMENT)
    assert "secret-value" not in str(caught.value)
