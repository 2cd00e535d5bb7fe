"""Tokenizers: bytes, for models from scratch, and tokenizers of transformers, with the same interface."""

from __future__ import annotations

from typing import Any, Protocol

from unified.errors import UsageError

BOS, EOS, PAD = 256, 257, 258
BYTE_VOCAB_SIZE = 259
CHARS_OF_TOKEN = 64
"""Most characters per token that are assumed: the end of a very long text is not tokenised."""


class Tokenizer(Protocol):
    """A text's tokens, as all frameworks need them."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens; a model has at least as many."""

    @property
    def pad_id(self) -> int:
        """Token for positions that do not count."""

    def tokens(self, text: str, limit: int) -> list[int]:
        """Return at least two tokens and at most `limit`."""


class ByteTokenizer:
    """Bytes of UTF-8 as tokens 0 to 255, between a token for the begin and one for the end."""

    vocab_size = BYTE_VOCAB_SIZE
    pad_id = PAD

    def tokens(self, text: str, limit: int) -> list[int]:
        return [BOS, *text[:limit].encode("utf-8", "replace"), EOS][:limit]

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens; tokens that are no bytes are left out."""
        return bytes(token for token in tokens if token < BOS).decode("utf-8", "replace")


class PretrainedTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: a `PreTrainedTokenizerBase`.

    Attributes:
        tokenizer: the given tokenizer, with a padding token.
    """

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise UsageError("the tokenizer has no token that ends a text (eos_token): give another tokenizer_name.")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)

    def tokens(self, text: str, limit: int) -> list[int]:
        """See `Tokenizer`. A text that is shorter than `limit` ends with the end token."""
        end = int(self.tokenizer.eos_token_id)
        begin = text[: limit * CHARS_OF_TOKEN].encode("utf-8", "replace").decode()  # replaces half a surrogate pair
        found: list[int] = self.tokenizer(begin, truncation=True, max_length=limit)["input_ids"]
        if len(found) < limit and found[-1:] != [end]:
            found.append(end)
        return found if len(found) > 1 else [end, end]
