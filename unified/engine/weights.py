"""Weights of an engine: a version that its worker has received is loaded by the engine's own processes.

vLLM maps the shared memory in which the version is, through its backend `unified` (`vllm_plugin`). The engine is paused
meanwhile, and requests under way go on with the new weights.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from unified.weights.state_dict import VersionedStateDict
from unified.weights.transfer_plan import Bucket, TensorEntry

Ask = Callable[[str, Any, float], Any]
"""Function that posts to the engine: path, body, seconds; EngineError if the answer is no success."""
LOAD_WITHIN_S = 240.0
"""Time that an engine has to load a version, less than the default of `sync_weights`."""
LEAST_VLLM = (0, 28)
PLUGIN = str(Path(__file__).parent / "vllm_plugin")
_FIND_VERSION = """import importlib.util, runpy
folder = importlib.util.find_spec("vllm").submodule_search_locations[0]
print(runpy.run_path(folder + "/_version.py")["__version__"])"""
_CONFIG = "--weight-transfer-config"


class VllmWeights:
    """Loads versions into vLLM, from 0.28 on."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._is_set_up = False

    def load(self, state: VersionedStateDict) -> None:
        """Have the engine load a version; EngineError: it did not."""
        # Tied tensors go under each of their names: vLLM may keep a packed copy of the output layer.
        whole = {name: each for name, each in state.items() if isinstance(each, torch.Tensor) and each.numel()}
        deadline = time.monotonic() + LOAD_WITHIN_S
        with _locations(whole) as locations:
            for path, body in (
                *([] if self._is_set_up else [("/init_weight_transfer_engine", {"init_info": dict[str, Any]()})]),
                ("/pause?mode=keep", None),
                ("/start_weight_update", None),
                ("/update_weights", {"update_info": {"tensors": locations}}),
                ("/finish_weight_update", {"weight_version": str(state.version)}),
                ("/resume", None),
            ):
                self._ask(path, body, max(1.0, deadline - time.monotonic()))
                self._is_set_up = True


def prepare_vllm(command: list[str], environ: MutableMapping[str, str], *, is_open: bool) -> tuple[list[str], str]:
    """Return the command of a vLLM that takes weights, and why it cannot take any, or an empty text.

    What the user has set stays: another backend, or ``VLLM_SERVER_DEV_MODE``.

    Args:
        is_open: other hosts reach the engine.
    """
    text = " ".join(command)
    if _CONFIG in text and not re.search(r'"backend"\s*:\s*"unified"', text):
        return command, f"its command has a {_CONFIG} of its own"
    if environ.get("VLLM_SERVER_DEV_MODE") == "0":
        return command, "VLLM_SERVER_DEV_MODE=0 closes its routes for weights"
    if is_open and "VLLM_SERVER_DEV_MODE" not in environ:
        return command, "other hosts reach it, so VLLM_SERVER_DEV_MODE, which anybody may call, is left to you"
    script = next((word for word in command if word.rpartition("/")[2] == "vllm"), "")
    python = _interpreter(shutil.which(script) or script) if script else command[0]
    found = subprocess.run([python, "-c", _FIND_VERSION], capture_output=True, text=True, timeout=60, check=False)
    version = found.stdout.strip()
    numbers = re.findall(r"\d+", version)
    if not numbers:
        return command, f"the version of vLLM is not known ({found.stderr.strip()[-200:]})"
    if tuple(map(int, numbers[:2])) < LEAST_VLLM:
        return command, f"vLLM {version} takes no weights: 0.28 or newer does"
    environ.setdefault("VLLM_SERVER_DEV_MODE", "1")  # it has the routes for weights
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [PLUGIN, environ.get("PYTHONPATH")]))
    if environ.get("VLLM_PLUGINS"):  # vLLM loads only those
        environ["VLLM_PLUGINS"] += ",unified"
    return command if _CONFIG in text else [*command, _CONFIG, '{"backend": "unified"}'], ""


def _interpreter(program: str) -> str:
    """Return the interpreter beside a script, or in its first line, else this one."""
    if (beside := Path(program).with_name("python")).exists():
        return str(beside)
    with contextlib.suppress(OSError), open(program, "rb") as file:
        words = file.readline(4096).decode(errors="replace").removeprefix("#!").split()
        if words and words[0].startswith("/"):
            return words[-1] if words[0].endswith("/env") else words[0]
    return sys.executable


Location = tuple[str, str, list[int], str, int]
"""Name, dtype, shape, file and offset of a tensor."""


@contextlib.contextmanager
def _locations(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[Location]]:
    """Yield the locations of all tensors in files of shared memory, which are there until the context is left.

    Tensors that are in no such file, as small ones are not, are copied into one that only this process's descriptor
    names, so that nothing of it stays, whatever happens.
    """
    files = _SharedFiles()
    found = {name: files.find(each.data_ptr()) for name, each in tensors.items() if each.is_contiguous()}
    loose = [(name, each) for name, each in tensors.items() if found.get(name) is None]
    bucket = Bucket(tuple(TensorEntry(name, "", tuple(each.shape), each.nbytes) for name, each in loose), 0)
    descriptor = os.memfd_create("unified-weights")
    try:
        if loose:
            os.truncate(descriptor, bucket.nbytes)
            memory = mmap.mmap(descriptor, bucket.nbytes)
            for (name, each), offset in zip(loose, bucket.offsets, strict=True):
                flat = torch.frombuffer(memory, dtype=each.dtype, count=each.numel(), offset=offset)
                flat.view(each.shape).copy_(each)
                found[name] = f"/proc/{os.getpid()}/fd/{descriptor}", offset
        yield [
            (name, str(each.dtype).removeprefix("torch."), list(each.shape), *place)
            for name, each in tensors.items()
            if (place := found[name]) is not None
        ]
    finally:
        os.close(descriptor)


class _SharedFiles:
    """The files of shared memory that this process has mapped now."""

    def __init__(self) -> None:
        self._mapped: list[tuple[int, int, int, str]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, _, _, *path = line.split(maxsplit=5)
            if path and path[0].startswith("/dev/shm/") and not path[0].endswith(" (deleted)"):
                start, end = (int(number, 16) for number in span.split("-"))
                self._mapped.append((start, end, int(offset, 16), path[0]))

    def find(self, address: int) -> tuple[str, int] | None:
        """Return the file that is mapped at an address, and the offset in the file; None if there is none."""
        for start, end, offset, path in self._mapped:
            if start <= address < end:
                return path, offset + address - start
        return None
