"""`shared_empty` where there is nobody to share with, and what it refuses."""

import numpy as np
import pytest

from unified import shared_empty
from unified.errors import UsageError


def test_outside_a_worker_it_is_an_array_like_any_other() -> None:
    array = shared_empty((300, 1000))
    assert (array.shape, array.dtype.str, array.flags.owndata) == ((300, 1000), "<f4", True)
    assert shared_empty(100_000, "u1").shape == (100_000,)
    assert shared_empty(np.int64(5)).shape == (5,)
    assert shared_empty([2, 3], np.int64).shape == (2, 3)
    assert shared_empty(()).shape == ()
    assert shared_empty((0, 7)).size == 0


def test_what_cannot_lie_in_shared_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="holds Python objects"):
        shared_empty(100_000, object)
    with pytest.raises(UsageError, match=r"cannot have the shape \(3, -1\)"):
        shared_empty((3, -1))
