"""Names of arguments that people know from other trainers, and names that a run refuses, each with the reason."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from unified.errors import OptionError

ALIASES = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "n_epochs": "num_epochs",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_seq_length": "max_seq_len",
    "max_length": "max_seq_len",
    "sequence_len": "max_seq_len",
    "cutoff_len": "max_seq_len",
    "dataloader_num_workers": "dataloader_workers",
    "val_set_size": "eval_fraction",
    "val_size": "eval_fraction",
    "sample_packing": "packing",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "lora_target_modules": "lora.target_modules",
    "lora_target": "lora.target_modules",
}
"""Other names of arguments, with our own; those of `lora` have a dot."""
_LORA: dict[str, Any] = {"lora": {}}
VALUES: dict[str, dict[Any, dict[str, Any]]] = {
    "assistant_only_loss": {True: {"loss_on": "assistant"}},
    "completion_only_loss": {True: {"loss_on": "completion"}, False: {"loss_on": "all"}},
    "train_on_inputs": {True: {"loss_on": "all"}, False: {}},
    "use_peft": {True: _LORA, False: {}},
    "adapter": {"lora": _LORA, "qlora": {**_LORA, "quantization": "4bit"}},
    "finetuning_type": {"lora": _LORA, "full": {}},
    "lora_target_linear": {True: {"lora.target_modules": "all-linear"}, False: {}},
    "load_in_4bit": {True: {"quantization": "4bit"}, False: {}},
    "load_in_8bit": {True: {"quantization": "8bit"}, False: {}},
    "quantization_bit": {4: {"quantization": "4bit"}, 8: {"quantization": "8bit"}},
    "stage": {
        "pt": {"method": "pretrain"},
        "rm": {"method": "reward"},
        **{each: {"method": each} for each in ("sft", "dpo", "kto")},
    },
}
"""Arguments of other trainers whose values are other arguments of ours, by value."""
REFUSED = {
    "output_dir": "checkpoints go below checkpoint_base_uri",
    "resume_from_checkpoint": "it is a field of the request, beside extra_args",
    "save_on_each_node": "each rank saves its own part",
    "enable_jit_checkpoint": "a run that is stopped saves a checkpoint anyway",
    "use_cpu": "the devices are those of the job",
    "no_cuda": "the devices are those of the job",
    "local_rank": "the ranks are those of the job",
    "ddp_backend": "the ranks are connected already",
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "the best model has the least eval_loss"),
    "logging_nan_inf_filter": "the loss is reported as it is; allow_non_finite_loss trains on where it is not finite",
    **dict.fromkeys(("model_init_kwargs", "dataset_kwargs"), "the run loads the model and the rows"),
    "chat_template_path": "chat_template says it",
    "hub_token": "config/run.json would hold it: give HF_TOKEN in env",
    "learning_rate_multiplier": "there is no rate that it would multiply: give lr",
    "suffix": "run_id and job_name name the run",
}
"""Names that are refused, with the reason."""


def own_names(extra_args: Mapping[str, Any], known: Container[str]) -> dict[str, tuple[str, Any]]:
    """Return values by our names of arguments, each with the name that was given.

    Args:
        known: names of the arguments that the framework has.

    Raises:
        OptionError: an argument is given twice, or a value is none of `VALUES`.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, value in extra_args.items():
        for own, each in _converted(name, value, known).items():
            if own in found and found[own][1] != each:
                raise OptionError(
                    f"extra_args has both {found[own][0]!r} and another name of the same, {name!r}: give one of them."
                )
            found[own] = (own if name == "lora" else name, each)
    return found


def _converted(name: str, value: Any, known: Container[str]) -> dict[str, Any]:
    if name in VALUES and "lora" in known:
        for each, meaning in VALUES[name].items():
            if type(each) is type(value) and each == value:
                return meaning
        allowed = " or ".join(repr(each) for each in VALUES[name])
        raise OptionError(f"extra_args: {name}={value!r} is not allowed: it must be {allowed}.")
    if name == "lora" and isinstance(value, dict):
        return {"lora": {}, **{f"lora.{key}": each for key, each in value.items()}}
    if name == "lora_target" and isinstance(value, str):  # of LLaMA-Factory; ours would be a regular expression
        value = "all-linear" if value == "all" else value.split(",")
    own = ALIASES.get(name, name)
    return {own if own in known else name: value}
