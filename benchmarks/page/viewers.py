"""Viewers of the page: plain streams that cost little themselves, and a tab of a real browser that is measured."""

from __future__ import annotations

import json
import selectors
import shutil
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BROWSERS = ("/usr/bin/chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0
WATCH = """(() => {
  const watch = window.watch = { usable: 0, told: [] };
  const painted = (then) => requestAnimationFrame(() => setTimeout(then));
  new MutationObserver(() => {
    if (!watch.usable && document.querySelector(SELECTOR)) {
      watch.usable = -1;
      painted(() => (watch.usable = performance.now()));
    }
    const text = (TEXT)();
    if (!text || text === watch.last) return;
    watch.last = text;
    painted(() => watch.told.push([text, performance.timeOrigin + performance.now()]));
  }).observe(document, { subtree: true, childList: true, characterData: true });
})()"""
"""Notes when what `SELECTOR` names, and each new text that `TEXT` returns, has been painted."""


def sign_in(port: int, token: str) -> str:
    """Return the cookie of a session."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/page/session",
        data=json.dumps({"ticket": token}).encode(),
        headers={"X-Unified": "1", "Origin": f"http://127.0.0.1:{port}"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return str(answer.headers["set-cookie"]).partition(";")[0]


class Streams:
    """Open streams of the page, which one thread reads.

    Args:
        cookie: of a session.
    """

    def __init__(self, port: int, cookie: str) -> None:
        self.cookie = cookie
        self._port = port
        self._sockets: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._is_closed = False
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        return len(self._sockets)

    def open(self, job_id: str = "") -> None:
        """Look at a job, or at the cluster."""
        opened = socket.create_connection(("127.0.0.1", self._port), timeout=DEADLINE_S)
        head = f"GET /page/stream?job={job_id} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nCookie: {self.cookie}\r\n"
        opened.sendall(f"{head}Sec-Fetch-Site: same-origin\r\n\r\n".encode())
        first = opened.recv(65536)
        if not first.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the gateway refused a stream: {first[:300]!r}")
        self._sockets.append(opened)
        self._selector.register(opened, selectors.EVENT_READ)

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        for each in self._sockets:
            each.close()
        self._selector.close()

    def _read(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select(0.1) if self._selector.get_map() else ():
                received = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                self.num_bytes += len(received)
                if not received:
                    self._selector.unregister(key.fileobj)
            time.sleep(0.02)  # several parts at once


class Tab:
    """A tab of a browser that notes what it shows, and when.

    Args:
        context: of playwright.
        text: body of a function in JavaScript that returns what is watched.
    """

    def __init__(self, context: Any, text: str) -> None:
        self.page = context.new_page()
        self._text = text
        self._devtools = context.new_cdp_session(self.page)

    def open(self, url: str, selector: str) -> float:
        """Open an address as if nothing of it were known; return the seconds until an element has been painted."""
        script = WATCH.replace("SELECTOR", json.dumps(selector)).replace("TEXT", self._text)
        self._devtools.send("Network.setCacheDisabled", {"cacheDisabled": True})
        added = self._devtools.send("Page.addScriptToEvaluateOnNewDocument", {"source": script})
        self._devtools.send("Page.enable")
        self.page.goto(url, wait_until="commit")
        try:
            deadline = time.monotonic() + DEADLINE_S
            while (found := self.page.evaluate("window.watch?.usable ?? 0")) <= 0:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{url} did not show {selector}: {self.page.inner_text('body')[:500]}")
                time.sleep(0.02)
        finally:
            self._devtools.send("Page.removeScriptToEvaluateOnNewDocument", added)
        return float(found) / 1000

    def told(self) -> list[tuple[str, float]]:
        """Each text that was watched, and when it was on the screen, in seconds since 1970."""
        return [(text, at / 1000) for text, at in self.page.evaluate("window.watch.told")]

    def elements(self) -> int:
        return int(self.page.evaluate("document.querySelectorAll('*').length"))

    def heap_mb(self) -> float:
        """Of JavaScript, with what is still to be collected."""
        return float(self._devtools.send("Runtime.getHeapUsage")["usedSize"]) / 1e6


@contextmanager
def browser(cookie: str = "", port: int = 0) -> Iterator[Any]:
    """A context of a headless browser of its own, signed in by the cookie if there is one."""
    from playwright.sync_api import sync_playwright

    found = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if found is None:
        raise RuntimeError("no Chromium on this host; where root may, `make test-browser` installs it")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        context = opened.new_context(viewport={"width": 1440, "height": 900})
        if cookie:
            name, _, value = cookie.partition("=")
            context.add_cookies([{"name": name, "value": value, "url": f"http://127.0.0.1:{port}"}])
        yield context
        opened.close()
