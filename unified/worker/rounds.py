"""Rounds of this worker: the control thread receives orders and notices, the main thread joins and leaves rounds.

A process takes part in one round, unless its code can join further ones (`begin_loop`, an elastic loop). In a loop, a
broken round does not end the process: it leaves the process group, keeps all other state, and waits for its order into
the next round.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from unified.errors import ClusterError
from unified.job.spec import RoleSpec
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.records import Failure
from unified.protocol.worker_agent import Failed, Launch, NodesChecked, Rejoins, Running, WorkerWord
from unified.rounds import own_store, process_group
from unified.rounds.group_abort import Address, abort_groups, is_gloo_lost
from unified.rounds.node_check import NodeCheck
from unified.rounds.rendezvous_store import open_round
from unified.threads import call_guarded, start_thread
from unified.worker import environment
from unified.worker.entrypoint import is_executable
from unified.worker.failure import is_collateral
from unified.worker.stop import EXIT_TERMINATED

_LOST_S = 0.5
_AGAIN_S = (0.02, 1.0)
"""Seconds between two attempts to abort, at first and at most. A group that is not made yet cannot be aborted."""
_LEAVE_WAIT = signal.SIGURG
"""Signal to the main thread, which interrupts its wait. Programs that do not handle it are not told of it."""
_WAITS = (
    *("unified.bus.", "unified.queue.", "unified.weights.", "unified.loader.", "unified.coordinator."),
    *("unified.worker.names", "asyncio.base_events"),
)
"""Modules whose waits end with the round. An exception at any moment is no harm there: Ctrl-C is one."""
_LIBRARIES = sys.stdlib_module_names | {"zmq"}


class RoundEnded(BaseException):
    """Raised as the round of this process ends: out of the user's loop, to the code that joins the next round.

    No `Exception`, so that a loop that catches its own errors does not catch this.
    """


class Rounds:
    """The rounds of one worker.

    Args:
        say: sends a word to the agent.
        on_join: called with each order before its round is joined.
    """

    def __init__(
        self, launch: Launch, role: RoleSpec, say: Callable[[WorkerWord], None], on_join: Callable[[RunOrder], None]
    ) -> None:
        self._launch = launch
        self._role = role
        self._say = say
        self._on_join = on_join
        self._orders: queue.SimpleQueue[RunOrder | None] = queue.SimpleQueue()
        self._changing = threading.Condition()
        """Held to change the fields below, and to abort: no abort may hit the group of a later round."""
        self._current: RunOrder | None = None
        self._stores: list[Address] = []
        self._notice: RoundNotice | None = None
        self._in_loop = False
        self._left_round = 0
        self.on_planned: Callable[[RoundNotice], None] = lambda notice: None
        """Called, in the control thread, with the notice of each planned change."""

    @property
    def is_elastic(self) -> bool:
        return self._role.kind == "elastic"

    @property
    def notice(self) -> RoundNotice | None:
        """The notice that the round of this process ends, if there is one."""
        with self._changing:
            current, notice = self._current, self._notice
        return notice if notice is not None and current is not None and notice.round >= current.round else None

    @property
    def is_of_many(self) -> bool:
        """True if the present round has other ranks: then their failure may break a collective of this worker."""
        current = self._current
        return current is not None and current.world_size > 1

    @property
    def end_reason(self) -> str:
        """The master's reason for the end of the round that was left last; empty if it gave none."""
        with self._changing:
            notice = self._notice
        return notice.reason if notice is not None and notice.round >= self._left_round else ""

    # Control thread

    def on_run(self, order: RunOrder) -> None:
        self._orders.put(order)

    def on_stop(self) -> None:
        """End the wait for an order: the worker stops."""
        self._orders.put(None)

    def on_notice(self, notice: RoundNotice) -> None:
        """Take in that a round ends. A broken round is aborted, so that a stuck main thread leaves it, too."""
        with self._changing:
            self._notice = notice
        self._abort_if_broken()
        if notice.kind == "planned":
            self.on_planned(notice)

    # Main thread

    def first(self) -> RunOrder | None:
        """Wait for the first order; None: a stop came before it."""
        return self._orders.get()

    def join(self, order: RunOrder, device: str) -> None:
        """Take part in a round from now on: its number, its variables, and its process group."""
        self._say(Running(round=order.round))
        self._on_join(order)
        if not self.is_elastic:
            return
        with self._changing:
            self._current = order
            self._stores = [Address(order.store_host, order.store_port)]
        self._abort_if_broken()  # the notice may have come before the round began
        communication = self._role.communication
        port = open_round(order, self._role.name, communication.timeout_s or process_group.OPEN_ROUND_WITHIN_S)
        with self._changing:
            self._stores.append(Address(order.store_host, port))
        if order.checks_nodes:
            self._check_nodes(order, port, device)
        os.environ.update(environment.elastic(self._launch, self._role, order, port))
        own_store.learn(order.store_host, port)
        if communication.auto_setup and not is_executable(self._role.entry_point):
            process_group.set_up(order, port, communication, device)

    def _check_nodes(self, order: RunOrder, port: int, device: str) -> None:
        """Check the nodes of the round together with its other ranks; after a failed check, wait for a stop."""
        report = NodeCheck(order, port, self._launch.node, device, self._role.communication.backend).run()
        self._say(NodesChecked(report=report))
        if report.is_good:
            return
        with contextlib.suppress(queue.Empty):
            if self._orders.get(timeout=process_group.OPEN_ROUND_WITHIN_S) is None:
                raise SystemExit(EXIT_TERMINATED)
        raise ClusterError(f"round {order.round}: the node check failed, and the master did not stop this worker.")

    def begin_loop(self) -> None:
        """Say that this process can take part in further rounds."""
        with self._changing:
            self._in_loop = True
        if threading.current_thread() is threading.main_thread() and not callable(signal.getsignal(_LEAVE_WAIT)):
            signal.signal(_LEAVE_WAIT, self._leave_wait)
        self._tell()

    def end_loop(self) -> None:
        """Say that this process can take part in no further round."""
        with self._changing:
            self._in_loop = False
        self._tell()

    def release(self, round_: int) -> None:
        """Say that a round may end as far as this process is concerned; from any thread."""
        with self._changing:
            self._left_round = max(self._left_round, round_)
        self._tell()

    def is_broken_by(self, error: BaseException) -> bool:
        """Return True if this error, which came out of the round, was raised because the round is broken."""
        notice = self.notice
        is_notified = notice is not None and notice.kind == "broken"
        return is_collateral(error, self.is_of_many) or (is_notified and isinstance(error, RuntimeError))

    def rejoin(self, device: str) -> RunOrder:
        """Leave the round and join the next one; skip rounds that break before they have begun.

        The wait for an order has no timeout. It ends at a stop of this worker, or with the agent, whose death ends this
        process.
        """
        while True:
            self._leave()
            order = self._next()
            try:
                self.join(order, device)
            except Exception as error:
                if not self.is_broken_by(error):
                    raise
            else:
                return order

    def _leave(self) -> None:
        with self._changing:
            self._left_round = max(self._left_round, self._current.round if self._current is not None else 0)
            self._current = None
            self._changing.notify_all()
        process_group.leave()
        self._tell()

    def _next(self) -> RunOrder:
        """Wait for an order into a round that was not left and is not known to be broken."""
        while True:
            order = self._orders.get()
            if order is None:
                raise SystemExit(EXIT_TERMINATED)
            with self._changing:
                notice = self._notice
            is_broken = notice is not None and notice.kind == "broken" and notice.round >= order.round
            if order.round > self._left_round and not is_broken and self._orders.empty():
                return order

    def _give_up(self, round_: int) -> NoReturn:
        """End this process, whose main thread hangs in a collective for ever; a new incarnation replaces it."""
        text = f"could not leave round {round_}: Gloo lost an operation when a peer hung up (as of torch 2.13)"
        self._say(Failed(failure=Failure(summary=text, category="crash", is_collateral=True)))
        print(f"unified: this worker {text}, and ends.", file=sys.stderr, flush=True)
        os._exit(1)

    def _tell(self) -> None:
        self._say(Rejoins(is_able=self._in_loop, left_round=self._left_round))

    def _abort_if_broken(self) -> None:
        """Begin to abort the present round if it is known to be broken, and this process can join another."""
        with self._changing:
            current, notice = self._current, self._notice
            if not self._in_loop or current is None or notice is None:
                return
        if notice.kind == "broken" and notice.round >= current.round:
            start_thread("unified-abort-round", self._abort, current.round)

    def _leave_wait(self, _number: int, frame: FrameType | None) -> None:
        """Handle `_LEAVE_WAIT`: raise RoundEnded if the main thread waits in the runtime for others."""
        notice = self.notice
        if self._in_loop and notice is not None and notice.kind == "broken" and _is_waiting(frame):
            raise RoundEnded

    def _is_in(self, round_: int) -> bool:
        return self._current is not None and self._current.round == round_

    def _abort(self, round_: int) -> None:
        pause, longest = _AGAIN_S
        num_peers = 1
        with self._changing:
            self._changing.wait(pause)  # mostly the collective itself fails when a peer dies
            while self._is_in(round_):
                call_guarded("abort-failed", abort_groups, self._stores, num_peers)
                was_lost = is_gloo_lost()
                if signal.getsignal(_LEAVE_WAIT) == self._leave_wait:
                    signal.pthread_kill(threading.main_thread().ident or 0, _LEAVE_WAIT)
                self._changing.wait(pause)
                if pause >= _LOST_S and was_lost and self._is_in(round_) and is_gloo_lost():
                    self._give_up(round_)
                pause, num_peers = min(1.5 * pause, longest), 2 * num_peers


def _is_waiting(frame: FrameType | None) -> bool:
    """Return True if the innermost frame that is not of a library is of the runtime, and not of user code that the
    runtime has called, such as a short handler."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_WAITS):
            return True
        if name != "unified.threads" and name.partition(".")[0] not in _LIBRARIES:
            return False
        frame = frame.f_back
    return False


class RoundChanges:
    """Planned changes of a round, for the code of one worker.

    A worker in an elastic loop need not react: its loop leaves the round at the next step. Other workers are restarted
    as processes, as soon as all workers of the role are ready, or when the time of the notice is over.

    Args:
        rounds: the rounds of this process; None in a test that needs none.
    """

    def __init__(self, rounds: Rounds | None) -> None:
        self._rounds = rounds
        self._deciding = threading.Lock()
        self._callbacks: list[Callable[[RoundNotice], None]] = []
        if rounds is not None:
            rounds.on_planned = self._learn

    @property
    def is_announced(self) -> bool:
        """True if a change has been announced, and this process has not yet joined the round that follows it."""
        return self._notice() is not None

    def on_change(self, callback: Callable[[RoundNotice], None]) -> None:
        """Have `callback(notice)` called for each change; at once for one that is announced already."""
        with self._deciding:
            self._callbacks.append(callback)
            notice = self._notice()
        if notice is not None:
            callback(notice)

    def ready(self) -> None:
        """Say that the round may end; without an announced change this does nothing."""
        if (notice := self._notice()) is not None and self._rounds is not None:
            self._rounds.release(notice.round)

    def _notice(self) -> RoundNotice | None:
        notice = self._rounds.notice if self._rounds is not None else None
        return notice if notice is not None and notice.kind == "planned" else None

    def _learn(self, notice: RoundNotice) -> None:
        with self._deciding:
            callbacks = list(self._callbacks)
        if callbacks:
            start_thread("unified-round-change", self._call, callbacks, notice)

    def _call(self, callbacks: list[Callable[[RoundNotice], None]], notice: RoundNotice) -> None:
        for callback in callbacks:
            call_guarded("round-change-callback-failed", callback, notice)
