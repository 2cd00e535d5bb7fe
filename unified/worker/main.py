"""The main of a worker process, from its first order to its exit.

The zygote calls `main` in a forked worker. A spawned worker runs ``python -m unified.worker.main``, with the number of
its control socket in ``UNIFIED_CONTROL_FD``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from traceback import clear_frames
from typing import NoReturn

from unified import compat, error_file, process
from unified.bus import tracing
from unified.bus.calls.late_exports import LateExports
from unified.bus.calls.registry import RPC_REGISTRY, adopt_instance, export_rpc_module
from unified.bus.endpoint import BusEndpoint
from unified.bus.executor import MainThread
from unified.bus.identity import BusIdentity, BusNetwork
from unified.config import settings
from unified.config.logging import asked_level, log_from
from unified.errors import EntryPointError, QueueClosedError, RemoteError
from unified.job import by_value
from unified.job.report_to import REPORT_TO
from unified.protocol import worker_agent
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import Failure, Inbox
from unified.rounds import process_group
from unified.rounds.rendezvous_store import needs_no_torch, require_torch
from unified.security.keys import learn
from unified.worker import environment, fork_setup, late_variables
from unified.worker.cleanup_watch import CleanupWatch
from unified.worker.context import Worker, current_worker, set_current_worker
from unified.worker.control import ControlChannel, Handlers
from unified.worker.debugger import DebugTerminal, await_debugpy
from unified.worker.entrypoint import LoadedEntry, imports_elastic, is_executable, load
from unified.worker.exit import (
    EXIT_CUT,
    WITHIN_S,
    clear_program,
    cut_after,
    end_program,
    exit_fork,
    exit_process,
    finish_work,
)
from unified.worker.failure import describe, exit_code, where, with_written
from unified.worker.progress import ActivityWatch, Reporter
from unified.worker.rounds import Rounds
from unified.worker.stacks import StackDumper
from unified.worker.step_recorder import StepRecorder
from unified.worker.stop import EXIT_INTERRUPTED, EXIT_TERMINATED, StopState, flush_output
from unified.worker.store_host import serve_stores

SWITCH_S = 0.001
"""Time after which a computing thread lets others run, such as the one that answers calls. With Python's 5 ms, one call
in a hundred would wait that long."""
TRACKERS_WITHIN_S = 60.0
"""Time for trackers to take the remaining reports once a program has returned."""
PRELOAD = (
    "numpy",
    "numpy.random",
    "torch",
    "torch.distributed",
    "omegaconf",
    "unified.worker.main",
    "unified.api.runtime.worker",
    "unified.api.runtime.role_group",
    "unified.queue.client",
    "unified.api.builder.builder",
)
"""Modules that a zygote imports for its workers, if they are installed. None starts a thread. `unified.elastic` is not
among them: its import sets a variable of NCCL, for ranks whose own code imports it."""


def main(control: socket.socket) -> NoReturn:
    """Run the worker that the agent at the other end of `control` launches; never returns."""
    fork_setup.open_output()
    # A crash in C++ leaves a Python traceback in the log: only of its thread, as our threads would fill the screen.
    faulthandler.enable(all_threads=False)
    fork_setup.disown_finalizers()
    channel = ControlChannel(control)
    launch = environment.with_shipped_code(channel.receive_launch())
    _present(launch)
    fork_setup.take_stdin(launch)
    if launch.kind == "store":
        serve_stores(channel, launch)
    _WorkerProcess(channel, launch).run_to_end()


class _WorkerProcess:
    def __init__(self, channel: ControlChannel, launch: worker_agent.Launch) -> None:
        self._channel = channel
        self._launch = launch
        self._role = launch.spec.role(launch.role)
        self._rounds = Rounds(launch, self._role, channel.send, on_join=self._on_join)
        self._stop = StopState(
            clean_up=self._unlink_sockets,
            on_settled=self._rounds.on_stop,
            on_saving=channel.send,
            grace_s=launch.spec.stop_grace_s,
            save_grace_s=launch.spec.save_grace_s,
        )
        self._stop.fail = self._fail_soon
        self._reporter = Reporter(channel.send)
        self._stacks = StackDumper(launch)
        self._recorder = StepRecorder(
            launch.log_file, lambda error: channel.send(worker_agent.StepRecorded(error=error))
        )
        self._reporter.recorder = self._recorder
        self._cleanup_watch = CleanupWatch(self._stacks.open_collective, self._reporter.clean_up)
        self._bus: BusEndpoint | None = None
        self._main_thread = MainThread()
        self._inbox: Inbox | None = None
        self._entry: LoadedEntry | None = None
        self._main = ""
        """Name of the entry point's module."""
        self._own_methods: set[str] = set()
        self._own_modules: set[str] = set()
        """Rpc methods and modules that were there before the user's code."""
        self._category = "crash"
        """Category of an error that happens now: the runtime's until user code runs."""
        self._only_serves = self._is_service = False
        self._late_error: BaseException | None = None
        """Error that ends the worker once its entry point has returned."""
        self._pid = os.getpid()
        channel.before_exit = self._unlink_sockets
        os.register_at_fork(after_in_child=channel.disown)

    def run_to_end(self) -> NoReturn:
        try:
            worker = self._set_up()
            await_debugpy(self._launch, self._reporter.wait_for)
            self._load()
            self._exit_if_forked()
            order = self._rounds.first()
            if order is None:
                self._exit(0, is_stopped=True)
            self._rounds.join(order, worker.device)
            self._run(worker)
        except SystemExit as error:
            self._exit_if_forked(error)
            if exit_code(error) != 0:
                self._fail(error)
        except BaseException as error:
            self._exit_if_forked(error)
            self._fail(error)
        self._finish()
        self._end()

    def _set_up(self) -> Worker:
        launch = self._launch
        learn(launch.key)
        environment.apply(launch)
        if level := asked_level(os.environ):
            log_from(level)
        compat.apply(os.environ)  # not in the zygote, which started before the job was known
        fork_setup.keep_freed(os.environ)  # before a second thread exists, which would get its own malloc arena
        self._stop.install()
        self._stacks.install()
        fork_setup.renew_randomness()
        fork_setup.settle_libraries(environment.thread_count(os.environ))
        sys.setswitchinterval(SWITCH_S)
        self._bus = bus = BusEndpoint(
            BusIdentity(
                job=launch.job_id,
                worker=launch.name,
                incarnation=launch.incarnation,
                node=launch.node,
                host=launch.host_id,
            ),
            BusNetwork(run_dir=launch.run_dir, address=launch.address, relay=launch.relay, key=launch.key),
            default_timeout_s=launch.spec.call_timeout_s,
            tracer=tracing.asked(os.environ, launch.log_file),
            main=self._main_thread,
        )
        bus.unread.on_total = self._reporter.count_unread
        self._reporter.watch_queues()
        self._inbox = bus.start()
        if self._role.hang_timeout_s is not None:
            activity = ActivityWatch(self._role.hang_timeout_s, lambda: bus.num_received, self._reporter.count_activity)
            activity.start()
        worker = Worker(
            launch,
            stop=self._stop,
            reporter=self._reporter,
            rounds=self._rounds,
            bus=bus,
            device=environment.take_device(launch, os.environ),
            claim=lambda claims: self._channel.send(worker_agent.Claimed(claims=claims)),
            hold_ports=self._channel.hold_ports,
        )
        if os.environ.get(REPORT_TO):
            from unified.trackers.feed import Trackers

            self._reporter.trackers = Trackers(launch, os.environ, lambda: worker.actor_info.rank)
        bus.on_directory(worker.names.learn)
        bus.update_directory(launch.directory)
        set_current_worker(worker)
        handlers = Handlers(
            on_run=self._rounds.on_run,
            on_directory=bus.update_directory,
            on_stop=self._on_stop,
            on_notice=self._rounds.on_notice,
            on_dump=self._on_dump,
            on_record=lambda order: self._recorder.begin(order.within_s),
        )
        self._channel.start(handlers)
        DebugTerminal(launch, self._stop, self._reporter.wait_for)
        self._channel.send(worker_agent.Hello(pid=os.getpid(), inbox=self._inbox))
        self._own_methods, self._own_modules = set(RPC_REGISTRY), set(sys.modules)
        return worker

    def _close_trackers(self, within_s: float) -> None:
        if self._reporter.trackers is not None:
            self._reporter.trackers.close(min(within_s, self._stop.left_s() / 2) if self._stop.is_asked else within_s)

    def _load(self) -> None:
        """Import the user's code before the order to run comes: the master still gathers the other workers."""
        entry = self._role.entry_point
        if self._role.kind == "elastic" and not is_executable(entry) and not needs_no_torch():
            require_torch(self._role.name)
            process_group.wrap_group_calls()
        if entry.kind != "value" and all(role.entry_point == entry for role in self._launch.spec.roles):
            by_value.all_run_this_script()
        late_variables.apply_at_import()
        with self._stop.user_code():
            waits = self._role.is_driver and not self._role.is_service
            entry = environment.entry_point(self._launch)
            self._entry = load(entry, is_driver=waits, is_elastic=self._role.kind == "elastic")
        if self._role.kind == "elastic" and imports_elastic(entry, self._entry.module):
            import_module("unified.elastic")  # before the round's group: the program may import it only later
        self._main = self._entry.module.__name__

    def _on_join(self, order: RunOrder) -> None:
        current_worker()._begin_round(order)
        self._stacks.begin_round(order.rank)
        if order.world_size > 1:
            self._cleanup_watch.start()

    def _run(self, worker: Worker) -> None:
        assert self._entry is not None
        self._category = "user"
        self._only_serves = self._entry.only_serves or self._role.is_service
        self._is_service = self._role.is_service or (self._only_serves and self._role.kind != "elastic")
        with self._stop.user_code():
            self._entry.construct(lambda: worker.job_info.user_config)
            self._exit_if_forked()
            _export(self._entry)
            late = LateExports(self._entry.module) if self._entry.is_program else None
            self._main_thread.will_serve = self._entry.only_serves
            worker.bus.open()
            try:
                self._entry.run(lambda: worker.job_info.user_config)
            except SystemExit as error:
                self._exit_if_forked(error)
                if exit_code(error) != 0:
                    raise
            except QueueClosedError as error:
                self._exit_if_forked(error)
                if isinstance(error, RemoteError):  # the end of another worker's stream
                    raise
                print(f"unified: ended by the end of a stream: {error}", file=sys.stderr)
            self._exit_if_forked()
            if self._late_error is not None:
                raise self._late_error
        if late is not None:
            _export(self._entry, late)

    def _exit_if_forked(self, error: BaseException | None = None) -> None:
        """Exit if user code forked this process: only the worker itself does what follows."""
        if os.getpid() != self._pid:
            exit_fork(error)

    def _finish(self) -> None:
        if self._stop.is_asked and not self._stop.await_order():
            # Only a signal came, for example from SLURM at the end of a step: the program's work may be unfinished.
            self._exit(EXIT_TERMINATED)
        self._stop.on_stop(self._hasten_end, is_users=False)
        self._cleanup_watch.close()
        if self._rounds.is_of_many:
            self._stacks.end_program()
            self._reporter.end_program(self._stacks.num_collectives())
        current_worker()._finish()
        if not self._goes_on():
            self._close_trackers(TRACKERS_WITHIN_S)  # before `atexit` functions end the trackers' libraries
            end_program(self._end_calls, self._clear)
        else:
            if not self._only_serves:
                finish_work()
            self._report_unread(settle=True)
        self._stop.finish()
        self._reporter.flush()
        flush_output(within_s=1.0)
        self._channel.send(worker_agent.Finished(is_serving=self._is_service))
        if not self._only_serves and not RPC_REGISTRY.users_names():  # handlers of calls may need the group
            process_group.end()

    def _end_calls(self) -> None:
        self._report_unread(settle=True)
        self._stop.forget_callbacks()
        self._stop.on_stop(self._hasten_end, is_users=False)

    def _end(self) -> NoReturn:
        """End in order when the job says so: `atexit` functions first, then the process group, then the bus."""
        self._stop.on_stop(lambda: self._main_thread.submit(None), is_users=False)
        self._main_thread.serve(self._stop.run_call)
        if self._late_error is not None and not self._stop.is_asked:
            self._fail(self._late_error)
        self._stop.wait()

        def last() -> None:
            process_group.destroy(min(process_group.DESTROY_WITHIN_S, self._stop.left_s() / 2))
            self._close_bus()

        self._exit(0, is_stopped=True, last=last)

    def _goes_on(self) -> bool:
        """Return True if the program serves others after its end: by rpc methods, a queue of its own, or threads."""
        return self._only_serves or not self._own_methods.issuperset(RPC_REGISTRY)

    def _hasten_end(self) -> None:
        """Limit the program's end to the grace period, since a stop came meanwhile."""
        if not self._stop.is_finished:
            self._channel.send(worker_agent.Running(round=0, is_ending=True))
            cut_after(self._stop.left_s, EXIT_CUT, self._report_cut)

    def _report_cut(self, text: str) -> None:
        self._channel.send(worker_agent.Failed(failure=Failure(summary=text, is_cut=True)))

    def _clear(self) -> None:
        self._entry = None
        main, self._main = self._main, ""
        if main:
            clear_program(main, self._own_modules)

    def _fail(self, error: BaseException) -> NoReturn:
        self._stop.begin_exit()
        self._cleanup_watch.close()
        failure = describe(
            error, category=self._category, has_process_group=self._rounds.is_of_many or process_group.is_set_up()
        )
        failure = with_written(failure, error_file.beside(self._launch.log_file))
        with contextlib.suppress(OSError, ValueError):  # user code may have closed stderr
            if isinstance(error, KeyboardInterrupt) and self._stop.is_asked_soon():  # one line per rank is enough
                print(f"unified: interrupted{where(error)}", file=sys.stderr)
            elif failure.is_collateral:  # only the first failure is worth reading; the report has this traceback
                print(f"unified: another worker broke this one: {failure.summary}", file=sys.stderr)
            elif failure.exit_code != EXIT_TERMINATED or not self._stop.is_asked_soon():  # a stop ends so
                print(failure.traceback, end="", file=sys.stderr)
            if failure.category == "setup":
                print(f"unified: {failure.summary}", file=sys.stderr)
        self._report_unread(settle=False)
        flush_output(within_s=1.0)
        if self._rounds.is_of_many:
            self._reporter.end_program(self._stacks.num_collectives())
        self._reporter.flush()
        self._channel.send(worker_agent.Failed(failure=failure))
        clear_frames(error.__traceback__)  # so that objects in their variables are freed with the globals
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._exit(exit_code(error) if isinstance(error, SystemExit) else code, is_stopped=self._stop.is_asked)

    def _exit(self, code: int, *, is_stopped: bool = False, last: Callable[[], None] | None = None) -> NoReturn:
        self._stop.begin_exit()
        last = last or self._close_bus
        self._close_trackers(WITHIN_S / 2)
        if is_stopped:
            exit_process(code, left_s=self._stop.left_s, last=last, clear=self._clear, on_cut=self._report_cut)
        exit_process(code, last=last, clear=self._clear)

    def _fail_soon(self, error: BaseException) -> None:
        self._late_error = self._late_error or error
        self._main_thread.submit(None)

    def _report_unread(self, *, settle: bool) -> None:
        """Log and count the errors of calls that user code never read."""
        if self._bus is None or not self._bus.inbox_id:
            return
        if settle and not self._stop.is_asked:
            self._bus.settle()
        else:
            self._bus.unread.tell_all()

    def _on_stop(self, stop: worker_agent.Stop) -> None:
        if self._bus is not None:
            self._bus.unread.is_stopping = True
        self._stop.request(stop.grace_s, stop.save_grace_s, is_interrupt=stop.interrupt)

    def _on_dump(self, order: worker_agent.DumpStacks) -> None:
        self._channel.send(worker_agent.StacksDumped(number=order.number, report=self._stacks.report()))

    def _close_bus(self) -> None:
        if self._bus is not None:
            self._bus.close()
        self._unlink_sockets()

    def _unlink_sockets(self) -> None:
        """Remove the inbox's socket file, which a process that ends at once would leave behind."""
        for route in self._inbox.routes if self._inbox is not None else ():
            if route.startswith("ipc://"):
                with contextlib.suppress(OSError):
                    os.unlink(route.removeprefix("ipc://"))


def _present(launch: worker_agent.Launch) -> None:
    """Name the process for `ps` and `top`, where forks look like their zygote, and give daemons priority over it."""
    if launch.kind == "store":
        process.set_title("unified-store")
    else:
        process.set_title(launch.role, f"-{launch.place.rank}")
        os.nice(settings.worker_nice())
    process.set_command_line(f"unified worker: {launch.name} incarnation {launch.incarnation} of {launch.job_id}")


def _export(entry: LoadedEntry, late: LateExports | None = None) -> None:
    try:
        if late is not None:
            late.close()
        export_rpc_module(entry.module)
        RPC_REGISTRY.owners = [type(entry.instance), entry.module]
        if entry.instance is not None:
            adopt_instance(None, entry.instance)
    except ValueError as error:
        raise EntryPointError(f"the @rpc functions of {entry.module.__name__!r} cannot be exported: {error}") from error


def _spawned() -> NoReturn:
    process.die_with_parent(signal.SIGKILL, os.getppid())
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # put there by `-m`: the folder of the agent's sockets
    main(socket.socket(fileno=int(os.environ.pop("UNIFIED_CONTROL_FD"))))


if __name__ == "__main__":
    _spawned()
