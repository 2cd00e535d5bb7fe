"""Weights into a real vLLM: `sync_weights` beside vLLM's update from a folder, and the log probabilities afterwards.

    .venv/bin/python -m benchmarks.rl.engine_weights --python ENV/bin/python --model FOLDER

ENV has vLLM from 0.28 on, transformers and Unified; FOLDER has a checkpoint. One engine runs on the processor of this
host, and a trainer beside it. In each round the trainer changes its model, and brings it into vLLM in one way after the
other: by `sync_weights`; and by `safetensors.save_file` and vLLM's own `reload_weights` (`/collective_rpc`), from a
folder in /dev/shm and from one on the disk, which the system may keep in its cache. All of them pause vLLM, which keeps
its requests. vLLM's own client (`HTTPVLLMWeightSyncClient`) is left out: its backends need GPUs.

Then vLLM's log probabilities of a text are compared with those of the model, which transformers loads afresh: the mean
of the absolute differences, before the way, when vLLM has older weights, and after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import unified
from unified import DLJobBuilder, RoleGroup

TEXT = "The capital of France is Paris. The capital of Italy is Rome. Water boils at one hundred degrees Celsius."
CHANGE = 0.05
"""Standard deviation of the change of each parameter, in parts of its own."""
ON_A_PROCESSOR = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
FIGURES = {"seconds": "s", "write": "of it: write, s", "gib_s": "GiB/s", "before": "logprobs before", "after": "after"}


def train() -> None:
    """Measure, as the trainer of the job."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = json.loads(os.environ["BENCH"])
    model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained(arguments["model"])(TEXT, return_tensors="pt").input_ids
    rollout = RoleGroup("rollout")
    rollout.urls()

    def ask(path: str, body: object = None) -> Any:
        return rollout[0].call("request", "POST", path, body).result(600)

    def of_vllm() -> torch.Tensor:
        body = {"model": "model", "prompt": tokens[0].tolist(), "max_tokens": 1, "echo": True, "logprobs": 1}
        found = ask("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
        return torch.tensor(found[1 : tokens.shape[1]])

    @torch.no_grad()
    def of_transformers() -> torch.Tensor:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            model.save_pretrained(folder)
            fresh = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
            logprobs = torch.log_softmax(fresh(tokens).logits.float(), -1)
        return logprobs[0, :-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)

    def by_sync() -> float:
        rollout.sync_weights(model)
        return 0.0

    def by_folder(parent: str) -> float:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            began = time.perf_counter()
            # With tied tensors twice: vLLM keeps a packed copy of the output layer, which stays old otherwise.
            save_file({name: each.clone() for name, each in model.state_dict().items()}, f"{folder}/model.safetensors")
            write_s = time.perf_counter() - began
            ask("/pause?mode=keep")
            ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            ask("/resume")
        return write_s

    ways: dict[str, Callable[[], float]] = {
        "sync_weights": by_sync,
        "folder in /dev/shm": lambda: by_folder("/dev/shm"),
        "folder on disk": lambda: by_folder(arguments["disk"]),
    }
    gib = sum(each.nbytes for each in model.parameters()) / 2**30
    readings: dict[str, dict[str, list[float]]] = {way: {figure: [] for figure in FIGURES} for way in ways}
    torch.manual_seed(1)
    for number in range(arguments["rounds"]):
        for way, bring in ways.items():
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(torch.randn_like(each) * each.float().std().clamp(min=0.02) * CHANGE)
            wanted, before = of_transformers(), of_vllm()
            began = time.perf_counter()
            write_s = bring()
            seconds = time.perf_counter() - began
            figures = (
                seconds,
                write_s,
                gib / seconds,
                *((wanted - each).abs().mean().item() for each in (before, of_vllm())),
            )
            for figure, value in zip(FIGURES, figures, strict=True):
                readings[way][figure].append(value)
            print(f"round {number + 1}, {way}: {seconds:.2f} s", flush=True)
    found = {"gib": gib, "vllm": rollout[0].call("request", "GET", "/version").result(60), "readings": readings}
    Path(arguments["out"]).write_text(json.dumps(found))


def show(found: dict[str, Any]) -> None:
    title = f"{found['gib']:.2f} GiB into vLLM {found['vllm']['version']}, medians"
    table = Table("", *FIGURES.values(), title=title)
    for way, readings in found["readings"].items():
        table.add_row(way, *(f"{statistics.median(readings[figure]):.3f}" for figure in FIGURES))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with vLLM and Unified")
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path("out/bench"), help="folder on a disk")
    parser.add_argument("--out", type=Path, default=Path("out/bench/engine_weights.json"))
    parser.add_argument(
        "--vllm", default="--enforce-eager --max-model-len 512 --max-num-seqs 8", help="options of vLLM"
    )
    arguments = parser.parse_args()
    if Path(sys.executable) != arguments.python.absolute():  # workers run with the Python of this process
        python = str(arguments.python.absolute())
        os.execv(python, [python, "-m", "benchmarks.rl.engine_weights", *sys.argv[1:]])
    for folder in (arguments.disk, arguments.out.parent):
        folder.mkdir(parents=True, exist_ok=True)
    passed = {name: str(getattr(arguments, name).absolute()) for name in ("model", "disk", "out")}
    builder = DLJobBuilder().device_type("CPU")
    trainer = builder.workload("trainer", "benchmarks.rl.engine_weights.train")
    trainer.env({"BENCH": json.dumps({**passed, "rounds": arguments.rounds}), "HF_HUB_OFFLINE": "1"})
    command = [str(Path(sys.executable).with_name("vllm")), "serve", passed["model"], "--port", "{port}"]
    command += ["--served-model-name", "model", *shlex.split(arguments.vllm)]
    builder.role("rollout").engine(command).env(ON_A_PROCESSOR)
    load_before = os.getloadavg()[0]
    with unified.local_cluster():
        builder.build().submit("engine-weights")
    found = {**json.loads(arguments.out.read_text()), "cores": os.cpu_count(), "load_before": load_before}
    arguments.out.write_text(json.dumps(found, indent=1))
    show(found)
    print(json.dumps(found["readings"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
