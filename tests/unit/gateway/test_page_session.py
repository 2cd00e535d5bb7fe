"""Sessions of the page: who gets in, for how long, and what a restart of the gateway leaves of it."""

from collections.abc import Callable

import pytest

from unified.security.keys import ClusterKey
from unified_gateway.http.limits import MAX_CLIENTS, RateLimits
from unified_gateway.page.session import SESSION_S, TICKET_S, TRIES_BURST, TRIES_PER_S, PageSession, Sessions
from unified_gateway.tokens import Tokens

KEY = ClusterKey(public="p" * 40, secret="s" * 40)
TOKENS = Tokens({"ci": "token-of-ci", "bob": "token-of-bob"}, readers={"bob"})
NO_TOKENS = Tokens({})


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(clock: Clock) -> Callable[..., Sessions]:
    """Starts a gateway's sessions; again, as after a restart."""
    return lambda key=KEY, tokens=TOKENS, **options: Sessions(key, tokens, clock=clock, **options)


def signed_in(sessions: Sessions, shown: str) -> tuple[PageSession, str]:
    session = sessions.sign_in(shown)
    assert session is not None
    return session, sessions.cookie(session).partition(";")[0].partition("=")[2]


def test_a_ticket_counts_once_and_for_five_minutes(start: Callable[..., Sessions], clock: Clock) -> None:
    sessions = start()
    ticket, other = sessions.new_ticket("me@here"), sessions.new_ticket("me@here")
    session = sessions.sign_in(ticket)
    assert session is not None
    assert (session.who, session.may_write) == ("me@here", True)
    assert sessions.sign_in(ticket) is None
    clock.now += TICKET_S
    assert sessions.sign_in(other) is None
    assert sessions.sign_in("") is None


def test_a_token_serves_as_a_ticket_and_keeps_its_rights(start: Callable[..., Sessions]) -> None:
    sessions = start()
    assert [sessions.sign_in(token) is None for token in ("token-of-ci", "token-of-bob", "wrong")] == [
        False,
        False,
        True,
    ]
    ci, bob = signed_in(sessions, "token-of-ci"), signed_in(sessions, "token-of-bob")
    assert sessions.session_of(ci[1]) == ci[0]
    assert (ci[0].who, ci[0].may_write) == ("ci", True)
    assert (bob[0].who, bob[0].may_write) == ("bob", False)
    assert start(tokens=NO_TOKENS).sign_in("anything") is None


def test_a_session_outlives_the_gateway_and_ends_after_twelve_hours(
    start: Callable[..., Sessions], clock: Clock
) -> None:
    session, cookie = signed_in(start(), "token-of-ci")
    clock.now += SESSION_S - 1
    assert start().session_of(cookie) == session
    clock.now += 1
    assert start().session_of(cookie) is None


def test_a_cookie_of_another_cluster_or_one_that_was_changed_is_none(start: Callable[..., Sessions]) -> None:
    _, cookie = signed_in(start(), "token-of-bob")
    other = ClusterKey(public="o" * 40, secret="t" * 40)
    assert start(other).session_of(cookie) is None
    assert start(None).session_of(cookie) is None
    body, _, seal = cookie.partition(".")
    forged = signed_in(start(other), "token-of-ci")[1].partition(".")[0]
    for wrong in (
        "",
        ".",
        cookie[:-2],
        f"{body}.",
        f".{seal}",
        f"{forged}.{seal}",
        cookie * 50,
        f"{body}é.{seal}",
        "a.b.c",
    ):
        assert start().session_of(wrong) is None, wrong


def test_without_a_cluster_key_sessions_end_with_the_gateway(start: Callable[..., Sessions]) -> None:
    sessions = start(None)
    session, cookie = signed_in(sessions, sessions.new_ticket("me"))
    assert sessions.session_of(cookie) == session
    assert start(None).session_of(cookie) is None


def test_a_token_that_is_taken_away_replaced_or_made_to_read_takes_its_sessions_along(
    start: Callable[..., Sessions],
) -> None:
    _, cookie = signed_in(start(), "token-of-ci")
    assert start(tokens=Tokens({"bob": "token-of-bob"})).session_of(cookie) is None
    assert start(tokens=Tokens({"ci": "another-one"})).session_of(cookie) is None
    reads = start(tokens=Tokens({"ci": "token-of-ci"}, readers={"ci"})).session_of(cookie)
    assert reads is not None
    assert not reads.may_write


def test_a_gateway_for_reading_alone_lets_nobody_write(start: Callable[..., Sessions]) -> None:
    _, cookie = signed_in(start(), "token-of-ci")
    session = start(is_read_only=True).session_of(cookie)
    assert session is not None
    assert not session.may_write
    assert not signed_in(start(is_read_only=True), "token-of-ci")[0].may_write


def test_who_signs_out_is_out(start: Callable[..., Sessions]) -> None:
    sessions = start()
    session, cookie = signed_in(sessions, "token-of-ci")
    _, other = signed_in(sessions, "token-of-ci")
    sessions.sign_out(session)
    assert sessions.session_of(cookie) is None
    assert sessions.session_of(other) is not None
    assert "Max-Age=0" in sessions.no_cookie()


def test_sessions_live_on_through_a_change_of_the_cluster_key(start: Callable[..., Sessions], clock: Clock) -> None:
    newer = ClusterKey(public="n" * 40, secret="m" * 40)
    changing = ClusterKey(KEY.public, KEY.secret, newer, clock.now + 100)
    _, cookie = signed_in(start(changing), "token-of-ci")
    clock.now += 110
    assert start(changing).session_of(cookie) is not None
    clock.now += 3600
    assert start(changing).session_of(cookie) is None


def test_cookies_are_for_scripts_of_nobody_and_for_https_where_there_is(start: Callable[..., Sessions]) -> None:
    session = start().sign_in("token-of-ci")
    assert session is not None
    plain, secure = start().cookie(session), start(is_secure=True).cookie(session)
    assert plain.endswith("; HttpOnly; SameSite=Strict; Path=/; Max-Age=43200")
    assert secure.endswith("; HttpOnly; SameSite=Strict; Path=/; Max-Age=43200; Secure")
    assert secure.startswith("__Host-unified-")
    assert start().cookie_name != start(None).cookie_name


def test_of_ten_thousand_sign_ins_in_a_minute_seventy_are_looked_at(clock: Clock) -> None:
    tries = RateLimits((TRIES_PER_S, TRIES_BURST), clock=clock)
    admitted = 0
    for _ in range(10_000):
        admitted += tries.admit("10.0.0.1", is_write=True) is None
        clock.now += 60 / 10_000
    assert admitted in (69, 70)
    assert tries.admit("10.0.0.2", is_write=True) is None


def test_of_many_addresses_the_limits_remember_some(clock: Clock) -> None:
    tries = RateLimits((TRIES_PER_S, TRIES_BURST), clock=clock)
    for number in range(3 * MAX_CLIENTS):
        assert tries.admit(f"address {number}", is_write=True) is None
    assert len(tries._buckets) == MAX_CLIENTS
