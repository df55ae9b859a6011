"""Whether our outputs of a foreign program are the framework's own, up to rounding.

No conclusion is drawn from a program that gives other outputs than its framework. Only rounding may differ, and its
size is measured: the program also runs in float64, and the framework may differ from our outputs by a small factor
times what our outputs differ from those in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message

_OTHER_ORDER = 16.0  # factor by which rounding may grow when the same sums are taken in another order
_LAST_DIGITS = 8.0  # units of eps times the largest element: needed where our own rounding is small by chance


def judge_outputs(
    name: str,
    framework: str,
    theirs: Sequence[Tensor],
    ours: Sequence[Tensor],
    exact: Sequence[Tensor],
    again: Callable[[], Sequence[Tensor]],
    random_hint: Message,
) -> None:
    """Raise an error unless our outputs of a program are the framework's, up to rounding.

    Args:
        name: Name of the program.
        framework: Name and version of its framework, as "JAX 0.10.2".
        theirs: The framework's outputs.
        ours: Our outputs in the program's dtypes.
        exact: Our outputs in float64.
        again: Runs the program in its framework once more.
        random_hint: What to do if its outputs differ from run to run.

    Raises:
        ModelError: More than rounding differs; the text says whether the framework's own outputs differ in each run.
    """
    for at, (right, made, wide) in enumerate(zip(theirs, ours, exact, strict=True)):
        if right.is_floating_point() or right.is_complex():
            off = beyond_rounding(right, made, wide)
        else:
            off = None if len(theirs) > 1 or torch.equal(right.long(), made.long()) else float("nan")
        if off is None:
            continue
        repeated = again()[at]
        if not torch.equal(*(x.nan_to_num() if x.is_floating_point() else x for x in (repeated, right))):
            raise ModelError(Message("frontends.random", name=name), hint=random_hint)
        raise ModelError(
            Message("frontends.other_outputs", name=name, gap=f"{off:.3g}", framework=framework),
            hint=Message("frontends.hint.report"),
        )


def beyond_rounding(theirs: Tensor, ours: Tensor, exact: Tensor) -> float | None:
    """Return the largest difference of two results, or None if every row differs by rounding only.

    A row that sees no key is NaN or infinite. Both results must have such elements at the same places.

    Args:
        theirs: the framework's result.
        ours: our result in the program's dtypes.
        exact: our result in float64.

    Example:
        >>> exact = torch.linspace(0, 1, 8, dtype=torch.float64)
        >>> ours = exact.float()
        >>> beyond_rounding(ours, ours, exact), beyond_rounding(ours.where(ours < 1, 3.0), ours, exact)
        (None, 2.0)
    """
    if theirs.shape != ours.shape:
        return float("inf")
    if not theirs.numel():
        return None
    shape = (-1, theirs.shape[-1]) if theirs.dim() else (1, 1)
    right, made, wide = (_plain(tensor).reshape(shape if not theirs.is_complex() else (-1, 2)) for tensor in
                         (theirs, ours, exact))  # fmt: skip
    seen = made.isfinite()
    if not torch.equal(seen, right.isfinite()):
        return float("nan")
    size = wide.abs().nan_to_num(0.0, 0.0).max()
    rounded = (made - wide).abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)
    # A row whose rounding is small by chance gets the tolerance of the median row.
    allowed = _OTHER_ORDER * rounded.clamp(min=float(rounded.median()))
    allowed = allowed + _LAST_DIGITS * torch.finfo(theirs.dtype).eps * size
    off = (right - made).abs().where(seen, 0.0)
    return float(off.max()) if bool((off > allowed).any()) else None


def _plain(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(torch.complex128)) if tensor.is_complex() else tensor.double()
