"""GRPO, small: rollouts stream tokens, a judge scores groups of answers, and a trainer sends its weights back."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from unified import DataQueue, DLJobBuilder, RoleGroup, WeightsReceiver, current_worker, rpc

DIGITS, LENGTH, GROUP, STEPS = 10, 6, 16, 60


def make_policy() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(DIGITS, 32), torch.nn.Linear(32, DIGITS))


class Rollout:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy, self.weights = make_policy(), WeightsReceiver()

    @rpc(concurrency=1)
    def write(self, token: int) -> Iterator[int]:
        if self.weights.version:  # 0 until the trainer has sent some
            self.weights.load_into(self.policy)
        for _ in range(LENGTH):
            with torch.no_grad():
                token = int(torch.multinomial(self.policy(torch.tensor(token)).softmax(-1), 1))
            yield token


def judge() -> None:  # the task: count up from the prompt
    rollouts, groups = RoleGroup("rollout"), DataQueue[dict[str, Any]]("groups")
    for prompt in itertools.cycle(range(DIGITS)):
        streams = [rollouts[i % len(rollouts)].stream(Rollout.write, prompt) for i in range(GROUP)]
        texts = torch.tensor([[prompt, *stream] for stream in streams])
        rewards = ((texts[:, 1:] - texts[:, :-1]) % DIGITS == 1).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)  # against the rest of its group
        groups.put({"texts": texts, "advantages": advantages, "reward": float(rewards.mean())})


def train() -> None:
    torch.set_num_threads(1)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    groups = DataQueue[dict[str, Any]]("groups", is_master=True, size=4)
    for step in range(STEPS):
        batch = [groups.get()[0] for _ in range(4)]
        texts, advantages = (torch.cat([group[key] for group in batch]) for key in ("texts", "advantages"))
        losses = cross_entropy(policy(texts[:, :-1]).transpose(1, 2), texts[:, 1:], reduction="none")
        optimizer.zero_grad()
        torch.autograd.backward((losses.mean(1) * advantages).mean())
        optimizer.step()
        RoleGroup("rollout").sync_weights(policy)
        reward = sum(group["reward"] for group in batch) / len(batch)
        current_worker().report(step=step + 1, total=STEPS, reward=reward)
        if step % 10 == 9:
            print(f"step {step + 1}: mean reward {reward:.2f}", flush=True)
    groups.close()  # and so the judge's next put ends the judge


if __name__ == "__main__":
    job = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    job.role("trainer").run(train)
    job.role("judge").run(judge).restart_alone()
    job.role("rollout").run(Rollout).total(2)
    raise SystemExit(job.build().submit("grpo"))
