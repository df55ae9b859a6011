"""Program of the process that runs an untrusted tokenizer: a JSON request on stdin, a JSON answer on stdout.

It is run as a file, and imports neither sqrtdk nor torch, which tokenizers do not need: this halves its start time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Any


def ids_between(directory: str, text: str, most: int, seconds: int, size: int) -> dict[str, Any]:
    """Return the ids of a text.

    A signal ends the process if a limit is passed.

    Args:
        directory: Directory of the tokenizer.
        text: The text.
        most: Largest number of ids to return.
        seconds: Limit of CPU time.
        size: Limit of address space, in bytes.

    Returns:
        The ids, the special ids before and after them, and the largest of all ids, by name.
    """
    from transformers import AutoTokenizer

    if sys.platform != "win32":  # there only the parent's timeout applies
        import resource

        with contextlib.suppress(OSError, ValueError):  # a lower limit is set already, or the system has none
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    ids: list[int] = tokenizer(text)["input_ids"]
    special = set(tokenizer.all_special_ids)
    head = ids[:1] if ids and ids[0] in special else []
    tail = ids[-1:] if len(ids) > 1 and ids[-1] in special else []
    body = ids[len(head) : len(ids) - len(tail)]
    number, token = _unknown(tokenizer)
    shortened = body[:most]
    share = sum(i == number for i in shortened) / max(len(shortened), 1)
    return {
        "head": head,
        "body": shortened,
        "tail": tail,
        "largest": max(ids, default=0),
        "share": share,
        "token": token,
    }


def _unknown(tokenizer: Any) -> tuple[int | None, str]:
    """Return id and text of the unknown token; (None, "") if there is none."""
    if tokenizer.unk_token_id is not None:
        return tokenizer.unk_token_id, str(tokenizer.unk_token)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    token = getattr(model, "unk_token", None)  # for tokenizer files that do not list their special tokens
    return (None, "") if not isinstance(token, str) else (tokenizer.convert_tokens_to_ids(token), token)


def answer_request() -> None:
    """Read one request (JSON) from stdin, and write the ids of its text or the error to stdout as JSON.

    This is the main function of the process in which an untrusted tokenizer runs.
    """
    answer = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not reach stdout
    request = json.load(sys.stdin)
    sys.path[:] = request.pop("path")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        result = ids_between(**request)
    except BaseException as error:  # a tokenizer may raise anything on untrusted files
        result = {"error": f"{type(error).__name__}: {error}"}
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    answer_request()
