"""An engine for tests: a small HTTP server, with routes that make it ill, and the metrics of vLLM.

``--as HOW`` sets how it starts, and with ``--first FILE`` only the process that can create the file starts so:
``silent`` never gets ready, ``memory`` takes memory until it is killed, ``memory-of-child`` exits with code 3 after
this has happened to a child, ``stubborn`` does not end at SIGTERM (it writes ``refused-PID``), ``bad-flag`` exits with
code 2. With ``--note FOLDER`` it appends its pid, and that of a child in a session of its own, to
``FOLDER/pids``, and writes ``FOLDER/orderly-PID`` when SIGTERM ends it. With ``--share FILE`` the first one has a
child that ends with it and has shared memory, whose name is in the file.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any, cast

from unified import process

MEMORY_BYTES = 2**31


class Engine(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Routes)
        self.health = 200
        self.num_open = 0
        self.num_tokens = 0
        self.released = threading.Event()


class Routes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        engine = cast("Engine", self.server)
        match self.path.partition("?"):
            case "/health", _, _:
                self.answer(engine.health, b"")
            case "/pid", _, _:
                self.answer_json(os.getpid())
            case "/env", _, name:
                self.answer_json(os.environ[name])
            case "/headers", _, name:
                self.answer_json(self.headers[name])
            case "/hold", _, _:
                engine.num_open += 1
                engine.released.wait()
                engine.num_open -= 1
                self.answer_json("released")
            case "/metrics", _, _:
                engine.num_tokens += engine.num_open == 0
                open_, tokens = f"{engine.num_open}.0", f"{engine.num_tokens}.0"
                lines = f'vllm:num_requests_running{{m="x"}} {open_}\nvllm:generation_tokens_total{{m="x"}} {tokens}\n'
                self.answer(200, lines.encode())
            case _:
                self.answer(404, b"no such route")

    def do_POST(self) -> None:
        engine = cast("Engine", self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match self.path:
            case "/echo":
                self.answer(200, body, self.headers.get("Content-Type", "application/octet-stream"))
            case "/health":
                engine.health = int(body)
                self.answer(200, b"", "application/json")
            case "/release":
                engine.released.set()
                self.answer_json(None)
            case _:
                self.answer(404, b"no such route")

    def answer_json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), "application/json; charset=utf-8")

    def answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def is_first(file: str) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def note(folder: Path) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with (folder / "pids").open("a") as file:
        print(os.getpid(), child.pid, file=file)

    def leave(number: int, frame: object) -> None:
        (folder / f"orderly-{os.getpid()}").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)


def share(file: Path) -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        process.die_with_parent(signal.SIGKILL)
        memory = shared_memory.SharedMemory(create=True, size=4096)
        tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
        os.kill(tracker, signal.SIGKILL)  # else it removes the memory
        os.write(writer, memory.name.encode())
        time.sleep(600)
    file.write_bytes(os.read(reader, 100))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--as", dest="how", default="")
    parser.add_argument("--first", default="")
    parser.add_argument("--note", type=Path)
    parser.add_argument("--share", type=Path)
    given, _ = parser.parse_known_args()
    if given.note is not None:
        note(given.note)
    if given.share is not None and not given.share.exists():
        share(given.share)
    match given.how if not given.first or is_first(given.first) else "":
        case "silent":
            time.sleep(600)
        case "memory-of-child" if (child := os.fork()) != 0:
            os.waitpid(child, 0)
            sys.exit(3)
        case "memory" | "memory-of-child":
            held = [bytearray(os.urandom(1) * 2**20) for _ in range(MEMORY_BYTES // 2**20)]
            print(len(held))
        case "stubborn":
            signal.signal(signal.SIGTERM, lambda *_: (given.note / f"refused-{os.getpid()}").touch())
        case "bad-flag":
            print("engine_server.py: error: unrecognized arguments", file=sys.stderr)
            sys.exit(2)
    Engine(given.port).serve_forever()


if __name__ == "__main__":
    main()
