"""The compiled description of the gRPC coordinator is that of its source."""

from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

from tests.support.grpc_client import PROTO
from unified_gateway.coordinator_grpc import COMPILED


def test_compiled_description_is_up_to_date(tmp_path: Path) -> None:
    out = tmp_path / "coordinator.binpb"
    assert protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={out}", "coordinator.proto"]) == 0
    now, then = (FileDescriptorSet.FromString(file.read_bytes()) for file in (out, COMPILED))
    assert now == then, "run the command at the head of deploy/proto/coordinator.proto"
