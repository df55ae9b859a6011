"""Refuses requests before they cost anything: sizes that fit nowhere, seeds that torch lacks, files without an end."""

from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from pathlib import Path

from sqrtdk.errors import InvalidValueError, ModelError
from sqrtdk.messages import Message

MAX_ELEMENTS = 2**26  # in one generated input: half a GiB of ids, or 400 images of 224 x 224
SEEDS = (-(2**63), 2**64 - 1)  # range of torch.manual_seed


def check_seed(seed: int) -> None:
    """Refuse a seed that torch does not take.

    Raises:
        InvalidValueError: The seed is not in the range `SEEDS`.

    Example:
        >>> check_seed(2**64)
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: seed 18446744073709551616 is not from -2^63 to 2^64 - 1
        Hint: Give a smaller number.
    """
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise InvalidValueError(Message("errors.options.seed", seed=seed), hint=Message("errors.hint.smaller_number"))


def check_sizes(batch: int, seq_len: int | None) -> None:
    """Check that there is at least one row and one token.

    Raises:
        InvalidValueError: `batch` or `seq_len` is below 1.
    """
    if batch < 1 or (seq_len is not None and seq_len < 1):
        raise InvalidValueError(
            Message("errors.options.sizes", batch=batch, seq_len=str(seq_len)), hint=Message("errors.hint.positive")
        )


def check_elements(name: str, shape: Sequence[int]) -> None:
    """Check that an input to be made has no empty dimension, and at most `MAX_ELEMENTS` elements.

    Raises:
        InvalidValueError: It has.

    Example:
        >>> check_elements("input_ids", (2**13, 2**14))
        Traceback (most recent call last):
        sqrtdk.errors.InvalidValueError: input_ids (8192, 16384) has 134217728 elements; at most 67108864 are made
        Hint: Give a smaller --batch or --seq-len, or --input FILE.safetensors.
    """
    shape = tuple(shape)
    if min(shape) < 1:
        raise InvalidValueError(
            Message("errors.inputs.made_empty", name=name, shape=str(shape)), hint=Message("errors.hint.config_sizes")
        )
    if math.prod(shape) > MAX_ELEMENTS:
        raise InvalidValueError(
            Message(
                "errors.inputs.too_large", name=name, shape=str(shape), elements=math.prod(shape), most=MAX_ELEMENTS
            ),
            hint=Message("errors.hint.smaller_inputs"),
        )


def check_file(path: str | Path, name: str, limit: int) -> None:
    """Check that a file is regular and not too large; a device or a pipe may have no end.

    Args:
        path: The file.
        name: What it is, for the error.
        limit: Largest size, in bytes.

    Raises:
        OSError: The file can't be inspected.
        ModelError: It is another kind of file, or larger.
    """
    status = Path(path).stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(Message("errors.files.not_regular", name=name), hint=Message("errors.hint.copy_content"))
    if status.st_size > limit:
        raise ModelError(
            Message("errors.files.too_large", name=name, size=status.st_size, limit=limit),
            hint=Message("errors.hint.smaller_file"),
        )


def read_bytes(path: str | Path, name: str, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: The file can't be read.
        ModelError: See `check_file`.
    """
    check_file(path, name, limit)
    with open(path, "rb") as file:
        content = file.read(limit + 1)  # one byte more, because files in /proc report a size of 0
    if len(content) > limit:
        raise ModelError(
            Message("errors.files.over_limit", name=name, limit=limit), hint=Message("errors.hint.smaller_file")
        )
    return content
