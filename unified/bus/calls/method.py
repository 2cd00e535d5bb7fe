"""What the service knows of a registered function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unified.bus.calls.concurrency import Gate, Pace
from unified.bus.calls.registry import RpcMark, is_async, mark_of


class Method(NamedTuple):
    """A registered function, and how it is to be run."""

    function: Callable[..., Any]
    is_async: bool
    is_inline: bool
    gate: Gate | None
    pace: Pace


def describe_method(name: str, function: Callable[..., Any], gates: dict[str, Gate]) -> Method:
    """Look at a function.

    Args:
        gates: of this service, by their names; one that is missing is made.
    """
    mark = mark_of(function) or RpcMark(name, False)
    gate = None
    if mark.group is not None or mark.concurrency is not None:
        limit = mark.concurrency or 1
        key = f"group {mark.group!r}" if mark.group is not None else f"method {name!r}"
        gate = gates.get(key)
        if gate is None:
            gate = gates[key] = Gate(key, limit)
        gate.limit = min(gate.limit, limit)  # of a group whose members say different numbers
    return Method(function, is_async(function), mark.inline, gate, Pace())
