"""The rows of a run, for training and held out, and batches of rows that are texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from unified.lazy import needed_by
from unified.training.rows import parse_parts, write_rows

if TYPE_CHECKING:
    from datasets import Dataset

    from unified.training.run import TrainingRun
    from unified.training.tokenizer import Tokenizer

FEWEST_ROWS = 20
"""A dataset of fewer rows holds none out."""
MOST_HELD_OUT = 1000
"""Most rows that are held out by default, so that evaluations stay short."""
IGNORED = -100
"""Label of a position without a target."""


class RunRows(NamedTuple):
    """Rows of a run, in a file of the node that all its ranks map."""

    form: str
    train: Dataset
    held_out: Dataset
    """May have no row."""


def load_rows(run: TrainingRun, allowed: Sequence[str] = ("text",)) -> RunRows:
    """Read the datasets of a run, and return their rows. A collective.

    Args:
        allowed: names of the forms that rows may have.

    Raises:
        DatasetError: a row is invalid, or there is none.
        StorageError: the bucket cannot be read.
    """
    arguments, folder = run.arguments, run.scratch / "dataset"

    def write() -> tuple[str, str]:
        field, parts = arguments.dataset_text_field, parse_parts(run.options.dataset_uri)
        form = write_rows(parts, folder / "train.arrow", text_field=field, allowed=allowed)
        if arguments.eval_dataset_uri:
            parts = parse_parts(arguments.eval_dataset_uri)
            write_rows(parts, folder / "eval.arrow", text_field=field, allowed=(form,))
        return form, str(folder)

    with needed_by("a dataset"):
        from datasets import Dataset
    form, place = run.work.on_each_node(write)
    rows = Dataset.from_file(f"{place}/train.arrow")
    if arguments.eval_dataset_uri:
        return RunRows(form, rows, Dataset.from_file(f"{place}/eval.arrow"))
    every = round(1 / arguments.eval_fraction) if arguments.eval_fraction and len(rows) >= FEWEST_ROWS else 0
    if every and "eval_fraction" not in arguments.given:
        every = max(every, math.ceil(len(rows) / MOST_HELD_OUT))
    return RunRows(form, *split_rows(rows, every))


def split_rows(rows: Dataset, every: int) -> tuple[Dataset, Dataset]:
    """Return rows to train on, and held-out rows: the last one of every `every` rows; 0: none is held out."""
    import numpy as np

    if not every:
        return rows, rows.select([])
    is_held_out = np.arange(1, len(rows) + 1) % every == 0
    return rows.select(np.flatnonzero(~is_held_out)), rows.select(np.flatnonzero(is_held_out))


class TokenRows:
    """Texts as tokens, computed on access: a dataset of `torch.utils.data`."""

    def __init__(self, rows: Dataset, tokenizer: Tokenizer, max_seq_len: int) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_seq_len = max_seq_len

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self._tokenizer.tokens(self._rows[index]["text"], self._max_seq_len)}


class PaddingCollator:
    """Makes batches of rows of unequal length: padded on the right to the longest, without targets there."""

    def __init__(self, pad_id: int) -> None:
        self._pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, each of shape (rows, longest)."""
        import torch

        tokens = [torch.tensor(row["input_ids"]) for row in rows]

        def padded(parts: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

        return {
            "input_ids": padded(tokens, self._pad_id),
            "attention_mask": padded([torch.ones_like(each) for each in tokens], 0),
            "labels": padded(tokens, IGNORED),
        }
