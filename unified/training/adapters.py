"""Low-rank adapters of PEFT, quantized weights below them, and weights that an earlier run made.

An earlier run's weights are those of its newest checkpoint when this run began; the marks of this run hold that step.
An adapter is merged into the weights below it, and `lora` puts a new one on top, so the reference of ``dpo`` is always
the model that the earlier run made.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from unified.errors import CheckpointError, NotFoundError, OptionError, UsageError, nearest
from unified.lazy import needed_by
from unified.training.arguments import HfArguments, LoraArguments
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout
from unified.training.models import ModelSource, load_pretrained

if TYPE_CHECKING:
    from unified.training.run import TrainingRun
    from unified.training.tokenizer import Tokenizer

RESTORED = "from-run"
"""Folder of earlier runs' weights, in the scratch folder of a node's first rank."""
Origin = tuple[str, int]
"""Id of a run, and the step of its checkpoint."""


def loading_options(run: TrainingRun) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for `attn_implementation` and `quantization`.

    Raises:
        UsageError: quantized weights on a CPU.
    """
    arguments = cast(HfArguments, run.arguments)
    options = {"attn_implementation": arguments.attn_implementation} if arguments.attn_implementation else {}
    if not arguments.quantization:
        return options
    if run.device.type == "cpu":  # bitsandbytes has kernels for inference there, far too slow to train with
        raise UsageError(f"extra_args: quantization={arguments.quantization!r} needs an accelerator, not a CPU.")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[run.precision]
    bits = {f"load_in_{arguments.quantization}": True, "bnb_4bit_compute_dtype": dtype}
    bits |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantized = transformers.BitsAndBytesConfig(**bits)
    return {**options, "quantization_config": quantized, "device_map": {"": run.device}, "dtype": dtype}


def lora_config(model: Any, method: str, lora: LoraArguments) -> Any:
    """Return the `peft.LoraConfig` of a method.

    Raises:
        OptionError: no layer of the model has a name in `target_modules`.
    """
    with needed_by("lora"):
        import peft
    layers = [name for name, each in model.named_modules() if getattr(getattr(each, "weight", None), "ndim", 0) == 2]
    wanted = lora.target_modules
    patterns = {wanted: wanted} if isinstance(wanted, str) else {each: rf"(.*\.)?{re.escape(each)}" for each in wanted}
    patterns.pop("all-linear", None)
    for each, pattern in patterns.items():
        try:
            is_there = any(re.fullmatch(pattern, name) for name in layers)
        except re.error:
            is_there = False
        if not is_there:
            names = sorted({name.rpartition(".")[2] for name in layers})
            reason = f"the model has no layer {each!r}.{nearest(each, names)} It has {', '.join(names)}."
            raise OptionError(f"extra_args: lora.target_modules: {reason}")
    sizes = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": wanted}
    return peft.LoraConfig(task_type="SEQ_CLS" if method == "reward" else "CAUSAL_LM", bias="none", **sizes)


def find_origin(run: TrainingRun) -> Origin | None:
    """Return the checkpoint to begin with: the one of a resumed run's first begin. A collective.

    Raises:
        UsageError: there is none of run `from_run`, or this run began with another run.
    """
    name = cast(HfArguments, run.arguments).from_run

    def find() -> Origin | None:
        if run.resume_step is None:
            return (name, _newest_step(run, name)) if name else None
        before, step = run.checkpoints.read_mark(run.resume_step).state.get("from_run") or ("", 0)
        if before != name:
            raise UsageError(
                f"the run began with from_run={before!r}, and it is {name!r} now: resume it with the same."
            )
        return (name, step) if name else None

    found = run.work.on_first(find)
    return (found[0], found[1]) if found else None


def restore(run: TrainingRun, origin: Origin, source: ModelSource, tokenizer: Tokenizer, method: str) -> ModelSource:
    """Copy the model of a checkpoint to this node, with its adapter merged into it. A collective.

    Args:
        source: model of this run's `model_id`, which lies below an adapter.

    Raises:
        UsageError: the checkpoint cannot be read, or its model does not fit this run.
    """

    def copy() -> str:
        folder = _copy_model(run, origin, source, tokenizer)
        kind = json.loads((folder / "config.json").read_text())["architectures"][0]
        if "SequenceClassification" in kind and method != "reward":
            raise UsageError(f"from_run: run {origin[0]!r} made a reward model, which method {method} cannot train.")
        return str(folder)

    return ModelSource(None, run.work.on_each_node(copy))


def _copy_model(run: TrainingRun, origin: Origin, source: ModelSource, tokenizer: Tokenizer) -> Path:
    """Return the local folder of a checkpoint's whole model."""
    (name, step), model_id = origin, run.options.model_id
    with RunCheckpointManager(RunLayout(run.layout.base_uri, name, "hf")) as store:
        try:
            store.fetch(step, run.scratch / RESTORED / name, endings=(".json", ".safetensors"))
            below = store.read_mark(step).state.get("from_run")
        except (CheckpointError, NotFoundError) as error:
            raise UsageError(f"from_run: step {step} of run {name!r} cannot be read: {error}") from error
        config = store.read_config() or {}
    folder = run.scratch / RESTORED / name / f"checkpoint-{step}"
    if not (folder / "adapter_config.json").exists():
        return folder
    if (other := config.get("model_id")) != model_id:
        raise UsageError(
            f"from_run: run {name!r} has an adapter of model {other!r}, and model_id is {model_id!r} here."
        )
    if below:
        source = ModelSource(None, str(_copy_model(run, tuple(below), source, tokenizer)))
    with needed_by("from_run"):
        import peft
    has_score = json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    torch.manual_seed(config["arguments"]["seed"])  # of a model from scratch
    model = load_pretrained(source, tokenizer, has_score=has_score).float()
    merged = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu").merge_and_unload()
    merged.save_pretrained(folder / "merged")
    return folder / "merged"


def _newest_step(run: TrainingRun, run_id: str) -> int:
    for framework in ("hf", "nemo", "meta"):
        with RunCheckpointManager(RunLayout(run.layout.base_uri, run_id, framework)) as store:
            if (step := store.latest()) is not None and framework == "hf":
                return step
            if store.read_config() is not None:
                raise UsageError(f"from_run: run {run_id!r} of framework {framework} has no checkpoint of hf.")
    raise UsageError(f"from_run: there is no run {run_id!r} below {run.layout.base_uri}.")
