"""A FastAPI application of one route, as plain as it can be, behind the server that the gateway has."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

ANSWER: dict[str, Any] = json.loads(os.environ.get("BARE_ANSWER", "{}"))
app = FastAPI()


@app.get("/train/{name}")
async def read_status(name: str) -> dict[str, Any]:
    """Return an answer of the gateway's shape and size."""
    return {**ANSWER, "name": name}


def main() -> None:
    # With its protocol named, as otherwise asyncio does not set TCP_NODELAY, and each answer waits for 40 ms.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    address = Path(sys.argv[1])
    address.with_suffix(".new").write_text(f"http://127.0.0.1:{listening.getsockname()[1]}")
    address.with_suffix(".new").rename(address)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


if __name__ == "__main__":
    main()
