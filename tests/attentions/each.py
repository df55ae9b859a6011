"""Several values of an argument in one test: both devices, every scale. What fails says with which of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sqrtdk.errors import add_note

Test = Callable[..., None]


def each(names: str, values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with one value after the other; `pytest.mark.parametrize` would make a test of each.

    Every run starts from the seed that a test starts from. Several names take tuples of values.

    Example:
        >>> seen = []
        >>> each("scale, meta", [(0.25, False), (1.0, True)])(lambda scale, meta: seen.append((scale, meta)))()
        >>> seen
        [(0.25, False), (1.0, True)]
    """
    listed = [name.strip() for name in names.split(",")]
    rows = [row if len(listed) > 1 else (row,) for row in values]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def over_values(*args: Any, **kwargs: Any) -> None:
            for row in rows:
                arguments = dict(zip(listed, row, strict=True))
                torch.manual_seed(0)
                try:
                    test(*args, **kwargs, **arguments)
                except BaseException as error:
                    add_note(error, f"with {', '.join(f'{name} = {value!r}' for name, value in arguments.items())}")
                    raise

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        over_values.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return over_values

    return decorate
