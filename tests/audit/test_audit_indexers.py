"""Compressed keys and indexers: DeepSeek-V4's attentions are judged, and what picks their keys is named."""

from __future__ import annotations

from typing import Any

import pytest

import sqrtdk

pytest.importorskip("transformers")
import torch

from tests.hf.compressed import LENGTH, deepseek_v4, inputs_for
from tests.hf.small import build, needs, small_config


def judged(model: Any) -> Any:
    return sqrtdk.check(model, inputs=inputs_for(model), laws="none")


@pytest.mark.full
def test_an_attention_to_compressed_keys_is_judged_by_code_and_numbers() -> None:
    report = judged(deepseek_v4())
    assert [call.verdict for call in report.calls] == ["exact"] * 3
    for call in report.calls:
        assert call.call.formula == "softmax(0.25 * rope(rms(q)).rope(rms(k)) + mask + sinks)"
        assert call.call.key_len > call.call.query_len == LENGTH
        assert call.call.scale.numeric == pytest.approx(0.25, rel=1e-5)
    assert {finding.rule for finding in report.findings} == {"unmeasured"}
    (indexer,) = report.not_measured
    assert indexer.site == "model.layers.1.self_attn.compressor.indexer"
    assert str(indexer.reason).startswith("ReLU attention")
    assert "relu(rope(q).rope(rms(k)))" in str(indexer.formula)


@pytest.mark.full
def test_a_wrong_scale_over_compressed_keys_is_found() -> None:
    model = deepseek_v4()
    model.model.layers[1].self_attn.scaling *= 0.5
    verdicts = {call.call.site: call.verdict for call in judged(model).calls}
    assert verdicts["model.layers.1.self_attn"] == "unexplained"
    assert verdicts["model.layers.0.self_attn"] == "exact"


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "indexers"),
    [("glm5_next_text", ["layers.1"]), ("dots3_note_text", ["model.layers.0", "model.layers.1"])],
)
def test_an_indexer_is_named_beside_its_attention(model_type: str, indexers: list[str]) -> None:
    needs(model_type)
    report = judged(build(small_config(model_type), "eager", torch.float32))
    named = [entry for entry in report.not_measured if str(entry.reason).startswith("ReLU attention")]
    assert [entry.site for entry in named] == [f"{place}.self_attn.indexer" for place in indexers]
    assert {call.verdict for call in report.calls} == {"exact"}
