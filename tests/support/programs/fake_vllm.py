"""A stand-in for vLLM: its routes for weights, which read shared memory as the backend `unified` does.

``GET /value?NAME`` answers the first number of a float32 tensor that was loaded last; ``POST /break`` has the next
`/update_weights` fail, and ``POST /freeze`` has it stop the process. ``--old`` has it refuse newer flags.
"""

import itertools
import json
import mmap
import os
import signal
import struct
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

loaded: dict[str, float] = {}
num_tokens = itertools.count(step=50)
state: dict[str, Any] = {"version": "default", "broken": "", "calls": [], "bodies": []}


class Routes(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        found: Any = {
            "/health": None,
            "/pid": os.getpid(),
            "/value": loaded.get(query),
            "/weight_info": state["version"],
            "/calls": state["calls"],
            "/bodies": state["bodies"],
            "/get_world_size": {"world_size": 2},
            "/metrics": f"vllm:num_requests_running 3.0\nvllm:generation_tokens_total {next(num_tokens)}.0\n".encode(),
            "/config": sys.argv[sys.argv.index("--weight-transfer-config") + 1] if path == "/config" else None,
            "/env": [os.environ.get("VLLM_SERVER_DEV_MODE"), os.environ.get("PYTHONPATH", "").split(":")[0]],
        }.get(path, "")
        self.answer(200, found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        state["calls"].append(self.path)
        state["bodies"].append(body)
        if self.path in ("/break", "/freeze"):
            state["broken"] = self.path
        elif self.path == "/update_weights":
            if state["broken"] == "/freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if state["broken"]:
                self.answer(500, {"error": "out of memory"})
                return
            info = body["update_info"]  # a list of a trainer of vLLM's own, for several workers
            for name, dtype, shape, path, offset in info.get("tensors", []) if isinstance(info, dict) else []:
                assert (dtype, bool(shape)) == ("float32", True)
                with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
                    (loaded[name],) = struct.unpack_from("f", memory, offset)
        elif self.path == "/finish_weight_update":
            state["version"] = body["weight_version"] if body else state["version"]
        self.answer(200, None)

    def answer(self, status: int, value: object) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    if "--old" in sys.argv and "--weight-transfer-config" in sys.argv:
        print("vllm: error: unrecognized arguments: --weight-transfer-config", file=sys.stderr)
        sys.exit(2)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Routes).serve_forever()
