"""The trainer: GRPO (Group Relative Policy Optimization) with answers of the engines.

A step is whole or has not been: the snapshot after it has the model, the optimizer and the prompts that were used. If
this process is killed, it starts again alone, restores the newest snapshot, and goes on with the next prompts.
"""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import prompts
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unified import RoleGroup, current_worker
from unified.errors import EngineError, WorkerDiedError

MAX_TRIES = 20
PAUSE_S = 1.0


class Answer(NamedTuple):
    """An answer of an engine."""

    prompt: list[int]
    tokens: list[int]
    reward: float
    versions: set[str]
    """Versions of the weights that have written it."""


def run() -> None:
    """Entry point of the role."""
    trainer = Trainer(current_worker().job_info.user_config)
    trainer.train()
    trainer.save()


class Trainer:
    """The state of the training, and the steps that change it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.worker = current_worker()
        self.engines = RoleGroup("rollout")
        self.tokenizer = AutoTokenizer.from_pretrained(config.model)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr)
        self.prompts = prompts.in_order(config.seed)[: config.steps * config.prompts]
        self.state = {"model": self.model, "optimizer": self.optimizer, "steps": [], "before": {}}
        self.worker.restore(self.state)  # at the first start there is none, and the state stays as it is
        self.version = 0

    def train(self) -> None:
        """Step until `config.steps`: answers, rewards, the optimizer, a snapshot, weights to the engines."""
        self.sync()  # also after a restart: the engines may have a step that the snapshot lacks
        self.state["before"] = self.state["before"] or self.likeliest()
        steps = self.state["steps"]
        while len(steps) < self.config.steps:
            began, first = time.time(), len(steps) * self.config.prompts
            mine = self.prompts[first : first + self.config.prompts]
            with ThreadPoolExecutor(len(mine)) as threads:
                groups = list(threads.map(self.ask, mine))
            self.learn(groups)
            answers = [answer for group in groups for answer in group]
            mean = sum(answer.reward for answer in answers) / len(answers)
            num_old = sum(answer.versions != {str(self.version)} for answer in answers)
            steps.append({"prompts": mine, "reward": mean, "num_old": num_old, "began": began, "ended": time.time()})
            self.worker.snapshot(self.state, len(steps))
            self.sync()
            self.worker.report(step=len(steps), total=self.config.steps, reward=round(mean, 3))
            with Path(self.config.out, "steps.jsonl").open("a") as file:
                file.write(json.dumps({"step": len(steps), "at": time.time()}) + "\n")
            print(f"step {len(steps)}: reward {mean:.2f} in {time.time() - began:.1f} s", flush=True)

    def ask(self, prompt: str, *, likeliest: bool = False) -> list[Answer]:
        """Have an engine write a group of answers, in tokens, and score them; if the engine dies, another one."""
        chat = [{"role": "user", "content": prompt}]
        tokens = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        how = {"n": 1, "temperature": 0.0} if likeliest else {"n": self.config.group, "temperature": 1.0}
        body = {"model": "policy", "token_ids": tokens, "sampling_params": {**how, "max_tokens": prompts.MAX_TOKENS}}
        for tries in itertools.count(1):
            try:
                engine = self.engines.next(timeout=600)
                answer = engine.call("request", "POST", "/inference/v1/generate", body).result()
            except (WorkerDiedError, EngineError) as error:  # it died, or is about to
                if tries == MAX_TRIES:
                    raise
                print(f"sent again: {prompt!r}, for {error}", flush=True)
                time.sleep(PAUSE_S)
                continue
            return [
                Answer(
                    tokens,
                    choice["token_ids"],
                    prompts.reward(len(choice["token_ids"]), has_ended=choice["finish_reason"] == "stop"),
                    {span["version"] for span in choice["weight_versions"]},
                )
                for choice in answer["choices"]
            ]
        raise AssertionError("unreachable")

    def learn(self, groups: list[list[Answer]]) -> None:
        """Make answers likelier that are better than the mean of their group, in one step of the optimizer."""
        answers = [answer for group in groups for answer in group]
        rewards = torch.tensor([[answer.reward for answer in group] for group in groups])
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten().to(self.device)
        length = max(len(answer.prompt) + len(answer.tokens) for answer in answers)
        tokens = torch.full((len(answers), length), self.tokenizer.eos_token_id)
        is_there, is_answer = torch.zeros(2, len(answers), length)
        for row, answer in enumerate(answers):
            end = len(answer.prompt) + len(answer.tokens)
            tokens[row, :end] = torch.tensor(answer.prompt + answer.tokens)
            is_there[row, :end] = 1
            is_answer[row, len(answer.prompt) : end] = 1
        tokens, is_there, is_answer = (each.to(self.device) for each in (tokens, is_there, is_answer))
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(input_ids=tokens, attention_mask=is_there).logits[:, :-1]
        chosen = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(chosen * is_answer[:, 1:] * advantages[:, None]).sum() / is_answer.sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def sync(self) -> None:
        """Bring the model to all engines that are there. One that starts gets it before it answers."""
        self.version = self.engines.sync_weights(self.model, dtype=torch.bfloat16)

    def likeliest(self) -> dict[str, str]:
        """Return the likeliest answer to each of two prompts."""
        asked = {prompt: self.ask(prompt, likeliest=True)[0].tokens for prompt in prompts.ASKED_TWICE}
        return {prompt: self.tokenizer.decode(tokens, skip_special_tokens=True) for prompt, tokens in asked.items()}

    def save(self) -> None:
        """Write the results, and the model where the next job, or vLLM, can load it."""
        num_updates = int(next(iter(self.optimizer.state.values()))["step"])  # AdamW counts by itself
        results = {
            "steps": self.state["steps"],
            "updates": num_updates,
            "before": self.state["before"],
            "after": self.likeliest(),
        }
        Path(self.config.out, "results.json").write_text(json.dumps(results, indent=1))
        self.model.to(torch.bfloat16).save_pretrained(Path(self.config.out, "model"))
        self.tokenizer.save_pretrained(Path(self.config.out, "model"))
