"""Copies that edits change: they answer as the model does, leave it alone, and share its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sqrtdk.answers.copies import shared_copy
from sqrtdk.answers.edited import copy_of, logits_of, watch_attentions
from sqrtdk.answers.edits import edits_of
from sqrtdk.answers.edits_rotation import llama3_frequencies, powers
from sqrtdk.answers.rounding import EXACT, INT8, Q4_0, ROUNDINGS, Rounding
from tests.answers.planted import prompts, reference
from tests.answers.planted_types import TYPES, drawn
from tests.tolerances import allowed

PROMPT = tuple(token % 128 for token in prompts()[0][:64])


def of(kind: str) -> PreTrainedModel:
    return reference() if kind == "gemma2" else drawn(kind)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gemma2", *TYPES])
@torch.no_grad()
def test_the_changed_attention_is_eager_s_where_nothing_is_changed(kind: str) -> None:
    model = of(kind)
    expected = model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits
    found = logits_of(copy_of(model).module, [PROMPT])
    # transformers' eager attention takes its softmax in float32
    largest = float(expected.abs().max())
    most = allowed(torch.float32, length=len(PROMPT), logit=30.0, magnitude=largest)
    assert float((found - expected).abs().max()) <= most


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["gemma2", *TYPES])
@torch.no_grad()
def test_an_edit_changes_the_copy_alone(kind: str) -> None:
    model = of(kind)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    before = logits_of(model, [PROMPT])
    facts = watch_attentions(model, PROMPT)
    assert len(facts) == model.config.num_hidden_layers
    edits = edits_of(copy_of(model, facts), len(PROMPT))
    assert len({edit.key for edit in edits}) == len(edits) > 25
    moved = 0
    for edit in edits:
        copy = copy_of(model, facts)
        edit.change(copy)
        moved += bool((logits_of(copy.module, [PROMPT]) - before).abs().max() > 1e-6)
    assert moved >= 0.8 * len(edits)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits_of(model, [PROMPT]), before)


class Plain(nn.Module):
    """A model of one's own with grouped heads, whose attention torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.kv = nn.Embedding(128, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.head = nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


@torch.no_grad()
def test_torch_s_attention_of_a_module_of_one_s_own_is_replaced() -> None:
    torch.manual_seed(0)
    model = Plain().double()
    (fact,) = watch_attentions(model, PROMPT)
    assert (fact.heads, fact.groups, fact.head_dim, fact.scale, fact.causal) == (4, 2, 8, 8**-0.5, True)
    found = logits_of(copy_of(model).module, [PROMPT])
    torch.testing.assert_close(found, model(torch.tensor([PROMPT])), atol=1e-12, rtol=0)
    causes = {edit.cause for edit in edits_of(copy_of(model, [fact]), len(PROMPT))}
    assert {"scale", "softcap", "window", "mask", "group_order", "norm_eps", "layer_bias"} <= causes


@torch.no_grad()
def test_a_module_that_holds_a_bound_method_is_copied_whole() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0
            self.call = self.times

        def times(self, x: torch.Tensor) -> torch.Tensor:
            return self.factor * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(x)

    model = Bound()
    other = shared_copy(model)
    other.factor = 3.0
    assert (float(other(torch.ones(()))), float(model(torch.ones(())))) == (3.0, 1.0)


@torch.no_grad()
def test_llama3_s_frequencies_are_those_of_transformers() -> None:
    config = drawn("llama").config
    config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    found = llama3_frequencies(powers(1e4, expected), 8.0, 512)
    torch.testing.assert_close(found, expected, atol=allowed(torch.float32, length=1, logit=1.0, magnitude=1.0), rtol=0)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
def test_rounding_changes_weights_by_as_much_as_its_bits(rounding: Rounding) -> None:
    weights = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    apart = (rounding.weights(weights) - weights).abs().max() / weights.abs().max()
    most = 0.08 if "int4" in rounding.name else 0.04
    assert float(apart) < most
    if rounding is EXACT or "cache" in rounding.name:
        assert float(apart) == 0


def test_q4_0_and_q8_0_are_those_of_gguf() -> None:
    quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    kinds = gguf.GGMLQuantizationType
    for kind, own in ((kinds.Q4_0, Q4_0), (kinds.Q8_0, INT8)):
        expected = torch.from_numpy(quants.dequantize(quants.quantize(weights.numpy(), kind), kind))
        torch.testing.assert_close(own.rounded(weights, torch.float16), expected, rtol=0, atol=0)
