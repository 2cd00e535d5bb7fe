"""What users get wrong: each ends with one line, of all ranks the same."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.training_runs import TrainingRuns, write_rows


def test_a_model_that_does_not_exist_is_one_line(runs: TrainingRuns) -> None:
    """Of the hub, which cannot be reached from here, and which may say no where it can."""
    said = runs.refused(model="no-such-organisation/no-such-model", env={"HF_HUB_OFFLINE": "1"})
    assert "the tokenizer no-such-organisation/no-such-model cannot be loaded: " in said or "the model" in said


def test_a_row_without_text_is_named(runs: TrainingRuns, tmp_path: Path) -> None:
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"text": "a"}\n{"txt": "b"}\n')
    said = runs.refused(dataset=str(rows))
    assert f"row 1 of {rows} has no" in said
    assert "its fields: 'txt'. Did you mean 'text'?" in said


def test_a_finished_run_is_not_begun_again(runs: TrainingRuns) -> None:
    runs.train(max_steps=2)
    assert "already has checkpoints up to step 2" in runs.refused(max_steps=2)


def test_a_run_goes_on_with_the_rows_that_it_began_with(runs: TrainingRuns, tmp_path: Path) -> None:
    runs.train(max_steps=2)
    fewer = str(write_rows(tmp_path / "fewer.jsonl", 60))
    said = runs.refused(max_steps=4, resume=True, dataset=fewer)
    assert "checkpoint 2 is of a run on 76 rows, and there are 57 now" in said
    runs.train(max_steps=4, resume=True)


def test_larger_steps_do_not_end_the_epochs_of_hf_too_early(hf: TrainingRuns) -> None:
    hf.train(num_epochs=2, save_steps=5)
    hf.checkpoints().delete(38)
    said = hf.refused(num_epochs=2, batch_size=8, resume=True)
    assert "checkpoint 35 is of a run whose steps had 4 rows, and they have 8 now" in said
    hf.train(max_steps=37, batch_size=8, resume=True)


def test_a_model_of_nemos_toolkit_needs_the_toolkit(nemo: TrainingRuns) -> None:
    said = nemo.refused(model="/models/some.nemo", max_steps=2)
    assert "is a model of NeMo's toolkit, which is not installed (No module named 'nemo')" in said
    assert "pip install 'unified-runtime[nemo]' nemo_toolkit" in said


def test_arguments_of_nemo(nemo: TrainingRuns) -> None:
    assert "nemo has no argument 'dataloader_worker'. Did you mean 'dataloader_workers'?" in nemo.refused(
        dataloader_worker=2
    )
    nemo.train(dataloader_workers=1, num_epochs=2, gradient_accumulation=2, precision="bf16", save_steps=0)
    assert nemo.checkpoints().complete_steps() == [19]  # 38 passes
    said = nemo.refused(strategy="dpp", run_id="other")
    assert "strategy 'dpp' is none of auto, ddp, fsdp. Did you mean 'ddp'?" in said
    assert "strategy 'deepspeed' is none of" in nemo.refused(strategy="deepspeed", run_id="other")
    said = nemo.refused(strategy="fsdp", max_grad_norm=1.0, run_id="other")
    assert "strategy 'fsdp' does not clip gradients: leave max_grad_norm away, or give 0" in said
    assert "strategy 'fsdp': " in nemo.refused(strategy="fsdp", run_id="other")  # which needs a GPU


def test_a_model_with_its_own_tokenizer_from_a_folder(hf: TrainingRuns, tmp_path: Path) -> None:
    """Saved with each checkpoint, so that one can be loaded as it is."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    hf.train("first", max_steps=2)
    folder = hf.fetch(2, "first")["checkpoint-2/config.json"].parent
    own = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=200, special_tokens=["?", "</s>"])
    own.train_from_iterator([json.loads(line)["text"] for line in hf.dataset.read_text().splitlines()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>", unk_token="?").save_pretrained(folder)
    model = shutil.copytree(folder, tmp_path / "model")
    hf.train("second", model=str(model), max_steps=2)
    assert "checkpoint-2/tokenizer.json" in hf.fetch(2, "second")
