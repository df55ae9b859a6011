"""Splits what a side adds to its logits into a bias and a fill of hidden keys, by what the other side knows.

One tensor may hold both. A tensor with 0 and -5 below the diagonal may be a bias, or a causal mask that lets some
weight through. A bias that was added to minus infinity is lost. The sum itself is not changed; it is read in the
other side's terms:

* bias + fill * hidden, where the fill is one number. This needs another side that hides keys, or that adds only 0 and
  one negative number. The bias is zero, a multiple of the other side's, or straight lines (ALiBi).
* At keys that are hidden for good the bias can't be known. It is taken to be the other side's if both agree on the
  keys that they share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.numbers import CONSTANT_TOLERANCE, single_ratio, times
from sqrtdk.masks.band import distances

ZERO_WEIGHT_FILL = -5e3  # exp(-5000) is 0: a key with this fill takes no weight next to any logit that an attention has
ALIBI = "alibi"


def split_alike(a: Formula, b: Formula, off: float = CONSTANT_TOLERANCE) -> tuple[Formula, Formula]:
    """Return both formulas, each with its bias and its fill separated by what the other side knows.

    Args:
        a: formula of A.
        b: formula of B.
        off: error allowed in numbers, relative to the largest, in the coarser dtype of both sides.

    Example:
        >>> lower = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
        >>> _, b = split_alike(Formula(visible=lower), Formula(bias=torch.where(lower, 0.0, -5.0)))
        >>> b.bias, b.fill, bool((b.visible == lower).all())
        (None, -5.0, True)
    """
    a, b = _split_by_other(a, b, off), _split_by_other(b, a, off)
    a, b = _completed(a, b), _completed(b, a)
    return _with_alibi_named(a, off), _with_alibi_named(b, off)


def common_keys(a: Formula, b: Formula) -> Tensor | None:
    """Return booleans, True where both sides may give a key weight; None if they may everywhere.

    The shape broadcasts to (B, Hq, L, S).
    """
    one, other = (None if _lets_through(x) else x.visible for x in (a, b))
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _lets_through(formula: Formula) -> bool:
    # A fill of -5 or -100 leaves some weight at hidden keys; -inf and -1e4 leave none.
    return math.isfinite(formula.fill) and formula.fill * formula.fill_by > ZERO_WEIGHT_FILL


def _split_by_other(own: Formula, other: Formula, off: float) -> Formula:
    """Return the formula with a bias of its own and a fill, if the other side hides keys and this one hides none."""
    shown = _visible_keys(other)
    if own.bias is None or own.visible is not None or shown is None or bool(shown.all()):
        return own
    added, seen = torch.broadcast_tensors(four_axes(own.bias), four_axes(shown))  # type: ignore[no-untyped-call]
    near = off * float(added.abs().max())
    for base in _biases(added, seen, other):
        rest = added - base
        # The fill is the median where the other side hides keys: a few keys that differ don't move it.
        fill = float(rest[~seen].median())
        hidden = (rest - fill).abs() <= near
        # Every entry must be bias alone or bias + fill, and the fill clearly negative.
        plain = bool((hidden | (rest.abs() <= near)).all()) and fill < -2 * near
        # Most of the hidden keys must be hidden on the other side too; otherwise this is another pattern, a bias.
        if plain and not bool(hidden.all()) and 2 * int((hidden & ~seen).sum()) > int(hidden.sum()):
            bias = torch.where(hidden, added - fill, added)
            visible = _distinct(~hidden)
            named = replace(own, visible=visible, mask=other.mask, fill=fill, fill_by=own.bias_by, fill_added=True)
            if bool((bias.abs() <= near).all()):
                return replace(named, bias=None, bias_by=1.0)
            return replace(named, bias=_distinct(bias))
    return own


def _visible_keys(formula: Formula) -> Tensor | None:
    """Return the visible keys. A bias of only 0 and one negative number counts as a mask, if the side has no other."""
    if formula.visible is not None or formula.bias is None:
        return formula.visible
    lowest = formula.bias.min()
    two = bool(((formula.bias == 0) | (formula.bias == lowest)).all()) and float(lowest) < 0
    return formula.bias == 0 if two else None


def _biases(added: Tensor, seen: Tensor, other: Formula) -> Iterator[Tensor]:
    """Yield candidates for the bias in a sum: zero, a multiple of the other side's, a straight line for each head."""
    yield torch.zeros((), dtype=torch.float64)
    if other.bias is not None and other.bias.shape[-1] == added.shape[-1]:
        like = four_axes(other.bias)
        yield like * _slope(added, like, seen).nanmedian()
    yield from _straight(added, seen)


def _straight(added: Tensor, seen: Tensor) -> Iterator[Tensor]:
    """Yield lines through the diagonal or the lower right diagonal: symmetric in i - j, linear in i - j, by key."""
    rows, keys = added.shape[-2:]
    if rows == 1:
        return
    apart = distances(rows, keys, added.device).double()
    for line in (
        apart.abs(),
        (apart + keys - rows).abs(),
        apart,
        -torch.arange(keys, device=added.device).expand(rows, -1),
    ):
        yield line * _slope(added, line, seen).nan_to_num()


def _slope(added: Tensor, line: Tensor, seen: Tensor) -> Tensor:
    """Return the slope of the line in each head, (B, H, 1, 1): the median over visible keys where it is not 0."""
    times_line = torch.where(seen & (line != 0), added / line, torch.nan)
    return times_line.flatten(2).nanmedian(-1).values[..., None, None]


def _completed(own: Formula, other: Formula) -> Formula:
    """Return the formula with the other side's bias at keys that are hidden for good, where its own is lost."""
    if own.bias is None or other.bias is None or own.visible is None or _lets_through(own):
        return own
    visible, mine, like = four_axes(own.visible), four_axes(own.bias), times(four_axes(other.bias), other.bias_by)
    assert isinstance(like, Tensor)
    # A bias that was lost reads as 0 at every hidden key: (scores + bias) + -inf is -inf.
    if mine.shape[-1] != like.shape[-1] or bool((mine.masked_fill(visible, 0.0) != 0).any()):
        return own
    both = common_keys(own, other)
    assert both is not None
    by = single_ratio(torch.where(both, mine, 0.0), torch.where(both, like, 0.0))
    return replace(own, bias=_distinct(torch.where(visible, mine, like / (by or own.bias_by or 1.0))))


def _with_alibi_named(formula: Formula, off: float) -> Formula:
    """Return the formula with a bias that is straight lines at visible keys named ALiBi."""
    if formula.bias is None or formula.bias_name == ALIBI or formula.bias.ndim < 2 or formula.bias.shape[-1] < 3:
        return formula
    bias = four_axes(formula.bias)
    seen = torch.ones_like(bias, dtype=torch.bool) if formula.visible is None else four_axes(formula.visible)
    bias, seen = torch.broadcast_tensors(bias, seen)  # type: ignore[no-untyped-call]
    near = off * float(bias.abs().max())
    lines = (torch.where(seen, bias - line, 0.0) for line in _straight(bias, seen))
    straight = near > 0 and any(bool((rest.abs() <= near).all()) for rest in lines)
    return replace(formula, bias_name=ALIBI) if straight else formula


def four_axes(tensor: Tensor) -> Tensor:
    """Return the tensor with leading axes of size 1 up to four axes; numbers are converted to float64."""
    tensor = tensor if tensor.dtype == torch.bool else tensor.double()
    return tensor[(None,) * (4 - tensor.ndim)]


def _distinct(tensor: Tensor) -> Tensor:
    """Return the tensor without batch entries and heads that only repeat the first."""
    for axis in (0, 1):
        if bool((tensor == tensor.narrow(axis, 0, 1)).all()):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.clone()
