"""The Trainer of each method of the hf framework: transformers' own for texts, and TRL's for all others."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers.trainer_utils import EvalLoopOutput

from unified.data.files import DataFiles, absolute
from unified.errors import OptionError, UsageError
from unified.lazy import needed_by
from unified.training.adapters import lora_config
from unified.training.arguments import HfArguments
from unified.training.dataset import IGNORED, PaddingCollator, RunRows, TokenRows
from unified.training.evaluation import HeldOutRows, count_targets, sum_losses
from unified.training.sampling import ResumableSampler
from unified.training.tokenizer import PretrainedTokenizer, Tokenizer

if TYPE_CHECKING:
    from unified.training.run import TrainingRun

CLASSES = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
"""Begins of the names of TRL's classes, by method."""
_PAIRS = ("dpo", "reward")


def import_trl() -> Any:
    """Return the module, which tells its authors nothing about the run.

    Raises:
        ModuleNotFoundError: TRL is not installed; the message names the extra.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with needed_by("a method other than pretrain"):
        import trl
    return trl


def config_class(method: str) -> Any:
    """Return the class of the method's arguments."""
    if method == "pretrain":
        return transformers.TrainingArguments
    return getattr(import_trl(), f"{CLASSES[method]}Config")


class RunTrainer(transformers.Trainer):
    """A Trainer that counts the tokens of this rank on its device, so that nothing waits for the device.

    Attributes:
        method: name of the method.
        num_tokens: tokens since the last reset to 0.
        order: sampler of an epoch's rows, which accelerate divides among all ranks; None: a sampler of transformers.
        held_out: rows to evaluate.
    """

    held_out: HeldOutRows
    method = "pretrain"
    num_tokens: torch.Tensor | int = 0
    order: ResumableSampler | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return our sampler: torch's would make a list of Python numbers for each epoch."""
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "random":
            return super()._get_train_sampler(rows)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.order = ResumableSampler(len(rows), rank=0, world_size=1, seed=seed)
        return self.order

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *more: Any, **others: Any) -> torch.Tensor:
        counted = inputs["attention_mask"].sum() if "attention_mask" in inputs else inputs["input_ids"].numel()
        self.num_tokens = self.num_tokens + counted
        return cast(torch.Tensor, super().training_step(model, inputs, *more, **others))

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        """Return the mean loss of all tokens, or of all rows: transformers' own is a mean of batches, or of ranks."""
        with self.compute_loss_context_manager():
            loss = self.held_out.evaluate(self.model, self._score)
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": loss}, len(self.held_out))

    def _score(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.method == "pretrain":
            return sum_losses(self.model, batch), count_targets(batch)
        num_rows = torch.tensor(len(batch["input_ids"]) // (2 if self.method in _PAIRS else 1))
        num_losses = count_targets(batch) if self.method == "sft" else num_rows.to(batch["input_ids"].device)
        return self.compute_loss(self.model, batch) * num_losses, num_losses


def make_trainer(
    run: TrainingRun,
    method: str,
    rows: RunRows,
    model: Any,
    tokenizer: Tokenizer,
    length: int,
    given: transformers.TrainingArguments,
    callback: transformers.TrainerCallback,
) -> RunTrainer:
    """Return the Trainer of a method.

    Args:
        length: most tokens of a row.
        given: an instance of the `config_class` of the method.

    Raises:
        UsageError: rows and arguments, or the tokenizer, do not go together.
        ValueError: of transformers or TRL, for the same reason.
    """
    processing = tokenizer.tokenizer if isinstance(tokenizer, PretrainedTokenizer) else None
    arguments = cast(HfArguments, run.arguments)
    if method != "sft" and (arguments.loss_on or arguments.packing):
        raise OptionError(f"extra_args: loss_on and packing are arguments of the method sft, not of {method}.")
    if method == "pretrain":
        train, held_out = (TokenRows(each, tokenizer, length) for each in (rows.train, rows.held_out))
        collator: Any = PaddingCollator(tokenizer.pad_id)
        trainer_class: type[RunTrainer] = RunTrainer
        more: dict[str, Any] = {"data_collator": collator}
    else:
        if processing is None:
            raise UsageError(f"method {method} needs a tokenizer of transformers: give tokenizer_name.")
        trl = import_trl()
        if arguments.chat_template:
            processing.chat_template = _read_template(arguments.chat_template)
        if not all(isinstance(value, str | bool) for value in rows.train[0].values()) and not processing.chat_template:
            raise UsageError("rows are conversations, and the tokenizer has no chat template: give chat_template.")
        if method == "sft":
            rows = _mark_targets(rows, arguments.loss_on, cast(Any, given), processing)
        train, held_out = rows.train, rows.held_out
        trainer_class = type("RunTrainer", (RunTrainer, getattr(trl, f"{CLASSES[method]}Trainer")), {"method": method})
        more = {}
    if arguments.lora is not None:
        config = lora_config(model, method, arguments.lora)
        from peft import get_peft_model, prepare_model_for_kbit_training

        if arguments.quantization:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # the Trainer enables it
        if method == "pretrain":
            transformers.set_seed(given.seed)
            model = get_peft_model(model, config)
            if given.gradient_checkpointing:
                model.enable_input_require_grads()
        else:
            more["peft_config"] = config
    trainer = trainer_class(
        model=model,
        args=given,
        train_dataset=train,
        eval_dataset=held_out if len(held_out) else None,
        processing_class=processing,
        callbacks=[callback],
        **more,
    )
    if arguments.lora is not None:  # PEFT has a folder of this node there, for a model of a bucket
        trainer.model.peft_config["default"].base_model_name_or_path = run.options.model_id
    scored = trainer.eval_dataset if trainer.eval_dataset is not None else []
    if method != "pretrain" and len(held_out):
        scored = trainer._remove_unused_columns(scored, description="evaluation")
    trainer.held_out = HeldOutRows(run, scored, trainer.data_collator, given.eval_batch_size)
    return trainer


def _read_template(given: str) -> str:
    if "{" in given:
        return given
    with DataFiles() as files, files.open(absolute(given)) as file:
        return file.read().decode()


def _mark_targets(rows: RunRows, loss_on: str, given: Any, tokenizer: Any) -> RunRows:
    """Set which tokens of ``sft`` have a loss; return the rows, as tokens if TRL cannot find those of the assistant."""
    wanted = loss_on or {"messages": "assistant", "completion": "completion", "text": "all"}[rows.form]
    given.completion_only_loss = wanted == "completion"
    if wanted == "all":
        return rows
    if rows.form == "text" or (wanted == "assistant" and rows.form != "messages"):
        raise OptionError(f"extra_args: loss_on={wanted!r}, and rows have the form {rows.form}.")
    if rows.form == "completion":
        return rows
    work: Any = Targets(tokenizer)
    if wanted == "completion":
        work = _last_as_completion
    else:
        with suppress(ValueError):  # TRL knows no such template
            import_trl().chat_template_utils.get_training_chat_template(tokenizer)
            given.assistant_only_loss = True
        if given.assistant_only_loss:
            return rows
    names = ["messages", "tools"] if wanted == "assistant" else ["messages"]
    train, held_out = (each.map(work, remove_columns=names) for each in (rows.train, rows.held_out))
    return RunRows(rows.form, train, held_out)


def _last_as_completion(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


class Targets:
    """Tokens of a conversation, with labels for what the assistant says. The template's texts tell which these are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, row: dict[str, Any]) -> dict[str, list[int]]:
        messages, text = row["messages"], self._text(row, len(row["messages"]))
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before, until = self._text(row, number, add_generation_prompt=True), self._text(row, number + 1)
            if not (text.startswith(until) and until.startswith(before)):
                raise UsageError(
                    "the chat template renders a message otherwise when others follow it, so that the assistant's part "
                    "cannot be told: give a chat_template with {% generation %}, or loss_on: 'all'."
                )
            spans.append((len(before), len(until)))
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        is_target = [any(first <= begin < last for first, last in spans) for begin, _ in found["offset_mapping"]]
        ids = found["input_ids"]
        return {"input_ids": ids, "labels": [id_ if it else IGNORED for id_, it in zip(ids, is_target, strict=True)]}

    def _text(self, row: dict[str, Any], num_messages: int, **more: Any) -> str:
        messages, tools = row["messages"][:num_messages], row.get("tools")
        return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **more))
