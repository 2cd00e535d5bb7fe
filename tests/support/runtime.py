"""A worker whose bus answers at once, from a registry in the same process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import RPC_REGISTRY
from unified.bus.calls.remote_errors import describe, rebuild
from unified.bus.codec.codec import SerializedValue
from unified.bus.executor import HandlerPool
from unified.bus.streams.generator import AnyGenerator, StreamSource, is_stream
from unified.bus.streams.stream import RpcStream, StreamFeed
from unified.core.directory import WorkerDirectory
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.envelope import Kind
from unified.protocol.worker_agent import Launch
from unified.worker.context import Worker, set_current_worker
from unified.worker.progress import Reporter
from unified.worker.stop import StopState

ENTRY = EntryPoint(kind="attribute", target="train", attribute="run")


class Called(NamedTuple):
    target: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    timeout: float | None


class InstantBus:
    """Calls what is registered in this process, whoever the target is. Streams run, each on a thread of its own."""

    def __init__(self) -> None:
        self.calls: list[Called] = []
        self.directory = WorkerDirectory()
        self.methods: dict[str, Callable[..., Any]] = {}
        self.failures: list[Exception] = []
        """What the next calls end in, without being made."""

    def call(
        self, target: str, method: str, args: Sequence[Any], kwargs: dict[str, Any], *, timeout: Any = None, **_: Any
    ) -> RpcFuture[Any]:
        self.calls.append(Called(target, method, tuple(args), kwargs, timeout))
        future: RpcFuture[Any] = RpcFuture(f"the call of {method!r} to worker {target}")
        if self.failures:
            future.fail(self.failures.pop(0))
            return future
        try:
            value = (self.methods.get(method) or RPC_REGISTRY[method])(*args, **kwargs)
            future.succeed(_streamed(value, future.what) if is_stream(value) else value)
        except Exception as error:
            future.fail(error)
        return future

    def call_many(
        self, targets: Sequence[str], method: str, args: Sequence[Any], kwargs: dict[str, Any], **options: Any
    ) -> list[RpcFuture[Any]]:
        return self.call_each(targets, method, [(args, kwargs)] * len(targets), **options)

    def call_each(
        self, targets: Sequence[str], method: str, arguments: Sequence[tuple[Any, Any]], **options: Any
    ) -> list[RpcFuture[Any]]:
        pairs = zip(targets, arguments, strict=True)
        return [self.call(target, method, args, kwargs, **options) for target, (args, kwargs) in pairs]


def _streamed(generator: AnyGenerator, what: str) -> RpcStream[Any]:
    def send(kind: Kind, count: int, content: SerializedValue, may_wait: bool) -> bool:
        match kind:
            case Kind.ITEM:
                feed.push(count, content.body, content.buffers)
            case Kind.RESULT:
                feed.end(count)
            case Kind.ERROR:
                feed.fail(rebuild(content.body, what))
        return True

    def told(error: BaseException) -> SerializedValue:
        return SerializedValue(describe(error, worker="far", node="n1", ours={}), [])

    def run() -> None:
        if source.is_async:
            asyncio.run(source.run_async())
        else:
            source.run(HandlerPool("bus-none", 1))

    source = StreamSource(generator, send, describe=told, what=what)
    feed = StreamFeed(what, send_more=source.more, cancel=source.close, abandon=source.close)
    threading.Thread(target=run, daemon=True).start()
    return RpcStream(feed)


def worker_of(bus: InstantBus, *, master: str = "tcp://127.0.0.1:7077", **roles: int) -> Worker:
    """Rank 0 of the first of these roles (name to number of workers)."""
    spec = JobSpec(
        name="job",
        roles=[RoleSpec(name=name, kind="simple", entry_point=ENTRY, total=total) for name, total in roles.items()],
    )
    launch = launch_of(spec, master=master, log_file="/log/x.err")
    reporter = Reporter(lambda progress: None)
    return Worker(launch, stop=StopState(), reporter=reporter, bus=cast(Any, bus), device="cpu")


@contextlib.contextmanager
def in_worker(**roles: int) -> Iterator[InstantBus]:
    """Make this process such a worker. Methods that are exported meanwhile are gone afterwards."""
    before = dict(RPC_REGISTRY)
    bus = InstantBus()
    set_current_worker(worker_of(bus, master="tcp://127.0.0.1:7077", **roles))
    yield bus
    set_current_worker(None)
    RPC_REGISTRY.clear()
    RPC_REGISTRY.update(before)


def launch_of(spec: JobSpec, rank: int = 0, **fields: Any) -> Launch:
    """Return the launch of a worker of the first role, with values for what `fields` leaves open."""
    role = spec.roles[0]
    who = {"name": role.worker(rank), "role": role.name, "place": role.place(rank)}
    names = {"job_id": "job-1", "kind": "worker", "incarnation": 0, **who}
    host = {"node": "n1", "host_id": "h", "address": "127.0.0.1", "master": "tcp://127.0.0.1:7077", "relay": ""}
    paths = {"run_dir": "/run", "log_file": ""}
    return Launch(**{"spec": spec, **names, **host, **paths, **fields})
