"""A stranger's tokenizer, run in a process of its own, which ends with its result or with its time.

Nothing within this process could stop one that takes for ever: it runs in a library that looks for no signal.
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

TOKENIZER_SECONDS = 60  # to load and to run; the slowest known, a conversion of sentencepiece, takes under 20
TOKENIZER_BYTES = 8 * 2**30  # of address space; the largest known take a quarter of it
START_SECONDS = 120  # for Python to start and to import transformers on a busy machine


class TokenizerError(ModelError):
    """The tokenizer of a directory could not be used; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of a text between the special ids that the tokenizer puts before and behind it.

    Attributes:
        head: before it.
        body: the text.
        tail: behind it.
        largest: of all ids.
        share: of the body that stands for what the vocabulary lacks.
        token: the one that does, "[UNK]"; "" where there is none.
    """

    head: list[int]
    body: list[int]
    tail: list[int]
    largest: int
    share: float = 0.0
    token: str = ""


def tokenize(directory: Path, text: str, *, most: int) -> Tokens:
    """Run the tokenizer of a directory on a text.

    Args:
        directory: Holds the tokenizer's files.
        text: To be tokenized.
        most: Ids of the body that are kept.

    Raises:
        TokenizerError: It can't be loaded, raises, takes over `TOKENIZER_SECONDS`, or over
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
            [sys.executable, "-P", tokenizer_process.__file__],
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
    if hasattr(signal, "SIGALRM") and done.returncode == -signal.SIGALRM:
        raise _too_slow()
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise TokenizerError(
            f"its process ended with {done.returncode}; it may take {TOKENIZER_BYTES // 2**30} GiB"
        ) from None
    if "error" in answer:
        raise TokenizerError(short_text(Exception(answer["error"]), 160))
    return Tokens(**answer)


def _too_slow() -> TokenizerError:
    return TokenizerError(f"it was stopped after {TOKENIZER_SECONDS} s")
