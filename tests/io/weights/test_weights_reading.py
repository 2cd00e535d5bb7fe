"""What a reader of weights sees: whole versions, when it waits for them, until it closes its receiver."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.bus import DEADLINE_S
from tests.support.deadlines import missed
from tests.support.weights import SMALL, Cast, fill, model_of, one_route, values_of
from unified.errors import UsageError, WeightsError, WeightsMismatchError, WeightsTimeoutError


def test_what_was_read_stays_as_it_was(cast: Cast) -> None:
    receivers = [cast.receiver("r0"), cast.receiver("r1", copy=True)]
    sender = cast.sender()
    cast.send(sender, model_of(1), bucket_bytes=SMALL)
    kept = [receiver.state_dict() for receiver in receivers]
    for number in (2, 3, 4):
        cast.send(sender, model_of(number), bucket_bytes=SMALL)
    assert [values_of(state) for state in kept] == [{1}, {1}]
    assert [values_of(receiver.state_dict()) for receiver in receivers] == [{4}, {4}]


@one_route
def test_dtypes_ties_and_extra_state(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    tied = torch.ones(3, 3)
    state = {"a": tied, "b": tied, "half": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3), "step": {"k": 1}}
    assert cast.send(cast.sender(), state, dtype=torch.float16) == 1
    got = receiver.state_dict()
    assert list(got) == ["a", "b", "half", "n", "step"]
    assert got["a"] is got["b"]
    assert [got[key].dtype for key in ("a", "half", "n")] == [torch.float16, torch.float16, torch.int64]
    assert got["step"] == {"k": 1}


@one_route
def test_a_model_that_does_not_fit_is_an_error_of_the_reader(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    cast.send(cast.sender(), torch.nn.Linear(2, 2))
    with pytest.raises(
        WeightsMismatchError, match=r"version 1 of weights 'default' does not fit Linear: .*weight \(here"
    ):
        receiver.load_into(torch.nn.Linear(2, 3))


@pytest.mark.parametrize("copy", [False, True])
def test_no_read_is_torn(cast: Cast, copy: bool) -> None:
    receiver = cast.receiver("r0", copy=copy)
    sender = cast.sender()
    cast.send(sender, model_of(1), bucket_bytes=SMALL)
    stop = threading.Event()
    seen: list[tuple[int, set[float]]] = []

    def read() -> None:
        model = model_of(0)
        while not stop.is_set():
            version = receiver.load_into(model)
            seen.append((version, values_of(model.state_dict())))
            state = receiver.state_dict()
            seen.append((state.version, values_of(state)))

    def read_slowly() -> None:
        while not stop.is_set():
            state = receiver.state_dict()
            for tensor in state.values():
                seen.append((state.version, values_of({"": tensor})))
                stop.wait(missed(0.001))

    readers = [threading.Thread(target=work) for work in (read, read, read_slowly)]
    for reader in readers:
        reader.start()
    model = model_of(1)
    try:
        for number in range(2, 40):
            fill(model, number)
            cast.send(sender, model, bucket_bytes=SMALL)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    torn = [(version, values) for version, values in seen if values != {version}]
    assert not torn
    assert len({version for version, _ in seen}) > 3


@one_route
def test_waiting_for_a_version(cast: Cast, pool: ThreadPoolExecutor) -> None:
    receiver = cast.receiver("r0")
    with pytest.raises(
        WeightsTimeoutError, match=r"worker r0 waited 0.01 s for version 1 or newer.*newest complete: none"
    ):
        receiver.load_into(model_of(0), timeout=missed(0.01))
    with pytest.raises(WeightsTimeoutError, match="newest complete: none"):
        receiver.state_dict()
    sender = cast.sender()
    waiting = pool.submit(receiver.wait, 2, DEADLINE_S)
    cast.send(sender, model_of(1))
    assert not waiting.done()
    cast.send(sender, model_of(2))
    assert waiting.result(DEADLINE_S) == 2


@one_route
def test_a_lock_is_held_while_the_model_changes(cast: Cast) -> None:
    receiver = cast.receiver("r0")
    cast.send(cast.sender(), model_of(1))
    lock = threading.Lock()
    held: list[bool] = []

    class Watched(torch.nn.Linear):
        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            held.append(lock.locked())
            super()._load_from_state_dict(*args, **kwargs)

    model = model_of(0)
    for layer in model.children():
        assert isinstance(layer, torch.nn.Sequential)
        layer[0] = Watched(100, 100)
    receiver.load_into(model, lock=lock)
    assert held == [True] * 6
    assert not lock.locked()


@one_route
def test_a_closed_receiver(cast: Cast, pool: ThreadPoolExecutor) -> None:
    receiver = cast.receiver("r0")
    with pytest.raises(UsageError, match=r"worker r0 has a WeightsReceiver\('default'\) already"):
        type(receiver)(bus=cast.buses["r0"])
    other = type(receiver)("other", bus=cast.buses["r0"])
    with other:
        waiting = pool.submit(receiver.wait)
        receiver.close()
        receiver.close()
        with pytest.raises(WeightsError, match="was closed"):
            waiting.result(DEADLINE_S)
    with pytest.raises(WeightsTimeoutError, match="no WeightsReceiver"):
        cast.send(cast.sender(), model_of(1), timeout=3.0)  # so long that a busy machine can answer that there is none
    with type(receiver)(bus=cast.buses["r0"]) as again:
        assert cast.send(cast.sender("other"), model_of(1)) == 1
        assert again.version == 1
