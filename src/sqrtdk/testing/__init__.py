"""Assertions on attention for tests, and a pytest plugin (`sqrtdk.testing.plugin`).

`assert_attention` audits a model as `sqrtdk check` does, `assert_laws` checks its laws, `assert_same_attention`
compares two models as `sqrtdk diff` does, and `assert_gradients` checks the backward pass of a function. All are
imported on first use, because pytest loads the plugin in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqrtdk._extras import lazy_names
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
__getattr__, __dir__ = lazy_names(__name__, _HOME)

_says_if_called(__name__)
