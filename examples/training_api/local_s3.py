"""An S3 store on this host: moto's server, in a process that ends with the one that started it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from unified.process import die_with_parent

START_S = 40.0


@contextlib.contextmanager
def running(log: Path, buckets: list[str]) -> Iterator[dict[str, str]]:
    """Start the store, and end it at the end.

    Args:
        log: what the server prints goes there.
        buckets: names of buckets to make.

    Returns:
        The environment in which S3 clients find it.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        url = _address(process, log)
        for name in buckets:
            urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=30).close()
        yield {
            "AWS_ENDPOINT_URL_S3": url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "local",
            "AWS_SECRET_ACCESS_KEY": "local",
        }
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"Running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the local S3 store did not start: {log.read_text()[-2000:]}")


def serve(parent: int) -> None:
    """Be the store, on a free port of the loopback device."""
    die_with_parent(signal.SIGKILL, parent)
    from moto.server import main

    main(["-H", "127.0.0.1", "-p", "0"])


if __name__ == "__main__":
    serve(int(sys.argv[1]))
