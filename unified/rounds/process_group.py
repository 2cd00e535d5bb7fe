"""Process group of a rank of an elastic role: made before the entry point runs, destroyed after the last use.

Gloo's ranks connect two by two. A rank may have all its own connections while two others still connect. If it leaves
then, it breaks their connection; so no rank returns from `set_up` before the groups of all ranks are up.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unified.errors import ClusterError
from unified.job.spec import Communication
from unified.protocol.agent_master import RunOrder
from unified.rounds.group_abort import hang_up
from unified.rounds.meeting import RoundMeeting, RoundMember
from unified.rounds.own_store import own_store
from unified.rounds.rendezvous_store import STORE_WITHIN_S, connect
from unified.threads import start_thread

if TYPE_CHECKING:
    import torch

DESTROY_WITHIN_S = 5.0
LEAVE_WITHIN_S = 20.0
HANG_UP_WITHIN_S = 0.02
"""Peers in a collective hang up within a millisecond; a peer that computes needs no wait."""
OPEN_ROUND_WITHIN_S = 60.0
_KEPT_S = 5.0


_groups: list[object] = []
"""Default groups of this process, kept so that no frame of the user's has the last reference to one. Dropping that of a
Gloo group joins its thread and holds the GIL, for which that thread may wait, as of torch 2.13."""


def wrap_group_calls() -> None:
    """Wrap the calls by which the worker's own code makes and destroys the default group.

    No frame of that code may have the last reference to a group that it made and destroyed (see `_groups`). A function
    that wraps a model in DDP and destroys the group has it: it frees the model when it returns. The groups are
    therefore kept for a while after `destroy_process_group`. A group made by code written for torchrun replaces the
    runtime's.
    """
    import torch.distributed as distributed

    c10d = distributed.distributed_c10d
    destroy_group, init_group = c10d.destroy_process_group, c10d.init_process_group

    @functools.wraps(destroy_group)
    def destroy_process_group(group: Any = None) -> None:
        kept: list[object] = list(c10d._world.pg_names)
        try:
            destroy_group(group)
        finally:
            start_thread("unified-drop-groups", _drop_later, kept)

    @functools.wraps(init_group)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if _groups and distributed.group.WORLD is _groups[-1]:
            leave()
        bound = inspect.signature(init_group).bind(*args, **kwargs)
        with own_store(bound.arguments, os.environ):
            init_group(*bound.args, **bound.kwargs)

    c10d.destroy_process_group = distributed.destroy_process_group = destroy_process_group
    c10d.init_process_group = distributed.init_process_group = init_process_group


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
    _groups.append(distributed.group.WORLD)
    # If a peer dies before it comes, this incarnation ends, and the wait with it.
    RoundMeeting(
        store,
        "unified/groups-up",
        RoundMember(order.round, order.rank, order.world_size),
        store_within_s,
        "set up their process groups",
        "Look at the logs of the other ranks; a longer comm_timeout_s gives them more time.",
    ).wait_for_all()


def _select(device: str) -> torch.device | None:
    """Make an accelerator this process's current one, and return it; None for a CPU."""
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
    """Return True if this process is in a default process group. Does not import torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def destroy(within_s: float = DESTROY_WITHIN_S) -> None:
    """Leave the process group; wait at most `within_s` seconds.

    NCCL may wait for a peer that is gone. The group then stays until the process ends.
    """
    if not is_set_up():
        return
    done = threading.Event()

    def work() -> None:
        import torch.distributed as distributed

        destroy_group = distributed.destroy_process_group
        try:
            getattr(destroy_group, "__wrapped__", destroy_group)()  # `_groups` keeps those of the runtime
        except Exception as error:  # the work is done, and a group that fails to end harms nobody
            print(f"unified: destroy_process_group() failed: {error}", file=sys.stderr)
        finally:
            done.set()

    start_thread("unified-destroy-group", work)
    done.wait(within_s)


def end() -> None:
    """Leave the process group when the program has ended. A peer in a collective then fails, instead of waiting."""
    if is_set_up():
        hang_up(HANG_UP_WITHIN_S)
        destroy()


def leave(within_s: float = LEAVE_WITHIN_S) -> None:
    """Leave all process groups, so that this process can join those of a further round.

    Peers are told first: otherwise peers that wait for this rank would wait on. Gloo keeps its connections while
    anything refers to the group, for example the traceback of a collective's error.

    Raises:
        ClusterError: the groups did not end within so many seconds.
    """
    if is_set_up():
        import torch.distributed as distributed

        hang_up(HANG_UP_WITHIN_S)
        _groups.extend(distributed.distributed_c10d._world.pg_names)
        destroy(within_s)
        start_thread("unified-drop-groups", _drop_later, list(_groups))
        _groups.clear()
    if not is_set_up():
        if (c10d := sys.modules.get("torch.distributed.distributed_c10d")) is not None:
            # The number of a group is part of its keys in the store. An aborted `init_process_group` has used one up
            # here and none in a new process, and both would wait for each other's key.
            c10d._world.group_count = 0
        return
    raise ClusterError(
        f"the process groups of a broken round could not be left within {within_s:g} s, so that this process cannot "
        "take part in a further one; it is started again."
    )


def _drop_later(groups: list[object]) -> None:
    """Drop groups that were left, once their threads have finished their work."""
    time.sleep(_KEPT_S)
    groups.clear()
