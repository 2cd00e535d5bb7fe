"""Hosts of a cluster as network namespaces on this machine, and the network between them."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from unified.testing import eventually

PROGRAMS = Path(__file__).parent / "programs"
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x2, 0x1000
FRAME = 1 << 16
_numbers = itertools.count()


class Hosts:
    """Network namespaces on one bridge. The first has the master, the next an agent with one device each.

    Args:
        count: of all of them.
        env: of the daemons, and with it of workers.
        flags: of the agents.
        num_idle: the last ones, which have no daemon.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        env: Mapping[str, str] = MappingProxyType({}),
        *flags: str,
        num_idle: int = 0,
    ) -> None:
        self.folder = folder
        self.env = dict(env)
        self.flags = flags
        # Of its own each time: the kernel takes a while to remove the devices of a namespace that is deleted.
        self.prefix = f"u{os.getpid() % 100_000}x{next(_numbers)}"
        self.bridge = f"{self.prefix}b"
        self.subnet = f"10.79.{os.getpid() & 255}"
        self.count = count
        self.num_agents = count - 1 - num_idle
        self.master = f"tcp://{self.subnet}.10:7077"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def open(self) -> None:
        self.switch_on()
        for number in range(self.count):
            name = self.namespace(number)
            self.ip("netns", "add", name)
            self.plug_in(number)
            self.ip("-n", name, "address", "add", f"{self.subnet}.{10 + number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self.ip("-n", name, "link", "set", device, "up")
        self.start(0, "unified_master", "--bind", self.master, "--state-dir", str(self.folder / "state"))
        for number in range(1, 1 + self.num_agents):
            self.start_agent(number)

    @contextlib.contextmanager
    def up(self) -> Iterator[Self]:
        """Open them, and close them at the end of the block, which begins when all agents are registered."""
        try:
            self.open()
            alive = ["ALIVE"] * self.num_agents
            eventually(lambda: list(self.nodes.values()) == alive, 100, "not all agents are there")
            yield self
        finally:
            self.close()

    def start_agent(self, number: int) -> None:
        flags = ["--node-id", f"h{number}", "--devices", "1", *self.flags]
        self.start(number, "unified_agent", "--master", self.master, *flags)

    def switch_on(self) -> None:
        self.ip("link", "add", self.bridge, "type", "bridge")
        self.ip("link", "set", self.bridge, "up")

    def plug_in(self, number: int) -> None:
        """Give a host its `eth0`."""
        link = f"{self.prefix}v{number}"
        self.ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace(number))
        self.ip("link", "set", link, "master", self.bridge, "up")

    def namespace(self, number: int) -> str:
        return f"{self.prefix}n{number}"

    def cut(self, number: int) -> None:
        """Take a host off the bridge: frames vanish in both directions, and no link goes down."""
        self.ip("link", "set", f"{self.prefix}v{number}", "nomaster")

    def heal(self, number: int) -> None:
        self.ip("link", "set", f"{self.prefix}v{number}", "master", self.bridge)

    def start(self, number: int, module: str, *flags: str) -> None:
        name = f"{module}-{number}"
        with (self.folder / f"{name}.log").open("ab") as stderr:
            command = [*self._command(number), "-m", module, "--insecure", *flags]
            self.daemons[name] = subprocess.Popen(command, env=self._env(number), stderr=stderr, start_new_session=True)

    def log(self, number: int) -> str:
        return (self.folder / f"{'unified_agent' if number else 'unified_master'}-{number}.log").read_text()

    def ask(self, *words: str) -> Any:
        """The answer of a `unified` command on the master's host, as JSON."""
        command = [*self._command(0), "-m", "unified", *words, "--json", "--master", self.master]
        done = subprocess.run(command, env=self._env(0), capture_output=True, text=True, timeout=100, check=True)
        return json.loads(done.stdout)

    def run(self, *words: str, on: int = 0) -> None:
        subprocess.run([*self._command(on), *words], env=self._env(on), timeout=100, check=True)

    def close(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            try:
                daemon.wait(100)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for number in range(self.count):
            subprocess.run(["ip", "netns", "delete", self.namespace(number)])
        self.switch_off()

    def switch_off(self) -> None:
        subprocess.run(["ip", "link", "delete", self.bridge])

    @property
    def nodes(self) -> dict[str, str]:
        """State of each node."""
        return {node["node"]: node["state"] for node in self.ask("nodes")}

    def ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    def _command(self, number: int) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.namespace(number)}", sys.executable]

    def _env(self, number: int) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "XDG_"))}
        home = self.folder / f"h{number}"
        env |= {"UNIFIED_HOME": str(home), "UNIFIED_RUN_DIR": str(home / "run"), "UNIFIED_INSECURE": "1"}
        return env | {"PYTHONPATH": str(PROGRAMS)} | self.env


class FarHosts(Hosts):
    """Hosts whose network delays every frame, and loses some: a switch in this process, to which they have taps.

    The kernels of the machines that tests run on have no netem. A frame is at most an MTU long here, as on a real wire,
    so that TCP meets each loss by itself.

    Args:
        delay_s: of each frame, so that a round trip takes twice that.
        loss: share of the frames that are lost.
    """

    def __init__(self, *args: Any, delay_s: float, loss: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self.switch = Switch(delay_s, loss)

    def switch_on(self) -> None:
        self.switch.start()

    def plug_in(self, number: int) -> None:
        link = f"{self.prefix}v{number}"
        self.switch.plug_in(link)
        self.ip("link", "set", link, "netns", self.namespace(number), "name", "eth0")

    def switch_off(self) -> None:
        self.switch.close()


class Switch(threading.Thread):
    """Carries Ethernet frames between tap devices, each to its receiver after a delay, and drops some."""

    def __init__(self, delay_s: float, loss: float) -> None:
        super().__init__(name="switch", daemon=True)
        self.num_carried = self.num_lost = 0
        self._delay_s = delay_s
        self._loss = loss
        self._random = random.Random(5)
        self._taps: list[int] = []
        self._ports: dict[bytes, int] = {}
        """Tap behind which a hardware address was seen."""
        self._due: deque[tuple[float, int, bytes]] = deque()
        """Time, tap and frame of what is under way, in the order of its arrival."""
        self._poll = select.epoll()
        self._ours, self._end = os.pipe()
        self._poll.register(self._ours, select.EPOLLIN)

    def plug_in(self, name: str) -> None:
        """Make a tap device of this name, which may be moved into a namespace. It lives until the switch is closed."""
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        self._taps.append(tap)
        self._poll.register(tap, select.EPOLLIN)

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            for source, _ in self._poll.poll(wait_s):
                if source == self._ours:
                    return
                self._take_in(source)
            self._hand_out()

    def close(self) -> None:
        os.write(self._end, b".")
        self.join()
        self._poll.close()
        for descriptor in (*self._taps, self._ours, self._end):
            os.close(descriptor)

    def _take_in(self, source: int) -> None:
        at = time.monotonic() + self._delay_s
        with contextlib.suppress(OSError):  # all of them are read, or the device is down
            while True:
                frame = os.read(source, FRAME)
                self._ports[frame[6:12]] = source
                known = self._ports.get(frame[:6])
                for tap in (known,) if known is not None else self._taps:
                    if tap != source:
                        self._send(at, tap, frame)

    def _send(self, at: float, tap: int, frame: bytes) -> None:
        if self._random.random() < self._loss:
            self.num_lost += 1
        else:
            self.num_carried += 1
            self._due.append((at, tap, frame))

    def _hand_out(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, tap, frame = self._due.popleft()
            with contextlib.suppress(OSError):  # its queue is full, or it is down: lost, as on a wire
                os.write(tap, frame)
