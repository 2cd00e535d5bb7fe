"""`RoleGroup.sync_weights`: the senders of this process, kept from call to call."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unified.errors import UsageError
from unified.weights.sender import Order, WeightsSender
from unified.worker.context import ActorInfo, current_worker

if TYPE_CHECKING:
    import torch

__all__ = ["Order", "sync_weights"]

_senders: dict[tuple[str, ...], WeightsSender] = {}
"""By inbox of this process, name of the receivers and names of their workers."""
_lock = threading.Lock()


def sync_weights(
    group: str, actors: Sequence[ActorInfo], weights: torch.nn.Module | Mapping[str, Any], name: str, order: Order
) -> int:
    """See `RoleGroup.sync_weights`."""
    if not actors:
        raise UsageError("No actors in the role group.")
    if order.version is not None and (type(order.version) is not int or order.version < 1):
        raise UsageError(f"version={order.version!r}: a whole number from 1 up is wanted.")
    if order.bucket_bytes < 1 or order.timeout <= 0:
        raise UsageError("sync_weights: bucket_bytes and timeout are to be more than zero.")
    worker = current_worker()
    targets = {actor.name: actor.node for actor in actors}
    with _lock:
        key = (worker.bus.inbox_id, name, *targets)
        sender = _senders.get(key)
        if sender is None:
            sender = _senders[key] = WeightsSender(worker.bus, worker.actor_info.node, group, name)
    return sender.send(weights, targets, order)
