"""What each rank runs: data-parallel training of a small GPT on real text.

Nothing here says how many ranks there are, on which nodes, or how they find each other: the runtime has already
called `init_process_group`, and after a failure it calls `run` again, in a new round, which goes on from the last
checkpoint.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import text
import torch
import torch.distributed as dist
from model import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from unified import current_worker

HELD_OUT_BATCHES = 4
HELD_OUT_SIZE = 32


def run() -> None:
    """Entry point of the role."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # matrices this small are done before a second thread has woken up
    training = Training(current_worker().job_info.user_config)
    training.resume()
    training.train()
    if dist.get_rank() == 0:
        training.save_results()


class Training:
    """The state of one rank, and the steps that change it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rank = dist.get_rank()
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.out / "checkpoint.pt"
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.text = text.load(config.data, config.limit_mb)
        torch.manual_seed(config.seed)
        self.gpt = GPT(config.layers, config.width, config.heads, config.context).to(self.device)
        self.model = DistributedDataParallel(self.gpt)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, self._warm_up_then_cosine)
        self.step = 0
        self.history: list[dict[str, float]] = []

    def resume(self) -> None:
        """Go on from the checkpoint of an earlier round of this run, if any: rank 0 reads it and tells the others."""
        found: list[Any] = [None]
        if self.rank == 0 and self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
            found = [state if state["run"] == self.config.run else None]
        dist.broadcast_object_list(found)
        if (state := found[0]) is None:
            return
        self.gpt.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.history = state["step"], state["history"]
        print(f"resumed at step {self.step}", flush=True)

    def train(self) -> None:
        """Steps until `config.steps`, with a look at the held-out text every `config.evaluate_every`."""
        if not self.history:
            self._evaluate(loss=math.nan)
        while self.step < self.config.steps:
            loss = self._take_step()
            if self.step % self.config.evaluate_every == 0 or self.step == self.config.steps:
                self._evaluate(loss)
                self._save_checkpoint()
            elif self.step % 10 == 0:
                current_worker().report(step=self.step, total=self.config.steps, loss=round(loss, 3))

    def save_results(self) -> None:
        """Rank 0: the numbers, a plot of them, and a sample of what the model writes."""
        generator = torch.Generator().manual_seed(self.config.seed)
        sample = self.gpt.write(self.config.prompt.encode(), self.config.sample_bytes, 0.8, generator)
        (self.out / "sample.txt").write_text(sample.decode(errors="replace"))
        results = {"run": self.config.run, "ranks": dist.get_world_size(), "steps": self.step, "history": self.history}
        (self.out / "metrics.json").write_text(json.dumps(results, indent=1))
        plot(self.history, self.out / "curve.png")

    def _take_step(self) -> float:
        seed = (self.config.seed * self.config.steps + self.step) * dist.get_world_size() + self.rank
        generator = torch.Generator().manual_seed(seed)
        inputs, targets = text.batch(self.text.train, self.config.batch, self.config.context, generator)
        loss: torch.Tensor = self.model(inputs.to(self.device), targets.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def _evaluate(self, loss: float) -> None:
        """Mean loss on held-out text; each rank takes its own part and all agree on the result."""
        generator = torch.Generator().manual_seed(self.rank)
        parts = [
            self.gpt(inputs.to(self.device), targets.to(self.device))
            for inputs, targets in (
                text.batch(self.text.held_out, HELD_OUT_SIZE, self.config.context, generator)
                for _ in range(HELD_OUT_BATCHES)
            )
        ]
        mean = torch.stack(parts).mean()
        dist.all_reduce(mean)
        val_loss = float(mean) / dist.get_world_size()
        self.history.append({"step": self.step, "loss": val_loss if math.isnan(loss) else loss, "val_loss": val_loss})
        progress = {key: round(value, 3) for key, value in self.history[-1].items() if key != "step"}
        current_worker().report(step=self.step, total=self.config.steps, **progress)
        if self.rank == 0:
            print(f"step {self.step}: val_loss {val_loss:.3f}", flush=True)

    def _save_checkpoint(self) -> None:
        """Rank 0: written aside and renamed, so that a kill at any moment leaves a whole file."""
        if self.rank != 0:
            return
        state = {
            "run": self.config.run,
            "model": self.gpt.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "history": self.history,
        }
        aside = self.checkpoint.with_suffix(".part")
        torch.save(state, aside)
        aside.replace(self.checkpoint)

    def _warm_up_then_cosine(self, step: int) -> float:
        steps: int = max(1, self.config.steps)
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / (0.05 * steps + 1)) * decay


def plot(history: list[dict[str, float]], file: Path) -> None:
    """The two loss curves as a picture."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = [line["step"] for line in history]
    axes.plot(steps, [line["loss"] for line in history], label="training")
    axes.plot(steps, [line["val_loss"] for line in history], label="held out")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="nanogpt")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
