"""Arguments of the hf framework: every name of TrainingArguments, the short ones, and those that are refused."""

import json
from pathlib import Path

import pytest

from tests.support.training_runs import TrainingRuns
from tests.training.conftest import needs_trl
from unified.errors import OptionError
from unified.training.method_fields import METHODS, check_rest
from unified.training.method_fields import fields_of as fields_of_table


def test_the_table_of_fields_is_that_of_the_libraries() -> None:
    """A gateway checks names and types by the table; `make docs` makes it."""
    needs_trl()
    from unified.training.hf_arguments import fields_of
    from unified.training.methods import config_class

    for method in METHODS:
        found = {name: (kind, default) for name, (kind, default) in fields_of(config_class(method)).items()}
        assert {name: tuple(field) for name, field in fields_of_table(method).items()} == found


def test_an_argument_that_the_installed_library_lacks(hf: TrainingRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_trl()
    from unified.training.hf_arguments import fields_of
    from unified.training.methods import config_class

    fields = dict(fields_of(config_class("sft")))
    del fields["packing_strategy"]
    with pytest.raises(OptionError, match="hf has no argument 'packing_strategy'"):
        check_rest({"packing_strategy": "bfd"}, ["sft"], fields, [])


def test_what_trainer_refuses_is_one_line(hf: TrainingRuns) -> None:
    assert "`args.metric_for_best_model` must be provided" in hf.refused(save_strategy="best", max_steps=2)
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
