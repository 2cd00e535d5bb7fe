"""Trains on two nodes with ranks that survive their peers: `python examples/elastic/submit.py`, with `--sharded` for
FSDP2, with `--kill` to have ranks and a node killed on the way, and with `--master` for a cluster of yours."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from pathlib import Path

import failover

from unified.api.builder import DLJob, DLJobBuilder


def main() -> int:
    args = parse()
    out = args.out.resolve() / uuid.uuid4().hex[:8]
    out.mkdir(parents=True)
    killer = failover.Killer(out, args.steps)
    if args.kill:
        killer.start()
    config = {"out": str(out), "steps": args.steps, "pause_s": args.pause_s}
    entry = "train_fsdp.run" if args.sharded else "train_ddp.run"
    code: int = build(entry, args.nodes, config).submit("elastic", master=None if args.kill else args.master)
    if code != 0:
        return code
    records = failover.read(out)
    print(f"loss {records[0]['loss']:.4f} -> {records[-1]['loss']:.4f} after {records[-1]['step']} steps, see {out}")
    if killer.kills:
        failover.show(out, killer.kills)
    return 0


def build(entry: str, nodes: int, config: dict[str, object]) -> DLJob:
    """Four ranks of one elastic role, two on each of two nodes; other nodes stand by."""
    job: DLJob = (
        DLJobBuilder()
        .node_num(nodes)
        .device_per_node(2)
        .device_type("CPU")
        .config(config)
        .train(entry)
        .nnodes(2)
        .nproc_per_node(2)
        .max_restart(10)
        .end()
        .build()
    )
    return job


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--sharded", action="store_true", help="shard the model (FSDP2) instead of replicating it")
    parser.add_argument("--kill", action="store_true", help="kill ranks and a node of a cluster here while it trains")
    parser.add_argument(
        "--nodes", type=int, default=3, help="agents of a cluster here, of which two train (default: 3)"
    )
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps (default: 400)")
    parser.add_argument("--pause-s", type=float, default=0.02, help="seconds that a step takes longer (default: 0.02)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/elastic"), help="a folder that all nodes see (default: out/elastic)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
