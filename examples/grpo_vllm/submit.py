"""Teaches a chat model to answer shortly, with answers of two vLLM engines, of which one is killed, as the trainer is:
`make example N=grpo_vllm`, or `python submit.py --model FOLDER` in an environment that has vLLM."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
import uuid
from pathlib import Path

import kills
import prompts

import unified
from unified import DLJob, DLJobBuilder

WINDOW = 5


def main() -> int:
    args = parse()
    out = args.out.resolve() / uuid.uuid4().hex[:8]
    out.mkdir(parents=True)
    model = Path(args.model)
    config = {
        "model": str(model.resolve()) if model.exists() else args.model,
        "out": str(out),
        "seed": args.seed,
        "steps": args.steps,
        "prompts": 2,  # a step
        "group": 8,  # answers to each prompt
        "lr": 1e-5,
    }
    began = time.time()
    killer = None
    with contextlib.ExitStack() as stack:
        if not args.master:
            cluster = stack.enter_context(unified.local_cluster(devices=None if args.gpu else 3))
            if not args.no_kill:
                killer = kills.Killer(out, args.steps, cluster.address)
                killer.start()
        code: int = build(config, gpu=args.gpu).submit(kills.JOB, master=args.master or None)
    if code != 0:
        return code
    return show(out, args, killer, time.time() - began)


def build(config: dict[str, object], *, gpu: bool) -> DLJob:
    """A trainer and two engines, each with a device of its own."""
    builder = DLJobBuilder().node_num(1).device_per_node(3).device_type("GPU" if gpu else "CPU").config(config)
    builder.preload("transformers.models.llama.modeling_llama")
    builder.role("trainer").run("train.run").restart_alone()
    beside = Path(sys.executable).with_name("vllm")
    vllm = str(beside) if beside.exists() else "vllm"
    command = [vllm, "serve", str(config["model"]), "--port", "{port}", "--served-model-name", "policy"]
    command += ["--enable-scale-out", "--max-model-len", "512"]  # tokens in, tokens out
    engines = builder.role("rollout").engine(command if gpu else [*command, "--enforce-eager", "--max-num-seqs", "16"])
    engines.total(2)
    if not gpu:
        engines.env({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    return builder.build()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--model", default="out/engines/model", help="a folder, or a name that vLLM can fetch")
    parser.add_argument("--gpu", action="store_true", help="three GPUs instead of this host's cores")
    parser.add_argument("--no-kill", action="store_true", help="kill nothing (a cluster elsewhere: nothing is killed)")
    parser.add_argument("--steps", type=int, default=30, help=f"default: 30, at most {len(prompts.THINGS) // 2}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/grpo_vllm"), help="where results go")
    args = parser.parse_args()
    if not 2 * WINDOW <= args.steps <= len(prompts.THINGS) // 2:
        parser.error(f"--steps: from {2 * WINDOW} to {len(prompts.THINGS) // 2}, two prompts a step, each used once")
    if not args.model or (args.model.startswith(("out/", "/", ".")) and not Path(args.model).exists()):
        parser.error(f"--model: there is no {args.model}; `make example N=grpo_vllm` makes one")
    if not Path(sys.executable).with_name("vllm").exists() and shutil.which("vllm") is None:
        parser.error("there is no program vllm here: `make example N=grpo_vllm` installs it")
    return args


def show(out: Path, args: argparse.Namespace, killer: kills.Killer | None, seconds: float) -> int:
    """Print the results; 0 if the model has learnt, with each prompt once, and with no answer of older weights."""
    results = json.loads((out / "results.json").read_text())
    steps = results["steps"]
    rewards = [step["reward"] for step in steps]
    used = [prompt for step in steps for prompt in step["prompts"]]
    num_old = sum(step["num_old"] for step in steps)
    first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
    bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * reward)] for reward in rewards)
    print(f"\nreward of each step   |{bars}|   {first:.2f} -> {last:.2f} (mean of the first and last {WINDOW} steps)")
    if killer is not None:
        kills.show(out, killer.kills)
    num_twice, num_updates = len(used) - len(set(used)), results["updates"]
    print(f"\n{len(used)} prompts in {num_updates} updates of the model, {num_twice} of them twice")
    print(f"{num_old} answers of older weights")
    for prompt, before in results["before"].items():
        print(f"{prompt}\n  before: {before!r}\n  after:  {results['after'][prompt]!r}")
    print(f"{seconds:.0f} s in all, with the start of vLLM; the model is in {out / 'model'}")
    problems = []
    if last <= first:
        problems.append("the reward has not risen")
    if used != prompts.in_order(args.seed)[: 2 * args.steps] or num_updates != args.steps:
        problems.append("a prompt was used twice, or left out: the model has had another number of updates than steps")
    if num_old:
        problems.append("answers of older weights were used")
    if killer is not None and not (len(killer.kills) == 2 and all(kill.back_at for kill in killer.kills)):
        problems.append("what was killed did not work again before the end: give it more --steps")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
