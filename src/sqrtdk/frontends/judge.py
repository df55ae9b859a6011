"""Whether our outputs of a foreign program are the framework's own, up to rounding.

No conclusion is drawn from a program that gives other outputs than its framework. Only rounding may differ, and its
size is measured: the program also runs in float64, and the framework may differ from our outputs by a small factor
times what our outputs differ from those in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_OTHER_ORDER = 16.0  # factor by which rounding may grow when the same sums are taken in another order
_LAST_DIGITS = 8.0  # units of eps times the largest element: needed where our own rounding is small by chance


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
