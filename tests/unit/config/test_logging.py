"""What anybody can make happen again and again is said once."""

from unified.config.logging import LogOnce


def test_a_thing_is_new_once_and_again_after_long_silence() -> None:
    said = LogOnce(forget_s=10.0)
    assert [said.is_new(now, "a") for now in (0.0, 5.0, 14.0, 24.0, 34.1)] == [True, False, False, False, True]
    assert said.is_new(34.2, "b")
    assert said.total == 6


def test_whoever_invents_ever_new_things_fills_no_memory() -> None:
    said = LogOnce(max_known=3)
    for number in range(100):
        assert said.is_new(0.0, str(number))
    assert len(said._seen_at) == 3
    assert not said.is_new(0.0, "99")
    assert said.is_new(0.0, "0"), "it was forgotten"
