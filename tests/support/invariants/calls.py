"""Invariants of the table of pending calls, which tests check after every step."""

from unified.bus.calls.pending import CallTable


def check(table: CallTable) -> list[str]:
    """Return the broken invariants, each as a sentence."""
    indexed = {call_id: call for calls in table._by_target.values() for call_id, call in calls.items()}
    broken = [] if indexed == table._open else ["the index by target does not match the open calls"]
    for call in table._open.values():
        if (call.timeout_s is not None) != (("deadline", call.call_id) in table._timers):
            broken.append(f"call {call.call_id} has no timer for its deadline, or one for none")
        if call.inbox is not None and table.directory.inbox(call.inbox.inbox_id) is None:
            broken.append(f"call {call.call_id} waits for an answer of an incarnation that is over")
        is_early = call.call_id in table._early.get(call.target, {})
        if (call.inbox is None) != (is_early or call.call_id in table._waiting.get(call.target, {})):
            broken.append(f"call {call.call_id} waits and was sent, or neither")
        if 0 <= call.incarnation <= table.directory.newest_over(call.target):
            broken.append(f"call {call.call_id} is open though incarnation {call.incarnation} of its target is over")
        if (
            is_early
            and (incarnation := table._incarnation_of(call.target)) is not None
            and incarnation[1] >= call.incarnation
        ):
            broken.append(f"call {call.call_id} waits for an incarnation that has begun")
    num_waiting = sum(len(line) for lines in (table._waiting, table._early) for line in lines.values())
    if num_waiting != sum(call.inbox is None for call in table._open.values()):
        broken.append("a call waits that has ended")
    for target in table._waiting:
        is_coming = target in table._sending or ("retry", target) in table._timers
        if table.directory.reachable(target) is not None and not is_coming:
            broken.append(f"calls wait though {target} can be reached")
    for target, (inbox, _) in table._ready.items():
        if target in table._waiting or table.directory.reachable(target) != inbox:
            broken.append(f"{target} is called at once though it cannot be, or earlier calls have to go")
    return broken
