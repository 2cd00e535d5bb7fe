"""The coordinator over gRPC under random messages: a refusal is one of the call, and no other call suffers."""

import asyncio
import math
import random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from tests.support.deadlines import missed
from tests.support.grpc_client import GeneratedClient, Stub, served
from tests.support.master_process import StartMaster

CALLS, AT_ONCE = 600, 30
OF_THE_SERVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE}
VALUES: dict[int, list[Any]] = {
    FieldDescriptor.TYPE_STRING: ["", "w0", "w1", "s", "d", "jsonl", "/none", "s3://", "\0", "../a", "é", "x" * 5000],
    FieldDescriptor.TYPE_UINT32: [0, 1, 2, 3, 2**31, 2**32 - 1],
    FieldDescriptor.TYPE_UINT64: [0, 1, 2, 2**53, 2**63 - 1, 2**63, 2**64 - 1],
    FieldDescriptor.TYPE_DOUBLE: [0.0, -1.0, 0.05, math.nan, math.inf, -math.inf, 1e308],
    FieldDescriptor.TYPE_BOOL: [True, False],
    FieldDescriptor.TYPE_ENUM: [0, 1, 7],
}


def random_value(field: FieldDescriptor) -> Any:
    if field.message_type is not None:  # all of them are maps
        words = VALUES[FieldDescriptor.TYPE_STRING]
        return {random.choice(words): random.choice(words) for _ in range(random.randrange(3))}
    values = VALUES[field.type]
    return random.choices(values, k=random.randrange(4)) if field.is_repeated else random.choice(values)


async def test_no_message_hurts_the_service_or_others(generated: GeneratedClient, start_master: StartMaster) -> None:
    methods = generated.messages.DESCRIPTOR.services_by_name["CoordinatorService"].methods
    master = start_master()
    broken: list[tuple[str, dict[str, Any], str | None]] = []
    async with served(master.address) as port, Stub(generated, port) as stub:

        async def call() -> None:
            method = random.choice(methods)
            fields = {each.name: random_value(each) for each in method.input_type.fields if random.random() < 0.7}
            try:
                await getattr(stub, method.name)(within_s=missed(2.0), **fields)
            except grpc.aio.AioRpcError as error:
                if error.code() in OF_THE_SERVER:
                    broken.append((method.name, fields, error.details()))

        bystander = await stub.register(7, 8)
        for _ in range(CALLS // AT_ONCE):
            await asyncio.gather(*(call() for _ in range(AT_ONCE)))
            assert (await stub.Heartbeat(**bystander)).is_known
            assert not broken
    assert "Traceback" not in master.log.read_text()
