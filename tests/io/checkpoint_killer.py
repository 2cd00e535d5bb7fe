"""Kills processes that save checkpoints, at random moments, and looks at what each leaves. Run by a test.

Usage: python checkpoint_killer.py PLACE POINTS SEED SECONDS, of which the last is the longest life. It forks, so it has
a process of its own, with one thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import warnings
from typing import Any

from unified.checkpoint import CheckpointManager
from unified.storage import LocalBackend

KEEP = 2


def payload(step: int) -> bytes:
    """What is saved as a step: of many sizes, and known by its own content."""
    size = (step * 7919) % 300_000 + 1
    return hashlib.sha256(b"%d" % step).digest() + bytes([step % 256]) * size


def open_manager(place: str, **options: Any) -> CheckpointManager:
    """Without fsync, which protects from the end of the machine alone: so more saves die in the same time."""
    if place.startswith("s3://"):
        return CheckpointManager(place, **options)
    return CheckpointManager("", LocalBackend(place, fsync=False), **options)


def save_until_killed(place: str, step: int, told: int) -> None:
    os.write(told, b"-1\n")  # it begins: the moment of its death counts from here
    manager = open_manager(place, keep_last_n=KEEP, compression="gzip" if step % 2 else None)
    while True:
        manager.save_bytes(payload(step), step)
        manager.wait()
        os.write(told, b"%d\n" % step)
        step += 1


def one_point(place: str, step: int, delay_s: float) -> int:
    """Kill one process; the last step that it said was saved, or -1."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            save_until_killed(place, step, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as lines:
        said = [int(lines.readline())]
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        said += [int(line) for line in lines]
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"the saving process ended by itself: status {status}")
    return said[-1]


def main(place: str, num_points: int, seed: int, max_delay_s: float) -> dict[str, int]:
    warnings.simplefilter("error")  # a fallback would be a damaged checkpoint
    rng = random.Random(seed)
    latest, seen = -1, set[int]()
    open_manager(place).steps()  # imports what the forked ones need
    for _ in range(num_points):
        said = one_point(place, latest + 1, rng.uniform(0, max_delay_s))
        with open_manager(place) as manager:
            steps = manager.steps()
            found = steps[-1] if steps else -1
            if found < max(said, latest):
                raise SystemExit(f"step {max(said, latest)} was saved, and the latest now is {found}")
            for step in steps:
                if manager.load_bytes(step, exact=True) != payload(step):
                    raise SystemExit(f"step {step} is not what was saved")
        seen.add(found - latest)
        latest = found
    return {"latest": latest, "kinds": len(seen)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
