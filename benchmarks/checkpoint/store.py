"""An S3 store on the loopback device, to be measured against: moto's HTTP server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator

BUCKET = "checkpoints"
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 << 30)}
"""The server holds all in memory: what it needs anew from the system each time would be most of what is measured."""


def is_installed() -> bool:
    return importlib.util.find_spec("moto") is not None and importlib.util.find_spec("flask") is not None


@contextlib.contextmanager
def store() -> Iterator[dict[str, str]]:
    """A new, empty store with a bucket: the environment in which programs find it."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean | KEEP_MEMORY
    ) as process:
        assert process.stdout is not None
        drain = threading.Thread(target=process.stdout.read)
        try:
            url = next(_addresses(process.stdout), None)
            drain.start()  # a full pipe would stop the server
            if url is None:
                raise RuntimeError("moto's server did not start")
            urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=30).close()
            yield {
                "AWS_ENDPOINT_URL_S3": url,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "benchmark",
                "AWS_SECRET_ACCESS_KEY": "benchmark",
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        finally:
            process.kill()
            if drain.is_alive():
                drain.join()


def _addresses(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        if found := re.search(rb"Running on (http://127\.0\.0\.1:\d+)", line):
            yield found[1].decode()
