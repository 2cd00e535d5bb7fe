"""A driver and two kinds of service: `python examples/actors/submit.py`, with `--master` for a cluster of yours."""

from __future__ import annotations

import argparse
import os
import sys

from unified.api.builder import DLJob, DLJobBuilder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--master", default=os.environ.get("UNIFIED_MASTER"), help="of a running cluster (default: one here)"
    )
    parser.add_argument("--generators", type=int, default=2)
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--goal", default="Roles call each other by name.")
    args = parser.parse_args()
    config = {"goal": args.goal, "length": len(args.goal), "children": 64, "generations": args.generations}
    job: DLJob = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(1)
        .device_type("CPU")
        .config(config)
        .role("driver")
        .run("driver.run")
        .resource(cpu=0.1)
        .role("generator")
        .run("services.Generator")
        .total(args.generators)
        .resource(cpu=0.1)
        .role("judge")
        .run("services.Judge")
        .resource(cpu=0.1)
        .build()
    )
    return job.submit("actors", master=args.master)


if __name__ == "__main__":
    sys.exit(main())
