"""Random generators of a process: those of Python, NumPy and torch, as one value."""

from __future__ import annotations

import random
import sys
from typing import Any


def capture() -> dict[str, Any]:
    """Return the state of all generators, and the initial seed of torch's."""
    import torch

    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "seed": torch.initial_seed(),
    }
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Set all generators to a state of this process."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def adopt(state: dict[str, Any], step: int) -> None:
    """Go on from the state of another rank.

    Ranks with one seed draw the same numbers, so the state is also that of this rank's earlier incarnation. Ranks with
    seeds of their own must differ, and the draws of the earlier incarnation are unknown: their generators start from
    this process's seed plus the step.
    """
    import torch

    own = torch.initial_seed()
    if own == state["seed"]:
        restore(state)
        return
    torch.manual_seed(own + step)
    random.seed(own + step)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed((own + step) % 2**32)
