"""A job whose driver calls a service on another node, and asks the master about itself. Run: submits it."""

import os
import sys

from unified import PrimeMasterApi, RoleGroup, current_worker, rpc
from unified.api.builder import DLJob, DLJobBuilder

MARKER = "attack-at-dawn-7f3a"
"""Goes through the job's description and through every call."""
ROUTE = "UNIFIED_BUS_ROUTE"


@rpc
def shout(text: str) -> str:
    return text.upper()


def serve() -> None:
    """Only to be called."""


def drive() -> None:
    marker = current_worker().job_info.user_config.marker
    service = RoleGroup("service")
    for number in range(50):
        (answer,) = service.call("shout", f"{marker} {number}").result()
        assert answer == f"{marker} {number}".upper(), answer
    large = marker * 500_000
    (echoed,) = service.call("shout", large).result()
    assert echoed == large.upper()
    print("stage", PrimeMasterApi.get_status().stage, "route", os.environ[ROUTE], flush=True)


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    job: DLJob = (
        DLJobBuilder()
        .node_num(2)
        .device_per_node(1)
        .device_type("CPU")
        .config({"marker": MARKER})
        .role("driver")
        .run("key_job.drive")
        .resource(accelerator=1)
        .role("service")
        .run("key_job.serve")
        .resource(accelerator=1)
        .not_driver()
        .build()
    )
    sys.path.insert(0, here)
    return job.submit("keyed")


if __name__ == "__main__":
    sys.exit(main())
