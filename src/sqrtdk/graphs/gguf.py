"""Reads the metadata of a GGUF file that a user names: a regular file of a size that is read.

What the bytes mean is in `sqrtdk.frontends.ggml.metadata`, which the run of a file in llama.cpp uses as well.

    {"general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32, ...}
"""

from __future__ import annotations

import os

from sqrtdk.errors import ModelError, short_text
from sqrtdk.frontends.ggml.metadata import Value as Value
from sqrtdk.frontends.ggml.metadata import metadata_entries
from sqrtdk.models.limits import check_file

MAX_GGUF_BYTES = 2**44


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Value]:
    """Return the names and values of a little-endian GGUF file of version 2 or 3, without its arrays.

    Args:
        path: The file.

    Returns:
        Numbers and texts by their keys.

    Raises:
        ModelError: The file can't be read, is no regular file, is no GGUF file, or exceeds the size above or one of the
            limits of `sqrtdk.frontends.ggml.metadata`.
    """
    shown = str(path)[:200]
    try:
        check_file(os.fspath(path), f"the file {shown!r}", MAX_GGUF_BYTES)
    except OSError as error:
        raise ModelError(f"can't read {shown!r}: {short_text(error)}", hint="Check the path.") from error
    return metadata_entries(path)
