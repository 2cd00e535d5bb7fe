"""Ray with its dashboard and so many actors that do nothing, until its standard input ends."""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil
import ray

BATCH = 10


class Idle:
    def nop(self) -> None:
        return None


def main() -> None:
    context = ray.init(
        num_cpus=2, include_dashboard=True, dashboard_port=0, log_to_driver=False, logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )  # fmt: skip
    idle: Any = ray.remote(num_cpus=0)(Idle)
    actors: list[Any] = []
    while len(actors) < int(sys.argv[1]):
        actors += [idle.remote() for _ in range(BATCH)]
        ray.get([actor.nop.remote() for actor in actors[-BATCH:]])
    children = psutil.Process().children(recursive=True)
    names = {each.pid: " ".join(each.cmdline()) for each in children}
    heads = [pid for pid, name in names.items() if "dashboard/dashboard.py" in name]
    below = [each.pid for head in heads for each in psutil.Process(head).children(recursive=True)]
    gcs = next(pid for pid, name in names.items() if "gcs_server" in name)
    print(json.dumps({"url": f"http://{context.dashboard_url}", "dashboard": heads + below, "gcs": gcs}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
