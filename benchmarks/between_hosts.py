"""Large payloads between hosts, with a cluster key and without: calls over the bus between two network namespaces.

Both sides are worker processes of ours, each in a namespace and on a core of its own, joined by a virtual cable. The
contenders take turns call by call: without a key; with one; with one, all by CURVE, which is what the buffers take
where a connection of their own cannot be had; Ray, without its TLS and with it, where `make peers` has installed it;
and iperf3 where it is installed. The second table has the processor time of the busier side, in which other programs do
not count; of Ray it is that of all processes of a node. Before the rounds a listener on the cable counts the frames
that have the payload in the clear. Needs root, iproute2, and openssl for Ray. All at 1 GiB take some 25 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from unified.bus.calls.registry import MethodRegistry
from unified.bus.endpoint import BusEndpoint
from unified.bus.identity import BusIdentity, BusNetwork
from unified.bus.transport.listeners import Listeners
from unified.protocol.records import DirectoryEntry, Inbox, Reachability
from unified.security.curve import new_key
from unified.security.keys import ClusterKey, load_key, write_key

ROOT = Path(__file__).parents[1]
RAY = ROOT / "out/peers/ray/bin"
OURS = ("without a key", "with a key", "with a key, by CURVE")
CONTENDERS = (*OURS, "Ray", "Ray with TLS")
RATIOS = {
    "with ÷ without": ("with a key", "without a key"),
    "with ÷ by CURVE": ("with a key", "with a key, by CURVE"),
    "with ÷ Ray with TLS": ("with a key", "Ray with TLS"),
    "Ray with TLS ÷ Ray": ("Ray with TLS", "Ray"),
}
MARK = "this-payload-travels-in-the-clear"
SIZES = {"64 MiB": 64 << 20, "1 GiB": 1 << 30}
DEADLINE_S = 300.0
Readings = dict[str, dict[str, list[float]]]


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
            command = [sys.executable, __file__, "--worker", hosts.addresses[side], mode, key]
            process = subprocess.Popen(
                hosts.on(side, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            self._processes.append(process)
        inboxes = [self._read(side) for side in (0, 1)]
        for side in (0, 1):
            self._ask(side, {"peer": inboxes[1 - side]})

    def call(self, what: str, nbytes: int) -> tuple[float, float]:
        """Make two calls with such an argument or result. Return the seconds that the second took, and the seconds of
        processor time of the side that had more."""
        self._ask(0, {"what": what, "nbytes": nbytes})
        before = self._cpu_s()
        seconds: float = self._ask(0, {"what": what, "nbytes": nbytes})
        return seconds, max(late - early for late, early in zip(self._cpu_s(), before, strict=True))

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
        driver = [str(RAY / "python"), str(ROOT / "benchmarks/peers/ray_between_hosts.py"), head, MARK]
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


def end(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that was asked for it."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # in a call
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


class RayError(Exception):
    """Why Ray does not do what it was asked."""


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


def listen() -> None:
    """Be a listener on the cable until stdin ends: say how many large frames there were, and how many had the mark."""
    num_frames = num_marked = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as cable:  # 3: all protocols
        cable.bind(("eth0", 0))
        say(None)
        while sys.stdin not in (ready := select.select([cable, sys.stdin], [], [])[0]):
            frame = cable.recv(1 << 17) if ready else b""
            num_frames += len(frame) > 1000
            num_marked += MARK.encode() in frame
    say([num_frames, num_marked])


def heard(hosts: Hosts, pair: Pair) -> tuple[int, int]:
    """Return what `listen` says of one call of 64 MiB."""
    command = hosts.on(1, sys.executable, __file__, "--listen")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        listener.stdout.readline()
        pair.call("take", SIZES["64 MiB"])
        listener.stdin.close()
        num_frames, num_marked = json.loads(listener.stdout.readline())
        return num_frames, num_marked


def work(address: str, mode: str, key_file: str) -> None:
    """Be one of the two workers, and do what lines of stdin say."""
    key: ClusterKey | None = load_key(Path(key_file)) if key_file else None
    results: dict[int, memoryview] = {}

    def give(nbytes: int) -> memoryview:
        if nbytes not in results:
            results.clear()
            results[nbytes] = payload(nbytes)
        return results[nbytes]

    if mode == "curve":
        Listeners._bind_bulk = lambda self, host: []  # type: ignore[method-assign]
    bus = BusEndpoint(
        BusIdentity(job="link", worker=address, incarnation=0, node=address, host=address),
        BusNetwork(run_dir="", address=address, key=key),
        registry=MethodRegistry({"take": len, "give": give}),
    )
    inbox = bus.start()
    bus.open()
    say(msgspec.to_builtins(inbox))
    peer = ""
    for line in sys.stdin:
        order = json.loads(line)
        if "peer" in order:
            theirs = msgspec.convert(order["peer"], Inbox)
            peer = f"peer-{theirs.inbox_id}"
            bus.update_directory(
                [
                    DirectoryEntry(
                        worker=peer, incarnation=0, state=Reachability.ALIVE, inbox=theirs, node="n", reason=""
                    )
                ]
            )
            say(None)
            continue
        if order["what"] == "cpu":
            say(time.process_time())
            continue
        argument = give(order["nbytes"]) if order["what"] == "take" else order["nbytes"]
        began = time.perf_counter()
        bus.call(peer, order["what"], [argument], {}).result(DEADLINE_S)
        say(time.perf_counter() - began)
    bus.close()


def payload(nbytes: int) -> memoryview:
    """Return so many bytes, whose pages are there, with a mark in each 4 KiB."""
    return memoryview(bytearray((os.urandom(4096 - len(MARK)) + MARK.encode()) * (nbytes >> 12)))


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


def iperf_gib_s(hosts: Hosts, seconds: int = 3) -> float:
    """Return the rate of one TCP connection from the caller's host to the callee's."""
    server = subprocess.Popen(hosts.on(1, "iperf3", "-s", "-1"), stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    command = hosts.on(0, "iperf3", "-c", hosts.addresses[1], "-t", str(seconds), "-J")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    server.wait(30)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8 / 2**30


def measure(
    hosts: Hosts, pairs: Mapping[str, Pair], num_rounds: int, sizes: Sequence[str]
) -> tuple[Readings, Readings]:
    """Return GiB/s, and seconds of processor time for a GiB, by row and contender."""
    rows = [
        (f"{word} of {size}", what, size) for size in sizes for word, what in (("argument", "take"), ("result", "give"))
    ]
    rates: Readings = {row: {} for row, *_ in rows}
    costs: Readings = {row: {} for row, *_ in rows}
    names = list(pairs)
    for number in range(num_rounds):
        for row, what, size in rows:
            gib, first = SIZES[size] / 2**30, number % len(names)
            for contender in (*names[first:], *names[:first]):
                seconds, cpu_seconds = pairs[contender].call(what, SIZES[size])
                rates[row].setdefault(contender, []).append(gib / seconds)
                costs[row].setdefault(contender, []).append(cpu_seconds / gib)
                text = f"{gib / seconds:.2f} GiB/s, {cpu_seconds / gib:.2f} s"
                print(f"round {number + 1}: {row}, {contender}: {text}", file=sys.stderr, flush=True)
        if shutil.which("iperf3"):
            rate = iperf_gib_s(hosts)
            for by_contender in rates.values():
                by_contender.setdefault("iperf3", []).append(rate)
    return rates, costs


def show(title: str, readings: Readings) -> None:
    columns = list(next(iter(readings.values())))
    ratios = {name: pair for name, pair in RATIOS.items() if {*pair} <= {*columns}}
    table = Table("", *columns, *ratios, title=title)
    for row, by_contender in readings.items():
        medians = [f"{statistics.median(by_contender[name]):.2f}" for name in columns]
        for one, other in ratios.values():
            each = zip(by_contender[one], by_contender[other], strict=True)
            medians.append(f"{statistics.median(ours / theirs for ours, theirs in each):.2f}")
        table.add_row(row, *medians)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ip {' '.join(arguments)}: {done.stderr.strip()} (this needs root and iproute2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("out/bench/between_hosts.json"))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--listen", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker or arguments.listen:
        work(*arguments.worker) if arguments.worker else listen()
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    hosts, key_file = Hosts(), arguments.out.parent / f"bench-{os.getpid()}.key"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_key(key_file, new_key())
    pairs: dict[str, Pair] = {}
    load_before = os.getloadavg()[0]
    with ExitStack() as stack:
        stack.callback(key_file.unlink, missing_ok=True)
        stack.callback(hosts.close)
        hosts.open()
        for name in [name for name in CONTENDERS if name in arguments.contenders]:
            if name in OURS:
                pairs[name] = Pair(hosts, name, key_file)
            elif not (RAY / "ray").exists():
                print(f"{name} is left out: it is not installed in {RAY.parent} (`make peers`)", file=sys.stderr)
                continue
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")))
                try:
                    pairs[name] = RayPair(hosts, name, folder)
                except (RayError, OSError, subprocess.SubprocessError) as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
                    continue
            stack.callback(pairs[name].close)
        marks = {name: heard(hosts, pair) for name, pair in pairs.items()}
        rates, costs = measure(hosts, pairs, arguments.rounds, arguments.sizes)
    show("GiB/s between two namespaces, medians", rates)
    show("Seconds of processor time for a GiB on the busier side, medians", costs)
    for name, (num_frames, num_marked) in marks.items():
        print(f"{name}: of {num_frames} large frames on the cable {num_marked} had the payload in the clear.")
    where = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    where += f", load {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
    print(f"{arguments.rounds} rounds, contenders in turn, a core a side; {where}. Ratios: medians of the rounds' own.")
    found = {"where": where, "gib_s": rates, "cpu_s_per_gib": costs, "marked_frames": marks}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
