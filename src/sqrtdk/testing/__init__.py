"""What tests are to ask of attention: two assertions, and a pytest plugin (`sqrtdk.testing.plugin`).

`assert_attention` audits a model as `sqrtdk check` does, `assert_same_attention` compares two as `sqrtdk diff` does.
Both are imported on first use: pytest loads the plugin in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqrtdk.testing.assertions import assert_attention as assert_attention
    from sqrtdk.testing.assertions import assert_same_attention as assert_same_attention

__all__ = ["assert_attention", "assert_same_attention"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sqrtdk.testing' has no attribute {name!r}")
    return getattr(import_module("sqrtdk.testing.assertions"), name)
