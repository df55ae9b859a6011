"""Compressed keys and indexers: DeepSeek-V4's attentions are judged, and what picks their keys is named."""

from __future__ import annotations

from typing import Any

import pytest

import sqrtdk

pytest.importorskip("transformers")
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    assert str(indexer.reason) == "ReLU scores that pick keys, without a softmax"
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
    # Their heads are summed by a matrix product of the scores with a vector for each row, as values would be.
    told = "ReLU attention: a product of activations meets values without a softmax"
    named = [entry for entry in report.not_measured if str(entry.reason) == told]
    assert [entry.site for entry in named] == [f"{place}.self_attn.indexer" for place in indexers]
    assert {call.verdict for call in report.calls} == {"exact"}


H, WIDTH = 4, 32


class Neighbours(nn.Module):
    """Each row's three nearest rows by ReLU scores."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, H)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.a, self.b))
        return (torch.relu(a @ b.mT) * self.gate(x).mT[..., None]).sum(1).topk(3, -1)[1]


class Attention(nn.Module):
    """An attention, to the keys that `indexer` picks if there is one."""

    def __init__(self, indexer: nn.Module | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.indexer = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), indexer

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = None
        if self.indexer is not None:
            mask = torch.zeros(len(x), x.shape[1], x.shape[1]).bool().scatter(-1, self.indexer(x), True)[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Beside(nn.Module):
    """An attention in one module, and a graph of neighbours in another."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.graph = Attention(), Neighbours()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x), self.graph(x)


def test_scores_that_pick_the_keys_of_an_attention_are_named_as_what_they_are() -> None:
    report = sqrtdk.check(Attention(Neighbours()).eval(), torch.randn(2, 16, WIDTH), laws="none")
    (entry,) = report.not_measured
    assert (entry.site, entry.reason) == ("indexer", "ReLU scores that pick keys, without a softmax")
    assert [call.verdict for call in report.calls] == ["exact"]


@pytest.mark.parametrize("model", [Neighbours, Beside])
def test_a_graph_of_neighbours_is_no_attention(model: type[nn.Module]) -> None:
    with sqrtdk.trace(model()) as run:
        run.model(torch.randn(2, 16, WIDTH))
    assert run.not_measured == ()
