"""`extra_args`, checked: tables of names with types, defaults and limits, one for each framework.

Names of `transformers.TrainingArguments` that mean the same are accepted everywhere (`ALIASES`). Any other name
is an error, which suggests the nearest name; for ``hf`` it stays in `rest`, to be checked against transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unified.errors import OptionError, nearest
from unified.training.layout import check_framework

Count = Annotated[int, Meta(ge=1)]
CountOrZero = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
ShareOfSteps = Annotated[float, Meta(gt=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=0.5)]

METHODS: dict[str, tuple[str, ...]] = {
    "pretrain": ("text",),
    "sft": ("text", "completion", "messages"),
    "dpo": ("preference",),
    "kto": ("label", "preference"),
    "reward": ("preference",),
}
"""Methods of the hf framework, with the forms of rows that each takes."""

ALIASES = {
    "learning_rate": "lr",
    "per_device_train_batch_size": "batch_size",
    "num_train_epochs": "num_epochs",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_seq_length": "max_seq_len",
    "max_length": "max_seq_len",
    "dataloader_num_workers": "dataloader_workers",
}
"""Other names of arguments, with our own names."""


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
    rest: dict[str, Any] = {}
    """Other fields of the method's configuration class, not checked yet."""


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


def parse_arguments(framework: str, extra_args: Mapping[str, Any]) -> Arguments:
    """Check `extra_args`; return them as the framework's own class, with defaults for missing ones.

    Raises:
        OptionError: an unknown name, a name that is given twice, or a value of the wrong type or out of range.
    """
    table = TABLES[check_framework(framework)]
    fields = {each.name: each for each in msgspec.structs.fields(table) if each.name not in _NOT_GIVEN}
    values: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for name, value in extra_args.items():
        own = name if name in fields else ALIASES.get(name, name)
        if own in values:
            raise OptionError(f"extra_args has both {own!r} and another name of the same, {name!r}: give one of them.")
        if own in fields:
            values[own] = _convert(name, value, fields[own].type)
        elif table is HfArguments:
            rest[name] = value
        else:
            raise OptionError(
                f"extra_args: {framework} has no argument {name!r}.{nearest(name, [*fields, *ALIASES])} It has "
                f"{', '.join(sorted(fields))}."
            )
    if values.get("eval_dataset_uri") and "eval_fraction" in values:
        raise OptionError("extra_args has both eval_dataset_uri and eval_fraction: give one of them.")
    values["given"] = frozenset(values)
    if table is HfArguments:
        values["rest"] = rest
    return table(**values)


def _convert(name: str, value: Any, wanted: Any) -> Any:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value  # YAML and jq write 50.0
    try:
        return msgspec.convert(whole, wanted)
    except msgspec.ValidationError as error:
        raise OptionError(f"extra_args: {name}={value!r} is not allowed: {str(error).replace('`', '')}.") from None
