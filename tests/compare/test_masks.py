"""Masks taken apart and put together: nothing is lost, and the parts are those that they were made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.program import Formula, Program, VectorPath
from sqrtdk.compare.inside.suspect import Sides
from sqrtdk.masks import decompose as taking_apart
from sqrtdk.masks.band import band_mask
from sqrtdk.masks.decompose import common_mask_shape, decompose
from sqrtdk.masks.parts import CLOSED, OPEN, Parts, recompose, with_padding, with_pattern
from tests.compare.formula_cases import tokens, visible

TAKEN_APART = taking_apart._taken_apart


def _whole(mask: Tensor | None, batch: int, rows: int, keys: int) -> Tensor:
    return (torch.ones(1, dtype=torch.bool) if mask is None else mask).expand(batch, 2, rows, keys)


@st.composite
def _masks(draw: st.DrawFn) -> tuple[Tensor, int, int, int]:
    """Any mask: a band or none, padding or none, rows of padding open or closed, and scattered keys hidden."""
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 7))
    least, greatest = (draw(st.one_of(st.none(), st.integers(-keys, rows))) for _ in range(2))
    mask = band_mask(rows, keys, least, greatest)[None, None]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        mask = mask & (torch.rand(batch, 1, 1, keys, generator=generator) < 0.7)
    blind = ~mask.any(-1, keepdim=True)
    if draw(st.booleans()):
        mask = mask | (blind & (torch.eye(rows, keys, dtype=torch.bool) if draw(st.booleans()) else True))
    if draw(st.booleans()):
        mask = mask & (torch.rand(batch, 1, rows, 1, generator=generator) < 0.7)
    if draw(st.booleans()):
        mask = mask & (torch.rand(1, 2, rows, keys, generator=generator) < 0.8)
    return mask, batch, rows, keys


@given(_masks())
def test_a_mask_is_the_sum_of_its_parts(drawn: tuple[Tensor, int, int, int]) -> None:
    mask, batch, rows, keys = drawn
    again = recompose(decompose(mask, batch, rows, keys))
    assert torch.equal(_whole(again, batch, rows, keys), _whole(mask, batch, rows, keys))


@given(_masks(), st.integers(0, 1000))
def test_a_mask_with_all_parts_of_another_is_the_other(drawn: tuple[Tensor, int, int, int], seed: int) -> None:
    mask, batch, rows, keys = drawn
    generator = torch.Generator().manual_seed(seed)
    least, greatest = (int(torch.randint(-3, 4, (), generator=generator)) for _ in range(2))
    made = band_mask(rows, keys, least, greatest)[None, None] & (
        torch.rand(batch, 1, 1, keys, generator=generator) < 0.8
    )
    other = decompose(made, batch, rows, keys)
    parts = decompose(mask & band_mask(rows, keys, least, None), batch, rows, keys)
    if parts.rest is not None or other.rest is not None:
        return  # a rest is no part that is put over
    moved = with_padding(with_pattern(parts, other, least=other.least, greatest=other.greatest), other)
    assert torch.equal(_whole(recompose(moved), batch, rows, keys), _whole(made, batch, rows, keys))


_CAUSAL, _LEFT, _RIGHT = visible(8, 8, 0), tokens(8, True), tokens(8, False)
KNOWN = {  # mask, least, greatest, hidden keys, open rows, closed rows
    "none": (None, None, None, 0, 0, 0),
    "all": (torch.ones(1, 1, 8, 8), None, None, 0, 0, 0),
    "causal": (_CAUSAL, 0, None, 0, 0, 0),
    "strict": (visible(8, 8, 1), 1, None, 0, 0, 0),
    "a key ahead": (visible(8, 8, -1), -1, None, 0, 0, 0),
    "window": (visible(8, 8, 0, 3), 0, 3, 0, 0, 0),
    "window, both ways": (visible(8, 8, -2, 2), -2, 2, 0, 0, 0),
    "padding": (_RIGHT, None, None, 5, 0, 0),
    "padding of one alone": (_RIGHT[1:2], None, None, 2, 0, 0),
    "causal, right": (_CAUSAL & _RIGHT, 0, None, 5, 0, 0),
    "causal, left": (_CAUSAL & _LEFT, 0, None, 5, 0, 0),
    "causal, left, all padded": ((_CAUSAL & _LEFT)[1:], 0, None, 5, 0, 0),
    "window, left": (visible(8, 8, 0, 2) & _LEFT, 0, 2, 5, 0, 0),
    "causal, left, rows open": (_CAUSAL & _LEFT | ~(_CAUSAL & _LEFT).any(-1, keepdim=True), 0, None, 5, 5, 0),
    "rows of padding closed": (_RIGHT & _RIGHT.mT, None, None, 5, 0, 5),
    "upper left": (visible(4, 8, 0), 0, None, 0, 0, 0),
    "lower right": (visible(4, 8, -4), -4, None, 0, 0, 0),
    "one row, its first key": (visible(1, 8, 0), 0, None, 0, 0, 0),
    "one row, the rest padding": (visible(1, 8, -2), None, None, 5, 0, 0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_parts_are_what_it_was_made_of(name: str) -> None:
    mask, least, greatest, hidden, opened, closed = KNOWN[name]
    batch, rows, keys = common_mask_shape(mask, torch.ones(1, 1, 1, 8))
    parts: Parts = decompose(mask, batch, 8 if mask is None else rows, keys)
    assert (parts.least, parts.greatest, parts.rest) == (least, greatest, None)
    assert int((~parts.padding).sum()) == hidden
    assert [int((parts.apart == code).sum()) for code in (OPEN, CLOSED)] == [opened, closed]


def test_what_is_neither_band_nor_padding_is_the_rest() -> None:
    mask = _CAUSAL.clone()
    mask[..., 5, 2] = False
    parts = decompose(mask, 1, 8, 8)
    assert parts.least == 0
    assert parts.rest is not None
    assert (~parts.rest).nonzero().tolist() == [[0, 0, 5, 2]]


def test_a_mask_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many causes look at it."""
    seen = []
    monkeypatch.setattr(taking_apart, "_taken_apart", lambda *args: seen.append(args[0]) or TAKEN_APART(*args))
    a, b = (
        Program(VectorPath(), VectorPath(), VectorPath(), Formula(visible=mask))
        for mask in (_CAUSAL.clone(), _CAUSAL & _LEFT)
    )
    found = [one for suspected in CAUSES.values() for one in suspected(Sides(a, b, 8, None, 2, self_attention=True))]
    assert [one.name for one in found] == ["padding"]
    assert len(seen) == 2
