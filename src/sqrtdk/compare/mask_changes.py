"""A part of one mask put into another: the band, or the padding, with what that makes of rows that stand apart.

A row that becomes blind is what the other side makes of blind rows; one that is blind no more sees what the parts let
it. So the parts of another mask, put over one by one in any order, end with the other mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.masks import NOT_APART, OPEN, Parts, band, blind


def with_band(parts: Parts, least: int | None, greatest: int | None, other: Parts) -> Parts:
    """The parts with another band; keys that come in or go out are else as the other mask has them."""
    old = band(parts.rows, parts.keys, parts.least, parts.greatest, parts.padding.device)
    new = band(parts.rows, parts.keys, least, greatest, parts.padding.device)
    moved = replace(parts, least=least, greatest=greatest)
    return _settled(parts, moved, other, torch.where(blind(parts), NOT_APART, parts.apart), old ^ new)


def with_padding(parts: Parts, other: Parts) -> Parts:
    """The parts with the padding of another mask, and with the rows that stand apart there."""
    moved = replace(parts, padding=other.padding)
    changed = (parts.padding ^ other.padding)[:, None, None]
    return _settled(parts, moved, other, torch.where(blind(other), NOT_APART, other.apart), changed)


def rows_differ(a: Parts, b: Parts) -> Tensor:
    """(b, L), rows that stand apart otherwise, where that does not follow from a band or a padding that differs."""
    return (a.apart != b.apart) & (blind(a) == blind(b))


def _settled(parts: Parts, moved: Parts, other: Parts, apart: Tensor, changed: Tensor) -> Parts:
    """The moved parts, with their rows and their rest.

    Args:
        parts: before.
        moved: with another band or padding.
        other: the other mask.
        apart: of rows that are not blind now.
        changed: broadcasts to (b, H, L, S), keys that came in or went out.
    """
    apart = torch.where(blind(moved), _of_blind(other, parts), apart)
    freed = (parts.apart != NOT_APART) & (apart == NOT_APART)
    return replace(moved, apart=apart, rest=_mixed(parts.rest, other.rest, changed | freed[:, None, :, None]))


def _of_blind(other: Parts, parts: Parts) -> Tensor:
    """(b, L), what the other makes of its blind rows; by the same rule what those are that are blind here alone."""
    rule = _rule(other)
    if rule is None:
        rule = _rule(parts)
    return torch.where(blind(other), other.apart, NOT_APART if rule is None else rule)


def _rule(parts: Parts) -> Tensor | None:
    """(L,), what most blind rows are, each in its place; None where no row is blind."""
    _, numbers = torch.nonzero(blind(parts).expand(parts.apart.shape), as_tuple=True)
    codes = parts.apart[blind(parts).expand(parts.apart.shape)]
    if not codes.numel():
        return None
    own = torch.arange(parts.rows, device=codes.device)
    alone = codes >= 0
    if 2 * int(alone.sum()) > codes.numel():
        own = own + (codes - numbers)[alone].mode().values
        return torch.where((own >= 0) & (own < parts.keys), own, NOT_APART)
    return torch.full_like(own, OPEN if 2 * int((codes == OPEN).sum()) > codes.numel() else NOT_APART)


def _mixed(rest: Tensor | None, other: Tensor | None, changed: Tensor) -> Tensor | None:
    """The rest, and the other's where something was changed."""
    if rest is None and other is None:
        return None
    one = torch.ones((), dtype=torch.bool, device=changed.device)
    return torch.where(changed, one if other is None else other, one if rest is None else rest)
