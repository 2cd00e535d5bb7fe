"""Deadlines of tests: those that have to be met are long, those that are meant to pass are marked.

A test awaits the event, with a deadline so long that only a hung program passes it: `met(100)`. A short one
is for tests of a time-out itself: `call(…, timeout=missed(0.1))`. Nothing that the test needs may have to happen
before such a deadline passes, for on a busy machine it does not. tests/house/test_deadlines.py finds short ones that
are not marked.
"""

LEAST_S = 100.0
"""Seconds below which a busy machine may miss a deadline of a test."""


def met(seconds: float) -> float:
    """Return a deadline that has to be met, refused if it is short."""
    if seconds < LEAST_S:
        raise ValueError(f"a busy machine may miss a deadline of {seconds:g} s: make it {LEAST_S:g} s at least")
    return seconds


def missed(seconds: float) -> float:
    """Return a deadline that is meant to pass: the test passes however little has happened by then."""
    return seconds
