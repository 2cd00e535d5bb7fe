"""Runs of the training program: a process for each rank, forked from one that has imported the frameworks, which takes
seconds."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.ports import unused_port
from unified.training import RunCheckpointManager, RunLayout

TINY = (
    'config:{"hidden_size":32,"intermediate_size":64,"num_hidden_layers":2,"num_attention_heads":2,'
    '"max_position_embeddings":64}'
)
WITHIN_S = 100.0


def write_rows(path: Path, count: int = 80) -> Path:
    """A dataset whose rows have unequal lengths."""
    rows = ({"text": f"row {number} " + "abc " * (number * 7 % 9)} for number in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class TrainingProcesses:
    """The ranks of one run.

    Args:
        output: file that all ranks write to.
    """

    def __init__(self, argv: Sequence[str], output: Path, world_size: int, env: Mapping[str, str]) -> None:
        self.output = output
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["unified.training.hf", "unified.training.nemo"])
        port = unused_port()
        self.ranks: list[BaseProcess] = []
        for rank in range(world_size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
            own = {name: str(value) for name, value in ranks.items()} if world_size > 1 else {}
            own |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **env}
            process = context.Process(target=_be_rank, args=(list(argv), own, str(output)))
            process.start()
            self.ranks.append(process)

    def wait(self) -> list[int | None]:
        """Exit codes by rank; those that do not end are killed, and have None."""
        until = time.monotonic() + WITHIN_S
        for rank in self.ranks:
            rank.join(max(0.0, until - time.monotonic()))
        codes = [rank.exitcode for rank in self.ranks]
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.join()
        return codes

    def signal(self, number: int, *, first: int = 0) -> None:
        """Send a signal to all ranks from `first` on that are there."""
        for rank in self.ranks[first:]:
            if rank.is_alive() and rank.pid is not None:
                os.kill(rank.pid, number)

    def text(self) -> str:
        return self.output.read_text()


class TrainingRuns:
    """Runs of one framework, below one folder or bucket.

    Args:
        base_uri: of the checkpoints.
    """

    def __init__(self, framework: str, folder: Path, base_uri: str = "") -> None:
        self.framework = framework
        self._folder = folder
        self._base = base_uri or f"file://{folder}/runs"
        self.dataset = write_rows(folder / "rows.jsonl")
        self._started: list[TrainingProcesses] = []

    def start(
        self,
        run_id: str = "run",
        world_size: int = 1,
        *,
        model: str = TINY,
        dataset: str = "",
        resume: bool = False,
        env: Mapping[str, str] | None = None,
        **extra_args: Any,
    ) -> TrainingProcesses:
        """Begin a run, small unless `extra_args` say otherwise."""
        extra = {"max_seq_len": 32, "batch_size": 4, "lr": 3e-3, "logging_steps": 5, **extra_args}
        options = {
            "framework": self.framework,
            "run-id": run_id,
            "checkpoint-base-uri": self._base,
            "dataset-uri": dataset or str(self.dataset),
            "model-id": model,
            "resume": str(resume).lower(),
            "extra-args-json": json.dumps({name: value for name, value in extra.items() if value is not None}),
        }
        argv = [text for name, value in options.items() for text in (f"--{name}", value)]
        output = self._folder / f"output-{len(self._started)}.txt"
        self._started.append(TrainingProcesses(argv, output, world_size, env or {}))
        return self._started[-1]

    def train(self, run_id: str = "run", world_size: int = 1, **options: Any) -> TrainingProcesses:
        """Have a run that succeeds, and wait for it."""
        ranks = self.start(run_id, world_size, **options)
        assert ranks.wait() == [0] * world_size, ranks.text()
        return ranks

    def refused(self, **options: Any) -> str:
        """Have a run that ends with one line, and return it."""
        ranks = self.start(**options)
        assert ranks.wait() == [2], ranks.text()
        lines = [line for line in ranks.text().splitlines() if line.startswith("unified-train: ")]
        assert "Traceback" not in ranks.text()
        return lines[-1]

    def checkpoints(self, run_id: str = "run") -> RunCheckpointManager:
        return RunCheckpointManager(RunLayout(self._base, run_id, self.framework))

    def wait_for_step(self, step: int, ranks: TrainingProcesses, run_id: str = "run") -> None:
        """Return when a step is complete."""
        until = time.monotonic() + WITHIN_S
        with self.checkpoints(run_id) as checkpoints:
            while (checkpoints.latest() or 0) < step:
                assert time.monotonic() < until, ranks.text()
                assert ranks.ranks[0].is_alive(), ranks.text()
                time.sleep(0.005)

    def fetch(self, step: int, run_id: str = "run") -> dict[str, Path]:
        """Files of a checkpoint, by name."""
        with self.checkpoints(run_id) as checkpoints:
            return checkpoints.fetch(step, self._folder / f"{run_id}-{step}")

    def close(self) -> None:
        for ranks in self._started:
            ranks.signal(signal.SIGKILL)
            for rank in ranks.ranks:
                rank.join()
                rank.close()


def _be_rank(argv: list[str], env: Mapping[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ.update(env)
    sys.path[:0] = filter(None, [env.get("PYTHONPATH")])
    import torch

    from unified.training.program import main

    torch.set_num_threads(1)  # it has read its environment in the process that this one was forked from
    if "HF_HUB_OFFLINE" in env and "huggingface_hub" in sys.modules:  # which has done so, too
        sys.modules["huggingface_hub"].constants.HF_HUB_OFFLINE = True
    sys.exit(main(argv))
