"""Document 5's short Python examples, under the aliases and with our own names.

Each is as it stands, but for the places that it names. What comes before and after an example is the test's; so is the
`torch.save` of the one that saves, as torch's cannot be called as it stands there.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unified import compat
from unified.data import EmbeddedCoordinator


@pytest.fixture(params=["dtruntime", "unified"])
def library(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What has the three classes."""
    if request.param == "unified":
        from unified import checkpoint, data

        yield SimpleNamespace(
            CheckpointManager=checkpoint.CheckpointManager,
            DatasetRegistry=data.DatasetRegistry,
            TrainingOrchestrator=data.TrainingOrchestrator,
        )
        return
    compat.install()
    try:
        yield importlib.import_module("dtruntime")
    finally:
        compat.uninstall()


async def execute(block: str, **names: Any) -> dict[str, Any]:
    """The names that a block leaves behind; it may await."""
    code = compile(textwrap.dedent(block), "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    outcome = eval(code, names)
    if inspect.iscoroutine(outcome):
        await outcome
    return names


# What the document's first block of each class calls it with: signatures, and no code.

SIGNATURES = {
    "DatasetRegistry": ["coordinator_url"],
    "CheckpointManager": ["storage_path", "backend"],
    "TrainingOrchestrator": ["worker_id", "coordinator_url", "world_size", "rank"],
}

# `DatasetRegistry`

REGISTER = """
    registry.register(
        "imagenet",
        "/data/imagenet",
        "parquet",
        total_samples=1_281_167,
        shard_size=10_000,
        shuffle=True,
        seed=42
    )
"""

GET_SHARD = """
    files = registry.get_shard("imagenet", worker_rank=0, epoch=0)
    # Returns: ["/data/imagenet/shard_0.parquet", "/data/imagenet/shard_5.parquet", ...]
"""

# `CheckpointManager`

SAVE = """
    import torch

    # Serialize model
    state_dict = model.state_dict()
    data = torch.save(state_dict)  # Returns bytes

    # Save asynchronously (non-blocking)
    await manager.save_async(data, step=1000)
"""

LOAD = """
    data = await manager.load(step=1000)
    state_dict = torch.load(io.BytesIO(data))
    model.load_state_dict(state_dict)
"""

LIST = """
    steps = await manager.list_checkpoints()
    # Returns: [100, 200, 300, 400, 500]
    latest_step = steps[-1]
"""

# `TrainingOrchestrator`

REGISTER_WORKER = """
    assigned_id = await orchestrator.register_worker(
        ip="192.168.1.10",
        port=8080,
        gpu_count=8,
        memory_bytes=512 * 1024**3  # 512 GB
    )
"""

BARRIER = """
    # All workers must reach this point before any continue
    await orchestrator.wait_barrier("start_epoch_5")

    # Training continues after all workers arrive
    for batch in dataloader:
        train_step(model, batch)
"""


@pytest.mark.parametrize("name", SIGNATURES)
def test_classes_take_the_documents_arguments(library: Any, name: str) -> None:
    has = inspect.signature(getattr(library, name)).parameters
    assert list(has)[: len(SIGNATURES[name])] == SIGNATURES[name], "in this order, and by these names"


async def test_registry(library: Any, tmp_path: Path) -> None:
    """The document's number of samples, in 13 files; one worker, so that all of them are its own."""
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "imagenet").mkdir()
    rest = 1_281_167
    for number in range(13):
        table = pyarrow.table({"x": pyarrow.nulls(min(rest, 100_000))})
        pyarrow.parquet.write_table(table, tmp_path / f"imagenet/shard_{number}.parquet")
        rest -= table.num_rows
    registry = library.DatasetRegistry(EmbeddedCoordinator(), rank=0, world_size=1)
    await execute(REGISTER.replace("/data", str(tmp_path)), registry=registry)
    files = (await execute(GET_SHARD, registry=registry))["files"]
    assert sorted(files) == sorted(str(path) for path in (tmp_path / "imagenet").iterdir())
    assert [(dataset.num_shards, dataset.seed) for dataset in registry.datasets()] == [(129, 42)]


async def test_checkpoints(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    import torch

    def save(state: object, file: Any = None, _save: Any = torch.save) -> bytes | None:
        """The document has `torch.save` return bytes where it is given no file, which torch's does not."""
        if file is not None:
            _save(state, file)
            return None
        buffer = io.BytesIO()
        _save(state, buffer)
        return buffer.getvalue()

    monkeypatch.setattr(torch, "save", save)
    manager = library.CheckpointManager(str(tmp_path / "checkpoints"))
    model = torch.nn.Linear(2, 2)
    names = {"manager": manager, "model": model, "io": io, "torch": torch}
    try:
        await execute(SAVE, **names)
        await manager.save_async(b"later", step=1500)
        before = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        await execute(LOAD, **names)
        assert torch.equal(model.weight, before)
        assert (await execute(LIST, **names))["latest_step"] == 1500
    finally:
        manager.close()


async def test_orchestrator(library: Any) -> None:
    trained: list[int] = []
    async with library.TrainingOrchestrator(
        worker_id="worker-0", coordinator_url="local", world_size=1, rank=0
    ) as orchestrator:
        names = {
            "orchestrator": orchestrator,
            "dataloader": [1, 2],
            "train_step": lambda model, batch: trained.append(batch),
            "model": None,
        }
        assert (await execute(REGISTER_WORKER, **names))["assigned_id"] == "worker-0"
        await execute(BARRIER, **names)
    assert trained == [1, 2]
