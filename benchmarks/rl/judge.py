"""The engine of `benchmarks/rl/run.py`: an HTTP server of the standard library that scores texts.

    judge.py --port PORT

It is the judge of docs/engines.md, without a log, and with room for the connections that come at once.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Judge(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # /up
        self.answer({})

    def do_POST(self) -> None:  # /score
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"score": float("42" in body["text"])})

    def answer(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """A line for each request would be most of the work."""


class JudgeServer(ThreadingHTTPServer):
    request_queue_size = 256
    """The default, 5, makes the 6th connection that waits to be accepted try again after a second."""


if __name__ == "__main__":
    JudgeServer(("127.0.0.1", int(sys.argv[-1])), Judge).serve_forever()
