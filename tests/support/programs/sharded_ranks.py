"""Ranks that save and load sharded checkpoints, as a program of their own: it forks them once torch is imported.

Each scenario is a function; each rank prints what it found, as a line of JSON.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as distributed
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from unified.checkpoint import CheckpointFallbackWarning, CheckpointManager
from unified.errors import CheckpointError, UsageError
from unified.storage import LocalBackend
from unified.storage.backend import Source, Stat

Found = dict[str, Any]


def main() -> None:
    place, scenario = sys.argv[1:]
    for number, (size, name, work) in enumerate(SCENARIOS[scenario]):
        children = []
        store = Path(tempfile.gettempdir(), f"ranks-{os.getpid()}-{number}")
        for rank in range(size):
            child = os.fork()
            if child == 0:
                be_rank(rank, size, store, name, work, place)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        store.unlink(missing_ok=True)
        if max(codes) > 0:  # those that were to be killed have a negative one
            sys.exit(1)


def be_rank(rank: int, size: int, store: Path, name: str, work: Callable[[str, int], Found], place: str) -> None:
    torch.set_num_threads(1)
    try:
        if name != "alone":
            distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        line = json.dumps({"work": name, "rank": rank, **work(place, rank)})
        os.write(1, f"{line}\n".encode())  # in one piece, as the others write too
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def manager_of(place: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(place, "s3" if place.startswith("s3://") else "local", **options)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 7)  # 7 rows: ranks have two, two, two and one
        self.second = torch.nn.Linear(7, 3)  # the fourth rank has none

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(data)).sum()
        return found


def trained(seed: int, *, is_sharded: bool = True) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    if is_sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1 * seed)
    for _ in range(seed):
        net(torch.ones(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def state_of(net: Net, optimizer: torch.optim.Optimizer, note: str) -> Found:
    model, optim = get_state_dict(net, optimizer)
    return {
        "model": model,
        "optim": optim,
        "note": note,
        "plain": torch.arange(3, dtype=torch.bfloat16),
        "list": [1, {"deep": note}],
    }


def digest(value: Any) -> str:
    """The same for the same whole tensors, in a world of any size. A collective."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.float().tolist()
    return value


def save(place: str, rank: int) -> Found:
    net, optimizer = trained(2)
    with manager_of(place, keep_last_n=2) as manager:
        for step in (1, 2, 3):
            state = state_of(net, optimizer, f"step {step}")
            saved = digest(state)
            manager.save(state, step, metadata={"loss": 0.5})
            with torch.no_grad():  # at once after the save
                net.first.bias.add_(1.0)
        distributed.barrier()
        distributed.destroy_process_group()  # before the last one is written
        manager.wait()
        return {"steps": manager.steps(), "state": saved}


def save_plain(place: str, rank: int) -> Found:
    with manager_of(place) as manager:
        manager.save({"same": torch.arange(3.0), f"own-{rank}": torch.full((2,), rank)}, 1, sharded=True)
    return {}


def go_back(place: str, rank: int) -> Found:
    with manager_of(place) as manager:
        for step in (2, 3):
            manager.save({"same": torch.zeros(3)}, step, sharded=True)
        return {"gone": manager.discard_after(1), "steps": manager.steps()}


def load(place: str, rank: int) -> Found:
    net, optimizer = trained(1)
    state = state_of(net, optimizer, "other")
    with manager_of(place) as manager, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", CheckpointFallbackWarning)
        step = manager.load_state_into(state)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return {
        "step": step,
        "state": digest(state),
        "again": digest(state_of(net, optimizer, state["note"])),
        "warned": [str(each.message) for each in warned if each.category is CheckpointFallbackWarning],
    }


def alone(place: str, rank: int) -> Found:
    net, optimizer = trained(1, is_sharded=False)
    state = state_of(net, optimizer, "other")
    with manager_of(place) as manager:
        step = manager.load_state_into(state)
        return {"step": step, "state": digest(state), "whole": digest(manager.load_state())}


def load_damaged(place: str, rank: int) -> Found:
    """The newest checkpoint has a part that only rank 1 reads, and it is damaged."""
    if rank == 0:
        (path,) = Path(place).glob("step-000003.*.parts/rank-00003.bin")
        data = bytearray(path.read_bytes())
        data[0] ^= 1
        path.write_bytes(data)
    distributed.barrier()
    return load(place, rank)


class Deadly(LocalBackend):
    """A store that ends its process at the beginning of a write, or refuses it."""

    def __init__(self, root: str, name: str, what: str) -> None:
        super().__init__(root, fsync=False)
        self.name, self.what = name, what

    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        if key.startswith("step-000004.") and key.endswith(self.name):
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("there is no room")
        return super().write(key, data, if_absent=if_absent)


def failing(
    place: str, rank: int, *, failing_rank: int, name: str, what: str = "kill", rank_timeout: float = 1.0
) -> Found:
    """Save step 3, then step 4, of which one rank does not write something."""
    state = {"same": torch.arange(3.0), f"own-{rank}": torch.ones(2)}
    place = f"{place}-{name}"
    with manager_of(place) as manager:
        manager.save(state, 3, sharded=True)
    backend = Deadly(place, name, what) if rank == failing_rank else LocalBackend(place, fsync=False)
    manager = CheckpointManager("", backend, rank_timeout=rank_timeout, max_tries=1)
    manager.save(state, 4, sharded=True)
    try:
        manager.wait()
    except CheckpointError as error:
        return {"error": str(error), "steps": manager.steps()}
    return {"error": None}


def disagree(place: str, rank: int) -> Found:
    found = {}
    with manager_of(f"{place}-other", keep_last_n=None) as manager:
        state = {"big": torch.arange(600_000.0), "same": torch.arange(600_000.0) + 1, "small": torch.ones(2)}
        for what, step, metadata in (("steps", rank, None), ("metadata", 9, {"a": object()} if rank else {})):
            try:
                manager.save(state, step, metadata=metadata, sharded=True)
            except (UsageError, CheckpointError) as error:
                found[what] = f"{type(error).__name__}: {error}"
        for step in (1, 2):  # with one plan
            manager.save(state, step, sharded=True)
        manager.save({**state, "more": torch.ones(rank + 3)[:3]}, 3, sharded=True)
        manager.wait()
        sizes = [[part.size_bytes for part in manager.checkpoint(step).parts] for step in (1, 2)]
        empty = {key: torch.zeros_like(each) for key, each in state.items()} | {"more": torch.zeros(3)}
        manager.load_state_into(empty)
        is_equal = all(torch.equal(empty[key], each) for key, each in state.items())
        return {**found, "steps_saved": manager.steps(), "sizes": sizes, "is_equal": is_equal}


def own_state(number: int) -> Found:
    """A state with values that depend on the number, beside a sharded model."""
    torch.manual_seed(number)
    return {
        "rng": torch.get_rng_state(),
        "rows": 10 + number,
        "array": numpy.arange(number + 1),
        "best": torch.ones(2) if number else None,
        "list": [torch.full((2,), float(number)), {"deep": number}],
        "big": torch.ones(400_000 + number),  # of the values above 1 MiB, only the layouts are compared
        "same": torch.arange(3.0),
        "net": trained(1)[0],
    }


def readable(state: Found) -> Found:
    values = {key: plain(state[key]) for key in ("rows", "best", "list", "same")}
    return {**values, "rng": digest(state["rng"]), "array": state["array"].tolist(), "big": state["big"].numel()}


def own(place: str, rank: int) -> Found:
    """The ranks have the same values in steps 1 and 4, and each its own in steps 2 and 3."""
    numbers = {1: 0, 2: rank, 3: 2 * rank, 4: 0}
    found = {}
    with manager_of(place) as manager:
        for step, number in numbers.items():
            manager.save(own_state(number), step)
        for step, number in numbers.items():
            state = own_state(number)
            found[f"saved {step}"] = readable(state)
            state |= {"rng": torch.zeros_like(state["rng"]), "rows": -1, "array": None}
            for tensor in (state["list"][0], state["same"], *([state["best"]] if number else [])):
                tensor.zero_()
            options: Found = {"of_rank": 1 - rank} if step == 2 else {}  # only for ranks without a value of their own
            manager.load_state_into(state, step, weights_only=False, **options)
            found[f"loaded {step}"] = readable(state)
    return found


SCENARIOS: dict[str, list[tuple[int, str, Callable[[str, int], Found]]]] = {
    "reshard": [(4, "save", save), (2, "load", load), (1, "alone", alone), (2, "load_damaged", load_damaged)],
    "own": [(2, "own", own)],
    "bucket": [(2, "save_plain", save_plain), (2, "go_back", go_back)],
    "faults": [
        (3, "kill_before_part", partial(failing, failing_rank=2, name="rank-00002.bin")),
        (2, "kill_before_note", partial(failing, failing_rank=1, name="rank-00001.note")),
        (2, "kill_before_index", partial(failing, failing_rank=0, name="index")),
        (2, "kill_before_manifest", partial(failing, failing_rank=0, name=".json")),
        (2, "refuse_part", partial(failing, failing_rank=1, name="rank-00001.bin", what="refuse", rank_timeout=300.0)),
        (2, "disagree", disagree),
    ],
}


if __name__ == "__main__":
    main()
