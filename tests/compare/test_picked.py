"""A mask that an indexer picks by an input with an earlier cause is a consequence; a mask of its own is a cause."""

from __future__ import annotations

from typing import Any

import pytest

import sqrtdk
from sqrtdk.messages import id_of

pytest.importorskip("transformers")
from tests.hf.compressed import deepseek_v4, inputs_for

FIRST, PICKING = "model.layers.0.self_attn", "model.layers.1.self_attn"


def pairs(*, scale: float = 1.0, weight: float = 1.0) -> dict[str, Any]:
    """The pairs of two models of which B has another scale in the first layer, and other weights in the indexer."""
    a, b = deepseek_v4(), deepseek_v4()
    b.model.layers[0].self_attn.scaling *= scale
    b.model.layers[1].self_attn.compressor.indexer.scorer.weights_scaling *= weight
    return {pair.site_a: pair for pair in sqrtdk.diff(a, b, inputs=inputs_for(a)).pairs}


def causes_of(pair: Any) -> list[str]:
    return [cause.name for cause in pair.causes]


@pytest.mark.full
def test_keys_picked_by_another_input_follow_from_the_earlier_cause() -> None:
    found = pairs(scale=0.5)
    assert causes_of(found[FIRST]) == ["scale"]
    picking = found[PICKING]
    assert (causes_of(picking), picking.follows_from) == ([], FIRST)
    (mask,) = (stage for stage in picking.stages if stage.stage == "mask")
    assert mask.same is False
    assert id_of(mask.reason or "") == "compare.stage.picked"


@pytest.mark.full
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_keys_picked_by_another_rule_are_a_cause_of_their_own(scale: float) -> None:
    found = pairs(scale=scale, weight=-1.0)
    assert causes_of(found[PICKING]) == ["mask"]
    assert found[PICKING].follows_from is None
