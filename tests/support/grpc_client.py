"""A client of the gRPC coordinator, generated from the published file by grpcio-tools as a user would do it."""

import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, Self

import grpc
import pytest

from unified.coordinator.client import RemoteCoordinator
from unified_gateway.coordinator_grpc import serve
from unified_gateway.tokens import Tokens

PROTO = Path(__file__).parents[2] / "deploy/proto"
TOKEN = "secret-of-the-test"
TOKENS = Tokens({"test": TOKEN})


def generate(folder: Path, *outputs: str) -> None:
    """Run protoc with these outputs, such as ``python``."""
    from grpc_tools import protoc

    flags = [f"--{each}_out={folder}" for each in outputs]
    assert protoc.main(["protoc", f"-I{PROTO}", *flags, "coordinator.proto"]) == 0


class GeneratedClient(NamedTuple):
    """The two modules of a generated client."""

    messages: ModuleType
    stubs: ModuleType


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> GeneratedClient:
    folder = tmp_path_factory.mktemp("grpc-client")
    generate(folder, "python", "grpc_python")
    sys.path.insert(0, str(folder))
    try:
        return GeneratedClient(*map(importlib.import_module, ("coordinator_pb2", "coordinator_pb2_grpc")))
    finally:
        sys.path.remove(str(folder))


class Stub:
    """A channel to the service, with the metadata of each call; ``stub.Heartbeat(worker_id=…)`` makes one."""

    def __init__(self, client: GeneratedClient, port: int, *, token: str | None = TOKEN, space: str = "") -> None:
        self._messages = client.messages
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stub = client.stubs.CoordinatorServiceStub(self._channel)
        self._metadata = [("x-trainer-token", token)] if token is not None else []
        self._metadata += [("x-unified-space", space)] if space else []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._channel.close()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        asked = self._messages.DESCRIPTOR.services_by_name["CoordinatorService"].methods_by_name[method].input_type.name

        def call(*, within_s: float | None = 20.0, **fields: Any) -> Awaitable[Any]:
            message = getattr(self._messages, asked)(**fields)
            answer: Awaitable[Any] = getattr(self._stub, method)(message, metadata=self._metadata, timeout=within_s)
            return answer

        return call

    async def register(self, rank: int, world_size: int, **fields: Any) -> dict[str, str]:
        """Register worker ``w{rank}``; return the fields that name it in later calls."""
        info = {"worker_id": f"w{rank}", "rank": rank, "world_size": world_size, **fields}
        found = await self.RegisterWorker(**info)
        return {"worker_id": found.assigned_id, "session": found.session}

    async def refusal(self, call: Awaitable[Any]) -> tuple[grpc.StatusCode, str, str]:
        """The status, code and text that a call ends with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = caught.value
        code = dict(error.trailing_metadata()).get("x-unified-code", "")
        return error.code(), str(code), str(error.details())


@asynccontextmanager
async def served(address: str, *, timeout_s: float = 10.0, tokens: Tokens = TOKENS) -> AsyncIterator[int]:
    """The port of a service before the master at this address."""
    with RemoteCoordinator(address, timeout_s=timeout_s) as coordinator:
        server, port = await serve(bind="127.0.0.1:0", coordinator=coordinator, tokens=tokens)
        try:
            yield port
        finally:
            await server.stop(None)
