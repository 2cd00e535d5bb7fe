"""Search of parts of files for a pattern, in a separate process, which can be killed if the pattern takes too long.

Run as a script, without any package, by ``python -I -S matcher.py ORDER SECONDS``. The order is a JSON object; the
process is killed after the seconds. It writes to stdout the offset up to which it searched, in 8 bytes, and then the
matching lines.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

BLOCK = 1 << 20
"""Most bytes that are searched at a time; a longer line counts as several lines."""
MEMORY = 1 << 30
NICE = 10


def search(order: dict[str, Any]) -> tuple[int, bytes]:
    """Return the offset up to which it searched, and the matching lines.

    Keys of the order are ``pattern``; ``parts``: start, size and descriptor of each file, in order; ``start`` and
    ``end``; ``takes_rest``: an end without a newline is a line; ``max_bytes`` to return; ``within_s`` to stop.
    """
    pattern = re.compile(order["pattern"].encode(), re.MULTILINE)
    until = time.monotonic() + order["within_s"]
    done, found, rest = order["start"], bytearray(), b""
    for block in _blocks(order):
        end = block.rfind(b"\n") + 1
        text, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
        if len(rest) >= BLOCK:
            text, rest = text + rest, b""
        for first, last in _lines(pattern, text):
            line = text[first:last][: order["max_bytes"] - 1] + b"\n"
            if len(found) + len(line) > order["max_bytes"] or (found and time.monotonic() > until):
                return done + first, bytes(found)
            found += line
        done += len(text)
        if time.monotonic() > until and done > order["start"]:
            return done, bytes(found)
    if rest and order["takes_rest"]:
        done += len(rest)
        if pattern.search(rest):
            found += rest[: order["max_bytes"] - 1] + b"\n"
    return done, bytes(found)


def _blocks(order: dict[str, Any]) -> Iterator[bytes]:
    at, end = order["start"], order["end"]
    for start, size, descriptor in order["parts"]:
        stop = min(start + size, end)
        while start <= at < stop and (block := os.pread(descriptor, min(BLOCK, stop - at), at - start)):
            at += len(block)
            yield block


def _lines(pattern: re.Pattern[bytes], text: bytes) -> Iterator[tuple[int, int]]:
    """Yield beginning and end of each matching line; a match across lines does not count."""
    at = 0
    while at < len(text) and (found := pattern.search(text, at)):
        first = text.rfind(b"\n", at, found.start()) + 1 or at
        last = text.find(b"\n", found.start())
        last = len(text) if last < 0 else last
        if pattern.search(text[first:last]):
            yield first, last
        at = last + 1


if __name__ == "__main__":
    signal.alarm(int(sys.argv[2]))  # in case nobody is left to kill it
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        searched, lines = search(json.loads(sys.argv[1]))
    except (re.error, OverflowError, RecursionError, MemoryError) as error:
        sys.exit(f"the pattern is not a Python regular expression: {error}")
    sys.stdout.buffer.write(searched.to_bytes(8, "big") + lines)
