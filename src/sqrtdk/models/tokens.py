"""Makes token ids: from a text through the model's tokenizer, or else at random with a seed."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sqrtdk import _files
from sqrtdk.errors import ModelError
from sqrtdk.messages import Message
from sqrtdk.models.limits import read_bytes
from sqrtdk.models.tokenizer import TokenizerError, tokenize

MAX_SHARE_UNKNOWN = 0.2  # share of unknown tokens; a text with more of them means nothing to the model
MAX_TEXT_BYTES = 16 * 2**20
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)


def embedded_text() -> str:
    """Return the text for a user who gives none: English prose, some code, some Chinese.

    Example:
        >>> len(embedded_text().splitlines()) > 35
        True
    """
    return (importlib.resources.files("sqrtdk.models") / "text.txt").read_text(encoding="utf-8")


def read_text(path: str | Path) -> str:
    """Read the file given by `--text`, UTF-8.

    Raises:
        ModelError: The file is unreadable, not regular, not UTF-8, empty, or over 16 MiB.
    """
    try:
        text = read_bytes(path, f"the text {str(path)!r}", MAX_TEXT_BYTES).decode("utf-8")
    except OSError as error:
        raise ModelError(
            Message("errors.inputs.text_unreadable", path=repr(str(path)), reason=_files.os_reason(error)),
            hint=Message("errors.hint.check_path"),
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            Message("errors.inputs.text_not_utf8", path=repr(str(path)), reason=str(error)),
            hint=Message("errors.hint.to_utf8"),
        ) from error
    if not text.strip():
        raise ModelError(
            Message("errors.inputs.text_empty", path=repr(str(path))), hint=Message("errors.hint.some_text")
        )
    return text


def tile(ids: list[int], batch: int, length: int, head: list[int], tail: list[int]) -> Tensor:
    """Cut a stream of ids into `batch` rows (B, L), each between `head` and `tail`; a short stream repeats.

    Example:
        >>> tile([5, 6, 7], batch=2, length=4, head=[1], tail=[])
        tensor([[1, 5, 6, 7],
                [1, 5, 6, 7]])
    """
    body = max(0, length - len(head) - len(tail)) if ids else 0
    stream = torch.tensor(ids, dtype=torch.long).repeat(-(-(batch * body) // max(1, len(ids))))
    first, last = (torch.tensor(part, dtype=torch.long).expand(batch, -1) for part in (head, tail))
    return torch.cat((first, stream[: batch * body].view(batch, body), last), dim=1)[:, :length]


def text_ids(directory: Path | None, text: str, *, batch: int, length: int, vocab: int) -> tuple[Tensor | None, str]:
    """Return ids (B, L) int64 of a text, from the model's own tokenizer.

    The tokenizer is read from local files only, and code of the directory never runs.

    Args:
        directory: Directory of the model; None: there is no tokenizer.
        text: The text; a short one is repeated.
        batch: Number of rows, B.
        length: Number of ids in a row, L.
        vocab: Number of ids that the model knows; a larger id is refused.

    Returns:
        The ids and a note, "" if there is nothing to say; or None and the reason.
    """
    if directory is None or not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return None, Message("premises.tokenizer.none")
    try:
        tokens = tokenize(directory, text, most=batch * length)
    except TokenizerError as error:
        return None, Message("premises.tokenizer.unusable", why=error.message)
    if not tokens.body:
        return None, Message("premises.tokenizer.no_tokens")
    if tokens.largest >= vocab:
        return None, Message("premises.tokenizer.too_large", most=tokens.largest, size=vocab)
    note = ""
    if tokens.share > MAX_SHARE_UNKNOWN:
        share, token = f"{tokens.share:.0%}", tokens.token[:40]
        note = Message("premises.inputs.unknown_tokens", share=share, token=token)
    return tile(tokens.body, batch, length, tokens.head, tokens.tail), note


def byte_ids(text: str, *, batch: int, length: int) -> Tensor:
    """Return the UTF-8 bytes of a text as ids (B, L), for a byte-level model; a short text is repeated.

    Example:
        >>> byte_ids("ab", batch=1, length=5)
        tensor([[97, 98, 97, 98, 97]])
    """
    return tile(list(text.encode("utf-8")), batch, length, [], [])


def random_ids(config: Any, *, batch: int, length: int, vocab: int, seed: int) -> Tensor:
    """Return random ids (B, L) int64, uniform over the vocabulary without the special ids that the config names.

    Args:
        config: Config of the model, whose `*_token_id` fields are left out.
        batch: Number of rows, B.
        length: Number of ids in a row, L.
        vocab: Number of ids of the vocabulary.
        seed: Seed of the generator; equal seeds give equal ids.
    """
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index", "_token_ids")):
            special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    allowed = torch.ones(vocab, dtype=torch.bool)
    allowed[[i for i in special if 0 <= i < vocab]] = False
    choices = allowed.nonzero()[:, 0] if allowed.any() else torch.arange(vocab)
    generator = torch.Generator().manual_seed(seed)
    return choices[torch.randint(len(choices), (batch, length), generator=generator)]
