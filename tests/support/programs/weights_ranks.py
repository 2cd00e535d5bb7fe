"""Four ranks of a process group, as a program of their own: each prints what it found, as a line of JSON."""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from unified.errors import WeightsVersionError
from unified.rounds.rank_group import MeshGroup, WholeGroup, lead
from unified.weights.sender import RANK_ERRORS, ranks_for
from unified.weights.state_dict import OutgoingStateDict, VersionedStateDict, load

SIZE = 4


def refuse() -> None:
    raise WeightsVersionError("not newer")


def found_by(rank: int) -> dict[str, Any]:
    square = DeviceMesh("cpu", torch.arange(SIZE).view(2, 2))
    halves = [DeviceMesh("cpu", [0, 2]), DeviceMesh("cpu", [1, 3])]  # every rank makes both
    half = halves[rank % 2]
    whole = WholeGroup()
    of_square, of_half = MeshGroup(square), MeshGroup(half)
    found: dict[str, Any] = {
        "ranks": [(each.rank, each.size) for each in (whole, of_square, of_half)],
        "gathered": [each.gather(f"from {rank}") for each in (whole, of_square, of_half)],
        "shared": [each.share(f"from {rank}") for each in (whole, of_square, of_half)],
        "lead": lead(of_half, lambda: f"by {rank}", RANK_ERRORS),
    }
    try:
        lead(whole, refuse, RANK_ERRORS)
    except WeightsVersionError as error:
        found["refused"] = str(error)

    full = torch.arange(15.0).view(5, 3)  # ranks have two rows, two, one, none
    tied = distribute_tensor(full, square, [Shard(0), Shard(0)])
    state = {
        "w": tied,
        "same": tied,
        "rows": distribute_tensor(full, square, [Replicate(), Shard(1)]),
        "b": full[0].clone(),
    }
    source = OutgoingStateDict(state, torch.float16)
    buckets = source.cut(1, SIZE)
    found["aliases"] = source.aliases
    found["senders"] = [bucket.rank for bucket in buckets]
    found["digests"] = len(set(whole.gather(source.digest(buckets))))
    collected = [source.collect(entry) for bucket in buckets for entry in bucket.entries]
    found["whole"] = [tensor.tolist() == full.tolist() for tensor in collected[1:]]
    found["classes"] = [
        type(ranks_for(OutgoingStateDict(each), together=False)).__name__
        for each in (state, {"w": distribute_tensor(full, half, [Shard(0)])}, {"b": full})
    ]
    version = VersionedStateDict(w=full + 1, same=full + 1, rows=full + 1, b=full[0] + 1)
    load(version, state, strict=True, what="it")
    found["loaded"] = [torch.equal(state[key].full_tensor(), full + 1) for key in ("w", "rows")]  # type: ignore[attr-defined]
    return found


def main() -> None:
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=SIZE)
            line = json.dumps(found_by(rank))
            os.write(1, f"{line}\n".encode())  # in one piece, as the others write too
            distributed.barrier()
            distributed.destroy_process_group()
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))


if __name__ == "__main__":
    main()
