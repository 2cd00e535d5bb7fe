"""Runs of the training program for tests: a tiny model, a dataset of a few hundred rows, ranks as torchrun has them."""

import json
import multiprocessing
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from tests.support.ports import unused_port
from unified.storage import open_storage
from unified.training import program
from unified.training.checkpoints import RunCheckpointManager
from unified.training.layout import RunLayout

TINY = 'config:{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}'
ARGUMENTS: dict[str, Any] = {"batch_size": 4, "lr": 0.01, "max_seq_len": 48, "logging_steps": 1, "save_steps": 10}
WITHIN_S = 200.0


def rows(count: int = 300, seed: int = 0) -> bytes:
    """Lines of words that follow one another, so that there is something to learn."""
    chance = random.Random(seed)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    starts = [(chance.randrange(5), chance.randrange(3, 8)) for _ in range(count)]
    texts = [" ".join(words[(start + number) % 5] for number in range(length)) for start, length in starts]
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def options(
    base: str, dataset: str, *, run_id: str = "run-1", framework: str = "meta", model: str = TINY, **extra_args: Any
) -> list[str]:
    """The command line of a run."""
    arguments = json.dumps({**ARGUMENTS, **extra_args})
    line = ["--framework", framework, "--run-id", run_id, "--checkpoint-base-uri", base, "--dataset-uri", dataset]
    return [*line, "--model-id", model, "--extra-args-json", arguments]


class Ranks:
    """Processes of the program with the variables of torchrun, forked from one that has torch loaded."""

    def __init__(self, argv: Sequence[str], world_size: int = 2) -> None:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(world_size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port())}
        self._folder = Path(tempfile.mkdtemp())
        self._files = [self._folder / f"{rank}.txt" for rank in range(world_size)]
        self.processes = []
        for rank, file in enumerate(self._files):
            file.touch()
            ours = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(_server().Process(target=_run, args=([*argv], ours, str(file)), daemon=True))
        for process in self.processes:
            process.start()

    def await_line(self, start: str) -> None:
        """Wait until rank 0 has printed a line that begins so."""
        until = time.monotonic() + WITHIN_S
        while not re.search(rf"^{re.escape(start)}", self._files[0].read_text(), re.MULTILINE):
            assert time.monotonic() < until, self._files[0].read_text()
            assert self.processes[0].is_alive(), self._files[0].read_text()
            time.sleep(0.001)

    def send_signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def wait(self) -> tuple[list[int], list[str]]:
        """Return exit codes and outputs by rank; kill what does not end in time."""
        until = time.monotonic() + WITHIN_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            process.kill()
            process.join()
        outputs = [file.read_text() for file in self._files]
        shutil.rmtree(self._folder)
        return [process.exitcode or 0 for process in self.processes], outputs


def run_ranks(argv: Sequence[str], world_size: int = 2) -> tuple[list[int], list[str]]:
    return Ranks(argv, world_size).wait()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "unified.training.meta", __name__])
    return context


def _run(argv: list[str], env: dict[str, str], output: str) -> None:
    import torch

    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.exit(program.main(argv))


def losses(output: str) -> dict[int, float]:
    """The loss that a rank printed for each step."""
    found = re.findall(r"^step (\d+)/\d+ loss=(\S+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def layout(base: str, run_id: str = "run-1", framework: str = "meta") -> RunLayout:
    return RunLayout(base, run_id, framework)


def complete_steps(base: str, run_id: str = "run-1", framework: str = "meta") -> list[int]:
    with RunCheckpointManager(layout(base, run_id, framework)) as manager:
        return manager.complete_steps()


def keys(base: str, run_id: str = "run-1", framework: str = "meta") -> list[str]:
    """Names below the folder of a run, logs of single ranks left away."""
    backend, prefix = open_storage(layout(base, run_id, framework).prefix)
    with backend:
        names = [stat.key.removeprefix(prefix).lstrip("/") for stat in backend.list(prefix)]
    return [name for name in names if not name.startswith("logs/") or name == "logs/.keep"]


def write_rows(folder: Path, count: int = 300) -> str:
    """Write a dataset; return its path."""
    path = folder / "rows.jsonl"
    path.write_bytes(rows(count))
    return str(path)
