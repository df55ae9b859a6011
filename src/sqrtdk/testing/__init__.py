"""Assertions on attention for tests, and a pytest plugin (`sqrtdk.testing.plugin`).

`assert_attention` audits a model as `sqrtdk check` does, `assert_laws` checks its laws, `assert_same_attention`
compares two models as `sqrtdk diff` does, and `assert_gradients` checks the backward pass of a function. All are
imported on first use, because pytest loads the plugin in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqrtdk._leads import says_if_called as _says_if_called

if TYPE_CHECKING:
    from sqrtdk.testing.assertions import assert_attention as assert_attention
    from sqrtdk.testing.assertions import assert_same_attention as assert_same_attention
    from sqrtdk.testing.gradients import assert_gradients as assert_gradients
    from sqrtdk.testing.laws import assert_laws as assert_laws

_HOME = {
    "assert_attention": "sqrtdk.testing.assertions",
    "assert_gradients": "sqrtdk.testing.gradients",
    "assert_laws": "sqrtdk.testing.laws",
    "assert_same_attention": "sqrtdk.testing.assertions",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        import_module("sqrtdk._guesses").no_attribute(__name__, name, _HOME)
    return getattr(import_module(_HOME[name]), name)


_says_if_called(__name__)
