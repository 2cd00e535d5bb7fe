"""What happens to a bus whose threads are interrupted, held up, or ended by its users' code."""

import concurrent.futures
import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import unified
from tests.support.bus import DEADLINE_S, World, call, entry
from tests.support.deadlines import missed
from tests.support.interrupts import Interrupter
from unified.bus.calls import pending
from unified.bus.calls.future import RpcFuture, gather
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import RouteLostError, RpcError, RpcTimeoutError, UsageError
from unified.protocol.envelope import Envelope, Kind
from unified.protocol.records import Reachability
from unified.testing import eventually


def test_waiting_for_centuries(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    future = a.call("b", "hold", (), {}, timeout=1e12)
    threading.Timer(0.1, release.set).start()
    assert future.result(1e10)


def test_done_callback_that_exits_ends_no_thread_of_the_bus(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S), "ping": lambda: 1})
    futures = [a.call("b", "hold", (), {}) for _ in range(8)]
    for future in futures:
        future.add_done_callback(lambda _: sys.exit("from a done callback"))
    release.set()
    assert eventually(lambda: all(each.done() for each in futures))
    assert [a.call("b", "ping", (), {}).result(DEADLINE_S) for _ in range(5)] == [1] * 5


def test_interrupted_wait_loses_nothing(world: World) -> None:
    release = threading.Event()
    a, b = world.pair({"hold": lambda i: release.wait(DEADLINE_S) and i, "ping": lambda: 1})
    futures = [a.call("b", "hold", (i,), {}) for i in range(3)]
    me = threading.main_thread().ident
    assert me is not None
    for _ in range(10):
        timer = threading.Timer(0.01, signal.pthread_kill, (me, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - on a busy machine it comes before the wait has begun
            timer.start()
            futures[0].result(DEADLINE_S)
        timer.join()
    assert call(a, "ping") == 1
    release.set()
    assert [each.result(DEADLINE_S) for each in futures] == [0, 1, 2]
    assert eventually(lambda: not b._server._known)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops one in a weakref callback
def test_interrupts_at_any_moment_end_every_call(world: World) -> None:
    """Each call ends: with its value, or with an error that says that it was interrupted or that its link broke."""
    a, _ = world.pair({"echo": lambda x: x})
    me = threading.main_thread().ident
    assert me is not None
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(0.003):
            signal.pthread_kill(me, signal.SIGUSR1)

    class Stop(BaseException):
        pass

    armed = [False]

    def on_signal(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise Stop

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=disturb)
    thread.start()
    futures = []
    try:
        for i in range(300):
            futures.append(a.call("b", "echo", (i,), {}))
            try:
                armed[0] = True
                futures[-1].result(DEADLINE_S)
                armed[0] = False
            except Stop:
                pass
            except RpcError:
                armed[0] = False
    finally:
        armed[0] = False
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    for i, future in enumerate(futures):
        assert future.exception(DEADLINE_S) is not None or future.result() == i
    assert call(a, "echo", "still") == "still"


def test_interrupt_before_the_timer_is_set_loses_no_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while its thread is started: nothing else may set it before the call is to be given up."""
    monkeypatch.setattr(pending, "LOST_GRACE_S", 0.02)
    release = threading.Event()
    a, b = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    future = a.call("b", "hold", (), {})
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:  # noqa: PT012
        sets = [KeyboardInterrupt, a._client._timer.set]
        patch.setattr(a._client._timer, "set", lambda at: raise_or_call(sets.pop(0), at))
        a._client.step(pending.LinkLost(inbox_id=b.inbox_id, reason="the test says so"))
    with pytest.raises(RouteLostError):
        future.result(DEADLINE_S)
    release.set()


def raise_or_call(action: Any, *args: Any) -> Any:
    if isinstance(action, type):
        raise action
    return action(*args)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python drops one in a finalizer
def test_interrupt_at_each_point_of_a_wait_ends_the_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for the rarest moments too: at each place in a wait at which Python looks for signals."""
    monkeypatch.setattr(pending, "LOST_GRACE_S", 0.02)
    a, _ = world.pair({"echo": lambda x: x})
    interrupter = Interrupter(str(Path(unified.__file__).parent))

    def wait(future: RpcFuture[Any]) -> None:
        with contextlib.suppress(RpcError):
            future.result(DEADLINE_S)

    def make(num_before: int) -> RpcFuture[Any]:
        """Make a call, which is held back to share a write if another came just before."""
        return [a.call("b", "echo", (i,), {}) for i in range(num_before + 1)][-1]

    num_vain = 0
    lost: list[str] = []
    while num_vain < 50:  # not each wait goes the same way
        future = make(num_vain % 2)
        point = interrupter.run(partial(wait, future))
        num_vain = num_vain + 1 if point is None else 0
        if point is not None:
            try:
                future.exception(DEADLINE_S)
            except RpcTimeoutError:
                lost.append(f"{point[0].co_qualname}, instruction at {point[1]}")
    assert not lost
    assert len(interrupter.hit) > 10
    with contextlib.suppress(RpcError):  # it may find a connection that the last interrupt broke
        call(a, "echo", "once")
    assert call(a, "echo", "still") == "still"


def test_interrupted_send_breaks_its_link_or_has_the_rest_sent_on() -> None:
    """At each place at which Python looks for signals: else the rest of a large message waited for the next one."""
    interrupter = Interrupter(str(Path(unified.__file__).parent))
    num_whole = 0
    while num_whole < 3:  # from Python 3.12 on, the first run does not see all points
        ours, theirs = socket.socketpair()
        link = UnixConnection(ours, Mock(watch=lambda link: setattr(link, "watched", link.events)), Mock(), peer_id="b")
        link.hold(b"held", set())
        if interrupter.run(partial(link.send, [b"large", bytes(1 << 20)])) is None:
            num_whole += 1
            assert link.backlog_bytes
        assert not link.backlog_bytes or link.watched & select.EPOLLOUT
        has_held = bool(link._held)
        link.close()
        with theirs:
            assert has_held or theirs.recv(4) in (b"held", b"")
    assert len(interrupter.hit) > 10


def test_callback_of_a_late_call_holds_up_no_other_deadline(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    a.call("b", "hold", (), {}, timeout=missed(0.05)).add_done_callback(lambda _: release.wait(DEADLINE_S))
    with pytest.raises(RpcTimeoutError):
        a.call("b", "hold", (), {}, timeout=missed(0.2)).result(DEADLINE_S)
    assert not release.is_set()
    release.set()


def test_news_of_a_death_is_taken_in_while_its_link_is_held_up(world: World) -> None:
    entered, release = threading.Event(), threading.Event()
    hold = threading.Event()
    a, b = world.pair({"hold": lambda: hold.wait(DEADLINE_S), "stuck": lambda: release.wait(DEADLINE_S)})

    def on_done(_: object) -> None:
        entered.set()
        release.wait(DEADLINE_S)

    future = a.call("b", "hold", (), {})
    future.add_done_callback(on_done)
    pending = a.call("b", "stuck", (), {})
    hold.set()
    assert entered.wait(DEADLINE_S)  # whoever reads the link is in the callback now
    a.update_directory([entry("b", b._listeners.inbox, 0, Reachability.DEAD, "killed")])
    assert not release.is_set()
    assert pending.exception(DEADLINE_S) is not None
    release.set()


def test_gather_fails_with_the_first_failure_while_another_worker_is_slow(world: World) -> None:
    release = threading.Event()

    def fail() -> None:
        raise KeyError("k")

    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    _, inbox = world.endpoint("c", {"fail": fail, "ping": lambda: 1})
    a.update_directory([entry("c", inbox)])
    assert call(a, "ping", target="c") == 1
    whole = gather([a.call("b", "hold", (), {}), a.call("c", "fail", (), {})], "both")
    with pytest.raises(KeyError):
        whole.result(DEADLINE_S)
    assert not release.is_set()
    release.set()


def test_broken_link_that_nobody_can_read_costs_no_time(world: World) -> None:
    if world.route != "auto":
        pytest.skip("links are for one host")
    entered, release = threading.Event(), threading.Event()
    a, process = world.pair_with_process()
    assert call(a, "echo", 1) == 1
    future = a.call("b", "echo", (1,), {})

    def on_done(_: object) -> None:
        entered.set()
        release.wait(DEADLINE_S)

    future.add_done_callback(on_done)
    if not entered.wait(DEADLINE_S):  # the answer was there before the callback
        pytest.fail("the callback was not called")
    process.kill()
    began, used = time.perf_counter(), time.process_time()
    release.wait(missed(0.3))
    share = (time.process_time() - used) / (time.perf_counter() - began)
    release.set()
    assert share < 0.5


def test_closing_from_a_handler_from_a_callback_and_from_two_threads(world: World) -> None:
    a, b = world.pair({"close": lambda: b.close(), "ping": lambda: 1})
    future = a.call("b", "ping", (), {})
    future.add_done_callback(lambda _: a.call("b", "close", (), {}))
    assert eventually(lambda: b._is_closing)
    c, inbox = world.endpoint("c", {"ping": lambda: 1, "hold": lambda: time.sleep(0.05)})
    a.update_directory([entry("c", inbox)])
    a.call("c", "hold", (), {}).add_done_callback(lambda _: a.close())
    assert eventually(lambda: a._is_closing)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: c.close(), range(2)))
    assert eventually(lambda: not list(world.run_dir.iterdir())), "a thread that closes has not come to an end"


def test_closing_while_others_call(world: World) -> None:
    a, _ = world.pair({"ping": lambda: 1})
    assert call(a, "ping") == 1
    ends: list[BaseException | None] = []

    def work() -> None:
        for _ in range(10_000):
            future = a.call("b", "ping", (), {})
            ends.append(future.exception(DEADLINE_S))
            if ends[-1] is not None:
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(ends) > 50)
    a.close()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert {type(each).__name__ for each in ends} <= {"NoneType", "RpcCancelledError"}


def test_what_a_worker_forked_does_not_keep_its_connections(tmp_path: Path) -> None:
    with contextlib.closing(World(tmp_path, "auto", "")) as world:
        a, process = world.pair_with_process()
        child = call(a, "fork")
        assert process.inbox.inbox_id in a._connections._connections
        process.kill()
        try:
            assert eventually(lambda: process.inbox.inbox_id not in a._connections._connections)
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_future_of_the_parent_is_refused_in_a_child(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S)})
    future = a.call("b", "hold", (), {})
    a._pid += 1  # as a child that was forked from here sees it
    with pytest.raises(UsageError, match="was forked from it"):
        future.result(DEADLINE_S)
    a._pid -= 1
    release.set()
    assert future.result(DEADLINE_S)


class _Exhausted(socket.socket):
    """A listener in a process that has no file numbers left, for a while."""

    num_tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_tries += 1
        if self.num_tries <= 20:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_no_file_numbers_left_is_waited_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    listener = _Exhausted(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    ticking = threading.Event()
    threads = IoThreads(listener, full_bytes=1)
    threads.tick_soon = ticking.set  # type: ignore[method-assign]
    threads.start(Mock())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(tmp_path / "s"))
        for tries in range(1, 21):
            assert ticking.wait(DEADLINE_S)
            assert eventually(lambda tries=tries: listener.num_tries == tries)  # type: ignore[misc]
            ticking.clear()
            threads.tick()
        assert eventually(lambda: threads.connections)
    threads.close()
    assert caplog.text.count("event=cannot-accept") == 1


def test_answer_that_cannot_be_sent_is_an_error_of_its_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = world.pair({"ping": lambda: 1})
    send = b._sender.send

    def fail(way: Any, envelope: Envelope, *rest: Any) -> bool:
        if envelope.kind is Kind.RESULT:
            raise OverflowError("too large to be said")
        return send(way, envelope, *rest)

    monkeypatch.setattr(b._sender, "send", fail)
    with pytest.raises(OverflowError, match="too large to be said"):
        call(a, "ping")
