"""`extra_args` of the hf framework as `transformers.TrainingArguments`: our short names, and all names of that class.

An unknown name, a name whose value the run decides, and a value of the wrong type are errors of one line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import msgspec
import transformers
from pydantic import ConfigDict, TypeAdapter, ValidationError

from unified.errors import OptionError, nearest
from unified.training.arguments import ALIASES, HfArguments
from unified.training.methods import config_class

if TYPE_CHECKING:
    from pathlib import Path

    from unified.training.run import TrainingRun

REFUSED = {
    "output_dir": "checkpoints go below checkpoint_base_uri",
    "resume_from_checkpoint": "it is a field of the request, beside extra_args",
    "load_best_model_at_end": "every checkpoint stays in the store, and its step-*.json has its eval_loss",
    "save_on_each_node": "each rank saves its own part",
    "enable_jit_checkpoint": "a run that is stopped saves a checkpoint anyway",
    "use_cpu": "the devices are those of the job",
    "no_cuda": "the devices are those of the job",
    "local_rank": "the ranks are those of the job",
    "ddp_backend": "the ranks are connected already",
    "logging_nan_inf_filter": "the loss is reported as it is; allow_non_finite_loss trains on where it is not finite",
    **dict.fromkeys(("model_init_kwargs", "dataset_kwargs"), "the run loads the model and the rows"),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "loss_on says it"),
    "chat_template_path": "chat_template says it",
    "hub_token": "config/run.json would hold it: give HF_TOKEN in env",
}
"""Names that are refused, with the reason."""
TRL_NAMES = {"learning_rate": "lr", "num_train_epochs": "num_epochs", "max_length": "max_seq_len"}
"""Arguments for which TRL's classes have other defaults, with our names of them."""


def training_arguments(run: TrainingRun, method: str, output_dir: Path) -> transformers.TrainingArguments:
    """Return the arguments of a method's Trainer: common ones under its names, then all others that were given.

    Where TRL has a default of its own (`TRL_NAMES`), it is in force unless the argument was given.

    Args:
        output_dir: folder of this rank alone.

    Raises:
        OptionError: a name, a type or a combination of values that the method's class does not accept.
    """
    arguments, made_by = cast(HfArguments, run.arguments), config_class(method)
    rest = check_rest(arguments.rest, made_by)
    eval_steps = arguments.eval_steps or arguments.save_steps
    precision = "fp32" if {"bf16", "fp16"} & rest.keys() and arguments.precision == "auto" else run.precision
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": run.device.type == "cpu",
        "learning_rate": arguments.lr,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation,
        "num_train_epochs": arguments.num_epochs,
        "max_steps": arguments.max_steps if arguments.max_steps > 0 else -1,
        "weight_decay": arguments.weight_decay,
        "warmup_steps": arguments.warmup_steps,
        "max_grad_norm": arguments.max_grad_norm,
        "logging_steps": arguments.logging_steps,
        "logging_nan_inf_filter": False,  # else a NaN is left out of the sum: a run of NaN has a loss of 0
        "save_steps": arguments.save_steps,
        "save_strategy": "steps" if arguments.save_steps else "no",
        "eval_steps": eval_steps,
        "eval_strategy": "steps" if eval_steps else "no",
        "seed": arguments.seed,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "ddp_find_unused_parameters": False,  # else DDP searches for some after each step; a decoder has none
        "disable_tqdm": not sys.stderr.isatty(),
        "report_to": "none",
    }
    if method != "pretrain":
        for name, own in TRL_NAMES.items():
            values.pop(name, None)
            if own in arguments.given:
                values[name] = getattr(arguments, own)
        if method == "sft":
            values["packing"] = arguments.packing
    try:
        made = made_by(**values | rest)
    except (ValueError, TypeError, ImportError) as error:
        raise OptionError(f"extra_args: {' '.join(str(error).split())}") from error
    made._n_gpu = min(made.n_gpu, 1)  # else Trainer would use DataParallel for several visible GPUs
    return made


def check_rest(rest: Mapping[str, Any], made_by: Any = transformers.TrainingArguments) -> dict[str, Any]:
    """Return the same values; raise OptionError for the first one that the class `made_by` would refuse."""
    hints = get_type_hints(made_by)
    known = {field.name: hints[field.name] for field in fields(made_by) if field.init}
    ours = {field.name for field in msgspec.structs.fields(HfArguments)} - {"given", "rest"}
    for name, value in rest.items():
        if name in REFUSED:
            raise OptionError(f"extra_args: {name!r} cannot be given: {REFUSED[name]}.")
        if name not in known:
            hint = nearest(name, {*known, *ours, *ALIASES} - REFUSED.keys())
            raise OptionError(
                f"extra_args: hf has no argument {name!r}.{hint} It has {', '.join(sorted(ours))} and those of "
                f"{made_by.__module__.partition('.')[0]}.{made_by.__name__}."
            )
        adapter: TypeAdapter[Any] = TypeAdapter(
            known[name], config=ConfigDict(strict=True, arbitrary_types_allowed=True)
        )
        try:
            adapter.validate_python(value)
        except ValidationError:
            reason = f"it must be {_spelled(known[name])}"
            raise OptionError(f"extra_args: {name}={value!r} is not allowed: {reason}.") from None
    return dict(rest)


def _spelled(hint: Any) -> str:
    """Return a type as people read it, such as ``float | None``."""
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
