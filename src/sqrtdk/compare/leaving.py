"""Whether what two attentions do otherwise cancels before it leaves their modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sqrtdk.compare.entering import Blind, exact_of
from sqrtdk.compare.first_module import gap_of, level_of, matched
from sqrtdk.compare.modules import Kept, ModuleStep, Place
from sqrtdk.compare.sides import Side
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.watch.recorder import unseen

_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of its size


def leaves_alike(a: Side, b: Side, pairs: Sequence[tuple[Place, Place]], blind: Blind) -> list[bool]:
    """Whether modules get the same and give the same, whatever their attentions do on the way.

    `(weights @ v) * sigmoid(lse - sink)` is attention with a sink: other weights, and the same output. A module that
    gives nothing but zeros, or fewer rows than it gets, as one that returns the last token, tells nothing. Nor does one
    whose output does not change with its attention, as `x + proj(heads)` where `proj` begins as zero.

    Args:
        a: A.
        b: B.
        pairs: places of modules of A and of B.
        blind: rows that see no key on one side.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None:
        return [False] * len(pairs)
    steps = [{step.place: step for step in one.steps} for one in exact if one is not None]
    allowed = level_of(exact, 0.0)[0]
    alike = []
    for place_a, place_b in pairs:
        one, other = steps[0].get(place_a), steps[1].get(place_b)
        if one is None or other is None or not one.gives or not _rows(one.gives[0]) >= _rows_taken(one):
            alike.append(False)
            continue
        takes, gives = matched(one.takes, other.takes), matched(one.gives[:1], other.gives)
        same = [bool(pairs) and all(gap_of(x, y, blind) <= allowed for x, y in pairs) for pairs in (takes, gives)]
        alike.append(all(same) and bool(one.gives[0].values.any()) and _reacts(a, one, blind, allowed))
    return alike


def _reacts(a: Side, step: ModuleStep, blind: Blind, allowed: float) -> bool:
    """Whether what a module gives changes where its attention gives something else."""
    call = next((call for call in a.calls if (call.site, call.index) == step.place), None)
    if call is None or call.output is None or a.again is None:
        return False
    a.forwards += 1
    other = Disturbed(call.output)
    try:
        with other:
            run = a.again(True, None)
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    gives = [own.gives[:1] for own in run.steps if own.place == step.place]
    return other.done and any(gap_of(x, y, blind) > allowed for own in gives for x, y in matched(step.gives[:1], own))


class Disturbed(TorchFunctionMode):
    """Scales the first result that has the numbers of an attention's output, another factor for every entry.

    Attributes:
        done: whether it came by.
    """

    def __init__(self, output: Tensor) -> None:
        """
        Args:
            output: of the attention, in any layout: it is known by its size and two sums.
        """
        super().__init__()
        self.done = False
        self._numel, self._sums = output.numel(), _sums(output)
        self._off = _CLOSE[output.dtype] if output.dtype in _CLOSE else _CLOSE[torch.float32]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple) and result else result
        if self.done or type(first) is not Tensor or not first.is_floating_point() or not self._is_it(first):
            return result
        self.done = True
        factor = torch.linspace(0.5, 1.5, first.numel(), dtype=first.dtype, device=first.device).view(first.shape)
        other = first * factor
        return (other, *result[1:]) if isinstance(result, tuple) else other

    def _is_it(self, tensor: Tensor) -> bool:
        if tensor.numel() != self._numel or not self._numel:
            return False
        return all(
            abs(one - other) <= self._off * max(abs(other), self._sums[1])
            for one, other in zip(_sums(tensor), self._sums, strict=True)
        )


def _sums(tensor: Tensor) -> tuple[float, float]:
    """The mean of the entries, and their root mean square."""
    with torch.no_grad(), unseen():
        values = tensor.detach().double()
        return float(values.mean()), float(values.square().mean().sqrt())


def _rows(kept: Kept) -> int:
    return math.prod(kept.shape[:-1])


def _rows_taken(step: ModuleStep) -> int:
    """Rows of its main argument; of ids, one each."""
    main = step.takes[0] if step.takes else None
    return 0 if main is None else _rows(main) if main.values.is_floating_point() else math.prod(main.shape)
