"""Invariants of a queue's state between two steps, which tests check."""

from unified.queue.core.queue import QueueCore
from unified.queue.core.state import ItemBuffer


def ids(buffer: ItemBuffer) -> list[int]:
    """Ids in the order in which the items will be taken."""
    return [item_id for item_id, _ in sorted(buffer._returned)] + [item.item_id for item in buffer._fresh]


def check(core: QueueCore) -> list[str]:
    broken: list[str] = []
    buffer, producers, consumers, handles = core.buffer, core.producers, core.consumers, core.state.handles
    waiting = ids(buffer)
    leases = [
        consumer.lease
        for handle in handles.values()
        for consumer in handle.consumers.values()
        if consumer.lease is not None
    ]
    leased = [item.item_id for lease in leases for item in lease.items]
    if waiting != sorted(waiting):
        broken.append(f"items leave in the order {waiting}, which is not that of their ids.")
    if len({*waiting, *leased}) != len(waiting) + len(leased):
        broken.append(f"an item is in two places: waiting {waiting}, leased {leased}.")
    if len(leased) != consumers.num_leased:
        broken.append(f"{len(leased)} items are leased, {consumers.num_leased} are counted.")
    if any(not lease.items for lease in leases):
        broken.append("a lease of nothing is kept.")
    if waiting and consumers.waiting:
        broken.append(f"{len(consumers.waiting)} gets wait though there are {len(waiting)} items.")
    if producers.waiting:
        put = next(iter(producers.waiting.values()))
        if buffer.has_room(put.items[put.num_in][1]):
            broken.append(f"put {put.number} of handle {put.handle.handle} waits though there is room.")
        if core.state.is_closed:
            broken.append("a put waits in a closed queue.")
    if core.is_finished and consumers.waiting:
        broken.append("a get waits for a queue that is finished.")
    indexed = {(handle.handle, number) for handle in handles.values() for number in handle.waiting_puts}
    if indexed != set(producers.waiting):
        broken.append("the puts of the handles are not those in the line.")
    for get in consumers.waiting.values():
        if get.consumer.lease is not None:
            broken.append(f"consumer {get.consumer.consumer} waits and has a lease.")
        if handles.get(get.consumer.handle) is None:
            broken.append(f"consumer {get.consumer.consumer} waits, and its handle is gone.")
    deadlines = [put.deadline for put in producers.waiting.values()]
    deadlines += [get.deadline for get in consumers.waiting.values()]
    if any(at is not None and (core.next_deadline is None or core.next_deadline > at) for at in deadlines):
        broken.append("a deadline would pass unseen.")
    return broken
