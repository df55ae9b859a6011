"""Steps whose operation nobody reads, of which only the shapes of the results are known.

    y = operator(x)     an operator of another library, a branch: nobody knows what it does to x

Such a step is one operator of torch under the operation's own name, in the namespace of its framework. A trace then
says what it says of every operator that it can't follow: an attention is judged if its formula does not depend on the
step, and is `unmeasured` by the operation's name if it does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_OPAQUE_SCHEMA = "(Tensor[] reads, int step) -> Tensor[]"
_NO_NAME = re.compile(r"\W+")
Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


@dataclass(eq=False)
class UnreadStep:
    """A step that is not read.

    Attributes:
        namespace: Name of the framework, as "onnx".
        name: Name of the operation.
        results: Shapes and dtypes of its results, if they are known.
        compute: Computes the results from what the step reads, in the framework itself; None if it can't.
    """

    namespace: str
    name: str
    results: Shapes = ()
    compute: Callable[[Sequence[Tensor]], list[Tensor]] | None = None

    def __call__(self, *reads: Tensor) -> list[Tensor]:
        """Return the results: on the meta device by their shapes, else the framework's own.

        Raises:
            RuntimeError: The step is asked for values, and the framework can't compute them.
        """
        _STEPS[id(self)] = self
        made: list[Tensor] = _operator(_NO_NAME.sub("_", self.namespace), _NO_NAME.sub("_", self.name))(
            list(reads), id(self)
        )
        return made


_STEPS: WeakValueDictionary[int, UnreadStep] = WeakValueDictionary()


@cache
def _operator(namespace: str, name: str) -> Any:
    """Return torch's operator that stands for the operation."""
    name = name if name.isidentifier() else f"op_{name}"
    torch.library.define(f"{namespace}::{name}", _OPAQUE_SCHEMA)
    torch.library.impl(f"{namespace}::{name}", "CompositeExplicitAutograd", _run)
    return getattr(getattr(torch.ops, namespace), name)


def _run(reads: list[Tensor], step: int) -> list[Tensor]:
    of = _STEPS[step]
    if all(tensor.is_meta for tensor in reads) and of.results:
        return [torch.empty(list(shape), dtype=dtype, device="meta") for shape, dtype in of.results]
    if of.compute is None:
        raise RuntimeError(f"{of.name} is not read, and is not computed without its framework")
    return of.compute(reads)
