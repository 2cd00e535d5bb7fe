"""Teaches a tiny transformer to sort by trial and error: `python examples/rl/submit.py`, with `--master` for a cluster
of yours."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
import uuid
from pathlib import Path

import plot

from unified.api.builder import RLJob, RLJobBuilder

WINDOW = plot.WINDOW


def main() -> int:
    args = parse()
    out = args.out.resolve()
    config = {
        "run": uuid.uuid4().hex,  # tells results of this run from those of an earlier one
        "out": str(out),
        "seed": args.seed,
        "iterations": args.iterations,
        "length": 4,  # digits to sort
        "prompts": 16,  # an iteration
        "group": 16,  # answers to each prompt
        "updates": 2,  # steps of the optimizer an iteration
        "lr": 4e-3,
        "clip": 0.2,
        "kl_weight": 0.01,
    }
    started = time.perf_counter()
    # The ranks of the actor start again together if one crashes; the default would start the whole job again.
    code: int = build(config).submit("rl", master=args.master, failover_exec_strategy=2)
    if code != 0:
        return code
    results = out / "rewards.json"
    if not results.exists() or json.loads(results.read_text())["run"] != config["run"]:
        return missing(out, args.master)
    return show(json.loads(results.read_text())["rewards"], out, time.perf_counter() - started)


def build(config: dict[str, object]) -> RLJob:
    """Six processes on one node, which share its devices, and the trainer."""
    job: RLJob = (
        RLJobBuilder()
        .node_num(1)
        .device_per_node(2)
        .device_type("CPU")
        .config(config)
        .trainer("trainer.run")
        .resource(cpu=0.1)
        .restart_alone()
        .actor("actor.Actor")
        .nnodes(1)
        .nproc_per_node(2)
        .rollout("rollout.Rollout")
        .total(2)
        .per_group(2)
        .restart_alone()
        .reference("reference.Reference")
        .restart_alone()
        .reward("reward.Reward")
        .restart_alone()
        .with_collocation_all()
        .build()
    )
    return job


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--iterations", type=int, default=300, help="default: 300")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/rl"), help="where results go (default: out/rl)")
    return parser.parse_args()


def missing(out: Path, master: str | None) -> int:
    """Results that are not here: as it should be if the trainer was on another host, else a failure."""
    if master is None or re.match(r"(tcp://)?(localhost|127\.[\d.]+|\[::1\])(:|/|$)", master):
        print(f"The job ended well, but it has left no results in {out}.", file=sys.stderr)
        return 1
    print(f"The results are in {out} on the node of the trainer.")
    return 0


def show(rewards: list[float], out: Path, seconds: float) -> int:
    """The curve; 0 if the policy has learnt something."""
    plot.chart(rewards)
    first, last = (sum(part) / len(part) for part in (rewards[:WINDOW], rewards[-WINDOW:]))
    print(f"mean reward {first:.2f} -> {last:.2f} (first and last {WINDOW} iterations), in {seconds:.0f} s")
    print(f"saved: {out / 'curve.svg'}, curve.png, rewards.json")
    if last >= 2 * first:
        return 0
    print("The reward has not doubled: give it more --iterations.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
