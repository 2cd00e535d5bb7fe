"""Workers whose agent is the test: it launches them and talks to them over their socket pairs."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from tests.support.deadlines import met
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import RunOrder
from unified.protocol.agent_zygote import Fork
from unified.protocol.framing import StreamBuffer, encode_stream
from unified.protocol.records import DirectoryEntry, Failure, Progress
from unified.protocol.worker_agent import (
    AgentOrder,
    Failed,
    Hello,
    Launch,
    Reported,
    Run,
    Running,
    Saving,
    Stop,
    WorkerWord,
    worker_to_agent,
)

W = TypeVar("W", bound=WorkerWord)
DEADLINE_S = met(150.0)
HOST_ID = "host"


class Talk:
    """A worker's control channel, and the files of its output."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.name = f"{launch.name}.{launch.incarnation}"
        self.output = folder / f"{self.name}.out"
        self.errors = folder / f"{self.name}.err"
        self._control, self._theirs = socket.socketpair()
        self._control.settimeout(DEADLINE_S)
        self._buffer = StreamBuffer()
        self._words: list[WorkerWord] = []
        with self._theirs, self.output.open("wb") as out, self.errors.open("wb") as err:
            self.begin(self._theirs, out, err)
        self.say(launch)

    def begin(self, control: socket.socket, out: IO[bytes], err: IO[bytes]) -> None:
        raise NotImplementedError

    def say(self, order: AgentOrder) -> None:
        self._control.sendall(encode_stream(order))

    def next_word(self) -> WorkerWord:
        """The next word, without the load of the process, which comes at any time."""
        while True:
            while not self._words:
                data = self._control.recv(65536)
                assert data, f"{self.name} hung up; its stderr:\n{self.errors.read_text()}"
                self._words += [worker_to_agent.decode(body) for body in self._buffer.feed(data)]
            word = self._words.pop(0)
            if not isinstance(word, Reported):
                return word
            word = Reported(progress=msgspec.structs.replace(word.progress, load=None), points=word.points)
            if word != Reported(progress=Progress()):
                return word

    def expect(self, kind: type[W]) -> W:
        """The next word but progress, saves, and that it is ending, which must be of this kind."""
        word = self.next_word()
        while kind is not type(word) and (
            isinstance(word, Reported | Saving) or (isinstance(word, Running) and word.is_ending)
        ):
            word = self.next_word()
        assert isinstance(word, kind), f"{word}\n{self.errors.read_text()}"
        return word

    def run(self, order: RunOrder | None = None) -> Hello:
        """Hello, the order to run, and its receipt."""
        hello = self.expect(Hello)
        order = order or RunOrder(round=1, rank=0, world_size=1)
        self.say(Run(order=order))
        assert self.expect(Running).round == order.round
        return hello

    def until_printed(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.output.read_text():
            assert not self.has_hung_up(), self.errors.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.005)  # a file tells nobody when it grows

    def has_said_anything(self) -> bool:
        """Is there a word that was not taken yet, or the end of the channel?"""
        has_something, _, _ = select.select([self._control], [], [], 0)
        return bool(self._words or has_something)

    def has_hung_up(self) -> bool:
        has_something, _, _ = select.select([self._control], [], [], 0)
        return bool(has_something) and self._control.recv(1, socket.MSG_PEEK) == b""

    def failure(self) -> Failure:
        return self.expect(Failed).failure

    def until_gone(self) -> None:
        """Until it ends and closes its end."""
        assert self._control.recv(1) == b""

    def hang_up(self) -> None:
        self._control.close()


class Child(Talk):
    def begin(self, control: socket.socket, out: IO[bytes], err: IO[bytes]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unified.worker.main"],
            pass_fds=[control.fileno()],
            env={**os.environ, "UNIFIED_CONTROL_FD": str(control.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def stop(self, grace_s: float = 20.0) -> None:
        self.say(Stop(grace_s=grace_s, reason="the test is over"))
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def exit_code(self) -> int:
        return self.process.wait(DEADLINE_S)

    def ends(self) -> int:
        """Its exit code, once it was stopped."""
        self.stop()
        return self.exit_code()

    def close(self) -> None:
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Agent:
    """Launches workers of one job whose code is in `folder`."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder = folder
        self.run_dir = run_dir
        self.children: list[Child] = []

    def write(self, name: str, code: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(code))
        return path

    def launch(self, entry: EntryPoint, **given: Any) -> Child:
        child = Child(self.describe(entry, **given), self.folder)
        self.children.append(child)
        return child

    def load(self, code: str, name: str = "run", **given: Any) -> Child:
        """A worker whose entry point is this name in this code."""
        self.write("wp_code.py", code)
        return self.launch(attribute(name), **given)

    def run(self, code: str | EntryPoint, name: str = "run", **given: Any) -> Child:
        """The same, or one with another entry point, with the order to run."""
        child = self.load(code, name, **given) if isinstance(code, str) else self.launch(code, **given)
        child.run()
        return child

    def describe(
        self,
        entry: EntryPoint,
        *,
        rank: int = 0,
        incarnation: int = 0,
        directory: Sequence[DirectoryEntry] = (),
        job: dict[str, Any] | None = None,
        **role: Any,
    ) -> Launch:
        spec = RoleSpec(**{"name": "role", "kind": "simple", "entry_point": entry, **role})
        given = {"name": "job", "accelerator_type": "CPU", "working_dir": str(self.folder), **(job or {})}
        job_spec = JobSpec(roles=[spec], **given)
        return Launch(
            job_id=f"{job_spec.name}-1",
            spec=job_spec,
            kind="worker",
            name=spec.worker(rank),
            incarnation=incarnation,
            role=spec.name,
            place=spec.place(rank),
            node="n1",
            host_id=HOST_ID,
            address="127.0.0.1",
            master="",
            relay="",
            run_dir=str(self.run_dir),
            log_file="",
            env={"GLOO_SOCKET_IFNAME": "lo"},
            directory=list(directory),
        )

    def close(self) -> None:
        for child in self.children:
            child.close()


class Forker:
    """A zygote, and the workers that it forked; it ends them when it is closed."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "unified.worker.zygote", str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self._children: list[ForkedChild] = []

    def launch(self, entry: EntryPoint, **given: Any) -> ForkedChild:
        return self._fork(self._agent.describe(entry, **given))

    def launch_store(self) -> ForkedChild:
        return self._fork(msgspec.structs.replace(self._agent.describe(attribute("run")), kind="store", name="store"))

    def _fork(self, launch: Launch) -> ForkedChild:
        self._children.append(ForkedChild(launch, self._agent.folder, self._control))
        return self._children[-1]

    def close(self) -> None:
        self._control.close()
        assert self._process.wait(DEADLINE_S) == 0
        for child in self._children:
            child.hang_up()


class ForkedChild(Talk):
    def __init__(self, launch: Launch, folder: Path, zygote: socket.socket) -> None:
        self._zygote = zygote
        super().__init__(launch, folder)

    def begin(self, control: socket.socket, out: IO[bytes], err: IO[bytes]) -> None:
        order = encode_stream(Fork(child=control.fileno()))
        socket.send_fds(self._zygote, [order], [control.fileno(), out.fileno(), err.fileno()])

    def ends(self) -> None:
        """Stop it, until it is gone."""
        self.say(Stop(grace_s=100, reason="the test is over"))
        self.until_gone()


def attribute(name: str) -> EntryPoint:
    return EntryPoint(kind="attribute", target="wp_code", attribute=name)
