"""Models of runs: from scratch by a configuration, or from a folder, a bucket or the hub, with their tokenizers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

from unified.data.files import absolute, is_remote
from unified.errors import NotFoundError, UsageError, nearest
from unified.lazy import needed_by
from unified.storage import open_storage
from unified.training.checkpoints import COPY_NBYTES
from unified.training.options import parse_config, read_config_file
from unified.training.tokenizer import BOS, EOS, PAD, ByteTokenizer, PretrainedTokenizer, Tokenizer

if TYPE_CHECKING:
    from torch import nn

    from unified.training.run import TrainingRun

FROM_SCRATCH = "config:"
BYTES = "bytes"
"""Value of `tokenizer_name` for the tokenizer of models from scratch."""
HUB = "https://huggingface.co"
HUB_WITHIN_S = 5.0
LONGEST_REASON = 300
_CONFIG_FILES = (".json", ".yaml", ".yml")


class ModelSource(NamedTuple):
    """Origin of a model: a configuration, or a place that transformers can load."""

    config: dict[str, Any] | None
    """Configuration of a model from scratch, with its `model_type` if it has one."""
    place: str = ""
    """Local folder or hub id."""


def find_model(run: TrainingRun) -> ModelSource:
    """Return where the model comes from; a model in a bucket is copied to this node. A collective.

    Raises:
        UsageError: an invalid configuration, or a missing folder.
        StorageError: the bucket cannot be read.
    """
    model_id = run.options.model_id
    if model_id.startswith(FROM_SCRATCH):
        return ModelSource(parse_config(model_id.removeprefix(FROM_SCRATCH), "model_id"))
    if model_id.endswith(_CONFIG_FILES):
        return ModelSource(run.work.on_each_node(lambda: read_config_file(model_id)))
    return ModelSource(None, _local(run, model_id, "model"))


def load_model(run: TrainingRun) -> tuple[nn.Module, Tokenizer]:
    """Return the model, in fp32 on the CPU, and its tokenizer. A collective.

    Raises:
        UsageError: the model or its tokenizer cannot be loaded, or they do not fit each other.
        ModuleNotFoundError: transformers is needed, and not installed; the message names the extra.
    """
    source = find_model(run)
    tokenizer = load_tokenizer(run, source)
    return make_model(run, source, tokenizer), tokenizer


def make_model(
    run: TrainingRun, source: ModelSource, tokenizer: Tokenizer, *, has_score: bool = False, **options: Any
) -> nn.Module:
    """Return the model, in fp32 on the CPU, or quantized on this rank's device. A collective.

    Args:
        has_score: the model returns one number for a text, in place of the next token.
        options: further arguments of `from_pretrained`.

    Raises:
        UsageError: the model cannot be loaded, or does not fit the tokenizer.
    """
    import torch

    torch.manual_seed(run.arguments.seed)  # the same weights on every rank
    config = source.config
    # transformers' Trainer needs a model of transformers.
    is_plain = config is not None and config.get("model_type", "llama") == "llama" and run.options.framework != "hf"
    if config is not None and is_plain:
        from unified.training.decoder import Decoder, DecoderConfig

        config = {"vocab_size": tokenizer.vocab_size, **config}
        model: nn.Module = Decoder(DecoderConfig.parse(config, run.options.model_id.partition(":")[0]))
    else:
        model = run.work.on_all(lambda: load_pretrained(source, tokenizer, has_score=has_score, **options))
        if "quantization_config" not in options:
            model = model.float()
    has = int(model.config.vocab_size)  # type: ignore[arg-type, union-attr]
    if has < tokenizer.vocab_size:
        raise UsageError(f"the model has {has} tokens and its tokenizer {tokenizer.vocab_size}: raise vocab_size.")
    return model


def load_tokenizer(run: TrainingRun, source: ModelSource) -> Tokenizer:
    """Return the tokenizer that `tokenizer_name` names, else the model's own (bytes from scratch). A collective."""
    name = run.arguments.tokenizer_name
    if name == BYTES or (not name and source.config is not None):
        return ByteTokenizer()
    place = _local(run, name, "tokenizer") if name else source.place

    def load() -> Tokenizer:
        with from_transformers("tokenizer" if name else "model", place):
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(place, local_files_only=not _can_download(place))
            return PretrainedTokenizer(loaded)

    return run.work.on_all(load)


def load_pretrained(source: ModelSource, tokenizer: Tokenizer, *, has_score: bool = False, **options: Any) -> Any:
    """Return a model of transformers, with new weights if its source is a configuration. See `make_model`."""
    with from_transformers("model", source.place or "of this configuration"):
        from transformers import (
            CONFIG_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )

        auto = AutoModelForSequenceClassification if has_score else AutoModelForCausalLM
        labels = {"num_labels": 1} if has_score else {}
        if source.config is None:
            local = not _can_download(source.place)
            return auto.from_pretrained(source.place, local_files_only=local, **labels, **options)
        if "quantization_config" in options:
            raise UsageError("extra_args: quantization is of weights that are there; a model from scratch has none.")
        defaults: dict[str, Any] = {"model_type": "llama", "vocab_size": tokenizer.vocab_size}
        if isinstance(tokenizer, ByteTokenizer):
            defaults |= {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
        config = {**defaults, **source.config, **labels}
        kind = config.pop("model_type")
        if kind not in CONFIG_MAPPING:
            raise UsageError(f"transformers has no model_type {kind!r}.{nearest(str(kind), CONFIG_MAPPING)}")
        return auto.from_config(AutoConfig.for_model(kind, **config), **options)


@contextmanager
def from_transformers(what: str, name: str) -> Iterator[None]:
    """Turn transformers' errors about a missing or broken model or tokenizer into a UsageError of one line."""
    try:
        with needed_by(f"a {what} other than config:{{...}}"):
            yield
    except (UsageError, ModuleNotFoundError, MemoryError):
        raise
    except Exception as error:  # of the hub, of safetensors, of pickle, of the model's own code
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} …"
        raise UsageError(f"the {what} {name} cannot be loaded: {reason}") from error


def sequence_length(run: TrainingRun, model: nn.Module) -> int:
    """Return the most tokens of a row: `max_seq_len`, or less if the model has fewer positions."""
    config: Any = model.config
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions is not None and positions < run.arguments.max_seq_len:
        run.log("sequences are shorter than max_seq_len: the model has no more positions", positions=positions)
        return int(positions)
    return run.arguments.max_seq_len


def _local(run: TrainingRun, place: str, kind: str) -> str:
    """Return the local folder of a place, or its hub id."""
    if is_remote(place):
        return run.work.on_each_node(lambda: _copy_folder(place, run.scratch / kind))
    if place.startswith(("/", ".", "~", "file:")) or os.path.isdir(place):
        folder = absolute(place)
        run.work.on_each_node(lambda: _check_folder(folder, kind))
        return folder
    return place


def _can_download(place: str) -> bool:
    """Return False if the hub does not answer: its own client would try for most of a minute."""
    if os.path.isdir(place) or getproxies():
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), HUB_WITHIN_S).close()
    except OSError as error:
        print(f"{hub.geturl()} cannot be reached; only this node's cache is used: {error}", flush=True)
        return False
    return True


def _check_folder(folder: str, kind: str) -> None:
    if not os.path.isdir(folder):
        raise UsageError(f"the {kind} {folder} is not there: check the path, and that this node sees it.")


def _copy_folder(uri: str, folder: Path) -> str:
    backend, prefix = open_storage(uri)
    with backend:
        found = backend.list(f"{prefix}/" if prefix else "")
        if not found:
            raise NotFoundError(f"{uri} is not there: no object below this prefix. Check the bucket and the prefix.")
        for stat in found:
            target = folder / stat.key.removeprefix(prefix).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            with backend.open_read(stat.key) as source, target.open("wb") as file:
                copyfileobj(source, file, COPY_NBYTES)
    return str(folder)
