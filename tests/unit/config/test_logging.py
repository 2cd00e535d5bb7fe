"""What anybody can make happen again and again is said once, and no record of a log is forged."""

import logging

from unified.config.logging import LogOnce, _OneLine, escaped

HOSTILE = "a\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\n2026-01-01 master INFO forged\x9b2J\x00\udcff"


def test_what_cannot_be_printed_is_escaped() -> None:
    assert escaped("größe 表 a b") == "größe 表 a b"
    assert escaped(HOSTILE) == (
        r"a\x1b[31mred\x1b]0;title\x07 \u202egnp.exe\n2026-01-01 master INFO forged\x9b2J\x00\udcff"
    )


def test_a_record_of_a_daemon_s_log_is_one_line_and_its_traceback_has_no_control_characters() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.LogRecord("n", logging.INFO, "f", 1, "worker %s", (HOSTILE,), (type(error), error, None))
    first, *rest = _OneLine("%(levelname)s %(message)s").format(record).split("\n")
    assert first == f"INFO worker {escaped(HOSTILE)}"
    assert rest[0].startswith("ValueError: a\\x1b[31mred")
    assert all(line.isprintable() for line in rest)


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
