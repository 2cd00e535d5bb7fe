"""The other side of shared memory, in a process of its own: `ShmPeer` starts this file and tells it what to do."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from unified.bus.codec.codec import SerializedValue, decode, deserialize, encode
from unified.bus.shm.pool import SharedPool
from unified.bus.shm.reader import SharedReader


class Side:
    """One process on the bus, as far as shared memory goes."""

    def __init__(self, directory: str, inbox_id: str) -> None:
        self.inbox_id = inbox_id
        self.pool = SharedPool(inbox_id, directory=directory, quota_bytes=1 << 30)
        self.reader = SharedReader(directory)
        self.held: list[Any] = []

    def send(self, value: Any, reader: str, num_readers: int = 1) -> tuple[bytes, list[Any] | None, list[Any]]:
        """A value for one reader: its body, descriptor and frames."""
        encoded = encode(value)
        exported = self.pool.export(encoded.buffers, num_readers)
        if exported is None:
            return encoded.body, None, encoded.buffers
        granted = self.pool.grant(exported, reader)
        exported.release()
        return encoded.body, granted.shared, granted.frames

    def receive(self, sender: str, body: bytes, shared: list[Any] | None) -> Any:
        """The value of a message that had no frames."""
        return decode(body, self.reader.borrow(sender, shared or [], []))


class ShmPeer:
    """A `Side` in another process, which holds what it receives until it is told to drop it."""

    def __init__(self, directory: str, inbox_id: str) -> None:
        self.inbox_id = inbox_id
        command = [sys.executable, __file__, directory, inbox_id]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.ask("hello") == "hello"

    def ask(self, word: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([word, *arguments]) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if isinstance(answer, dict):
            raise AssertionError(answer["error"])
        return answer

    def receive(self, sender: str, body: bytes, shared: list[Any] | None) -> int:
        """Have it take up and hold an array; the sum of its items."""
        assert shared is not None
        return int(self.ask("receive", sender, body.hex(), shared))

    def send(self, nbytes: int, item: int, reader: str) -> tuple[bytes, list[Any]]:
        """Have it send an array of `nbytes` equal items."""
        body, shared = self.ask("send", nbytes, item, reader)
        return bytes.fromhex(body), shared

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def peers(directory: str, *inbox_ids: str) -> Iterator[list[ShmPeer]]:
    started = [ShmPeer(directory, inbox_id) for inbox_id in inbox_ids]
    try:
        yield started
    finally:
        for peer in started:
            peer.close()


def names(directory: str) -> list[str]:
    return sorted(os.listdir(directory))


def run_code(code: str, directory: str) -> None:
    """Run this in a process of its own, which has to end well and quietly."""
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, cwd=os.getcwd())
    assert (done.returncode, done.stderr) == (0, "")


def main(directory: str, inbox_id: str) -> None:
    side = Side(directory, inbox_id)
    for line in sys.stdin:
        word, *arguments = json.loads(line)
        try:
            answer = obey(side, word, arguments)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def obey(side: Side, word: str, arguments: list[Any]) -> Any:
    match word:
        case "receive":
            sender, body, shared = arguments
            value = side.receive(sender, bytes.fromhex(body), shared)
            if isinstance(value, SerializedValue):
                value = deserialize(value)
            side.held.append(value)
            return int(np.asarray(value, dtype="u8").sum())
        case "send":
            nbytes, item, reader = arguments
            body, shared, frames = side.send(np.full(nbytes, item, "u1"), reader)
            assert not frames
            return [body.hex(), shared]
        case "hand-on":
            return side.send(side.held[-1], arguments[0])[1]
        case "sums":
            return [int(np.asarray(value, dtype="u8").sum()) for value in side.held]
        case "add":
            side.held[-1] += arguments[0]
            return None
        case "drop":
            side.held.clear()
            gc.collect()
            return None
        case "forget":
            side.reader.forget(arguments[0])
            return None
        case "close":
            side.pool.close()
            return None
        case _:
            return word


if __name__ == "__main__":
    main(*sys.argv[1:])
