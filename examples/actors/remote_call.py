"""Every call between the roles of this job, in one typed place.

Callers use these as plain functions and know neither roles nor rpc. Providers name them in `@rpc(name=…)`, so that a
method can be called anything and a search for one of these names finds both ends. (`@rpc(remote_call.mutate)` means
the same as `@rpc(name=…)`; the keyword lets type checkers see the method's own signature.)
"""

from __future__ import annotations

from unified import FutureSequence, RoleGroup


def mutate(parents: list[str]) -> FutureSequence[str]:
    """A changed copy of each parent. The list is cut into one run a generator, and results can be read as they come."""
    return RoleGroup("generator").call_batch(mutate, len(parents), parents)


def cool_down(rate: float) -> None:
    """Tell every generator how much to change from now on: a share of the letters, 0 to 1."""
    RoleGroup("generator").call(cool_down, rate).result()


def num_mutated() -> list[int]:
    """How many texts each generator has made, by rank."""
    made: list[int] = RoleGroup("generator").call("num_mutated").result()
    return made


def judge(texts: list[str]) -> list[float]:
    """The share of letters, 0 to 1, that are right in each text."""
    scores: list[float] = RoleGroup("judge").call_rank0(judge, texts).result()
    return scores
