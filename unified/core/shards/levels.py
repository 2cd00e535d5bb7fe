"""How many things each of some holders is to get, or to give, so that they have as many as each other."""

from __future__ import annotations

from collections.abc import Mapping


def filled(loads: Mapping[str, int], num_more: int, tickets: Mapping[str, bytes]) -> dict[str, int]:
    """How many of `num_more` things each holder gets when they go one by one to one who has least.

    Args:
        loads: what each holder has; at least one holder, unless there is nothing to give out.
        tickets: of each holder; the lowest is first among those that have as many as each other.
    """
    rising = sorted(loads, key=lambda name: (loads[name], tickets[name]))
    level = total = 0
    num_below = 0
    for num_below, name in enumerate(rising, 1):
        total += loads[name]
        level, _ = divmod(total + num_more, num_below)
        if num_below == len(rising) or level < loads[rising[num_below]]:
            break
    below = rising[:num_below]
    more = {name: max(level - loads[name], 0) for name in below}
    _add_one_each(more, [name for name in below if loads[name] <= level], num_more - sum(more.values()), tickets)
    return {name: count for name, count in more.items() if count}


def drained(loads: Mapping[str, int], num_less: int, tickets: Mapping[str, bytes]) -> dict[str, int]:
    """How many of `num_less` things each holder gives when they are taken one by one from one who has most.

    Args:
        loads: what each holder has; `num_less` in all, or more.
        tickets: of each holder; the lowest is first among those that have as many as each other.
    """
    ceiling = max(loads.values(), default=0)
    return filled({name: ceiling - load for name, load in loads.items()}, num_less, tickets)


def _add_one_each(counts: dict[str, int], names: list[str], num_names: int, tickets: Mapping[str, bytes]) -> None:
    if num_names:
        for name in sorted(names, key=tickets.__getitem__)[:num_names]:
            counts[name] += 1
