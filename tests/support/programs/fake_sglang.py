"""A stand-in for SGLang: its route for weights, which reads a checkpoint of safetensors as SGLang does.

``GET /value?NAME`` answers the first number of a float32 tensor that was loaded last; ``POST /break`` has the next load
fail, and ``POST /slow`` has it wait until the ready route was asked so often that the engine would count as unhealthy.
"""

import glob
import json
import math
import os
import struct
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_UNHEALTHY = 6
loaded: dict[str, float] = {}
state: dict[str, Any] = {"version": "default", "broken": "", "folder": "", "looks": None}
has_looked = threading.Event()


def read(folder: str) -> dict[str, float]:
    """Return the first number of each tensor. The library of safetensors refuses gaps between tensors, too."""
    found = {}
    (path,) = glob.glob(os.path.join(folder, "*.safetensors"))
    with open(path, "rb") as file:
        content = file.read()
    assert os.path.getsize(path) == len(content)
    (size,) = struct.unpack_from("<Q", content)
    header, end = json.loads(content[8 : 8 + size]), 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, before = entry["data_offsets"][0], end
        end = entry["data_offsets"][1]
        assert begin == before, header
        nbytes = {"F32": 4, "F16": 2, "BOOL": 1, "F8_E5M2": 1, "I64": 8, "BF16": 2}[entry["dtype"]]
        assert end - begin == math.prod(entry["shape"]) * nbytes
        assert (8 + size + begin) % nbytes == 0, "torch reads aligned numbers only"
        if entry["dtype"] == "F32":
            (found[name],) = struct.unpack_from("f", content, 8 + size + begin)
    assert end == len(content) - 8 - size
    return found


class Routes(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path == "/health" and state["looks"] is not None:
            state["looks"] += 1
            if state["looks"] >= NUM_UNHEALTHY:
                has_looked.set()
            self.answer(503, "the model is loaded")
            return
        found: Any = {
            "/health": None,
            "/pid": os.getpid(),
            "/value": loaded.get(query),
            "/names": sorted(loaded),
            "/model_info": {"weight_version": state["version"], "model_path": state["folder"]},
            "/exists": os.path.lexists(state["folder"]),
            "/argv": sys.argv[1:],
        }.get(path, "")
        self.answer(200, found)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        if self.path in ("/break", "/slow"):
            state["broken"] = self.path
        elif self.path != "/update_weights_from_disk":
            self.answer(404, "no such route")
            return
        elif state["broken"] == "/break":
            self.answer(400, {"success": False, "message": "out of memory"})
            return
        else:
            if state["broken"] == "/slow":
                state["broken"], state["looks"] = "", 0
                has_looked.wait()
                state["looks"] = None
            assert body["load_format"] == "safetensors"
            loaded.clear()
            loaded.update(read(body["model_path"]))
            state.update(version=body["weight_version"], folder=body["model_path"])
        self.answer(200, {"success": True, "message": ""})

    def answer(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Routes).serve_forever()
