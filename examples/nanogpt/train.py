"""Program of each rank: data-parallel training of a small GPT on real text.

Nothing here says how many ranks there are, on which nodes, or how they find each other: the runtime has already
called `init_process_group`, and after a failure it calls `run` again, in a new round, which goes on from the last
checkpoint: with the model as it was, and after the last sample that it had learnt from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from unified import current_worker
from unified.checkpoint import CheckpointManager
from unified.data import DatasetRegistry, ShardedDataset, merge_positions

HELD_OUT = 128
"""Windows of held-out text that each rank looks at."""


def run() -> None:
    """Entry point of the role."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # matrices this small are done before a second thread has woken up
    training = Training(current_worker().job_info.user_config)
    training.resume()
    training.train()
    training.close()


class Training:
    """The state of one rank, and the steps that change it."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.rank = dist.get_rank()
        self.out = Path(config.out)
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        torch.manual_seed(config.seed)
        self.gpt = GPT(config.layers, config.width, config.heads, config.context).to(self.device)
        self.model = DistributedDataParallel(self.gpt)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, self._warm_up_then_cosine)
        self.checkpoints = CheckpointManager(self.out / "checkpoints" / config.run, keep_last_n=2)
        self.dataset = self._open_dataset()
        self.batches = self._endless(DataLoader(self.dataset, batch_size=config.batch))
        self.held_out = self._read_held_out()
        self.step = 0
        self.history: list[dict[str, float]] = []

    def resume(self) -> None:
        """Go on from the latest checkpoint of an earlier round of this run, if any; each rank reads it for itself.

        The data go back with the model: what was read after the checkpoint, and is lost with it, comes again.
        """
        try:
            state = self.checkpoints.load_state()
        except FileNotFoundError:
            return
        self.gpt.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.dataset.load_state_dict(state["data"])
        self.step, self.history = state["step"], state["history"]
        print(f"resumed at step {self.step}, with {len(state['data']['done'])} shards read", flush=True)

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

    def close(self) -> None:
        """Rank 0: the numbers, a plot of them, and a sample of what the model writes."""
        self.checkpoints.close()
        if self.rank != 0:
            return
        generator = torch.Generator().manual_seed(self.config.seed)
        sample = self.gpt.write(self.config.prompt.encode(), self.config.sample_bytes, 0.8, generator)
        (self.out / "sample.txt").write_text(sample.decode(errors="replace"))
        results = {"ranks": dist.get_world_size(), "steps": self.step, "history": self.history}
        (self.out / "metrics.json").write_text(json.dumps(results, indent=1))
        plot(self.history, self.out / "curve.png")

    def _take_step(self) -> float:
        loss = self._loss(self.model, next(self.batches))
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
        mean = self._loss(self.gpt, self.held_out)
        dist.all_reduce(mean)
        val_loss = float(mean) / dist.get_world_size()
        self.history.append({"step": self.step, "loss": val_loss if math.isnan(loss) else loss, "val_loss": val_loss})
        progress = {key: round(value, 3) for key, value in self.history[-1].items() if key != "step"}
        current_worker().report(step=self.step, total=self.config.steps, **progress)
        if self.rank == 0:
            print(f"step {self.step}: val_loss {val_loss:.3f}", flush=True)

    def _save_checkpoint(self) -> None:
        """The model, which is the same everywhere, and how far all ranks together have read."""
        positions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(positions, self.dataset.state_dict())
        if self.rank == 0:
            state = {
                "model": self.gpt.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                "data": merge_positions(positions),
                "step": self.step,
                "history": self.history,
            }
            self.checkpoints.save(state, self.step)

    def _open_dataset(self) -> ShardedDataset:
        """Open this rank's part of the text."""
        registry = DatasetRegistry()
        path, size = self.out / "data" / "train.jsonl", self.config.shard_size
        registry.register("text", path, "jsonl", shard_size=size, shuffle=True, seed=self.config.seed)
        return ShardedDataset(registry, "text", transform=to_tensor)

    def _read_held_out(self) -> torch.Tensor:
        with (self.out / "data" / "held_out.jsonl").open() as lines:
            mine = islice(lines, self.rank, HELD_OUT * dist.get_world_size(), dist.get_world_size())
            return torch.stack([to_tensor(json.loads(line)) for line in mine])

    def _endless(self, loader: DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
        while True:  # each iteration is an epoch
            yield from loader

    def _loss(self, model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
        windows = windows.to(self.device)
        loss: torch.Tensor = model(windows[:, :-1], windows[:, 1:])
        return loss

    def _warm_up_then_cosine(self, step: int) -> float:
        steps: int = max(1, self.config.steps)
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        return min(1.0, (step + 1) / (0.05 * steps + 1)) * decay


def to_tensor(sample: dict[str, Any]) -> torch.Tensor:
    """The bytes of a window, as int64."""
    return torch.tensor(list(sample["text"].encode("latin-1")))


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
