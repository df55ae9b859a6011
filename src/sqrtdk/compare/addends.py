"""What is added to the logits of both sides, told apart into a bias and a fill of hidden keys by what the other knows.

One tensor may hold both. By itself 0 and -5 below the diagonal is a bias as well as it is a causal mask that lets some
weight through, and of a bias that was added to minus infinity nothing is left. The sum stays as it is; it is read as
the other side has it:

* bias + fill * hidden, with a fill that is one number, where the other side hides keys, or adds nothing but 0 and one
  number below it; the bias is none, that of the other side times a number, or straight lines (ALiBi);
* at keys that are hidden for good a bias that can't be known is the other side's, as far as their common keys say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.masks import distances
from sqrtdk.compare.numbers import HELD, ratio, times
from sqrtdk.compare.program import Formula

FAR = -5e3  # no logit of an attention is so low that a key with this fill took weight beside it
ALIBI = "alibi"


def told_alike(a: Formula, b: Formula, off: float = HELD) -> tuple[Formula, Formula]:
    """Both formulas, what each adds being told apart by the other.

    Args:
        a: of A.
        b: of B.
        off: by what numbers may be off, relative to the largest, in the coarser dtype of both.

    Example:
        >>> lower = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
        >>> _, b = told_alike(Formula(visible=lower), Formula(bias=torch.where(lower, 0.0, -5.0)))
        >>> b.bias, b.fill, bool((b.visible == lower).all())
        (None, -5.0, True)
    """
    a, b = _told_apart(a, b, off), _told_apart(b, a, off)
    a, b = _completed(a, b), _completed(b, a)
    return _named(a, off), _named(b, off)


def common_keys(a: Formula, b: Formula) -> Tensor | None:
    """True where both sides give a key weight, broadcasts to (B, Hq, L, S); None where both do so everywhere."""
    one, other = (None if _lets_through(x) else x.visible for x in (a, b))
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _lets_through(formula: Formula) -> bool:
    return math.isfinite(formula.fill) and formula.fill * formula.fill_by > FAR


def _told_apart(own: Formula, other: Formula, off: float) -> Formula:
    """The bias taken for one and a fill of hidden keys, where the other side hides some and this one none."""
    shown = _shown(other)
    if own.bias is None or own.visible is not None or shown is None or bool(shown.all()):
        return own
    added, seen = torch.broadcast_tensors(whole(own.bias), whole(shown))  # type: ignore[no-untyped-call]
    near = off * float(added.abs().max())
    for base in _biases(added, seen, other):
        rest = added - base
        fill = float(rest[~seen].median())
        hidden = (rest - fill).abs() <= near
        plain = bool((hidden | (rest.abs() <= near)).all()) and fill < -2 * near
        if plain and not bool(hidden.all()) and 2 * int((hidden & ~seen).sum()) > int(hidden.sum()):
            bias = torch.where(hidden, added - fill, added)
            visible = _distinct(~hidden)
            named = replace(own, visible=visible, mask=other.mask, fill=fill, fill_by=own.bias_by, fill_added=True)
            if bool((bias.abs() <= near).all()):
                return replace(named, bias=None, bias_by=1.0)
            return replace(named, bias=_distinct(bias))
    return own


def _shown(formula: Formula) -> Tensor | None:
    """What a side lets every row see; 0 and one number below it are a mask, where nothing else is."""
    if formula.visible is not None or formula.bias is None:
        return formula.visible
    lowest = formula.bias.min()
    two = bool(((formula.bias == 0) | (formula.bias == lowest)).all()) and float(lowest) < 0
    return formula.bias == 0 if two else None


def _biases(added: Tensor, seen: Tensor, other: Formula) -> Iterator[Tensor]:
    """What may be a bias in a sum: none, the other side's times a number, a straight line for each head."""
    yield torch.zeros((), dtype=torch.float64)
    if other.bias is not None and other.bias.shape[-1] == added.shape[-1]:
        like = whole(other.bias)
        yield like * _slope(added, like, seen).nanmedian()
    yield from _straight(added, seen)


def _straight(added: Tensor, seen: Tensor) -> Iterator[Tensor]:
    """Lines through the diagonal, or through its lower right one: on either side alike, on through it, by the key."""
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
    """(B, H, 1, 1), by what most keys that are seen have the line multiplied; not a number where it is 0 at all."""
    times_line = torch.where(seen & (line != 0), added / line, torch.nan)
    return times_line.flatten(2).nanmedian(-1).values[..., None, None]


def _completed(own: Formula, other: Formula) -> Formula:
    """With the other side's bias at keys that are hidden for good, where nothing is left of the own one."""
    if own.bias is None or other.bias is None or own.visible is None or _lets_through(own):
        return own
    visible, mine, like = whole(own.visible), whole(own.bias), times(whole(other.bias), other.bias_by)
    assert isinstance(like, Tensor)
    if mine.shape[-1] != like.shape[-1] or bool((mine.masked_fill(visible, 0.0) != 0).any()):
        return own
    both = common_keys(own, other)
    assert both is not None
    by = ratio(torch.where(both, mine, 0.0), torch.where(both, like, 0.0))
    return replace(own, bias=_distinct(torch.where(visible, mine, like / (by or own.bias_by or 1.0))))


def _named(formula: Formula, off: float) -> Formula:
    """The formula with a relative bias called ALiBi where it is straight lines at the keys that count."""
    if formula.bias is None or formula.bias_name == ALIBI or formula.bias.ndim < 2 or formula.bias.shape[-1] < 3:
        return formula
    bias = whole(formula.bias)
    seen = torch.ones_like(bias, dtype=torch.bool) if formula.visible is None else whole(formula.visible)
    bias, seen = torch.broadcast_tensors(bias, seen)  # type: ignore[no-untyped-call]
    near = off * float(bias.abs().max())
    lines = (torch.where(seen, bias - line, 0.0) for line in _straight(bias, seen))
    straight = near > 0 and any(bool((rest.abs() <= near).all()) for rest in lines)
    return replace(formula, bias_name=ALIBI) if straight else formula


def whole(tensor: Tensor) -> Tensor:
    """With all four axes, numbers in float64."""
    tensor = tensor if tensor.dtype == torch.bool else tensor.double()
    return tensor[(None,) * (4 - tensor.ndim)]


def _distinct(tensor: Tensor) -> Tensor:
    """Without the entries of the batch, and the heads, that only repeat."""
    for axis in (0, 1):
        if bool((tensor == tensor.narrow(axis, 0, 1)).all()):
            tensor = tensor.narrow(axis, 0, 1)
    return tensor.clone()
