"""Weights of an engine: a version that its worker has received is loaded by the engine's own processes.

vLLM maps the shared memory in which the version is, through its backend `unified` (`vllm_plugin`). The engine is paused
meanwhile, and requests under way go on with the new weights. SGLang reads a checkpoint, whose one file is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import struct
import tempfile
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from unified.weights.state_dict import VersionedStateDict

Ask = Callable[[str, Any, float], Any]
"""Function that posts to the engine: path, body, seconds; EngineError if the answer is no success."""
LOAD_WITHIN_S = 240.0
"""Time that an engine has to load a version, less than the default of `sync_weights`."""
_CONFIG = "--weight-transfer-config"


def load_vllm(ask: Ask, state: VersionedStateDict) -> None:
    """Have vLLM, from 0.28 on, load a version."""
    deadline = time.monotonic() + LOAD_WITHIN_S
    with _locations(_tensors(state)) as locations:
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": dict[str, Any]()}),
            ("/pause?mode=keep", None),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"tensors": locations}}),
            ("/finish_weight_update", {"weight_version": str(state.version)}),
            ("/resume", None),
        ):
            ask(path, body, max(1.0, deadline - time.monotonic()))


def load_sglang(ask: Ask, state: VersionedStateDict) -> None:
    """Have SGLang load a version. Requests under way end first, as it can only then drop what it caches of them."""
    once = {id(each): name for name, each in reversed(_tensors(state).items())}  # a checkpoint has no tied tensor twice
    tensors = sorted(((name, state[name]) for name in once.values()), key=lambda item: -item[1].element_size())
    ends = list(accumulate((each.nbytes for _, each in tensors), initial=0))
    header = dict[str, Any]()
    for (name, each), span in zip(tensors, pairwise(ends), strict=True):
        dtype = re.sub("loat|(?<=u)int|nt|fn$", "", _dtype(each)).upper()  # bfloat16: BF16
        header[name] = {"dtype": dtype, "shape": list(each.shape), "data_offsets": span}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (
        _memory_file([each for _, each in tensors], struct.pack("<Q", len(head)) + head) as (path, _),
        tempfile.TemporaryDirectory(prefix="unified-weights-") as folder,
    ):
        os.symlink(path, f"{folder}/model.safetensors")
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": str(state.version)}
        ask("/update_weights_from_disk", body, LOAD_WITHIN_S)


def prepare_vllm(command: list[str], environ: MutableMapping[str, str], *, is_open: bool) -> str:
    """Add to a command what lets vLLM take weights; return why it cannot take any, or an empty text.

    What the user has set stays: another backend, or ``VLLM_SERVER_DEV_MODE``, which only the user sets if `is_open`:
    other hosts reach the engine.
    """
    if environ.get("VLLM_SERVER_DEV_MODE") == "0":
        return "VLLM_SERVER_DEV_MODE=0 closes its routes for weights"
    if is_open and "VLLM_SERVER_DEV_MODE" not in environ:
        return "other hosts reach it, so VLLM_SERVER_DEV_MODE, which anybody may call, is left to you"
    environ.setdefault("VLLM_SERVER_DEV_MODE", "1")  # it has the routes for weights
    text = " ".join(command)
    if _CONFIG not in text:
        command += [_CONFIG, '{"backend": "unified"}']
    elif not re.search(r'"backend"\s*:\s*"unified"', text):
        return f"its command has a {_CONFIG} of its own"
    plugin = str(Path(__file__).parent / "vllm_plugin")
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [plugin, environ.get("PYTHONPATH")]))
    if environ.get("VLLM_PLUGINS"):  # vLLM loads only those
        environ["VLLM_PLUGINS"] += ",unified"
    return ""


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors(state: VersionedStateDict) -> dict[str, torch.Tensor]:
    """Return all tensors; tied ones under each of their names, as vLLM may keep a packed copy of the output layer."""
    return {name: each for name, each in state.items() if isinstance(each, torch.Tensor) and each.numel()}


@contextlib.contextmanager
def _locations(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[tuple[Any, ...]]]:
    """Yield name, dtype, shape, file and offset of each tensor. Those in no shared memory, are copied."""
    mapped, found = _shared_files(), dict[str, tuple[str, int]]()
    for name, each in tensors.items():
        start, end, offset, path = mapped[bisect(mapped, (each.data_ptr(), math.inf)) - 1]
        if start <= each.data_ptr() < end and each.is_contiguous():
            found[name] = path, offset + each.data_ptr() - start
    loose = sorted(tensors.keys() - found, key=lambda name: -tensors[name].element_size())
    with _memory_file([tensors[name] for name in loose]) as (path, offsets):
        found |= {name: (path, offset) for name, offset in zip(loose, offsets, strict=True)}
        yield [(name, _dtype(each), list(each.shape), *found[name]) for name, each in tensors.items()]


@contextlib.contextmanager
def _memory_file(tensors: Sequence[torch.Tensor], head: bytes = b"") -> Iterator[tuple[str, list[int]]]:
    """Yield the path of a file in memory that has `head` and then the tensors, and their offsets in it.

    Only this process's descriptor names it: nothing of it stays, whatever happens.
    """
    *offsets, size = accumulate((each.nbytes for each in tensors), initial=len(head))
    descriptor = os.memfd_create("unified-weights")
    try:
        os.truncate(descriptor, max(size, 1))
        memory = mmap.mmap(descriptor, 0)
        memory[: len(head)] = head
        for each, offset in zip(tensors, offsets, strict=True):
            flat = torch.frombuffer(memory, dtype=each.dtype, count=each.numel(), offset=offset)
            flat.view(each.shape).copy_(each)
        yield f"/proc/{os.getpid()}/fd/{descriptor}", offsets
    finally:
        os.close(descriptor)


def _shared_files() -> list[tuple[int, int, int, str]]:
    """Return where this process has files of shared memory mapped, by address: start, end, offset in the file, path."""
    found = [(0, 0, 0, "")]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/dev/shm/") and not path[0].endswith(" (deleted)"):
            start, end = (int(number, 16) for number in span.split("-"))
            found.append((start, end, int(offset, 16), path[0]))
    return found
