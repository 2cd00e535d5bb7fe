"""Chat rows of all forms, and the losses of runs and of plain scripts of TRL on them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.agents import ROOT
from tests.support.hosts import PROGRAMS
from tests.support.ports import unused_port
from tests.support.training_runs import TrainingRuns

STEPS = 6
REAL_MODEL = ROOT / "out/engines/model"
LESS: dict[str, Any] = {"max_steps": STEPS, "train_sampling_strategy": "sequential"}
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


PEFT = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": "all-linear", "bias": "none"}
PEFT["task_type"] = "CAUSAL_LM"
"""Our defaults of `lora`, as arguments of PEFT's `LoraConfig`."""
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
