"""Opens a side that answers by its name: `package.module:function`, an ONNX file, the address of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sqrtdk._extras import load_extra
from sqrtdk.answers.edited import logits_of
from sqrtdk.answers.server import Server, Tokenizer
from sqrtdk.answers.sides import Function, Side, session_of
from sqrtdk.errors import INTERRUPTS, InvalidTypeError, InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.models.factory import imported_target
from sqrtdk.models.names import is_address

ONNX = ".onnx"


def open_side(given: Side | str | Callable[[list[int]], Any]) -> Side:
    """Return a side that answers.

    Args:
        given: A side; a function of token ids, see `Function`; or a name: `package.module:function`, an ONNX file,
            which onnxruntime runs, or the address of a server, which is asked as `Server` asks by default.

    Raises:
        ModelError: There is no such function or file, or it can't be opened.
        InvalidValueError: The name is of neither form.
        InvalidTypeError: It names something that can't be called.

    Example:
        >>> open_side(abs).name
        'abs'
    """
    if isinstance(given, str):
        if given.lower().endswith(ONNX):
            return session_of(given)
        if is_address(given):
            return Server(given)
        if ":" not in given:
            raise InvalidValueError(
                Message("answers.error.no_side", given=repr(given)), hint=Message("answers.hint.side")
            )
        return _function(imported_target(given), given)
    if callable(given):
        return _function(given, getattr(given, "__qualname__", type(given).__name__))
    return given


def tokenizer_of(a: nn.Module | str, revision: str | None = None) -> Tokenizer | None:
    """Return the tokenizer of a model of transformers, from local files; None if it has none.

    Args:
        a: The model, or its name.
        revision: Branch, tag or commit of a hub id.
    """
    name = a if isinstance(a, str) else getattr(getattr(a, "config", None), "name_or_path", "")
    if not name or ":" in name or name.lower().endswith(".json"):
        return None
    try:
        found: Tokenizer = load_extra("transformers", "hf").AutoTokenizer.from_pretrained(
            name, revision=revision, local_files_only=True, trust_remote_code=False
        )
    except INTERRUPTS:
        raise
    except Exception:  # files of strangers; a kind that needs a tokenizer says that there is none
        return None
    return found


def _function(target: Any, name: str) -> Function:
    if isinstance(target, nn.Module):
        target.eval()
        return Function(lambda ids: logits_of(target, [tuple(ids)]), name)
    if not callable(target):
        raise InvalidTypeError(
            Message("answers.error.not_callable", name=name, kind=type(target).__name__),
            hint=Message("answers.hint.side"),
        )
    return Function(target, name)
