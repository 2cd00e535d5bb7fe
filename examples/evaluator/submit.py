"""Two ranks train one model, an evaluator scores it every 50 steps, and a run that ended goes on where it was."""

import os
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from unified import DLJobBuilder, RoleGroup, current_worker, rpc
from unified.checkpoint import CheckpointManager


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def draw_rows(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(number, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x, (3 * x[:, :1]).sin() * x[:, 1:]


class Evaluator:
    def __init__(self) -> None:
        self.model, (self.x, self.y) = make_model(), draw_rows(2000, seed=0)  # held-out rows

    @rpc(concurrency=1, idempotent=True)
    def evaluate(self, weights: dict[str, torch.Tensor]) -> float:
        self.model.load_state_dict(weights)
        with torch.no_grad():
            return float((self.model(self.x) - self.y).square().mean())


def train(config: Any) -> None:
    rank = current_worker().actor_info.rank
    torch.manual_seed(7)
    model = DistributedDataParallel(make_model())  # the process group is up already
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    checkpoints = CheckpointManager(config.folder, keep_last_n=2)
    evaluator, start = RoleGroup("evaluator")[0].with_options(retries=3, timeout=60), 0
    if checkpoints.steps():
        state = checkpoints.load_state()
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        print(f"resumed at step {start}", flush=True)
    for step in range(start + 1, config.steps + 1):
        x, y = draw_rows(32, seed=2 * step + rank + 1)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        if step % 50 == 0 or step == config.steps:
            weights = model.module.state_dict()
            checkpoints.save({"model": weights, "optimizer": optimizer.state_dict(), "step": step}, step=step)
            if rank == 0:
                score = evaluator.call(Evaluator.evaluate, weights).result()
                current_worker().report(step=step, total=config.steps, held_out=score)
                print(f"step {step}: {score:.4f} on held-out rows", flush=True)
    checkpoints.close()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    config = {"steps": steps, "folder": os.path.abspath("out/evaluator")}
    job = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").config(config)
    job.train(train).nnodes(1).nproc_per_node(2)
    job.role("evaluator").run(Evaluator).service()
    raise SystemExit(job.build().submit("fit", failover_exec_strategy=2))  # a dead rank restarts its role alone
