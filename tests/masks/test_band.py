"""A band is what its bounds say, whichever way it is made, counted or read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sqrtdk.masks.band import Band, band_around, band_mask, distances, in_band, keys_in_band, mask_pattern, mask_reach

SIZES = st.integers(1, 6)
BOUNDS = st.one_of(st.none(), st.integers(-7, 7))


@given(SIZES, SIZES, BOUNDS, BOUNDS)
def test_every_way_shows_the_same_keys(rows: int, keys: int, least: int | None, greatest: int | None) -> None:
    apart = distances(rows, keys)
    expected = torch.ones(rows, keys, dtype=torch.bool)
    expected &= True if least is None else apart >= least
    expected &= True if greatest is None else apart <= greatest
    assert torch.equal(band_mask(rows, keys, least, greatest), expected)
    i, band = torch.arange(rows)[:, None], Band(least, greatest)
    assert torch.equal(keys_in_band(i, keys, band), expected.sum(-1, keepdim=True))
    if band != Band():
        assert torch.equal(in_band(i, torch.arange(keys), band), expected)
    shown = apart[expected]
    assert band_around(expected) == ((int(shown.min()), int(shown.max())) if len(shown) else None)


@pytest.mark.parametrize("far", [2**63, 2**70])
def test_a_bound_beyond_all_numbers_hides_all_or_nothing(far: int) -> None:
    assert not band_mask(3, 4, far, None).any()
    assert not band_mask(3, 4, None, -far).any()
    assert band_mask(3, 4, -far, far).all()


@pytest.mark.parametrize(
    ("rows", "keys", "bounds", "pattern", "ahead"),
    [
        (4, 4, (0, None), "causal", 0),
        (3, 5, (-2, None), "causal_lower_right", 0),
        (5, 5, (0, 2), "window", 0),
        (5, 5, (-1, 1), "window", 0),
        (5, 5, (-1, None), "mask", 1),  # tril(1) for tril()
        (5, 5, (-2, None), "mask", 0),
    ],
)
def test_patterns(rows: int, keys: int, bounds: tuple[int, int | None], pattern: str, ahead: int) -> None:
    mask = band_mask(rows, keys, *bounds)
    assert mask_pattern(mask) == pattern
    reach = mask_reach(mask.expand(2, 3, rows, keys), 2)
    assert reach["band"]
    assert (reach["least"], reach["ahead_by_one"]) == (bounds[0], ahead * 2 * 3 * 2)


def test_padding_is_no_evidence_against_a_pattern() -> None:
    mask = band_mask(5, 5, 0, None) & (torch.arange(5) > 1)
    assert mask_pattern(mask[None, None]) == "mask"
    both = torch.stack([mask, band_mask(5, 5, 0, None)])
    assert mask_pattern(both) == "causal"
    assert mask_reach(mask) == {"least": 0, "greatest": 2, "band": True, "ahead_by_one": 0}
    assert mask_reach(torch.zeros(2, 3, 4, dtype=torch.bool)) == {}
