"""Guard of the page: where it may be served at all, which hosts and origins it answers, and headers of its answers."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from unified.config.addresses import split_address
from unified.security.keys import is_loopback

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of all answers of the page."""
OWN_HEADER = b"x-unified"
"""Header that another site's scripts cannot send without a preflight request, and its forms not at all."""


@dataclass(frozen=True, kw_only=True)
class PageOptions:
    """Options of the page of one gateway."""

    host: str = "127.0.0.1"
    """Address that the gateway listens on; empty: a Unix socket."""
    hosts: frozenset[str] = frozenset()
    """Further names of the gateway's host, as browsers know it."""
    has_tls: bool = False
    is_behind_proxy: bool = False
    """True if a proxy before the gateway takes care of HTTPS, and passes on the header ``Host``."""
    is_read_only: bool = False
    ticket: str = ""
    """Ticket that signs in the user of the gateway. With a ticket, only the page is served."""

    @property
    def is_secure(self) -> bool:
        """True if browsers come by HTTPS."""
        return self.has_tls or self.is_behind_proxy

    @property
    def hindrance(self) -> str:
        """Reason why the page is not served; empty: it is."""
        if self.is_secure or not self.host or is_loopback(self.host):
            return ""
        return (
            f"the page is not served at {self.host}, which other hosts reach, without TLS: give --tls-cert and "
            "--tls-key, or --behind-proxy where a proxy takes care of it; or `unified ui` shows it to its user."
        )


class Guard:
    """Decides by the head of a request whether the page answers it."""

    def __init__(self, options: PageOptions) -> None:
        own = {"localhost"} if not options.host or is_loopback(options.host) else {os.uname().nodename, options.host}
        self._names = {name.lower() for name in own | options.hosts}

    def refusal(self, headers: Mapping[bytes, bytes], *, is_call: bool, is_stream: bool = False) -> str:
        """Return the reason why a request is refused, as a sentence; empty: it may go on.

        Args:
            headers: names in lower case.
            is_call: True for the interface of the page's own scripts, where a cookie counts.
            is_stream: True for the stream, for which a browser cannot set headers.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if not self.is_own_host(host):
            return (
                f"{host[:100]!a} is not a name of this gateway: open it by the name or address that it "
                "listens on, or start it with --allow-host NAME."
            )
        if not is_call:
            return ""
        if not is_stream and headers.get(OWN_HEADER) != b"1":
            return "the header X-Unified: 1 is missing: this interface is for the page's own scripts."
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        is_same = origin is not None and origin.partition(b"://")[2].lower() == host.lower().encode("latin-1")
        if (origin is not None and not is_same) or site not in (None, b"same-origin") or (site is None and not is_same):
            return "the request does not come from this page: its Origin or Sec-Fetch-Site is another, or missing."
        return ""

    def is_own_host(self, text: str) -> bool:
        """Return True for a header ``Host`` that names this gateway. Any address is accepted: the owner of
        another site can make a name point to this host, but not an address.
        """
        try:
            name = split_address(text).bare_host.lower()
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.rstrip(".") in self._names
        return True
