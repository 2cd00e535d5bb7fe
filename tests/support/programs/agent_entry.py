"""A worker of few words, for tests of the zygote and the agent: it does what its role's first argument says.

Run by the zygote as the entry ``agent_entry:main``, and as ``python -m agent_entry`` where a new interpreter is asked.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from msgspec import structs

from unified.job.shared_spec import map_spec
from unified.protocol.framing import StreamBuffer, encode_stream
from unified.protocol.records import Failure, Inbox, Progress
from unified.protocol.worker_agent import (
    AgentToWorker,
    DirectoryNews,
    Failed,
    Finished,
    Hello,
    Launch,
    Reported,
    Run,
    Running,
    Stop,
    agent_to_worker,
)


class Orders:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._buffer = StreamBuffer()
        self._bodies: list[bytes] = []
        self._passed: list[int] = []

    def next(self) -> AgentToWorker:
        while not self._bodies:
            data, passed, _, _ = socket.recv_fds(self.control, 65536, 1)
            self._passed += passed
            if not data:
                os._exit(9)
            self._bodies += self._buffer.feed(data)
        order = agent_to_worker.decode(self._bodies.pop(0))
        if isinstance(order, Launch) and order.spec_bytes:
            return structs.replace(order, spec=map_spec(self._passed.pop(0), order.spec_bytes))
        return order

    def say(self, word: object) -> None:
        self.control.sendall(encode_stream(word))


def main(control: socket.socket) -> None:
    orders = Orders(control)
    launch = orders.next()
    assert isinstance(launch, Launch)
    os.environ.update(launch.env)
    mode = launch.spec.role(launch.role).entry_point.argv[0] if launch.kind == "worker" else "store"
    if mode == "silent":
        signal.pause()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "key":
        print(launch.key, flush=True)
    port = 4242 if mode == "store" else None
    socket_file = os.path.join(launch.run_dir, f"{os.getpid()}.sock")
    open(socket_file, "w").close()
    inbox = Inbox(inbox_id=f"inbox-{os.getpid()}", routes=[f"ipc://{socket_file}"])
    orders.say(Hello(pid=os.getpid(), inbox=inbox, store_port=port))
    while True:
        match orders.next():
            case Run(order=order):
                orders.say(Running(round=order.round))
                _act(mode, orders)
            case DirectoryNews(entries=entries):
                print("news", *[f"{entry.worker}={entry.state}" for entry in entries], flush=True)
            case Stop():
                if mode != "stubborn":
                    sys.exit(0)
            case Launch():
                os._exit(8)


def _act(mode: str, orders: Orders) -> None:
    match mode.split(":"):
        case ["finish"]:
            print("hello from the worker", flush=True)
            orders.say(Reported(progress=Progress(step=1, total=2)))
            orders.say(Finished())
        case ["exit", code]:
            print("this is the end", file=sys.stderr, flush=True)
            os._exit(int(code))
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["fail"]:
            orders.say(Failed(failure=Failure(summary="ValueError: no", exception_type="ValueError")))
            os._exit(1)
        case ["print", count]:
            line = b"x" * 1023 + b"\n"
            for _ in range(int(count)):
                os.write(1, line)
            orders.say(Finished())
        case ["children"]:
            subprocess.Popen(["sleep", "60"])
            subprocess.Popen(["sleep", "60"], start_new_session=True)
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            orders.say(Finished())


if __name__ == "__main__":
    main(socket.socket(fileno=int(os.environ["UNIFIED_CONTROL_FD"])))
