"""`extra_args`, checked: tables of names with types, defaults and limits, one for each framework.

Names of other trainers that mean the same are accepted (`unified.training.aliases`). Any other name is an error, which
suggests the nearest name; for ``hf`` it may be a field of the method's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unified.errors import OptionError, nearest
from unified.training.aliases import ALIASES, REFUSED, VALUES, own_names
from unified.training.layout import check_framework
from unified.training.method_fields import METHODS, Fields, check_rest, convert, fields_of

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
ShareOfSteps = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=0.5)]

LORA_LR = 2e-4
"""Default of `lr` with `lora`."""
TRL_NAMES = {"learning_rate": "lr", "num_train_epochs": "num_epochs", "max_length": "max_seq_len"}
"""Arguments for which TRL's classes have other defaults, with our names of them."""
RUN_DEFAULTS = {"report_to": "none", "ddp_find_unused_parameters": False}
"""Defaults of a run that differ from those of the method's class: DDP would search after each step for what a decoder
never has."""
DEFAULT_METHODS = ["pretrain", "sft"]
"""Methods of a run that is given none: of rows that are texts, and of all others."""
DERIVED = ("bf16", "fp16", "eval_strategy", "save_strategy", "per_device_eval_batch_size", "disable_tqdm")
"""Fields of the method's class whose defaults follow from our own arguments."""


class CommonArguments(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="framework", omit_defaults=True, forbid_unknown_fields=True
):
    """Arguments of every framework.

    A job's config has those that are no defaults; a rank of a release that lacks one of them refuses it.
    """

    dataset_text_field: str = "text"
    """Field of each row that holds its text."""
    eval_dataset_uri: str | list[str | dict[str, Any]] = ""
    """Dataset to evaluate on, given as `dataset_uri`; empty: `eval_fraction` of the rows."""
    eval_fraction: Share = 0.05
    """Share of the rows that is held out: none of less than 20 rows; by default, at most 1 000."""
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 42
    """Seed of the weights, of the order of the rows, and of dropout."""
    max_seq_len: Annotated[int, Meta(ge=2)] = 512
    """Tokens; longer texts are cut."""
    lr: Annotated[float, Meta(ge=0, le=1e6)] = 5e-5
    """Learning rate of AdamW."""
    batch_size: Count = 8
    """Rows of one rank in one forward pass."""
    num_epochs: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Passes over the rows; the last pass may be partial."""
    max_steps: int = 0
    """Optimizer steps in all, which override `num_epochs`; 0 or less: as many as the epochs have."""
    save_steps: CountOrZero = 500
    """Steps between checkpoints; 0: only at the end."""
    eval_steps: CountOrZero = 0
    """Steps between evaluations; 0: as `save_steps`."""
    save_total_limit: CountOrZero = 0
    """Number of newest checkpoints that are kept; 0: all."""
    logging_steps: Count = 10
    """Steps between lines of the log and reports of the loss."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """``auto`` is bf16 on a device that has it, else fp32."""
    tokenizer_name: str = ""
    """Hub id, folder or ``s3://bucket/prefix`` of a tokenizer that replaces the model's own; ``bytes``: UTF-8."""
    gradient_accumulation: Count = 1
    """Forward passes of one optimizer step."""
    weight_decay: NotNegative = 0.0
    """Weight decay of AdamW."""
    warmup_steps: CountOrZero = 0
    """Steps in which the learning rate rises to `lr`."""
    max_grad_norm: NotNegative = 1.0
    """Norm that gradients are clipped to; 0: never."""
    allow_non_finite_loss: bool = False
    """Go on to train and save when the loss is NaN or infinite. By default the run fails without saving that step."""
    given: frozenset[str] = frozenset()
    """Names that were given; all other arguments are defaults."""


class LoraArguments(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Low-rank adapters, which are trained in place of the model's own weights. Defaults of numbers are TRL's."""

    r: Count = 16
    """Rank of the matrices."""
    alpha: Positive = 32
    """An adapter's output is multiplied by `alpha` / `r`."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    """Share of an adapter's inputs that is set to 0 in training."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an adapter, or a regular expression of them; ``all-linear``: all but the head."""


class HfArguments(CommonArguments, frozen=True, kw_only=True, tag="hf"):
    """Arguments of the hf framework. A number of steps below 1 is a share of all steps, as in the Trainer."""

    warmup_steps: CountOrZero | ShareOfSteps = 0  # type: ignore[assignment]
    """Steps in which the learning rate rises to `lr`, or their share of all."""
    logging_steps: Count | ShareOfSteps = 10  # type: ignore[assignment]
    """Steps between lines of the log and reports of the loss, or their share of all."""
    save_steps: CountOrZero | ShareOfSteps = 500  # type: ignore[assignment]
    """Steps between checkpoints, or their share of all; 0: only at the end."""
    eval_steps: CountOrZero | ShareOfSteps = 0  # type: ignore[assignment]
    """Steps between evaluations, or their share of all; 0: as `save_steps`."""
    method: Literal["", "pretrain", "sft", "dpo", "kto", "reward"] = ""
    """Method: ``pretrain``, ``sft``, ``dpo``, ``kto`` or ``reward``; default: ``pretrain`` if rows are texts,
    else ``sft``."""
    loss_on: Literal["", "assistant", "completion", "all"] = ""
    """Tokens with a loss, of ``sft``; default: those of the assistant, or of the completion."""
    chat_template: str = ""
    """Chat template that replaces the tokenizer's: a text of Jinja, or a file with one."""
    packing: bool = False
    """Put several rows of ``sft`` into one sequence of `max_seq_len` tokens."""
    lora: LoraArguments | None = None
    """Train low-rank adapters; ``{}``: with its defaults. The learning rate is 2e-4 then, if `lr` is not given."""
    quantization: Literal["", "8bit", "4bit"] = ""
    """Bits of the weights below adapters, which it adds also without `lora`; default: as they are stored."""
    from_run: str = ""
    """Run whose newest checkpoint has the weights to begin with: a `run_id` below the same base."""
    attn_implementation: str = ""
    """Attention of the model: ``eager``, ``sdpa``, ``flash_attention_2``, …; default: transformers chooses."""
    early_stopping_patience: CountOrZero = 0
    """Evaluations in a row without a better `eval_loss` after which the run ends; 0: it goes on to its last step."""
    rest: dict[str, Any] = {}
    """Other fields of the method's class."""


class NemoArguments(CommonArguments, frozen=True, kw_only=True, tag="nemo"):
    """Arguments of the nemo framework."""

    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "linear"
    """Schedule of the learning rate after the warm-up; ``linear`` and ``cosine`` end at 0."""
    dataloader_workers: CountOrZero = 0
    """Processes of each rank that tokenise ahead."""
    strategy: str = "auto"
    """Strategy of Lightning's `Trainer`: ``auto``, ``ddp`` or ``fsdp``."""


class MetaArguments(CommonArguments, frozen=True, kw_only=True, tag="meta"):
    """Arguments of the meta framework."""

    lr_scheduler_type: Literal["linear", "cosine", "constant"] = "cosine"
    """Schedule of the learning rate after the warm-up; ``linear`` and ``cosine`` end at 0."""


Arguments = HfArguments | NemoArguments | MetaArguments
TABLES: dict[str, type[Arguments]] = {"hf": HfArguments, "nemo": NemoArguments, "meta": MetaArguments}
_NOT_GIVEN = {"given", "rest"}


def parse_arguments(framework: str, extra_args: Mapping[str, Any], *, has_more: bool = False) -> Arguments:
    """Check `extra_args`; return them as the framework's own class, with defaults for missing ones.

    Args:
        has_more: a file has further arguments, which may say the method.

    Raises:
        OptionError: an unknown name, a name that is given twice, or a value of the wrong type or out of range.
    """
    table = TABLES[check_framework(framework)]
    fields = argument_types(table)
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for own, (name, value) in own_names(extra_args, fields).items():
        if own in fields:
            values[own] = convert(name, value, fields[own])
        elif table is HfArguments and not own.startswith("lora."):
            rest[name] = value
        else:
            raise OptionError(
                f"extra_args: {framework} has no argument {name!r}.{nearest(name, [*fields, *ALIASES])} It has "
                f"{', '.join(sorted(fields))}."
            )
    if lora := {own.removeprefix("lora."): values.pop(own) for own in fields if "." in own and own in values}:
        values["lora"] = LoraArguments(**lora)
    if values.get("eval_dataset_uri") and "eval_fraction" in values:
        raise OptionError("extra_args has both eval_dataset_uri and eval_fraction: give one of them.")
    if values.get("quantization"):
        values["lora"] = values.get("lora") or LoraArguments()
    if values.get("lora") is not None:
        values.setdefault("lr", LORA_LR)
    values["given"] = frozenset(values)
    if table is HfArguments:
        methods = [values["method"]] if values.get("method") else [*METHODS] if has_more else DEFAULT_METHODS
        values["rest"] = check_rest(rest, methods, fields_of(*methods), fields)
    return table(**values)


def values_in_force(arguments: Arguments, method: str = "pretrain", fields: Fields | None = None) -> dict[str, Any]:
    """Return the values of all arguments of a run: our own, and for ``hf`` those of the method's class.

    Args:
        fields: fields of the class that is installed; default: those of `method_fields.fields_of`.
    """
    ours = {each.name: getattr(arguments, each.name) for each in _fields(type(arguments))}
    ours |= {name: msgspec.structs.asdict(value) for name, value in ours.items() if isinstance(value, msgspec.Struct)}
    ours["eval_steps"] = arguments.eval_steps or arguments.save_steps
    if not isinstance(arguments, HfArguments):
        return ours
    fields = fields or fields_of(method)
    if method != "pretrain":
        ours |= {own: fields[name][1] for name, own in TRL_NAMES.items() if own not in arguments.given}
    hidden = {*ours, *ALIASES, *VALUES, *REFUSED, *DERIVED}
    others = {name: default for name, (_, default) in fields.items() if name not in hidden}
    return {**ours, "method": method, **others, **RUN_DEFAULTS, **arguments.rest}


def values_by_method(arguments: Arguments) -> dict[str, dict[str, Any]]:
    """Return the values in force of the methods that a run may have."""
    given = arguments.method if isinstance(arguments, HfArguments) else "pretrain"
    return {method: values_in_force(arguments, method) for method in ([given] if given else DEFAULT_METHODS)}


def argument_types(table: type[Arguments]) -> dict[str, Any]:
    """Return the types of a framework's arguments by name; those of `lora` have a dot."""
    found = {each.name: each.type for each in _fields(table)}
    if table is HfArguments:
        found |= {f"lora.{each.name}": each.type for each in msgspec.structs.fields(LoraArguments)}
    return found


def _fields(table: type[Arguments]) -> list[msgspec.structs.FieldInfo]:
    return [each for each in msgspec.structs.fields(table) if each.name not in _NOT_GIVEN]
