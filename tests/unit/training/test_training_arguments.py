"""`extra_args`: names, types and limits, each error naming what is wrong."""

import re
from typing import Any

import pytest

from unified.errors import OptionError
from unified.training.aliases import ALIASES, REFUSED, VALUES
from unified.training.arguments import (
    HfArguments,
    LoraArguments,
    MetaArguments,
    NemoArguments,
    parse_arguments,
    values_by_method,
    values_in_force,
)
from unified.training.method_fields import METHODS, fields_of


def test_the_documents_payload() -> None:
    arguments = parse_arguments("hf", {"max_steps": 50000, "lr": 3e-5, "batch_size": 128})
    assert (arguments.max_steps, arguments.lr, arguments.batch_size) == (50000, 3e-5, 128)
    assert arguments.given == {"max_steps", "lr", "batch_size"}
    assert arguments.dataset_text_field == "text"


def test_names_of_transformers_mean_the_same() -> None:
    arguments = parse_arguments("meta", {"learning_rate": 1, "gradient_accumulation_steps": 4, "num_train_epochs": 2})
    assert isinstance(arguments, MetaArguments)
    assert (arguments.lr, arguments.gradient_accumulation, arguments.num_epochs) == (1.0, 4, 2.0)


def test_hf_leaves_the_rest_to_transformers() -> None:
    arguments = parse_arguments("hf", {"lr": 1e-4, "adam_beta2": 0.95})
    assert isinstance(arguments, HfArguments)
    assert arguments.rest == {"adam_beta2": 0.95}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": "fast"}, "lr='fast'.*Expected float, got str"),
        ({"lr": -1}, "lr=-1.*>= 0"),
        ({"batch_size": 0}, "batch_size=0.*>= 1"),
        ({"batch_size": 1.5}, "batch_size=1.5.*Expected int, got float"),
        ({"batch_size": True}, "batch_size=True.*Expected int, got bool"),
        ({"allow_non_finite_loss": 1}, "allow_non_finite_loss=1.*Expected bool, got int"),
        ({"max_steps": [1]}, r"max_steps=\[1\]"),
        ({"save_steps": None}, "save_steps=None"),
        ({"precision": "int8"}, "precision='int8'"),
        ({"eval_fraction": 0.9}, "eval_fraction=0.9"),
        ({"dataset_text_field": 3}, "dataset_text_field=3.*Expected str"),
        ({"save_step": 3}, "meta has no argument 'save_step'. Did you mean 'save_steps'"),
        ({"given": ["lr"]}, "no argument 'given'"),
        ({"lr": 1, "learning_rate": 2}, "both 'lr' and another name of the same, 'learning_rate'"),
    ],
)
def test_a_wrong_argument_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_arguments("meta", given)
    assert "\n" not in str(caught.value)


TAKEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "learning_rate": (0.1, {"lr": 0.1}),
    "per_device_train_batch_size": (3, {"batch_size": 3}),
    "micro_batch_size": (3, {"batch_size": 3}),
    "num_train_epochs": (2, {"num_epochs": 2.0}),
    "n_epochs": (2, {"num_epochs": 2.0}),
    "gradient_accumulation_steps": (4, {"gradient_accumulation": 4}),
    "max_seq_length": (99, {"max_seq_len": 99}),
    "max_length": (99, {"max_seq_len": 99}),
    "sequence_len": (99, {"max_seq_len": 99}),
    "cutoff_len": (99, {"max_seq_len": 99}),
    "val_set_size": (0.1, {"eval_fraction": 0.1}),
    "val_size": (0.1, {"eval_fraction": 0.1}),
    "sample_packing": (True, {"packing": True}),
    "lora_r": (4, {"lora": LoraArguments(r=4)}),
    "lora_rank": (4, {"lora": LoraArguments(r=4)}),
    "lora_alpha": (8, {"lora": LoraArguments(alpha=8.0)}),
    "lora_dropout": (0, {"lora": LoraArguments(dropout=0.0)}),
    "lora_target_modules": (["q_proj"], {"lora": LoraArguments(target_modules=["q_proj"])}),
    "lora_target": ("q_proj,v_proj", {"lora": LoraArguments(target_modules=["q_proj", "v_proj"])}),
    "assistant_only_loss": (True, {"loss_on": "assistant"}),
    "completion_only_loss": (False, {"loss_on": "all"}),
    "train_on_inputs": (True, {"loss_on": "all"}),
    "use_peft": (True, {"lora": LoraArguments()}),
    "adapter": ("qlora", {"lora": LoraArguments(), "quantization": "4bit"}),
    "finetuning_type": ("lora", {"lora": LoraArguments()}),
    "lora_target_linear": (True, {"lora": LoraArguments()}),
    "load_in_4bit": (True, {"lora": LoraArguments(), "quantization": "4bit"}),
    "load_in_8bit": (True, {"quantization": "8bit"}),
    "quantization_bit": (8, {"quantization": "8bit"}),
    "stage": ("rm", {"method": "reward"}),
}


@pytest.mark.parametrize("name", [*ALIASES, *VALUES])
def test_a_name_of_another_trainer_takes_effect(name: str) -> None:
    if name == "dataloader_num_workers":
        arguments = parse_arguments("nemo", {name: 2})
        assert isinstance(arguments, NemoArguments)
        assert arguments.dataloader_workers == 2
        return
    value, wanted = TAKEN[name]
    arguments = parse_arguments("hf", {name: value})
    for own, each in wanted.items():
        assert getattr(arguments, own) == each != getattr(HfArguments(), own)
        assert own in arguments.given


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_a_run_refuses(name: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' cannot be given: {REFUSED[name][:20]}"):
        parse_arguments("hf", {name: "hf_secret"})


def test_names_of_one_thing_go_together_if_they_agree() -> None:
    arguments = parse_arguments("hf", {"adapter": "qlora", "load_in_4bit": True, "lora_r": 4, "lora": {"alpha": 8}})
    assert isinstance(arguments, HfArguments)
    assert (arguments.lora, arguments.quantization) == (LoraArguments(r=4, alpha=8.0), "4bit")
    assert parse_arguments("hf", {"lora": None}) == HfArguments(given=frozenset({"lora"}))


@pytest.mark.parametrize("method", METHODS)
def test_every_field_of_a_methods_class_is_taken_or_refused(method: str) -> None:
    """With its own default, unless a run decides it."""
    chosen = {"method": method}
    for name, (spelled, default) in fields_of(method).items():
        if name in REFUSED or name in ALIASES or name in VALUES or hasattr(HfArguments(), name):
            continue
        arguments = parse_arguments("hf", {**chosen, name: default})
        assert isinstance(arguments, HfArguments)
        assert arguments.rest == {name: default}
        with pytest.raises(OptionError, match=f"{name}=.* is not allowed: it must be {re.escape(spelled)}"):
            parse_arguments("hf", {**chosen, name: [{"no": "type"}]})


def test_a_file_may_say_the_method() -> None:
    arguments = parse_arguments("hf", {"beta": 0.5}, has_more=True)
    assert isinstance(arguments, HfArguments)
    assert arguments.rest == {"beta": 0.5}
    with pytest.raises(OptionError, match="hf has no argument 'betta'"):
        parse_arguments("hf", {"betta": 0.5}, has_more=True)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"adam_betta1": 0.8}, "hf has no argument 'adam_betta1'. Did you mean 'adam_beta1'?"),
    ({"grad_accumulation": 2}, "Did you mean 'gradient_accumulation'?"),
    ({"lora_rankk": 2}, "Did you mean 'lora_rank'?"),
    ({"lora": {"rank": 2}}, "hf has no argument 'lora.rank'. Did you mean 'lora_rank'?"),
    ({"lora": 8}, "lora=8 is not allowed: Expected object | null, got int"),
    ({"lora": {"r": 8}, "lora_r": 4}, "both 'lora.r' and another name of the same, 'lora_r'"),
    ({"lora_r": "8"}, "lora_r='8' is not allowed: Expected int, got str"),
    ({"beta": 0.5}, "hf has no argument 'beta'"),
    ({"method": "dpo", "packing_strategy": "bfd"}, "and those of trl.DPOConfig"),
    ({"method": "dpoo"}, "method='dpoo' is not allowed"),
    ({"adapter": "dora"}, "adapter='dora' is not allowed: it must be 'lora' or 'qlora'"),
    ({"stage": ["sft"]}, "stage=['sft'] is not allowed: it must be 'pt' or 'rm' or 'sft'"),
    ({"assistant_only_loss": False}, "it must be True"),
    ({"batch_size": "auto"}, "batch_size='auto' is not allowed: Expected int, got str"),
    ({"adam_beta1": "0.8"}, "adam_beta1='0.8' is not allowed: it must be float"),
    ({"logging_first_step": 1}, "logging_first_step=1 is not allowed: it must be bool"),
    ({"dataloader_num_workers": True}, "dataloader_num_workers=True is not allowed: it must be int"),
    ({"lr_scheduler_type": "spiral"}, "lr_scheduler_type='spiral' is not allowed: it must be 'linear'|'cosine'"),
    ({"report_to": {"a": 1}}, "report_to={'a': 1} is not allowed"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_argument_of_hf_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_arguments("hf", given)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["lora_r", "load_in_4bit", "sample_packing"])
def test_names_of_hf_alone_are_unknown_elsewhere(name: str) -> None:
    with pytest.raises(OptionError, match=f"meta has no argument '{name}'"):
        parse_arguments("meta", {name: 1})


def test_the_values_in_force() -> None:
    """TRL's defaults differ from ours and from transformers'."""
    values = values_by_method(parse_arguments("hf", {"max_length": 99, "adam_beta2": 0.9}))
    assert values.keys() == {"pretrain", "sft"}
    assert [values[each]["lr"] for each in ("pretrain", "sft")] == [5e-5, 2e-5]
    assert [values[each]["gradient_checkpointing"] for each in ("pretrain", "sft")] == [None, True]
    assert all((each["max_seq_len"], each["adam_beta2"]) == (99, 0.9) for each in values.values())
    assert not any({"learning_rate", "output_dir", "bf16"} & each.keys() for each in values.values())
    (found,) = values_by_method(parse_arguments("hf", {"method": "dpo", "lora_r": 4})).values()
    assert (found["lr"], found["beta"], found["max_seq_len"], found["report_to"]) == (2e-4, 0.1, 1024, "none")
    assert found["lora"] == {"r": 4, "alpha": 32, "dropout": 0.05, "target_modules": "all-linear"}
    assert values_in_force(parse_arguments("meta", {"save_steps": 7}))["eval_steps"] == 7
