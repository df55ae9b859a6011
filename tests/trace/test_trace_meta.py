"""Models without data on the meta device, wrong arguments, traces without a model, and enlarged logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import sqrtdk
from tests.attentions.cases import STYLES, traced
from tests.attentions.styles import DIM, Attention, B, L, tolerance

# Styles whose scale is a tensor of values: on the meta device they are not there.
HELD = ("divided_by_0d_tensor", "0d_tensor", "0d_tensor_on_the_left", "buffer")
PLAIN = [
    name
    for name, style in STYLES.items()
    if name not in HELD
    and style.mask is None
    and style.bias is None
    and isinstance(style.scale, float)
    and style.kind != "flex"
]


@pytest.mark.parametrize("name", PLAIN)
def test_the_meta_device_gives_the_same_formula_and_scale(name: str) -> None:
    style = STYLES[name]
    with torch.device("meta"):
        model = Attention(style).to(style.dtype)
        with style.context(), sqrtdk.trace(model) as found:
            model(torch.empty(B, L, DIM, dtype=style.dtype))
    (call,) = found.calls
    (real,) = traced(name)[1].calls
    same = ("formula", "kind", "heads", "kv_heads", "head_dim", "norm", "rope", "softcap", "score", "terms", "unknown")
    assert {f: getattr(call, f) for f in same} == {f: getattr(real, f) for f in same}
    assert call.scale.symbolic == pytest.approx(real.scale.symbolic)
    assert call.scale.numeric is None
    assert call.scale.agree is None
    assert call.stats is None
    assert call.stats_reason == "no data on the meta device"
    assert call.device == "meta"


@pytest.mark.parametrize("name", ["learned", "per_head", "l2_learned", *HELD])
def test_a_scale_without_data_is_not_guessed(name: str) -> None:
    with torch.device("meta"):
        model = Attention(STYLES[name])
        with sqrtdk.trace(model) as found:
            model(torch.empty(B, L, DIM))
    (call,) = found.calls
    assert call.scale.symbolic is None
    assert call.scale.effective is None
    assert call.scale.reason
    assert [factor.learned for factor in call.scale.factors] == [name not in HELD]
    assert "?" in call.formula or name not in HELD


@pytest.mark.parametrize("wrong", ["gpt2", 3, torch.zeros(2), {"model": nn.Linear(2, 2)}, nn.Linear])
def test_anything_but_a_module_is_refused(wrong: Any) -> None:
    with pytest.raises(sqrtdk.SqrtdkError, match=type(wrong).__name__) as caught:
        sqrtdk.trace(wrong)
    assert isinstance(caught.value, TypeError)
    assert caught.value.hint


def test_without_a_model_the_sites_are_unnamed() -> None:
    layer = nn.MultiheadAttention(8, 2)
    x = torch.randn(4, 1, 8)
    with sqrtdk.trace() as found:
        layer(x, x, x)
    assert [(call.site, call.head_dim) for call in found.calls] == [("", 4)]


@pytest.mark.parametrize("eager", [True, False])
def test_enlarging_multiplies_q_of_one_call(eager: bool) -> None:
    """The logits of the named call grow by the factor; those of the others stay."""
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()

    def attend() -> None:
        for _ in range(2):
            if eager:
                _ = (q @ k.mT * 8**-0.5).softmax(-1) @ v
            else:
                functional.scaled_dot_product_attention(q, k, v)

    with sqrtdk.trace(enlarge={("", 1): 5.0}) as found:
        attend()
    true = (q.double() @ k.double().mT / math.sqrt(8)).std(-1, correction=0).square().mean((0, 2)).sqrt()
    first, second = (call.stats for call in found.calls)
    assert first is not None
    assert second is not None
    assert first.std_logit == pytest.approx(true.tolist(), rel=tolerance(torch.float32))
    assert second.std_logit == pytest.approx((5 * true).tolist(), rel=tolerance(torch.float32))
