"""How `call_batch` cuts its arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from unified.errors import UsageError


def is_cut(value: object) -> bool:
    """Whether each actor gets a share of this argument: a sequence that is not text or bytes, an array, a tensor."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    if isinstance(value, Sequence):
        return True
    for module, name in (("numpy", "ndarray"), ("torch", "Tensor")):
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(value, getattr(loaded, name)):
            return bool(value.ndim)
    return False


def share(value: Any, start: int, end: int) -> Any:
    """The part of an argument for the actor that gets inputs `start` to `end`."""
    if not is_cut(value):
        return value
    try:
        return value[start:end]
    except TypeError:  # a sequence that cannot be sliced, such as a deque
        return [value[i] for i in range(start, end)]


def size_of_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The size that `call_batch` was given, by its place or by its name, and the arguments after it.

    A `size` beside a number in that place is an argument of the method.

    Raises:
        UsageError: there is none.
    """
    if "size" in kwargs and not (args and type(args[0]) is int):
        return kwargs.pop("size"), args
    if not args:
        raise UsageError("call_batch(method, size, …) was given no size: how many inputs has the batch?")
    return args[0], args[1:]


def check_lengths(size: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError (a ValueError) unless every argument that is cut has `size` entries."""
    if type(size) is not int or size < 0:
        raise UsageError(f"the size of a batch is a number from 0 on, not {size!r}.")
    for where, value in [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        if is_cut(value) and len(value) != size:
            raise UsageError(f"a batch of {size}, and {where} has {len(value)} entries: they must be as many.")
