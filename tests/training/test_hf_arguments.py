"""Arguments of the hf framework: every name of TrainingArguments, the short ones, and those that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_runs import TrainingRuns
from tests.training.conftest import needs
from unified.errors import OptionError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"adam_betta1": 0.8}, "hf has no argument 'adam_betta1'. Did you mean 'adam_beta1'?"),
    ({"grad_accumulation": 2}, "Did you mean 'gradient_accumulation'?"),
    ({"adam_beta1": "0.8"}, "adam_beta1='0.8' is not allowed: it must be float"),
    ({"logging_first_step": 1}, "logging_first_step=1 is not allowed: it must be bool"),
    ({"dataloader_num_workers": True}, "dataloader_num_workers=True is not allowed: it must be int"),
    ({"report_to": {"a": 1}}, "report_to={'a': 1} is not allowed"),
    ({"lr_scheduler_kwargs": [1]}, "lr_scheduler_kwargs=[1] is not allowed"),
    ({"output_dir": "/tmp"}, "'output_dir' cannot be given: checkpoints go below checkpoint_base_uri"),
    (
        {"logging_nan_inf_filter": True},
        "'logging_nan_inf_filter' cannot be given: the loss is reported as it is; allow_non_finite_loss",
    ),
    ({"hub_token": "hf_secret"}, "'hub_token' cannot be given: config/run.json would hold it: give HF_TOKEN in env"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=[next(iter(given)) for given, _ in BAD])
def test_a_wrong_argument_is_named(given: dict[str, Any], message: str) -> None:
    needs("hf")
    from unified.training.hf_arguments import check_rest

    with pytest.raises(OptionError) as raised:
        check_rest(given)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hf_secret" not in str(raised.value)


def test_right_arguments_of_each_type_pass() -> None:
    needs("hf")
    from unified.training.hf_arguments import check_rest

    given = {
        "adam_beta1": 0.8,
        "adam_epsilon": 1,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "report_to": ["none"],
        "metric_for_best_model": None,
        "dataloader_num_workers": 2,
        "gradient_checkpointing": True,
        "optim": "adamw_torch",
    }
    assert check_rest(given) == given


def test_what_trainer_refuses_is_one_line(hf: TrainingRuns) -> None:
    assert "extra_args: spiral is not a valid SchedulerType" in hf.refused(lr_scheduler_type="spiral", max_steps=2)
    assert "`args.metric_for_best_model` must be provided" in hf.refused(save_strategy="best", max_steps=2)
    assert "warmup_stepps" in hf.refused(warmup_stepps=2)
    assert "cpu does not support precision=fp16" in hf.refused(precision="fp16")


def test_arguments_reach_trainer(hf: TrainingRuns, tmp_path: Path) -> None:
    """By the short names, and by those of TrainingArguments that have none."""
    hf.train(
        gradient_accumulation=2,
        num_epochs=2,
        learning_rate=0.01,
        lr=None,
        lr_scheduler_type="constant",
        dataloader_num_workers=1,
        logging_steps=4,
        eval_fraction=0,
        save_steps=0,
        bf16=True,
    )
    (step,) = hf.checkpoints().complete_steps()
    assert step == 20
    import torch

    files = hf.fetch(step)
    state = (files["checkpoint-20/trainer_state.json"]).read_text()
    assert '"learning_rate": 0.01' in state
    assert '"eval_loss"' not in state
    arguments = torch.load(files["checkpoint-20/training_args.bin"], weights_only=False)
    assert (arguments.bf16, arguments.num_train_epochs, arguments.report_to) == (True, 2, [])


def test_steps_may_be_shares_and_whole_floats(hf: TrainingRuns) -> None:
    hf.train(max_steps=10.0, save_steps=0.4, eval_steps=0.5, logging_steps=0.3, warmup_steps=0.2)
    assert hf.checkpoints().complete_steps() == [4, 8, 10]
    state = json.loads(hf.fetch(10)["checkpoint-10/trainer_state.json"].read_text())
    assert [each["step"] for each in state["log_history"] if "eval_loss" in each] == [5, 10]
    saves = {4, 8}  # at which the loss is measured as well
    assert [each["step"] for each in state["log_history"] if "loss" in each] == sorted({3, 6, 9, 10} | saves)
    rates = {each["step"]: each["learning_rate"] for each in state["log_history"] if "learning_rate" in each}
    assert rates[3] == pytest.approx(3e-3)
    assert "save_steps=1.5 is not allowed" in hf.refused(save_steps=1.5, run_id="other")
