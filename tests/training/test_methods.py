"""Methods of the hf framework: their losses are those of a plain script of TRL on the same rows."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import (
    CASES,
    LESS,
    PEFT,
    PLAIN_TEMPLATE,
    REAL_MODEL,
    STEPS,
    answer,
    losses,
    plain_losses,
    question,
    write,
)
from tests.support.training_runs import TrainingRuns
from tests.training.conftest import needs_trl
from unified.errors import UsageError

pytestmark = pytest.mark.timeout(400)
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""That of SmolLM2, with marks."""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_trl(case: str, world_size: int, hf: TrainingRuns, model: Path, tmp_path: Path) -> None:
    method, form, ours, theirs = CASES[case]
    rows = write(tmp_path / "rows.jsonl", form)
    sizes = {"learning_rate": 0.01, "per_device_train_batch_size": 4, "max_length": 256}
    wanted = plain_losses(method, model, rows, world_size, **sizes, **LESS, **theirs)
    found = losses(hf, world_size, dataset=str(rows), model=str(model), eval_fraction=0, **LESS, **ours)
    assert len(wanted) == STEPS
    assert wanted[0] != wanted[-1]
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("case", "has_lora"), [("conversations", False), ("conversations", True), ("dpo", False)])
def test_losses_of_a_real_model_are_those_of_trl(
    case: str, has_lora: bool, world_size: int, hf: TrainingRuns, tmp_path: Path
) -> None:
    """Its chat template has no marks of the assistant's parts, so TRL gets the same template with marks."""
    needs_trl()
    if not REAL_MODEL.is_dir():
        pytest.skip("make example N=grpo_vllm makes the model, in out/engines/model")
    method, form, ours, theirs = CASES[case]
    rows = write(tmp_path / "rows.jsonl", form)
    if case == "conversations":
        (tmp_path / "marked.jinja").write_text(MARKED_TEMPLATE)
        theirs = {**theirs, "chat_template_path": str(tmp_path / "marked.jinja")}
    if has_lora:
        ours, theirs = {**ours, "lora": {}}, {**theirs, "lora": PEFT}
    less: dict[str, Any] = {"max_steps": 10, "train_sampling_strategy": "sequential"}
    sizes = {"learning_rate": 1e-5, "per_device_train_batch_size": 1, "max_length": 256}
    wanted = plain_losses(method, REAL_MODEL, rows, world_size, **sizes, **less, **theirs)
    more: dict[str, Any] = {"dataset": str(rows), "model": str(REAL_MODEL), "lr": 1e-5, "batch_size": 1}
    found = losses(hf, world_size, eval_fraction=0, **more, **less, **ours)
    assert len(wanted) == 10
    assert wanted[-1] < wanted[0]
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("case", ["conversations", "dpo", "reward"])
def test_the_held_out_loss_is_the_same_on_any_number_of_ranks(
    case: str, hf: TrainingRuns, model: Path, tmp_path: Path
) -> None:
    """The rate is 0, so that the weights are the same after a step of other rows. Packed rows do not see each other."""
    _, form, ours, _ = CASES[case]
    rows = str(write(tmp_path / "rows.jsonl", form))
    packing: list[dict[str, Any]] = [{}, {"packing": True}] if case == "conversations" else [{}]
    found = []
    for number, (world_size, more) in enumerate((ranks, more) for ranks in (1, 2) for more in packing):
        options = {"dataset": rows, "model": str(model), "lr": 0, "max_steps": 1, "max_seq_len": 256, **ours, **more}
        hf.train(f"run-{number}", world_size, eval_fraction=0.25, **options)
        found.append(hf.checkpoints(f"run-{number}").read_mark(1).metrics["eval_loss"])
    assert found == pytest.approx([found[0]] * len(found), rel=1e-5)


@pytest.mark.parametrize("case", ["conversations", "dpo"])
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    case: str, hf: TrainingRuns, model: Path, tmp_path: Path
) -> None:
    _, form, ours, _ = CASES[case]
    more = {**LESS, "dataset": str(write(tmp_path / "rows.jsonl", form)), "model": str(model), "save_steps": 2, **ours}
    wanted = losses(hf, 2, "whole", **more)
    killed = hf.start("killed", 2, logging_steps=1, max_seq_len=256, **{"lr": 0.01, **more})
    hf.wait_for_step(2, killed, "killed")
    killed.signal(signal.SIGKILL, first=1)
    killed.wait()
    assert losses(hf, 2, "killed", resume=True, **more) == pytest.approx(wanted, abs=1e-6)


def test_targets_are_what_the_assistant_says(model: Path) -> None:
    transformers = needs_trl()
    from unified.training.methods import Targets

    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = PLAIN_TEMPLATE
    messages = [question(1), {**answer(2), "weight": 0}, question(2), answer(4)]
    row = Targets(tokenizer)({"messages": messages, "tools": None})
    assert tokenizer.decode(row["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    learned = [token for token in row["labels"] if token >= 0]
    assert tokenizer.decode(learned) == "it is 4<|im_end|>\n"

    tokenizer.chat_template = "{{ messages | length }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(UsageError, match="renders a message otherwise when others follow it"):
        Targets(tokenizer)({"messages": messages, "tools": None})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pairs without a method": ("preference", {}, "(hf takes chosen/rejected with the method dpo or kto or reward)"),
    "an unknown method": ("text", {"method": "dpoo"}, "method='dpoo' is not allowed"),
    "rows of another method": ("text", {"method": "kto"}, "has the form text, and this run takes prompt/completion/"),
    "targets of texts": (
        "text",
        {"method": "sft", "loss_on": "assistant"},
        "loss_on='assistant', and rows have the form",
    ),
    "packed texts": ("text", {"packing": True}, "packing are arguments of the method sft, not of pretrain"),
    "packed pairs": ("preference", {"method": "dpo", "packing": True}, "packing are arguments of the method sft"),
    "an argument of another method": ("messages", {"beta": 0.5}, "hf has no argument 'beta'"),
    "a misspelt argument": ("preference", {"method": "dpo", "los_type": ["ipo"]}, "Did you mean 'loss_type'?"),
}


@pytest.mark.parametrize(("form", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_payload(
    form: str, given: dict[str, Any], message: str, hf: TrainingRuns, model: Path, tmp_path: Path
) -> None:
    needs_trl()
    rows = write(tmp_path / "rows.jsonl", form)
    assert message in hf.refused(dataset=str(rows), model=str(model), **given)
