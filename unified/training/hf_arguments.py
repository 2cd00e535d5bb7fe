"""`extra_args` of the hf framework as `transformers.TrainingArguments`: our short names, and all names of that class.

An unknown name, a name whose value the run decides, and a value of the wrong type are errors of one line.
"""

from __future__ import annotations

import dataclasses
import sys
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import transformers

from unified.errors import OptionError
from unified.training.arguments import RUN_DEFAULTS, TRL_NAMES, HfArguments, argument_types
from unified.training.method_fields import Fields, check_rest
from unified.training.methods import config_class

if TYPE_CHECKING:
    from pathlib import Path

    from unified.training.run import TrainingRun


def training_arguments(run: TrainingRun, method: str, output_dir: Path) -> transformers.TrainingArguments:
    """Return the arguments of a method's Trainer: common ones under its names, then all others that were given.

    Where TRL has a default of its own (`TRL_NAMES`), it is in force unless the argument was given.

    Args:
        output_dir: folder of this rank alone.

    Raises:
        OptionError: a name, a type or a combination of values that the method's class does not accept.
    """
    arguments, made_by = cast(HfArguments, run.arguments), config_class(method)
    rest = check_rest(arguments.rest, [method], fields_of(made_by), argument_types(HfArguments))
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
        "disable_tqdm": not sys.stderr.isatty(),
        **RUN_DEFAULTS,
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
    if made.load_best_model_at_end and made.eval_strategy == "steps" and made.eval_steps != made.save_steps:
        raise OptionError(
            "extra_args: load_best_model_at_end needs a checkpoint of each evaluation: leave out eval_steps."
        )
    made._n_gpu = min(made.n_gpu, 1)  # else Trainer would use DataParallel for several visible GPUs
    return made


def fields_of(kind: Any) -> Fields:
    """Return the fields of a class of arguments, with their types as JSON has them, and their defaults."""
    hints, found = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        if field.init:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[field.name] = (_spelled(hints[field.name]), default.value if isinstance(default, Enum) else default)
    return found


def _spelled(hint: Any) -> str:
    """Return a type as in `unified.training.method_fields.Fields`, such as ``float|None``."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    enums = [each for each in parts if isinstance(each, type) and issubclass(each, Enum)]
    spelled = [repr(each.value) for kind in enums for each in kind]
    for each in parts:
        if get_origin(each) is list:
            spelled.append("list[float]" if get_args(each) == (float,) else "list[str]")
        elif get_origin(each) is Literal:
            spelled += [type(value).__name__ for value in get_args(each)]
        elif each is NoneType:
            spelled.append("None")
        elif (kind := get_origin(each) or each) in (bool, int, float, dict) or (kind is str and not enums):
            spelled.append(kind.__name__)
    return "|".join(spelled)
