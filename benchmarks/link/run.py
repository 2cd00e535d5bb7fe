"""Large payloads between hosts, with a cluster key and without: calls over the bus between two network namespaces.

Both sides are worker processes of ours, each in a namespace and on a core of its own, joined by a virtual cable. The
contenders take turns call by call: without a key; with one; with one, all by CURVE, which is what the buffers take
where a connection of their own cannot be had; Ray, without its TLS and with it, where `make peers` has installed it;
and iperf3 where it is installed. The second table has the processor time of the busier side, in which other programs do
not count; of Ray it is that of all processes of a node. Before the rounds a listener on the cable counts the frames
that have the payload in the clear. Needs root, iproute2, and openssl for Ray. All at 1 GiB take some 16 GiB of memory.

`--check` ends with 1 if a floor is missed: with a key 0.75 of the rate without one, and faster than Ray with TLS, in
each row. A ratio is the median of the rounds' own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.link.contenders import (
    CONTENDERS,
    OURS,
    RAY,
    SIZES,
    Hosts,
    Pair,
    RayError,
    RayPair,
    heard,
    iperf_gib_s,
)
from unified.security.curve import new_key
from unified.security.keys import write_key

RATIOS = {
    "with ÷ without": ("with a key", "without a key"),
    "with ÷ by CURVE": ("with a key", "with a key, by CURVE"),
    "with ÷ Ray with TLS": ("with a key", "Ray with TLS"),
    "Ray with TLS ÷ Ray": ("Ray with TLS", "Ray"),
}
FLOORS = {"with ÷ without": 0.75, "with ÷ Ray with TLS": 1.0}
"""Least ratio in each row."""
Readings = dict[str, dict[str, list[float]]]


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


def ratio(by_contender: Mapping[str, list[float]], name: str) -> float | None:
    """Return a ratio of a row: the median of the rounds' own; None: a contender is missing."""
    one, other = (by_contender.get(contender) for contender in RATIOS[name])
    if not one or not other:
        return None
    return statistics.median(ours / theirs for ours, theirs in zip(one, other, strict=True))


def show(title: str, readings: Readings) -> None:
    columns = list(next(iter(readings.values())))
    ratios = [name for name, pair in RATIOS.items() if {*pair} <= {*columns}]
    table = Table("", *columns, *ratios, title=title)
    for row, by_contender in readings.items():
        medians = [statistics.median(by_contender[name]) for name in columns]
        found = [ratio(by_contender, name) for name in ratios]
        table.add_row(row, *(f"{number:.2f}" for number in (*medians, *found)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def check(rates: Readings) -> int:
    """Print how the rates stand to the floors; return the exit code. A row without a contender misses its floor."""
    is_held = True
    for row, by_contender in rates.items():
        for name, floor in FLOORS.items():
            found = ratio(by_contender, name)
            passes = found is not None and found >= floor
            is_held &= passes
            text = "not measured" if found is None else f"{found:.2f}"
            print(f"{row}, {name}: {text} (≥ {floor:g}): {'pass' if passes else 'FAIL'}")
    return 0 if is_held else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--out", type=Path, default=Path("out/bench/link.json"))
    parser.add_argument("--check", action="store_true", help="end with 1 if a floor is missed")
    parser.add_argument("--check-only", action="store_true", help="hold the figures of the last run against the floors")
    arguments = parser.parse_args()
    if arguments.check_only:
        return check(json.loads(arguments.out.read_text())["gib_s"])
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
    return check(rates) if arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
