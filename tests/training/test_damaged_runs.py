"""Runs that shall not go on in silence: from a checkpoint whose bytes were changed, and with a loss of NaN."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.support.training_runs import TrainingRuns
from tests.training.conftest import NEEDS, needs
from unified.training.tokenizer import ByteTokenizer

pytestmark = pytest.mark.timeout(240)
every_framework = pytest.mark.parametrize("framework", ["meta", *NEEDS], indirect=True)


@every_framework
def test_a_run_goes_on_from_the_newest_checkpoint_that_is_not_damaged(runs: TrainingRuns) -> None:
    runs.train(max_steps=4, save_steps=2)
    largest = max(runs.checkpoints().read_mark(4).files, key=lambda file: file.nbytes)
    path = Path(urlsplit(runs.checkpoints().layout.checkpoints_uri).path, largest.name)
    with path.open("r+b") as file:
        file.seek(largest.nbytes // 2)
        file.write(b"\xff" * 4096)
    resumed = runs.train(max_steps=6, save_steps=2, resume=True)
    warning = rf"^unified-train: warning: checkpoint 4 in .* {re.escape(largest.name)} has the checksum"
    assert re.search(warning, resumed.text(), re.MULTILINE), resumed.text()
    assert "resume_step=2" in resumed.text()
    assert runs.checkpoints().complete_steps() == [2, 4, 6]
    assert 0 < runs.checkpoints().read_mark(6).metrics["loss"] < 10
    assert "warning" not in runs.train(max_steps=6, resume=True).text()


@every_framework
def test_a_loss_that_is_not_finite_ends_the_run_before_its_checkpoint(runs: TrainingRuns, tmp_path: Path) -> None:
    """Though that is saved at a step that logs nothing; and a run that allows it says what its loss is."""
    sizes: dict[str, Any] = {
        "model": model_of_nan(tmp_path),
        "tokenizer_name": "bytes",
        "save_steps": 2,
        "logging_steps": 3,
    }
    line = runs.refused(max_steps=4, **sizes)
    assert line.startswith("unified-train: loss is nan at step 2, which was not saved: "), line
    assert "extra_args.allow_non_finite_loss=true" in line
    assert runs.checkpoints().latest() is None
    allowed = runs.train("allowed", max_steps=2, allow_non_finite_loss=True, **sizes)
    assert runs.checkpoints("allowed").read_mark(2).metrics["loss"] is None, "JSON has no NaN"
    if runs.framework != "hf":
        assert "loss=nan" in allowed.text()


def model_of_nan(folder: Path) -> str:
    """A model of transformers one of whose weights is NaN, in a folder."""
    needs("hf")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=ByteTokenizer().vocab_size, **sizes))
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(folder / "nan")
    return str(folder / "nan")
