"""Sessions of the page: a browser exchanges a ticket or token for a cookie, which outlives a restart of the gateway.

A cookie holds its owner and its end. Its HMAC, with a key derived from the cluster's key, shows that a gateway of this
cluster made it. The gateway itself stores only which sessions were signed out.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from unified.security.keys import ClusterKey, accepted
from unified_gateway.tokens import Tokens

TICKET_S = 300.0
SESSION_S = 43200
"""Time from sign-in to the end of a session: 12 hours."""
TRIES_PER_S, TRIES_BURST = 1.0, 10.0
"""Limit of sign-ins of one address. A ticket cannot be guessed; a token that people chose might be."""
ALL_TRIES_PER_S, ALL_TRIES_BURST = 20.0, 100.0
"""Limit of sign-ins of all addresses."""
MAX_SIGNED_OUT = 10_000
MAX_COOKIE = 1024
_PURPOSE = b"unified page session 1"


class PageSession(msgspec.Struct, frozen=True):
    """A signed-in browser. The cookie holds this in JSON, beside its HMAC."""

    who: str
    """Name of its token, or the user of the gateway that gave the ticket."""
    may_write: bool
    ends_at: int
    """Seconds since 1970."""
    number: str
    """Random id of the session."""
    token: str = ""
    """Name of the token of the sign-in; empty: a ticket."""


class Sessions:
    """The sessions and tickets of one gateway.

    Args:
        key: the cluster's key; None: sessions end with this process.
        tokens: tokens that may be shown in place of a ticket.
        is_read_only: no session may change anything.
        is_secure: cookies are for HTTPS alone.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        key: ClusterKey | None,
        tokens: Tokens,
        *,
        is_read_only: bool = False,
        is_secure: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = key
        self._own = secrets.token_bytes(32)
        self._tokens = tokens
        self._is_read_only = is_read_only
        self._is_secure = is_secure
        self._clock = clock
        self._tickets: dict[bytes, tuple[str, float]] = {}
        self._signed_out: OrderedDict[str, None] = OrderedDict()
        cluster = self._own if key is None else key.public.encode()
        # Browsers send a cookie to all ports of a host, so each cluster has its own name for it.
        name = f"unified-{hashlib.sha256(cluster).hexdigest()[:8]}"
        self.cookie_name = f"__Host-{name}" if is_secure else name

    def add_ticket(self, ticket: str, who: str) -> None:
        """Add a ticket that signs `who` in once, within `TICKET_S` seconds."""
        self._tickets[_digest(ticket)] = (who, self._clock() + TICKET_S)

    def new_ticket(self, who: str) -> str:
        ticket = secrets.token_urlsafe(32)
        self.add_ticket(ticket, who)
        return ticket

    def sign_in(self, shown: str) -> PageSession | None:
        """Return a new session for a ticket or a token; None: it is neither, was used before, or is too old."""
        now = self._clock()
        self._tickets = {digest: each for digest, each in self._tickets.items() if each[1] > now}
        who, _ = self._tickets.pop(_digest(shown), ("", 0.0))  # by digest: the time tells nothing of other tickets
        token = ""
        if not who:
            token = (self._tokens.client_of(shown) if self._tokens.are_needed else None) or ""
            who = token
        if not who:
            return None
        may_write = not self._is_read_only and (not token or self._tokens.may_write(token))
        return PageSession(who, may_write, int(now + SESSION_S), secrets.token_hex(8), token)

    def sign_out(self, session: PageSession) -> None:
        """End a session, for this process."""
        self._signed_out[session.number] = None
        while len(self._signed_out) > MAX_SIGNED_OUT:
            self._signed_out.popitem(last=False)

    def session_of(self, cookie: str) -> PageSession | None:
        """Return the session of a cookie; None: it is not this cluster's, is over, or its token was removed."""
        body, _, seal = cookie.partition(".")
        if len(cookie) > MAX_COOKIE or not cookie.isascii():
            return None
        try:
            found = msgspec.json.decode(_unpacked(body), type=PageSession)
            shown = _unpacked(seal)
        except ValueError:
            return None
        if not any(hmac.compare_digest(self._seal(key, found, body), shown) for key in self._keys()):
            return None
        if self.is_over(found):
            return None
        may_write = not self._is_read_only and (not found.token or self._tokens.may_write(found.token))
        return msgspec.structs.replace(found, may_write=found.may_write and may_write)

    def is_over(self, session: PageSession) -> bool:
        """Return True for a session that has ended, was signed out, or whose token was removed."""
        is_past = session.ends_at <= self._clock() or session.number in self._signed_out
        return is_past or bool(session.token and self._tokens.digest(session.token) is None)

    def cookie(self, session: PageSession) -> str:
        body = _packed(msgspec.json.encode(session))
        return self._set(f"{body}.{_packed(self._seal(self._keys()[0], session, body))}", SESSION_S)

    def no_cookie(self) -> str:
        """Return the value of ``Set-Cookie`` that removes the cookie."""
        return self._set("", 0)

    def _set(self, value: str, max_age: int) -> str:
        end = "; Secure" if self._is_secure else ""
        return f"{self.cookie_name}={value}; HttpOnly; SameSite=Strict; Path=/; Max-Age={max_age}{end}"

    def _keys(self) -> list[bytes]:
        """Return the valid keys of HMACs, the key for new cookies first."""
        if self._key is None:
            return [self._own]
        return [each.secret.encode() for each in accepted(self._key, self._clock())]

    def _seal(self, key: bytes, session: PageSession, body: str) -> bytes:
        # The token's digest is part of the key, so that a replaced token ends its sessions.
        digest = (self._tokens.digest(session.token) or b"") if session.token else b""
        own = hmac.digest(key, _PURPOSE + digest, "sha256")
        return hmac.digest(own, body.encode(), "sha256")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unpacked(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
