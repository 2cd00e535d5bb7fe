"""The state that every contender saves, the rows that are measured, our floors, and an S3 store: moto's HTTP server."""

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
from typing import TYPE_CHECKING

from benchmarks.bus.checks import Floor
from benchmarks.bus.work import MIB, Row

if TYPE_CHECKING:
    import torch


READINGS = {"disk": 3, "store": 1}
"""Of each row, in each round; their median counts. A save to the store of the benchmark takes ten times as long."""
WIDTH = 1024
"""Of the model whose state is saved; one layer has 12 matrices of this width, which are 48 MiB."""
EMBEDDING_MIB = 16

STALL = Row("stall", "stall of `save`", "ms", False)
LOCAL = Row("local", "to disk, from `save` to the manifest", "MB/s", True)
PEAK = Row("peak", "peak of extra memory, to disk", "× the state", False)
STORE = Row("s3", "to S3, from `save` to the manifest", "MB/s", True)
STORE_PEAK = Row("s3_peak", "peak of extra memory, to S3", "× the state", False)
ROWS = [STALL, LOCAL, PEAK, STORE, STORE_PEAK]
NAMES = [row.name for row in ROWS]
ON_DISK = [STALL.name, LOCAL.name, PEAK.name]
IN_STORE = [STORE.name, STORE_PEAK.name]

TITLES = {
    "unified": "unified",
    "bare": "bare",
    "dcp": "dcp.async_save",
    "torch": "torch.save",
}
WITH_STORE = ["unified", "bare"]
PEERS = ["bare", "dcp", "torch"]
PUBLISHED = {"local": 500.0, "s3": 200.0}
"""By the reference, on 64 cores."""
FLOORS = [
    Floor("unified", "stall", "bare", "stall", 1 / 1.5),
    Floor("unified", "stall", "dcp", "stall", 1),
    Floor("unified", "local", "bare", "local", 0.9),
    Floor("unified", "s3", "bare", "s3", 1),
    Floor("unified", "peak", "state", "peak", 1 / 1.1),
    Floor("unified", "s3_peak", "state", "s3_peak", 1 / 1.1),
]
SIZES = {"state": {"peak": 1.0, "s3_peak": 1.0}}
"""What needs no measuring: the state itself, beside which extra memory is held."""


def state(mib: int) -> dict[str, torch.Tensor]:
    """As large a state as asked for, with tensors as a language model has them: matrices, and small ones between."""
    import torch

    layers, rest = divmod(mib - EMBEDDING_MIB, 48) if mib > EMBEDDING_MIB else (0, mib - EMBEDDING_MIB)
    made = {"embedding": torch.rand((EMBEDDING_MIB + rest) * MIB // (4 * WIDTH), WIDTH)}
    for layer in range(layers):
        made |= {f"layers.{layer}.{name}": torch.rand(shape) for name, shape in _layer()}
    return made


def nbytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _layer() -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("norm_1", "norm_2"):
        yield f"{name}.weight", (WIDTH,)
        yield f"{name}.bias", (WIDTH,)
    for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
        yield f"{name}.weight", (rows * WIDTH, columns * WIDTH)
        yield f"{name}.bias", (rows * WIDTH,)


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
