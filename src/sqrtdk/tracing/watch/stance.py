"""Compiled models run eagerly while a trace is open: the compiler's stance, shared by the traces of all threads."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_KNOWN = r"Using `torch\.compile\(module\)` when there are global hooks|flex_attention called without torch\.compile"
_lock = threading.Lock()
_open = 0
_stance = ExitStack()


@contextmanager
def eager_compiler() -> Iterator[None]:
    """Let compiled functions run their Python code, until the last of the open traces ends.

    Nothing is done before the compiler has been imported: nothing is compiled then, and the import is slow.
    """
    if "torch._dynamo" not in sys.modules and "torch.nn.attention.flex_attention" not in sys.modules:
        yield
        return
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _open
    with _lock:
        if _open == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
            _stance.enter_context(_without_warnings())
        _open += 1


def _end() -> None:
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            _stance.close()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Torch warns that a global hook sees a compiled module twice, and that FlexAttention is not compiled.

    The trace knows: it is the trace that does so.
    """
    warnings.filterwarnings("ignore", message=_KNOWN)
    rule = warnings.filters[0]
    try:
        yield
    finally:
        rules: Any = warnings.filters
        if rule in rules:
            rules.remove(rule)


@contextmanager
def steps_seen() -> Iterator[None]:
    """Without the fast path of nn.MultiheadAttention: one operation, of whose q, k and v nothing is seen."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
