"""A worker whose bus answers at once, from a registry in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from unified.bus.futures import RpcFuture
from unified.bus.registry import RPC_REGISTRY
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.worker_agent import Launch
from unified.worker.context import Worker
from unified.worker.reporting import Reporter
from unified.worker.stop import StopState

ENTRY = EntryPoint(kind="attribute", target="train", attribute="run")


class Called(NamedTuple):
    """One call, as the bus got it."""

    target: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None


class InstantBus:
    """Calls what is registered in this process, whoever the target is."""

    def __init__(self) -> None:
        self.calls: list[Called] = []
        self.methods: dict[str, Callable[..., Any]] = {}

    def call(
        self, target: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, timeout: float | None = None
    ) -> RpcFuture[Any]:
        self.calls.append(Called(target, method, args, kwargs, timeout))
        future: RpcFuture[Any] = RpcFuture()
        try:
            future.succeed((self.methods.get(method) or RPC_REGISTRY[method])(*args, **kwargs))
        except Exception as error:
            future.fail(error)
        return future


def worker_of(bus: InstantBus, *, master: str = "tcp://127.0.0.1:7077", **roles: int) -> Worker:
    """Rank 0 of the first of these roles (name to number of workers)."""
    spec = JobSpec(
        name="job",
        roles=[RoleSpec(name=name, kind="simple", entry_point=ENTRY, total=total) for name, total in roles.items()],
    )
    first = spec.roles[0]
    launch = Launch(
        job_id="job-1",
        spec=spec,
        kind="worker",
        name=first.worker(0),
        incarnation=0,
        role=first.name,
        rank=0,
        world_size=first.total,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        node="n1",
        host_id="h",
        address="127.0.0.1",
        master=master,
        relay="",
        run_dir="/run",
        log_file="/log/x.err",
    )
    reporter = Reporter(lambda progress: None)
    return Worker(launch, stop=StopState(), reporter=reporter, bus=cast(Any, bus), device="cpu")
