"""torch.distributed for a rank of an elastic role: made before the entry point runs, destroyed after the last use.

Gloo's ranks connect two by two. A rank that has all its own connections may be done while two others still connect, and
a rank that leaves then breaks theirs; so nobody returns from `set_up` before the groups of all ranks are up.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from unified.errors import ClusterError, EntryPointError
from unified.job.spec import Communication
from unified.protocol.agent_master import RunOrder
from unified.threads import start_thread
from unified.worker.rendezvous_store import STORE_WITHIN_S, connect

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

DESTROY_WITHIN_S = 5.0
OPEN_ROUND_WITHIN_S = 60.0
_RANKS_UP = "unified/ranks-up"
_ALL_UP = "unified/all-ranks-up"


def require_torch(role: str) -> None:
    """Raise `EntryPointError` where torch is missing: an elastic role cannot do without."""
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise EntryPointError(
            f"role {role} is elastic, which needs torch, and {sys.executable} has none: "
            "pip install 'unified-runtime[torch]' there."
        ) from error
    if not distributed.is_available():
        raise EntryPointError(f"role {role} is elastic, and the torch of {sys.executable} has no torch.distributed.")


def choose_backend(wanted: str, device: str) -> str:
    """``auto`` becomes nccl on CUDA (and ROCm), hccl on Ascend, gloo on a CPU; anything else stays."""
    if wanted != "auto":
        return wanted
    return {"cuda": "nccl", "npu": "hccl"}.get(device.partition(":")[0], "gloo")


def set_up(order: RunOrder, store_port: int, communication: Communication, device: str) -> None:
    """Select the device and join the round's default process group, through the round's own store.

    Returns once the groups of all ranks are up.
    """
    import torch.distributed as distributed

    timeout = None if communication.timeout_s is None else timedelta(seconds=communication.timeout_s)
    store_within_s = communication.timeout_s or STORE_WITHIN_S
    store = connect(order.store_host, store_port, store_within_s)
    backend = choose_backend(communication.backend, device)
    accelerator = _select(device)
    distributed.init_process_group(
        backend,
        # A prefix, so that user code may destroy this group and make its own by env:// in the same store.
        store=distributed.PrefixStore(  # type: ignore[attr-defined]  # torch exports it without saying so
            f"unified/{order.store_prefix}", store
        ),
        rank=order.rank,
        world_size=order.world_size,
        # NCCL then connects here, within this call's timeout, and not in the middle of the user's first collective.
        device_id=accelerator if "nccl" in backend else None,
        timeout=timeout,
    )
    wait_for_all(store, order, store_within_s)


def wait_for_all(store: TCPStore, order: RunOrder, within_s: float) -> None:
    """Return once all ranks of the round have called this; a peer that dies before ends the wait, with this life."""
    from torch.distributed import DistError

    if store.add(_RANKS_UP, 1) == order.world_size:
        store.set(_ALL_UP, "1")
    try:
        store.wait([_ALL_UP], timedelta(seconds=within_s))
    except DistError as error:
        raise ClusterError(
            f"round {order.round}: rank {order.rank} waited {within_s:g} s for the process groups of all "
            f"{order.world_size} ranks, and those of {store.add(_RANKS_UP, 0)} are up. Look at the logs of the "
            "other ranks; a longer comm_timeout_s gives them more time."
        ) from error


def _select(device: str) -> torch.device | None:
    """Make an accelerator this process's current one; None for a CPU."""
    import torch

    if device == "cpu":
        return None
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        torch.get_device_module(chosen).set_device(chosen)
    return chosen


def is_set_up() -> bool:
    """Is this process in a default process group? Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def destroy(within_s: float = DESTROY_WITHIN_S) -> None:
    """Leave the process group, waiting at most so long.

    NCCL may wait in there for a peer that is gone. The group is then left to the end of the process.
    """
    if not is_set_up():
        return
    done = threading.Event()

    def work() -> None:
        import torch.distributed as distributed

        try:
            distributed.destroy_process_group()
        except Exception as error:  # the work is done, and a group that fails to end harms nobody
            print(f"unified: destroy_process_group() failed: {error}", file=sys.stderr)
        finally:
            done.set()

    start_thread("unified-destroy-group", work)
    done.wait(within_s)
