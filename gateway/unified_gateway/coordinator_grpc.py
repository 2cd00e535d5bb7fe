"""The coordinator's gRPC service beside the gateway's HTTP: tokens, time limits and errors of its calls.

The service is described in `deploy/proto/coordinator.proto`; `unified_gateway.coordinator_calls` has its calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from unified import errors
from unified.coordinator.client import RemoteCoordinator
from unified_gateway.coordinator_calls import CoordinatorCalls, Fields, GrpcCall
from unified_gateway.tokens import TOKEN_HEADER, Tokens

SPACE_KEY = "x-unified-space"
CODE_KEY = "x-unified-code"
"""Metadata keys: the space of a call, and the coordinator's own code of a refusal."""
MAX_REQUEST = 1 << 20
MAX_ANSWER = 4 << 20
"""Most bytes of a message. By default, clients accept 4 MiB."""
MAX_CALLS = 10_000
"""Most calls at once, including those that wait at barriers."""
MAX_DETAILS = 600
"""Most characters of an error text. Each may take 12 bytes, and clients accept 8 KiB of metadata."""
_KEEPALIVE_MS = 30_000
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.max_send_message_length", MAX_ANSWER),
    ("grpc.so_reuseport", 0),  # a second gateway on this port fails, and takes no calls away
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # finds lost clients, which then leave their barriers
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
]
_Status = grpc.StatusCode
STATUS_OF_CODE = {
    "bad-request": _Status.INVALID_ARGUMENT,
    "not-found": _Status.NOT_FOUND,
    "name-taken": _Status.ALREADY_EXISTS,
    "ended": _Status.FAILED_PRECONDITION,
    "unknown-worker": _Status.FAILED_PRECONDITION,
    "replaced": _Status.ABORTED,
    "lost": _Status.ABORTED,
    "closed": _Status.ABORTED,
    "timeout": _Status.DEADLINE_EXCEEDED,
    "busy": _Status.RESOURCE_EXHAUSTED,
    "key": _Status.INTERNAL,
}
"""Status for each code of a refusal, or of a barrier's end."""
STATUS_OF_ERROR: list[tuple[type[Exception], grpc.StatusCode]] = [
    (errors.MasterUnreachableError, _Status.UNAVAILABLE),
    (errors.StorageUnavailableError, _Status.UNAVAILABLE),
    (errors.DataFileNotFoundError, _Status.NOT_FOUND),
    (errors.NotFoundError, _Status.NOT_FOUND),
    (errors.UsageError, _Status.INVALID_ARGUMENT),
    (errors.DatasetError, _Status.INVALID_ARGUMENT),
    (TimeoutError, _Status.DEADLINE_EXCEEDED),
    (OSError, _Status.FAILED_PRECONDITION),  # files, or a bucket, that this host may not read
    (ImportError, _Status.FAILED_PRECONDITION),
    (errors.UnifiedError, _Status.INTERNAL),
]
"""Status for errors without a code; the first class that fits counts."""
Method = Callable[[Any, GrpcCall], Awaitable[Fields]]
COMPILED = Path(__file__).with_name("coordinator.binpb")
"""Compiled description of the service. Messages are made from it at run time: a generated module would refuse each
release of protobuf that is older than its compiler."""


async def serve(*, bind: str, coordinator: RemoteCoordinator, tokens: Tokens) -> tuple[grpc.aio.Server, int]:
    """Start the service. Its calls are not encrypted: outside a trusted network, put a proxy in front of it.

    Args:
        bind: ``HOST:PORT``; port 0 takes any free one.
        coordinator: the connection to the master, which the caller closes.

    Returns:
        The server, to be ended with ``await server.stop(grace)``, and its port.

    Raises:
        UsageError: the port cannot be opened, or other hosts can reach it and there is no token.
    """
    tokens.check_listening("the gRPC service", bind)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((_handlers(CoordinatorCalls(coordinator), tokens),))
    try:
        port = server.add_insecure_port(bind)
    except RuntimeError:
        raise errors.UsageError(
            f"the gRPC service cannot listen on {bind}: the port is taken, or the address is none of this host's. Give "
            "another --grpc-port."
        ) from None
    await server.start()
    return server, port


def described() -> ServiceDescriptor:
    pool = DescriptorPool()  # not the default pool: another module of this process may have a coordinator.proto, too
    for file in FileDescriptorSet.FromString(COMPILED.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName("unified.coordinator.v1.CoordinatorService")


def _handlers(calls: CoordinatorCalls, tokens: Tokens) -> grpc.GenericRpcHandler:
    service = described()
    methods: dict[str, Method] = {
        "RegisterWorker": calls.register_worker,
        "Heartbeat": calls.heartbeat,
        "RegisterDataset": calls.register_dataset,
        "GetDataShard": calls.get_data_shard,
        "WaitBarrier": calls.wait_barrier,
        "NotifyCheckpoint": calls.notify_checkpoint,
        "GetLatestCheckpoint": calls.get_latest_checkpoint,
    }
    handlers = {}
    for method in service.methods:
        answer = GetMessageClass(method.output_type)
        handlers[method.name] = grpc.unary_unary_rpc_method_handler(
            _guarded(methods[method.name], answer, tokens),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=answer.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _guarded(method: Method, answer: Callable[..., Any], tokens: Tokens) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return the method as a handler, which checks the token and turns errors into status codes."""

    async def handle(asked: Any, context: grpc.aio.ServicerContext) -> Any:
        metadata = dict(context.invocation_metadata())
        if tokens.client_of(metadata.get(TOKEN_HEADER.lower())) is None:
            reason = f"the metadata {TOKEN_HEADER.lower()} has no token that is known here."
            await context.abort(_Status.UNAUTHENTICATED, reason)
        left_s = context.time_remaining()
        deadline = math.inf if left_s is None else time.monotonic() + left_s
        try:
            fields = await method(asked, GrpcCall(metadata.get(SPACE_KEY, ""), deadline))
        except (errors.UnifiedError, OSError, ImportError) as error:
            code = getattr(error, "code", "") or ("bad-request" if isinstance(error, errors.UsageError) else "")
            await context.abort(status_of(error), _shortened(str(error)), ((CODE_KEY, code),) if code else ())
        return answer(**fields)

    return handle


def status_of(error: Exception) -> grpc.StatusCode:
    if code := getattr(error, "code", ""):
        return STATUS_OF_CODE.get(code, _Status.FAILED_PRECONDITION)
    return next(status for kind, status in STATUS_OF_ERROR if isinstance(error, kind))


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_DETAILS else f"{text[:MAX_DETAILS]}…"
