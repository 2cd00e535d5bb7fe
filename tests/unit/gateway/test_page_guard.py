"""Hosts and origins that the page answers, and where it is not served at all."""

import pytest

from unified_gateway.page.guard import CSP, Guard, PageOptions

OWN = {b"host": b"127.0.0.1:8000", b"x-unified": b"1", b"sec-fetch-site": b"same-origin"}


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:9", True),
        ("LOCALHOST", True),
        ("[::1]:8000", True),
        ("10.0.0.7", True),  # an address: no name was led here
        ("gw.example", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("localhost@evil.example", False),
        ("", False),
        ("localhost evil", False),
        ("\xe9", False),
    ],
)
def test_a_host_has_to_be_ours(host: str, is_own: bool) -> None:
    guard = Guard(PageOptions(hosts=frozenset({"gw.example"})))
    assert guard.is_own_host(host) is is_own
    reason = guard.refusal({b"host": host.encode("latin-1")}, is_call=False)
    assert bool(reason) is not is_own


def test_beyond_loopback_the_hosts_own_name_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(PageOptions(host="gpu1.example", has_tls=True))
    assert guard.is_own_host("gpu1.example:8000")
    assert not guard.is_own_host("localhost:8000")


@pytest.mark.parametrize(
    ("changed", "is_stream", "is_let_in"),
    [
        ({}, False, True),
        ({b"x-unified": None}, False, False),
        ({b"x-unified": b"0"}, False, False),
        ({b"x-unified": None}, True, True),
        ({b"sec-fetch-site": b"same-site"}, False, False),
        ({b"sec-fetch-site": b"cross-site"}, True, False),
        ({b"sec-fetch-site": b"none"}, True, False),
        ({b"sec-fetch-site": None}, False, False),
        ({b"sec-fetch-site": None, b"origin": b"http://127.0.0.1:8000"}, False, True),
        ({b"sec-fetch-site": None, b"origin": b"http://127.0.0.1:9000"}, False, False),
        ({b"origin": b"https://evil.example"}, False, False),
        ({b"origin": b"null"}, True, False),
    ],
)
def test_a_cookie_counts_for_the_pages_own_scripts_alone(
    changed: dict[bytes, bytes | None], is_stream: bool, is_let_in: bool
) -> None:
    headers = {name: text for name, text in {**OWN, **changed}.items() if text is not None}
    reason = Guard(PageOptions()).refusal(headers, is_call=True, is_stream=is_stream)
    assert (reason == "") is is_let_in


def test_beyond_loopback_the_page_needs_https() -> None:
    assert PageOptions().hindrance == ""
    assert PageOptions(host="").hindrance == ""
    assert "--tls-cert" in PageOptions(host="0.0.0.0").hindrance
    assert PageOptions(host="0.0.0.0", has_tls=True).hindrance == ""
    assert PageOptions(host="0.0.0.0", is_behind_proxy=True).is_secure


def test_the_policy_lets_nothing_in_but_our_own_files() -> None:
    assert "unsafe" not in CSP
    assert {"default-src 'none'", "trusted-types 'none'", "frame-ancestors 'none'"} <= set(CSP.split("; "))
