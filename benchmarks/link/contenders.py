"""Contenders of `benchmarks/link/run.py`: a caller on one host and a callee on another, both network namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from benchmarks.link.worker import MARK

ROOT = Path(__file__).parents[2]
WORKER = str(Path(__file__).with_name("worker.py"))
RAY = ROOT / "out/peers/ray/bin"
OURS = ("without a key", "with a key", "with a key, by CURVE")
CONTENDERS = (*OURS, "Ray", "Ray with TLS")
SIZES = {"64 MiB": 64 << 20, "1 GiB": 1 << 30}
DEADLINE_S = 300.0


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"link{os.getpid()}{side}" for side in "ab"]
        self.addresses = ["10.78.3.1", "10.78.3.2"]

    def open(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        cable = ("link", "add", "eth0", "netns", self.names[0], "type", "veth", "peer", "name", "eth0")
        ip(*cable, "netns", self.names[1])
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def on(self, side: int, *command: str) -> list[str]:
        """Return the command that runs another on a host, and on a core of its own."""
        core = sorted(os.sched_getaffinity(0))[side % len(os.sched_getaffinity(0))]
        return ["taskset", "-c", str(core), "ip", "netns", "exec", self.names[side], *command]


class Pair:
    """A caller and a callee of one contender."""

    def __init__(self, hosts: Hosts, contender: str, key_file: Path) -> None:
        key = "" if contender == "without a key" else str(key_file)
        self._processes: list[subprocess.Popen[str]] = []
        for side in (0, 1):
            mode = "curve" if contender.endswith("CURVE") else "best"
            command = [sys.executable, WORKER, "work", hosts.addresses[side], mode, key]
            process = subprocess.Popen(
                hosts.on(side, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            self._processes.append(process)
        inboxes = [self._read(side) for side in (0, 1)]
        for side in (0, 1):
            self._ask(side, {"peer": inboxes[1 - side]})

    def call(self, what: str, nbytes: int) -> tuple[float, float]:
        """Make two calls with such an argument or result. Return the seconds that the second took, and the seconds of
        processor time of the side that had more. Nobody keeps the payload: five contenders do not fit in memory."""
        self._ask(0, {"what": what, "nbytes": nbytes})
        before = self._cpu_s()
        seconds: float = self._ask(0, {"what": what, "nbytes": nbytes})
        cpu_s = max(late - early for late, early in zip(self._cpu_s(), before, strict=True))
        for side in range(len(self._processes)):
            self._ask(side, {"what": "drop"})
        return seconds, cpu_s

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            end(process)

    def _cpu_s(self) -> list[float]:
        return [self._ask(side, {"what": "cpu"}) for side in (0, 1)]

    def _ask(self, side: int, order: dict[str, Any]) -> Any:
        stdin = self._processes[side].stdin
        assert stdin is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        return self._read(side)

    def _read(self, side: int) -> Any:
        stdout = self._processes[side].stdout
        assert stdout is not None
        return json.loads(stdout.readline())


class RayPair(Pair):
    """A Ray cluster of two nodes, whose driver calls an actor on the other one.

    Raises:
        RayError: it does not come up.
    """

    def __init__(self, hosts: Hosts, contender: str, folder: Path) -> None:
        number = CONTENDERS.index(contender)
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
        env |= certificate(hosts, folder) if contender == "Ray with TLS" else {}
        head = f"{hosts.addresses[0]}:{6379 + number}"
        start = [str(RAY / "ray"), "start", "--block", "--num-cpus=1", f"--object-store-memory={5 << 29}"]
        start += [f"--min-worker-port={20_000 + 1000 * number}", f"--max-worker-port={20_999 + 1000 * number}"]
        start += [f"--dashboard-agent-listen-port={52_365 + number}"]
        node = [*start, f"--address={head}", '--resources={"callee": 1}', f"--node-ip-address={hosts.addresses[1]}"]
        start += ["--head", f"--port={6379 + number}", f"--node-ip-address={hosts.addresses[0]}"]
        start += ["--include-dashboard=false", f"--temp-dir={folder}"]
        driver = [str(RAY / "python"), str(ROOT / "benchmarks/peers/ray_link.py"), head, MARK]
        self._processes = []
        self._nodes = []
        self._log = folder / "log"
        try:
            for side, command in enumerate((start, node)):
                with self._log.open("a") as log:
                    process = subprocess.Popen(hosts.on(side, *command), env=env, stdout=log, stderr=log, text=True)
                self._nodes.append(process)
                self._await_start(side + 1)  # a node that finds no head gives up at once
            with self._log.open("a") as log:
                pipe, command = subprocess.PIPE, hosts.on(0, *driver)
                self._processes.append(
                    subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=ROOT)
                )
            self._read(0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        for process in reversed(self._nodes):
            process.terminate()
            end(process)

    def _await_start(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self._log.read_text().count("Ray runtime started") < count:
            if self._nodes[-1].poll() is not None or time.monotonic() > deadline:
                raise self._error()
            time.sleep(0.2)

    def _error(self) -> RayError:
        return RayError((self._log.read_text().splitlines() or ["it said nothing"])[-1])

    def _cpu_s(self) -> list[float]:
        (driver,), (head, node) = self._processes, self._nodes
        return [sum(map(tree_cpu_s, pids)) for pids in ((driver.pid, head.pid), (node.pid,))]

    def _read(self, side: int) -> Any:
        try:
            return super()._read(side)
        except ValueError:  # it has ended
            raise self._error() from None


class RayError(Exception):
    """Why Ray does not do what it was asked."""


def end(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that was asked for it."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # in a call
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def tree_cpu_s(pid: int) -> float:
    """Return the seconds of processor time of a process and of all that it has started."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def certificate(hosts: Hosts, folder: Path) -> Mapping[str, str]:
    """Make a certificate for both hosts. Return the environment that has both sides of each connection use it."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    names = ",".join(["DNS:localhost", *(f"IP:{address}" for address in ("127.0.0.1", *hosts.addresses))])
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=bench"]
    command += ["-addext", f"subjectAltName={names}", "-out", cert, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    env = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": cert, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": cert}
    return env | {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": cert}


def heard(hosts: Hosts, pair: Pair) -> tuple[int, int]:
    """Return what `listen` says of one call of 64 MiB."""
    command = hosts.on(1, sys.executable, WORKER, "listen")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        listener.stdout.readline()
        pair.call("take", SIZES["64 MiB"])
        listener.stdin.close()
        num_frames, num_marked = json.loads(listener.stdout.readline())
        return num_frames, num_marked


def iperf_gib_s(hosts: Hosts, seconds: int = 3) -> float:
    """Return the rate of one TCP connection from the caller's host to the callee's."""
    server = subprocess.Popen(hosts.on(1, "iperf3", "-s", "-1"), stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    command = hosts.on(0, "iperf3", "-c", hosts.addresses[1], "-t", str(seconds), "-J")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    server.wait(30)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8 / 2**30


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ip {' '.join(arguments)}: {done.stderr.strip()} (this needs root and iproute2)")
