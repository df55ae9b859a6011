"""Steps that neither side's program knows, between what is judged before them and what is behind them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compare.ports.answers import alarms
from tests.compare.ports.built import build
from tests.compare.ports.pairs import compare

CACHE = {"cache_k": "once", "cache_v": "once"}


@pytest.mark.parametrize(
    ("base", "common", "planted", "expected"),
    [
        ("rope", {}, {"biases": "qvo"}, {("projection_bias", "key")}),
        ("sdpa", {}, {"biases": "qko", "cache_k": "never"}, {("projection_bias", "value"), ("kv_scale", "key")}),
        ("eager", {"qk_norm": "rms"}, {"qk_norm_over": "heads"}, {("qk_norm_axis", "query norm")}),
        ("rope", {}, {"rope_base": 1e6, "cache_k": "twice"}, {("rope_base", "query rotation"), ("kv_scale", "key")}),
    ],
)
def test_what_differs_on_either_side_of_a_cache(
    base: str, common: dict[str, Any], planted: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    common = common | CACHE
    report = compare(base, build(base, common=common, **planted), **common)
    for pair in report.pairs:
        assert pair.same is False
        assert {(cause.name, cause.stage) for cause in pair.causes} == expected
        assert pair.explained is not None
        assert pair.explained >= 0.99


@pytest.mark.parametrize("base", ["rope", "gqa"])
def test_a_cache_on_both_sides_is_no_difference(base: str) -> None:
    assert not alarms(compare(base, build(base, common=CACHE, style="einsum"), **CACHE), 3)


def test_another_cache_behind_the_same_values_is_not_passed_over() -> None:
    """Twice as coarse: what comes into the step is the same, what it gives is not."""
    b = build("eager", common=CACHE)
    for layer in b.blocks():
        layer.attn.k_step.mul_(2)
    report = compare("eager", b, **CACHE)
    assert report.pairs[0].same is False
    assert [cause.name for cause in report.pairs[0].causes] == ["unknown"]
