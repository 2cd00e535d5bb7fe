"""TRAINER: the loop, and the role that the job waits for. It holds no model: it asks the roles that do."""

from __future__ import annotations

import json
from pathlib import Path

import grpo
import plot
import remote_call
import task
import torch

from unified import DataQueue, current_worker

EXPERIENCE = "experience"
NUM_ACTORS = 2


def run() -> None:
    """Prompts, answers, rewards, advantages, experience; again and again."""
    torch.set_num_threads(1)
    worker = current_worker()
    config = worker.job_info.user_config
    experience = DataQueue[dict[str, torch.Tensor]](EXPERIENCE, is_master=True, size=2 * NUM_ACTORS)
    rewards: list[float] = []
    for iteration in range(config.iterations):
        seed = config.seed * 1_000_000 + iteration * config.prompts
        prompts = task.draw_prompts(config.prompts, config.length, seed)
        seeds = list(range(seed, seed + config.prompts))
        # Policy number `iteration` is the one that has seen all experience so far: rollouts wait until they have it.
        answers = list(remote_call.generate(prompts, seeds, config.group, iteration))
        texts = torch.cat([answer.texts for answer in answers])
        reference, scores = remote_call.refer(texts), remote_call.score(texts)  # both at once
        reward = scores.result()
        batch = {
            "texts": texts,
            "old": torch.cat([answer.log_probabilities for answer in answers]),
            "reference": reference.result(),
            "advantage": grpo.advantages(reward, config.group),
        }
        shares = {name: tensor.chunk(NUM_ACTORS) for name, tensor in batch.items()}
        experience.put(*({name: share[rank] for name, share in shares.items()} for rank in range(NUM_ACTORS)))
        rewards.append(float(reward.mean()))
        worker.report(step=iteration + 1, total=config.iterations, reward=round(rewards[-1], 3))
        if iteration % 10 == 9:
            print(f"iteration {iteration + 1}: mean reward {sum(rewards[-10:]) / 10:.3f} {example(texts)}", flush=True)
    experience.close()  # the actors' loops end
    save(Path(config.out), config.run, rewards)


def example(texts: torch.Tensor) -> str:
    """The first answer, for people: ``4 1 3 1 -> 1 1 3 4``."""
    length = texts.shape[1] // 2
    prompt, answer = (" ".join(map(str, part.tolist())) for part in (texts[0, :length], texts[0, length + 1 :]))
    return f"({prompt} -> {answer})"


def save(out: Path, run: str, rewards: list[float]) -> None:
    """The numbers, and a picture of them."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "rewards.json").write_text(json.dumps({"run": run, "rewards": rewards}))
    for suffix in ("png", "svg"):
        plot.picture(rewards, out / f"curve.{suffix}")
