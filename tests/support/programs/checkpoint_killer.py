"""Kills processes that save checkpoints, at random moments, and looks at what each leaves. Run by a test.

Usage: python checkpoint_killer.py PLACE POINTS SEED [states]. It forks, so it has a process of its own, with one
thread. It prints the latest step, and how many incarnations ended at which stage of a save. POINTS of them end inside
one: an incarnation that ends between two saves is not counted among the stages, and another one is taken.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TextIO

from unified.checkpoint import CheckpointManager
from unified.checkpoint.manifest import step_of
from unified.storage import LocalBackend, S3Backend, StorageBackend

IN_A_PART = "while a part is written"
BEFORE_THE_MANIFEST = "before the manifest"
BEFORE_IT_SAYS_SO = "before it says so"
STAGES = {IN_A_PART, BEFORE_THE_MANIFEST, BEFORE_IT_SAYS_SO}
"""Of a save."""
KEEP = 2
MANY_STEPS = 4
"""Incarnations that all end before their sweep leave more and more to look at: beyond this, the killer sweeps."""
MOST_KILLS = 20
"""For each point inside a save."""
PART_NBYTES = 5 << 20
"""The smallest that S3 knows."""
LARGE_NBYTES = PART_NBYTES + 500_000
STATE_NBYTES = 20_000_000
"""More than two of the blocks in which a large file goes past the page cache, and a rest."""
NUM_UNHURT = 8
"""Saves of the first incarnation, which tells how long one takes here."""
LONGEST_INCARNATION = 1.25
"""In times of the slowest save: else a large one would never come to an end."""
AIM = 0.1
"""How long after it has begun at most, in times of the slowest save."""
DEADLINE_S = 20.0
ADAPT = 1.03
"""An incarnation that saved nothing makes the next ones longer by this, one that did shorter again: so enough save,
however busy the machine becomes."""
SEVERAL = 4
"""An incarnation that saved more than so many was too long: what made the slowest save slow is over."""
SHRINK = 1.2
"""By this the next ones are shorter then."""


class Place:
    """Where they save: a directory, or ``s3://bucket``.

    In a directory without fsync, which protects from the end of the machine alone: so more saves die in the same time.
    In a bucket every eighth is sent in parts.

    Args:
        has_states: they save large tensors, to a directory with fsync; else bytes.
    """

    def __init__(self, text: str, *, has_states: bool) -> None:
        bucket = text.removeprefix("s3://") if text.startswith("s3://") else None
        self.storage: StorageBackend = (
            S3Backend(bucket, part_nbytes=PART_NBYTES, num_parallel=1)
            if bucket
            else LocalBackend(text, fsync=has_states)
        )
        self.bucket = bucket
        self._path = text
        self._has_states = has_states
        if has_states:
            import torch

            import unified.checkpoint.state_stream  # noqa: F401 - what a forked process imports takes of its time

            torch.set_num_threads(1)  # threads of this process would be missed in those that it forks

    def open(self, **options: Any) -> CheckpointManager:
        return CheckpointManager("", self.storage, **options)

    def save(self, manager: CheckpointManager, step: int) -> None:
        if self._has_states:
            manager.save(self._state(step), step)
        else:
            manager.save_bytes(self._payload(step), step)

    def is_right(self, manager: CheckpointManager, step: int) -> bool:
        if not self._has_states:
            return manager.load_bytes(step, exact=True) == self._payload(step)
        import torch

        found = manager.load_state(step, exact=True)
        return all(torch.equal(found[name], tensor) for name, tensor in self._state(step).items())

    def _state(self, step: int) -> dict[str, Any]:
        import torch

        return {"weight": torch.full((STATE_NBYTES // 4,), float(step)), "step": torch.tensor(step)}

    def _payload(self, step: int) -> bytes:
        """What is saved as a step: of many sizes, and known by its own content."""
        size = LARGE_NBYTES if self.bucket and step % 8 == 2 else (step * 7919) % 300_000 + 1
        return hashlib.sha256(b"%d" % step).digest() + bytes([step % 256]) * size

    def unfinished(self) -> set[str]:
        """What is being written, and is no object yet."""
        if isinstance(self.storage, S3Backend):
            client, _ = self.storage._connect()
            return {each["UploadId"] for each in client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])}
        return {name for name in os.listdir(self._path) if name.startswith(".")} if os.path.isdir(self._path) else set()


def save_until_killed(place: Place, step: int, told: int) -> None:
    manager = place.open(keep_last_n=KEEP, compression="gzip" if step % 2 else None)
    manager.steps()  # connects
    os.write(told, b"-1\n")  # it begins: the moment of its death counts from here
    while True:
        place.save(manager, step)
        manager.wait()
        os.write(told, b"%d\n" % step)
        step += 1


def one_point(place: Place, step: int, kill_when: Callable[[TextIO], object]) -> int:
    """Kill one process when that function returns; the last step that it said was saved, or -1."""
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
        kill_when(lines)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        said += [int(line) for line in lines]
    if os.WTERMSIG(status) != signal.SIGKILL:
        raise SystemExit(f"the saving process ended by itself: status {status}")
    return said[-1]


def after(delay_s: float) -> Callable[[TextIO], object]:
    return lambda _: time.sleep(delay_s)


def amid_a_part(place: Place, unfinished: set[str], delay_s: float) -> Callable[[TextIO], object]:
    """So long after something new is being written: how often a random moment is such a one depends on the machine."""

    def wait(_: TextIO) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not place.unfinished() - unfinished and time.monotonic() < deadline:
            time.sleep(0.0005)
        if time.monotonic() >= deadline:
            raise SystemExit(f"nothing was written within {DEADLINE_S:g} s")
        time.sleep(delay_s)

    return wait


def seconds_of_the_slowest(place: Place) -> float:
    times: list[float] = []

    def note(lines: TextIO) -> None:
        for _ in range(NUM_UNHURT + 1):
            times.append(time.monotonic())
            lines.readline()

    one_point(place, 0, note)
    return max(later - sooner for sooner, later in itertools.pairwise(times))


def main(text: str, num_points: int, seed: int, *, has_states: bool) -> dict[str, Any]:
    warnings.simplefilter("error")  # a fallback would be a damaged checkpoint
    rng = random.Random(seed)
    place = Place(text, has_states=has_states)
    stages = Counter[str]()
    place.open().steps()  # imports what the forked ones need
    shortest_s = longest_s = LONGEST_INCARNATION * seconds_of_the_slowest(place)
    latest, unfinished, stored = NUM_UNHURT - 1, set[str](), set[str]()
    num_between = 0
    for number in range(MOST_KILLS * num_points):
        if stages.total() == num_points:
            return {"latest": latest, "stages": stages, "between": num_between}
        is_aimed = has_states and number % 2
        latest_s = AIM * shortest_s if is_aimed else longest_s
        delay_s = rng.uniform(0, latest_s)
        moment = amid_a_part(place, unfinished, delay_s) if is_aimed else after(delay_s)
        said = one_point(place, latest + 1, moment)
        with place.open() as manager:
            began, was = unfinished, stored
            unfinished, stored = place.unfinished(), {each.key for each in manager.store.stored()}
            steps = sorted(step for key in stored if (step := step_of(key)) is not None)
            found = steps[-1] if steps else -1
            if found < max(said, latest):
                raise SystemExit(f"step {max(said, latest)} was saved, and the latest now is {found}")
            for step in steps:
                if not place.is_right(manager, step):
                    raise SystemExit(f"step {step} is not what was saved")
            if len(steps) > MANY_STEPS:
                manager.store.sweep(KEEP, ())
        if unfinished - began:
            stages[IN_A_PART] += 1
        elif any(int(key[5:11]) > found for key in stored - was):
            stages[BEFORE_THE_MANIFEST] += 1
        elif found > max(said, latest):
            stages[BEFORE_IT_SAYS_SO] += 1
        else:
            num_between += 1
        if found > latest + SEVERAL:
            shortest_s, longest_s = shortest_s / SHRINK, longest_s / SHRINK
        elif found > latest:
            longest_s = max(longest_s / ADAPT, shortest_s)
        else:
            longest_s = min(longest_s * ADAPT, 4 * shortest_s)
        latest = found
    raise SystemExit(f"of {MOST_KILLS * num_points} kills only {stages.total()} were inside a save")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), has_states=sys.argv[4:] == ["states"])))
