"""Two workers on real sockets: every promise of the bus, on every route."""

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from msgspec.structs import replace

from tests.support.bus import DEADLINE_S, HOST_ID, World, call, entry, pass_deadlines
from tests.support.deadlines import missed
from unified.bus.calls.future import RpcFuture
from unified.bus.calls.inbound import CURRENT
from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.bus.transport.framing import pack
from unified.errors import (
    BusOverloadedError,
    ClusterError,
    RpcCancelledError,
    RpcTimeoutError,
    UsageError,
    WorkerDiedError,
)
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope
from unified.protocol.records import Inbox, Reachability
from unified.testing import eventually


def test_call_with_everything_an_argument_can_be(world: World) -> None:
    a, _ = world.pair({"echo": lambda *args, **kwargs: (args, kwargs)})
    assert call(a, "echo") == ((), {})
    assert call(a, "echo", 1, (2, {3}), None, key=[b"4"]) == ((1, (2, {3}), None), {"key": [b"4"]})


def test_async_handlers_run_together(world: World) -> None:
    met = asyncio.Event()

    async def wait() -> str:
        await met.wait()
        return "met"

    async def meet() -> str:
        met.set()
        return threading.current_thread().name

    a, _ = world.pair({"wait": wait, "meet": meet})
    waiting = a.call("b", "wait", (), {})
    assert call(a, "meet") == "bus-loop"
    assert waiting.result(DEADLINE_S) == "met"


def test_sync_handlers_run_together(world: World) -> None:
    barrier = threading.Barrier(8)
    a, _ = world.pair({"meet": lambda: barrier.wait(DEADLINE_S)})
    meetings = [a.call("b", "meet", (), {}) for _ in range(8)]
    assert sorted(each.result(DEADLINE_S) for each in meetings) == list(range(8))


def test_sync_function_that_returns_a_coroutine(world: World) -> None:
    async def inner(x: int) -> int:
        return x + 1

    a, _ = world.pair({"outer": lambda x: inner(x)})
    assert call(a, "outer", 1) == 2


def test_deadline_and_a_callee_that_is_told(world: World) -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    a, _ = world.pair({"forever": forever, "ping": lambda: 1})
    future = a.call("b", "forever", (), {}, timeout=DEADLINE_S)
    assert began.wait(DEADLINE_S)
    pass_deadlines(a)
    with pytest.raises(
        RpcTimeoutError,
        match=rf"worker b did not answer 'forever' within {DEADLINE_S:g} s: incarnation 0 has had the call",
    ):
        future.result(DEADLINE_S)
    assert cancelled.wait(DEADLINE_S)
    assert call(a, "ping") == 1


def test_default_deadline(world: World) -> None:
    a, _ = world.endpoint("a", default_timeout_s=missed(0.05))
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError, match=r"within 0.05 s: it has not started yet"):
        call(a, "ping")
    assert time.monotonic() - began >= 0.05


def test_cancel_stops_an_async_handler_and_drops_a_queued_one(world: World) -> None:
    began, cancelled, release = threading.Event(), threading.Event(), threading.Event()
    ran: list[int] = []

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    a, b = world.pair({"forever": forever, "hold": lambda: release.wait(DEADLINE_S), "note": ran.append})
    future = a.call("b", "forever", (), {})
    assert began.wait(DEADLINE_S)
    assert future.cancel()
    with pytest.raises(RpcCancelledError):
        future.result()
    assert cancelled.wait(DEADLINE_S)
    holding = [a.call("b", "hold", (), {}) for _ in range(32)]  # as many as there are threads
    eventually(lambda: b._pool._num_busy == 32)
    queued = a.call("b", "note", (1,), {})
    assert queued.cancel()
    behind = a.call("b", "note", (2,), {})
    eventually(lambda: len(b._server._known) == 34)  # the last has arrived, so the cancellation before it has too
    release.set()
    behind.result(DEADLINE_S)
    assert all(each.result(DEADLINE_S) for each in holding)
    assert ran == [2]


def test_call_before_the_target_is_up_waits(world: World) -> None:
    a, _ = world.endpoint("a")
    early = a.call("b", "ping", (), {}, timeout=DEADLINE_S)
    _, inbox = world.endpoint("b", {"ping": lambda: "up"})
    a.update_directory([entry("b", inbox)])
    assert early.result(DEADLINE_S) == "up"


def test_call_before_the_exports_are_open_waits(world: World) -> None:
    a, _ = world.endpoint("a")
    b, inbox = world.endpoint("b")
    a.update_directory([entry("b", inbox)])
    early = a.call("b", "ping", (), {})
    with pytest.raises(RpcTimeoutError, match="had not ended after"):
        early.result(missed(0.05))
    b._server._registry["ping"] = lambda: "open"
    b.open()
    assert early.result(DEADLINE_S) == "open"


def test_death_fails_pending_calls_at_once(world: World) -> None:
    a, process = world.pair_with_process()
    assert call(a, "pid") == process.popen.pid
    pending = [a.call("b", "forever", (), {}) for _ in range(3)]
    process.kill()
    a.update_directory([entry("b", None, 0, Reachability.DEAD, "killed by SIGKILL")])
    for each in pending:
        with pytest.raises(
            WorkerDiedError, match=r"worker b \(incarnation 0 on node n1\) died before it .* by SIGKILL"
        ):
            each.result(0)
    next_incarnation = a.call("b", "pid", (), {})
    second = world.process("b", 1)
    a.update_directory([entry("b", second.inbox, 1)])
    assert next_incarnation.result(DEADLINE_S) == second.popen.pid


def test_calls_for_one_incarnation_end_before_its_death_is_told(world: World) -> None:
    a, _ = world.endpoint("a")
    done = threading.Event()
    _, inbox = world.endpoint("b", {"m": done.wait})
    a.update_directory([entry("b", inbox)])
    early = a.call("b", "name", (), {}, incarnation=1)
    pending = [*a.call_many(["b", "b"], "m", (), {}, incarnations=[0, 0]), a.call("b", "m", (), {})]
    told: list[list[bool]] = []
    a.on_directory(lambda changes: told.append([each.done() for each in [early, *pending]]))
    _, inbox = world.endpoint("b", {"name": lambda: "second"}, incarnation=1)
    a.update_directory([entry("b", inbox, 1)])
    assert told == [[False, True, True, True]]
    for each in pending:
        with pytest.raises(WorkerDiedError):
            each.result(0)
    assert early.result(DEADLINE_S) == "second"
    with pytest.raises(WorkerDiedError, match=r"worker b \(incarnation 0\) died before 'm' was called"):
        a.call("b", "m", (), {}, incarnation=0).result(0)
    done.set()


def test_new_incarnation_never_gets_the_old_ones_mail(world: World) -> None:
    heard: list[str] = []
    a, _ = world.endpoint("a")
    old, old_inbox = world.endpoint("b", {"note": lambda word: heard.append(f"old {word}")})
    a.update_directory([entry("b", old_inbox)])
    call(a, "note", "1")
    old.close()
    lost = a.call("b", "note", ("2",), {})  # the directory does not know yet
    _, new_inbox = world.endpoint("b", {"note": lambda word: heard.append(f"new {word}")}, incarnation=1)
    assert new_inbox.inbox_id != old_inbox.inbox_id
    a.update_directory([entry("b", new_inbox, 1)])
    with pytest.raises(WorkerDiedError):
        lost.result(DEADLINE_S)
    call(a, "note", "3")
    assert heard == ["old 1", "new 3"]


def test_arrays_and_tensors(world: World) -> None:
    a, _ = world.pair({"echo": lambda value: value})
    array, tensor = np.arange(100_000.0), torch.arange(50_000, dtype=torch.bfloat16).reshape(100, 500)
    back = call(a, "echo", {"array": array, "state": [tensor, np.float32(2)]})
    assert (back["array"] == array).all()
    assert not back["array"].flags.writeable
    assert torch.equal(back["state"][0], tensor)
    assert type(back["state"][1]) is np.float32


def test_64_mib_to_another_process_and_back(world: World) -> None:
    a, _ = world.pair_with_process()
    array = np.full(64 << 20, 3, np.uint8)
    assert call(a, "total", array) == 3 * array.nbytes
    assert (call(a, "echo", array) == array).all()


def test_call_to_oneself_and_from_inside_a_handler(world: World) -> None:
    def back() -> Any:
        return call(b, "ping", target="a")

    async def back_async() -> Any:
        return await b.call("a", "ping", (), {})

    a, b = world.cast({"a": {"ping": lambda: "pong"}, "b": {"back": back, "back_async": back_async}}).values()
    assert call(a, "ping", target="a") == "pong"
    assert call(a, "back") == "pong"  # a, b, a
    assert call(a, "back_async") == "pong"


def test_answer_finds_a_caller_that_the_directory_does_not_know(world: World) -> None:
    a, b = world.pair({"ping": lambda: 1})
    assert b._client.table.directory.get("a") is None
    assert call(a, "ping") == 1


def test_trace_goes_through_nested_calls(world: World) -> None:
    def trace() -> str:
        call = CURRENT.get()
        return "" if call is None else call.trace_id

    a, b = world.cast({"a": {}, "b": {"outer": lambda: (trace(), call(b, "inner")), "inner": trace}}).values()
    outer, inner = call(a, "outer")
    assert outer == inner != ""


async def test_await_and_wait(world: World) -> None:
    a, _ = world.pair({"double": lambda x: 2 * x})
    assert await a.call("b", "double", (2,), {}) == 4
    assert await asyncio.wrap_future(a.call("b", "double", (3,), {})) == 6
    futures = [a.call("b", "double", (i,), {}) for i in range(20)]
    assert not concurrent.futures.wait(futures, DEADLINE_S).not_done
    assert [each.result() for each in futures] == list(range(0, 40, 2))


def test_waiting_inside_a_callback_is_refused_instead_of_hanging(world: World) -> None:
    release = threading.Event()  # else the answer may be there before the callback
    a, _ = world.pair({"ping": lambda: 1, "hold": lambda: release.wait(DEADLINE_S)})
    caught: RpcFuture[str] = RpcFuture()

    def on_done(_: object) -> None:
        try:
            a.call("b", "ping", (), {}).result()
        except UsageError as error:
            caught.succeed(str(error))

    a.call("b", "hold", (), {}).add_done_callback(on_done)
    release.set()
    assert "would wait for ever" in caught.result(DEADLINE_S)
    assert call(a, "ping") == 1


def test_bytes_in_flight_are_bounded(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda data: release.wait(DEADLINE_S)}, limit_bytes=100_000)
    first = a.call("b", "hold", (b"x" * 80_000,), {})
    with pytest.raises(BusOverloadedError, match=r"80... of 100000 bytes are in flight to it already"):
        a.call("b", "hold", (b"x" * 80_000,), {}, block=False)
    with pytest.raises(RpcTimeoutError, match="No room came before"):
        a.call("b", "hold", (b"x" * 80_000,), {}, timeout=missed(0.05))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(lambda: a.call("b", "hold", (b"x" * 80_000,), {}))
        assert not concurrent.futures.wait([blocked], missed(0.05)).done
        release.set()
        assert blocked.result(DEADLINE_S).result(DEADLINE_S)
    assert first.result(DEADLINE_S)
    assert call(a, "hold", b"x" * 300_000)  # larger than the limit, and alone
    assert not a._client._flow_control._held


def test_closing_ends_open_calls_and_refuses_new_ones(world: World) -> None:
    a, _ = world.endpoint("a")
    waiting = a.call("b", "ping", (), {})
    a.close()
    a.close()
    with pytest.raises(RpcCancelledError, match="the bus of worker a was closed"):
        waiting.result(DEADLINE_S)
    with pytest.raises(RpcCancelledError):
        call(a, "ping")


def test_closing_is_not_held_up_by_a_dead_peer_or_a_stuck_handler(world: World) -> None:
    a, _ = world.endpoint("a")
    release = threading.Event()
    b, inbox = world.endpoint("b", {"stuck": release.wait})
    gone = Inbox(inbox_id="gone", routes=[f"ipc://{world.run_dir}/gone", "tcp://127.0.0.1:9"], host_id=HOST_ID)
    a.update_directory([entry("b", inbox), entry("c", gone)])
    futures = [a.call("b", "stuck", (), {}), a.call("c", "ping", (b"x" * 100_000,), {})]
    eventually(lambda: b._server._known)
    a.close()
    b.close()
    assert not release.is_set()
    release.set()
    for future in futures:
        with pytest.raises(RpcCancelledError):
            future.result(0)


def test_rubbish_disturbs_nobody(world: World) -> None:
    a, b = world.pair({"ping": lambda: 1})
    assert call(a, "ping") == 1
    mine = b._listeners.inbox
    stranger = Envelope(BUS_VERSION, Kind.CALL, 1, "x", "x", mine.inbox_id, job="job-1")
    rubbish: list[list[bytes]] = [
        [b""],
        [b"\xc1", b""],
        [os.urandom(50), os.urandom(50), os.urandom(50)],
        [b"x" * 100_000],
        [encode_envelope(replace(stranger, version=9)), b""],
        [encode_envelope(replace(stranger, target="somebody else")), b""],
        [encode_envelope(replace(stranger, kind=Kind.HELLO)), b"\xc1"],
        [encode_envelope(replace(stranger, kind=Kind.RESULT)), b"\xc1"],
        [encode_envelope(replace(stranger, method="ping")), b"\xc1"],
        [encode_envelope(replace(stranger, method="ping"))],
    ]
    kind = zmq.DEALER if world.route == "relay" else zmq.PUSH
    if world.route == "auto":
        throw_at_a_unix_socket(mine.routes[0], rubbish)
    else:
        throw_at_zmq(world.relay if world.route == "relay" else mine.routes[0], kind, rubbish)
    refused = {"auto": 5, "tcp": 7, "relay": 1}[world.route]
    eventually(lambda: b.num_rejected >= refused)
    assert call(a, "ping") == 1


def throw_at_zmq(address: str, kind: int, rubbish: list[list[bytes]]) -> None:
    context: zmq.Context[Any] = zmq.Context()
    sender = context.socket(kind)
    sender.connect(address)
    for frames in rubbish:
        sender.send_multipart(frames)
    sender.close(1000)
    context.term()


def throw_at_a_unix_socket(address: str, rubbish: list[list[bytes]]) -> None:
    """Each on a connection of its own, with and without a right beginning."""
    for envelope, *rest in rubbish:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(address.removeprefix("ipc://"))
            for piece in [*pack(envelope, rest[0] if rest else b"", rest[1:]), os.urandom(100)]:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was refused at once
                    connection.sendall(piece)


def test_method_name_of_silly_length_is_refused_here(world: World) -> None:
    a, _ = world.endpoint("a")
    with pytest.raises(UsageError, match="has 10000 characters"):
        a.call("b", "x" * 10_000, (), {})


def test_forked_child_is_told_that_the_bus_is_not_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, "auto", "")
    a, _ = world.endpoint("a")
    a._pid += 1  # as a child that was forked from here sees it
    with pytest.raises(UsageError, match="was forked from it and cannot call"):
        a.call("b", "m", (), {})
    a.close()
    assert list(tmp_path.iterdir()), "the child closed its parent's inbox"
    a._pid -= 1
    world.close()


def test_inbox_is_private_and_says_how_to_reach_it(tmp_path: Path) -> None:
    world = World(tmp_path / "run", "auto", "")
    _, inbox = world.endpoint("a")
    assert [route.split(":")[0] for route in inbox.routes] == ["ipc", "tcp"]
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    world.close()
    assert not list((tmp_path / "run").iterdir())


def test_path_too_long_for_a_socket_leaves_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path / ("x" * 100), "auto", "")
    a, b = world.pair({"ping": lambda: 1})
    assert [route.split(":")[0] for route in b._listeners.inbox.routes] == ["tcp"]
    assert "107 are allowed" in caplog.text
    assert call(a, "ping") == 1
    world.close()


def test_start_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endpoint(**given: str) -> BusEndpoint:
        network = BusNetwork(run_dir=str(tmp_path), address="127.0.0.1")._replace(**given)  # type: ignore[arg-type]
        return BusEndpoint(BusIdentity("j", "a", 0, "n", "h"), network, registry=MethodRegistry())

    with pytest.raises(UsageError, match="has not been started"):
        endpoint().call("b", "m", (), {})
    with pytest.raises(ClusterError, match="has no address"):
        endpoint(address="203.0.113.1", run_dir="/proc/nowhere").start()
    monkeypatch.setenv("UNIFIED_BUS_ROUTE", "relay")
    with pytest.raises(UsageError, match="there is no relay: unset UNIFIED_BUS_ROUTE"):
        endpoint().start()
    never = endpoint()
    never.close()
