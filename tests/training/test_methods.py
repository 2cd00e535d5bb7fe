"""Methods of the hf framework: their losses are those of a plain script of TRL on the same rows."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents import ROOT
from tests.support.hosts import PROGRAMS
from tests.support.ports import unused_port
from tests.support.training_runs import TrainingRuns
from tests.training.conftest import needs
from unified.errors import UsageError

pytestmark = pytest.mark.timeout(400)
STEPS = 6
REAL_MODEL = ROOT / "out/engines/model"
LESS: dict[str, Any] = {"max_steps": STEPS, "train_sampling_strategy": "sequential"}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""That of SmolLM2, with marks."""
PLAIN_TEMPLATE = re.sub(r"\{% (end)?generation %\}", "", TEMPLATE)


def question(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"what is {number} plus {number} " + "please " * (number * 5 % 7)}


def answer(text: object) -> dict[str, str]:
    return {"role": "assistant", "content": f"it is {text}"}


ROWS: dict[str, Any] = {
    "text": lambda number: {"text": f"{number} and {number} " * (1 + number % 3)},
    "completion": lambda number: {"prompt": f"{number} plus {number} is ", "completion": f"{number * 2}"},
    "messages": lambda number: {
        "messages": [question(number), answer(number * 2), question(number + 1), answer(number * 2 + 2)]
    },
    "preference": lambda number: {
        "prompt": [question(number)],
        "chosen": [answer(number * 2)],
        "rejected": [answer("unknown")],
    },
    "label": lambda number: {"prompt": f"{number} and ", "completion": f"{number * 2}", "label": number % 3 != 0},
}


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


def needs_trl() -> Any:
    needs("hf")
    pytest.importorskip("trl")
    import transformers

    return transformers


def write(path: Path, form: str, count: int = 48) -> Path:
    path.write_text("".join(json.dumps(ROWS[form](number)) + "\n" for number in range(count)))
    return path


def losses(runs: TrainingRuns, world_size: int = 1, run_id: str = "run", **arguments: Any) -> list[float]:
    """The losses of all steps of a run, as its last checkpoint has them."""
    runs.train(run_id, world_size, **{"logging_steps": 1, "save_steps": 0, "max_seq_len": 256, "lr": 0.01, **arguments})
    last = arguments["max_steps"]
    history = json.loads(runs.fetch(last, run_id)[f"checkpoint-{last}/trainer_state.json"].read_text())["log_history"]
    return [each["loss"] for each in history if "loss" in each]


def plain_losses(method: str, model: Path, rows: Path, world_size: int, **arguments: Any) -> list[float]:
    command = [sys.executable, str(PROGRAMS / "plain_trl.py"), method, str(model), str(rows), json.dumps(arguments)]
    port, ranks = unused_port(), list[subprocess.Popen[str]]()
    for number in range(world_size):
        own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        env = {name: str(value) for name, value in own.items()} if world_size > 1 else {}
        env |= {"MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **env}, text=True))
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    found: list[float] = json.loads(said[0].splitlines()[-1])
    return found


CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "texts": ("sft", "text", {"method": "sft"}, {}),
    "prompts and completions": ("sft", "completion", {}, {}),
    "conversations": ("sft", "messages", {}, {"assistant_only_loss": True}),
    "packed conversations": ("sft", "messages", {"packing": True}, {"packing": True, "assistant_only_loss": True}),
    "all of conversations": ("sft", "messages", {"loss_on": "all"}, {}),
    "dpo": ("dpo", "preference", {"method": "dpo"}, {}),
    "dpo with another beta": ("dpo", "preference", {"method": "dpo", "beta": 0.5}, {"beta": 0.5}),
    "kto": ("kto", "label", {"method": "kto"}, {}),
    "reward": ("reward", "preference", {"method": "reward"}, {}),
}


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
@pytest.mark.parametrize("case", ["conversations", "dpo"])
def test_losses_of_a_real_model_are_those_of_trl(case: str, world_size: int, hf: TrainingRuns, tmp_path: Path) -> None:
    """Its chat template has no marks of the assistant's parts, so TRL gets the same template with marks."""
    needs_trl()
    if not REAL_MODEL.is_dir():
        pytest.skip("make example N=grpo_vllm makes the model, in out/engines/model")
    method, form, ours, theirs = CASES[case]
    rows = write(tmp_path / "rows.jsonl", form)
    if case == "conversations":
        (tmp_path / "marked.jinja").write_text(MARKED_TEMPLATE)
        theirs = {**theirs, "chat_template_path": str(tmp_path / "marked.jinja")}
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
    "what the run decides": ("messages", {"assistant_only_loss": True}, "cannot be given: loss_on says it"),
}


@pytest.mark.parametrize(("form", "given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_payload(
    form: str, given: dict[str, Any], message: str, hf: TrainingRuns, model: Path, tmp_path: Path
) -> None:
    needs_trl()
    rows = write(tmp_path / "rows.jsonl", form)
    assert message in hf.refused(dataset=str(rows), model=str(model), **given)
