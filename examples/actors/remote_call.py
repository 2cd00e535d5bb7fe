"""Every call between the roles of this job, in one typed place.

Callers use these as plain functions and know neither roles nor rpc: what a stub returns says how it is called.
Providers name them in `@rpc(name=…)`, so that a method can be called anything and a search for one of these names finds
both ends. (`@rpc(remote_call.mutate)` means the same as `@rpc(name=…)`; the keyword lets type checkers see the method's
own signature.)
"""

# mypy: disable-error-code=empty-body

from __future__ import annotations

from unified import FutureSequence
from unified.api.runtime.remote_call import bind


@bind("generator")
def mutate(parents: list[str]) -> FutureSequence[str]:
    """A changed copy of each parent. The list is cut into one run a generator, and results can be read as they come."""


@bind("generator")
def cool_down(rate: float) -> None:
    """Tell every generator how much to change from now on: a share of the letters, 0 to 1."""


@bind("generator", to="all")
def num_mutated() -> list[int]:
    """Return the number of texts that each generator has made, by rank."""


@bind("judge")
def judge(texts: list[str]) -> list[float]:
    """The share of letters, 0 to 1, that are right in each text."""
