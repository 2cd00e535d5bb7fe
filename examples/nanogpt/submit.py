"""Trains a small GPT on two nodes: `python examples/nanogpt/submit.py`, with `--master` for a cluster of yours."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from pathlib import Path

import text

from unified.api.builder import DLJob, DLJobBuilder

TARGET = 0.7
"""The run counts as a success when the held-out loss has fallen below this share of its first value."""


def main() -> int:
    args = parse()
    try:
        described = describe(args)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    started = time.perf_counter()
    code = described.submit("nanogpt", master=args.master)
    if code != 0:
        return code
    return show(args.out.resolve(), time.perf_counter() - started)


def job() -> DLJob:
    """The job with all defaults: `unified submit examples/nanogpt/submit.py`, or `unified slurm submit …`."""
    return describe(parse([]))


def describe(args: argparse.Namespace) -> DLJob:
    out = args.out.resolve()
    context, ranks = 64, args.nodes * args.devices_per_node
    windows = text.prepare(args.data, out / "data", context, limit_mb=8)
    config = {
        "run": uuid.uuid4().hex,  # tells checkpoints of this run from those that an earlier one left
        "out": str(out),
        "shard_size": max(1, min(256, windows // (4 * ranks))),
        "steps": args.steps,
        "layers": 2,
        "width": 96,
        "heads": 4,
        "context": context,
        "batch": 16,
        "lr": 8e-3,
        "seed": 1337,
        "evaluate_every": max(1, args.steps // 20),
        "prompt": "def ",
        "sample_bytes": 400,
    }
    return (
        DLJobBuilder()
        .node_num(args.nodes)
        .device_per_node(args.devices_per_node)
        .device_type(args.device_type)
        .config(config)
        .train("train.run")
        .nnodes(args.nodes)
        .nproc_per_node(args.devices_per_node)
        .max_restart(args.max_restart)
        .end()
        .build()
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--nodes", type=int, default=2, help="agents to train on (default: 2)")
    parser.add_argument("--devices-per-node", type=int, default=1, help="ranks on each (default: 1)")
    parser.add_argument("--device-type", choices=["CPU", "GPU"], default="CPU")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (default: 600)")
    parser.add_argument("--data", type=Path, help="a text file or folder (default: Python's standard library)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/nanogpt"), help="a folder that all nodes see (default: out/nanogpt)"
    )
    parser.add_argument("--max-restart", type=int, default=10, help="failures that are forgiven (default: 10)")
    return parser.parse_args(words)


def show(out: Path, seconds: float) -> int:
    """The curve and the sample, from the files that rank 0 wrote; 0 if the model has learnt enough."""
    history = json.loads((out / "metrics.json").read_text())["history"]
    draw(history)
    print((out / "sample.txt").read_text(), end="\n\n")
    first, last = history[0]["val_loss"], history[-1]["val_loss"]
    print(f"held-out loss {first:.3f} -> {last:.3f} nats a byte ({last / first:.0%} of the first), in {seconds:.0f} s")
    print(f"saved: {out / 'curve.png'}, metrics.json, sample.txt")
    if last < TARGET * first:
        return 0
    print(f"The loss has not fallen below {TARGET:.0%} of the first: give it more --steps.", file=sys.stderr)
    return 1


def draw(history: list[dict[str, float]]) -> None:
    """The held-out loss over the steps, as a chart in the terminal."""
    import plotext

    chart = plotext.figure
    chart.plot_size(76, 15)
    chart.title("held-out loss (nats a byte) by step")
    losses = chart.signal([line["step"] for line in history], [line["val_loss"] for line in history], marker="braille")
    chart.draw(losses.lines())
    chart.show(colorless=True)


if __name__ == "__main__":
    sys.exit(main())
