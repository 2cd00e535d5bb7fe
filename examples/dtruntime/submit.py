"""Trains with shards, barriers and checkpoints, kills one of four workers, and checks that every sample of every epoch
was counted exactly once: `python examples/dtruntime/submit.py`, with `--master` for a cluster of yours."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import exactly_once
import points

from unified.api.builder import DLJob, DLJobBuilder

WORKERS = 4
SHARD_SIZE = 100


def main() -> int:
    args = parse()
    out = args.out.resolve()
    run = out / uuid.uuid4().hex[:8]
    points.make(out / "data")
    config = {
        "data": str(out / "data"),
        "run": str(run),
        "epochs": args.epochs,
        "shard_size": SHARD_SIZE,
        "batch": 20,
        "kill": None if args.kill == "none" else int(args.kill),
    }
    code: int = build(config).submit("dtruntime", master=args.master)
    if code != 0:
        return code
    records = exactly_once.read_records(run / "trained")
    show(records, args.epochs)
    found = exactly_once.problems(records, points.ids(out / "data"), args.epochs)
    print("\n".join(found) if found else "every sample of every epoch was counted exactly once")
    print(f"saved: checkpoints and what each worker was trained on, in {run}")
    return 1 if found else 0


def build(config: dict[str, object]) -> DLJob:
    """Four workers of one role on two nodes; `dtruntime` is a name of Unified's for them."""
    job: DLJob = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(2)
        .device_type("CPU")
        .config(config)
        .global_env({"UNIFIED_COMPAT": "1"})
        .workload("trainer", "train.run")
        .total(WORKERS)
        .resource(cpu=0.1)
        .restart_alone()  # a worker that is killed is started again by itself; by default the whole job would be
        .build()
    )
    return job


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--epochs", type=int, default=6, help="default: 6")
    ranks = [str(rank) for rank in range(WORKERS)]
    parser.add_argument(
        "--kill", choices=["none", *ranks], default="3", help="which worker is killed in its second epoch (default: 3)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/dtruntime"), help="a folder that all nodes see (default: out/dtruntime)"
    )
    return parser.parse_args()


def show(records: list[dict[str, Any]], epochs: int) -> None:
    """Per epoch: how many samples counted, who trained on how many shards, and the mean loss."""
    print(f"epoch  samples  {'':2}shards of workers 0 to {WORKERS - 1}  loss")
    for epoch in range(epochs):
        mine = [record for record in records if record["epoch"] == epoch]
        shards = "".join(f"{sum(each['worker'] == rank for each in mine):7}" for rank in range(WORKERS))
        loss = sum(each["loss"] for each in mine) / max(1, len(mine))
        print(f"{epoch:5}  {sum(len(each['samples']) for each in mine):7}{shards}  {loss:.4f}")
    for rank, incarnation in sorted(
        {(each["worker"], each["incarnation"]) for each in records if each["incarnation"] > 0}
    ):
        num = sum((each["worker"], each["incarnation"]) == (rank, incarnation) for each in records)
        print(f"worker {rank} was started again, and trained on {num} shards after that (incarnation {incarnation})")


if __name__ == "__main__":
    sys.exit(main())
