"""The loss of the held-out rows is that of the saved weights, scored row by row, whatever the number of ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.support.training_runs import TINY, TrainingRuns
from tests.training.conftest import NEEDS, needs
from unified.training.decoder import Decoder, DecoderConfig
from unified.training.tokenizer import ByteTokenizer

pytestmark = pytest.mark.timeout(240)
MAX_SEQ_LEN = 48
NUM_ROWS = 180


@pytest.fixture
def texts() -> list[str]:
    """Texts of which the twentieth, fortieth, … are held out: nine, and the longest is the last one by itself."""
    return [f"{number} " + "abc " * (number // 20 + number % 3) for number in range(NUM_ROWS)]


def test_it_is_that_of_the_saved_weights(runs: TrainingRuns, texts: list[str], tmp_path: Path, world_size: int) -> None:
    """In batches of two: two ranks make three passes, the last of which has one row on the first and none on the
    second."""
    dataset = tmp_path / "unequal.jsonl"
    dataset.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes: dict[str, Any] = {"max_steps": 2, "save_steps": 1, "batch_size": 2, "max_seq_len": MAX_SEQ_LEN, "lr": 0.01}
    runs.train("run", world_size, dataset=str(dataset), **sizes)
    held_out = texts[19::20]
    assert len(held_out) == 9
    for step in (1, 2):
        said = runs.checkpoints().read_mark(step).metrics["eval_loss"]
        assert said == pytest.approx(scored(saved_model(runs, step), held_out), rel=1e-5)


@pytest.fixture(params=["meta", *NEEDS], autouse=True)
def framework(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


@pytest.fixture(params=[1, 2])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def saved_model(runs: TrainingRuns, step: int) -> Any:
    """The model of a checkpoint, as whoever downloads it would load it."""
    files = runs.fetch(step)
    if runs.framework == "hf":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(files[f"checkpoint-{step}/config.json"].parent)
    config = {"vocab_size": ByteTokenizer().vocab_size, **json.loads(TINY.removeprefix("config:"))}
    model = Decoder(DecoderConfig.parse(config, "config"))
    (path,) = files.values()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"] if runs.framework == "meta" else dict(_without_module(saved["state_dict"])))
    return model


def _without_module(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name.removeprefix("model."), each) for name, each in state.items())


@torch.no_grad()
def scored(model: Any, texts: list[str]) -> float:
    """The mean loss of all tokens, each predicted from those before it in its text."""
    model.eval()
    losses = []
    for text in texts:
        tokens = torch.tensor([ByteTokenizer().tokens(text, MAX_SEQ_LEN)])
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        losses.append(cross_entropy(logits[0, :-1].double(), tokens[0, 1:], reduction="none"))
    return float(torch.cat(losses).mean())
