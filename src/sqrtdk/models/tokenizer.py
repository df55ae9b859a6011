"""Runs an untrusted tokenizer in a separate process with limits on time and memory.

Nothing inside this process could stop a tokenizer that never ends, because its library does not check for signals.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqrtdk.errors import ModelError, short_text
from sqrtdk.models import tokenizer_process

TOKENIZER_SECONDS = 60  # to load and run; the slowest known, a conversion of sentencepiece, takes under 20
TOKENIZER_BYTES = 8 * 2**30  # of address space; the largest known tokenizers take a quarter of it
# the option that keeps a program's own folder off sys.path; Python 3.10 has only the one that also ignores PYTHON*
_OWN_FOLDER_OFF = "-P" if hasattr(sys.flags, "safe_path") else "-I"
START_SECONDS = 120  # for Python to start and to import transformers on a busy machine


class TokenizerError(ModelError):
    """The tokenizer of a directory can't be used; the text is the reason."""


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Ids of a text, and the special ids that the tokenizer puts before and after it.

    Attributes:
        head: Special ids before the text.
        body: Ids of the text.
        tail: Special ids after the text.
        largest: Largest of all ids.
        share: Share of the body that is the unknown token.
        token: The unknown token, e.g. "[UNK]"; "" if there is none.
    """

    head: list[int]
    body: list[int]
    tail: list[int]
    largest: int
    share: float = 0.0
    token: str = ""


def tokenize(directory: Path, text: str, *, most: int) -> TokenizedText:
    """Run the tokenizer of a directory on a text.

    Args:
        directory: Directory with the tokenizer's files.
        text: The text to tokenize.
        most: Largest number of body ids to keep.

    Raises:
        TokenizerError: The tokenizer can't be loaded, raises, or takes more than `TOKENIZER_SECONDS` or
            `TOKENIZER_BYTES`.
    """
    request = {
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "directory": str(directory),
        "text": text,
        "most": most,
        "seconds": TOKENIZER_SECONDS,
        "size": TOKENIZER_BYTES,
    }
    try:
        done = subprocess.run(
            [sys.executable, _OWN_FOLDER_OFF, tokenizer_process.__file__],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_SECONDS + TOKENIZER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _too_slow() from None
    except OSError as error:
        raise TokenizerError(f"no process for it: {short_text(error)}") from error
    if hasattr(signal, "SIGALRM") and done.returncode == -signal.SIGALRM:  # ended by its own alarm
        raise _too_slow()
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise TokenizerError(
            f"its process ended with {done.returncode}; it may take {TOKENIZER_BYTES // 2**30} GiB"
        ) from None
    if "error" in answer:
        raise TokenizerError(short_text(Exception(answer["error"]), 160))
    return TokenizedText(**answer)


def _too_slow() -> TokenizerError:
    return TokenizerError(f"it was stopped after {TOKENIZER_SECONDS} s")
