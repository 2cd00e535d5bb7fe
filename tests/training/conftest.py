"""Runs of the training program with the frameworks of extras; skipped where those are missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import TEMPLATE
from tests.support.s3 import bucket, s3_environment, s3_server  # noqa: F401 - fixtures
from tests.support.training_api import service  # noqa: F401 - a fixture
from tests.support.training_runs import TrainingRuns

NEEDS = {"hf": ["transformers", "accelerate"], "nemo": ["lightning"]}


def needs(framework: str) -> str:
    """Skip the test where a package of the framework is missing; return the framework."""
    for module in NEEDS.get(framework, []):
        pytest.importorskip(module, reason=f"framework {framework}: pip install 'unified-runtime[{framework}]'")
    return framework


def needs_trl() -> Any:
    needs("hf")
    pytest.importorskip("trl")
    import transformers

    return transformers


@pytest.fixture(params=[*NEEDS])
def framework(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture
def runs(framework: str, tmp_path: Path) -> Iterator[TrainingRuns]:
    """Runs of each framework in turn."""
    runs = TrainingRuns(framework, tmp_path)
    yield runs
    runs.close()


@pytest.fixture
def hf(tmp_path: Path) -> Iterator[TrainingRuns]:
    runs = TrainingRuns(needs("hf"), tmp_path)
    yield runs
    runs.close()


@pytest.fixture
def nemo(tmp_path: Path) -> Iterator[TrainingRuns]:
    runs = TrainingRuns(needs("nemo"), tmp_path)
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer that has a chat template, new and random."""
    transformers, tokenizers = needs_trl(), pytest.importorskip("tokenizers")
    import torch

    folder = tmp_path_factory.mktemp("model")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    bpe.train_from_iterator(["what is it please plus user assistant"] * 5, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
