"""A wrong scale in the weights: with the code's scale put right, the model computes what it did."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.repair import fold_scale_
from tests.repair.layouts import GROUPED, IDS, LATENT, SIZES
from tests.repair.modules import Attention, Latent, WithGain, randomised, states


def _hub(config: Any, attn: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    return randomised(hf.AutoModel.from_config(config, attn_implementation=attn), size=1.0)


HUB: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "Llama": (lambda: _hub(hf.LlamaConfig(**GROUPED)), ("q_proj.weight",)),
    "Qwen2": (lambda: _hub(hf.Qwen2Config(**GROUPED)), ("q_proj.weight", "q_proj.bias")),
    "GPT-NeoX": (lambda: _hub(hf.GPTNeoXConfig(**SIZES)), ("query_key_value.weight", "query_key_value.bias")),
    "Qwen3": (lambda: _hub(hf.Qwen3Config(**GROUPED, head_dim=8)), ("q_norm.weight",)),
    "Gemma 3": (lambda: _hub(hf.Gemma3TextConfig(**GROUPED, head_dim=8)), ("q_norm.weight",)),
    "Gemma 2": (lambda: _hub(hf.Gemma2Config(**GROUPED, head_dim=8), "eager"), ("q_proj.weight",)),
    "Persimmon": (lambda: _hub(hf.PersimmonConfig(**SIZES)), ("q_layernorm.weight", "q_layernorm.bias")),
    "DeepSeek-V3": (lambda: _hub(hf.DeepseekV3Config(**LATENT)), ("q_b_proj.weight",)),
}


@pytest.mark.parametrize("ratio", [8.0, 3.0])
@pytest.mark.parametrize("name", HUB)
def test_outputs_stay_when_the_scale_of_the_code_is_put_right(name: str, ratio: float) -> None:
    make, parameters = HUB[name]
    model = make()
    (site,) = [path for path, module in model.named_modules() if hasattr(module, "scaling")]
    attention = model.get_submodule(site)
    attention.scaling *= ratio  # trained so
    with torch.no_grad():
        expected = model(IDS).last_hidden_state
        record = fold_scale_(model, site, ratio)
        assert record.parameters == tuple(f"{site}.{parameter}" for parameter in parameters)
        assert (model(IDS).last_hidden_state - expected).abs().max() > 1e-3
        attention.scaling /= ratio
        actual = model(IDS).last_hidden_state
    if ratio == 8.0 and name != "Gemma 3":  # 1 + gain rounds
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_audit_calls_the_scale_right_afterwards() -> None:
    """The ratio that the trace reads is the one to fold."""
    model = randomised(Attention(after=lambda own, logits: logits * own.extra))
    model.extra = 8**0.5
    x = states()
    with sqrtdk.trace(model, keep=True) as run:
        expected = model(x)
    ratio = run.calls[0].scale.ratio
    assert ratio == pytest.approx(8**0.5)
    record = fold_scale_(model, "", ratio, stats=run)
    assert record.scale == pytest.approx(1.0)
    assert record.parameters == ("q.weight", "q.bias")
    model.extra = 1.0
    with sqrtdk.trace(model) as run:
        torch.testing.assert_close(model(x), expected)
    assert run.calls[0].scale.ratio == pytest.approx(1.0)


def test_copies_of_an_optimizer_take_it_too() -> None:
    model = randomised(Attention()).to(torch.bfloat16)
    masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
    fold_scale_(model, "", 3.0, inputs=(states().bfloat16(),), optimizer=torch.optim.SGD(masters, lr=0.1))
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())


def _same(own: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)


def _tied() -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Attention(), Attention()
            self.two.q = self.one.q

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    return Two()


def _tied_behind_a_step() -> nn.Module:
    model = _tied()
    model.two.between = lambda own, q, k: (q.tanh(), k)
    return model


def _one() -> nn.Module:
    model = Attention()
    model.k = model.q
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a norm without a gain": (lambda: Attention(_same), "", r"q is normalised \(l2\) without a gain"),
    "another site's projection": (_tied, "one", "one.q.weight is also that of q in two"),
    "another site's, behind a step": (
        _tied_behind_a_step,
        "one",
        "one.q.weight is also used by two: q went through tanh",
    ),
    "a bias in the scale": (
        lambda: Attention(after=lambda own, z: (z - torch.arange(6.0)) * 0.5),
        "",
        "its bias is multiplied by 0.5 as well",
    ),
    "q is k": (_one, "", "q.weight is also that of k in the root"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_it_is_not_allowed_it_says_so_and_changes_nothing(name: str) -> None:
    make, site, message = REFUSED[name]
    model = randomised(make())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=message) as raised:
        fold_scale_(model, site, 2.0, inputs=(states(),))
    assert raised.value.hint
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


def test_several_products_are_refused() -> None:
    config = hf.DebertaV2Config(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=16,
        relative_attention=True, pos_att_type="c2p|p2c",
    )  # fmt: skip
    model = _hub(config, "eager").float()
    with pytest.raises(UnsupportedError, match="its logits are 3 products"):
        fold_scale_(model, "encoder.layer.0.attention.self", 2.0)


class _InHalves(Attention):
    """Two attentions at one site, each with half of the heads."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.q, self.k, self.v))
        halves = zip(*(each.split(2, 1) for each in (q, k, v)), strict=True)
        each = [functional.scaled_dot_product_attention(*half, scale=self.scale) for half in halves]
        return torch.cat(each, 1).transpose(1, 2).flatten(2)


def test_all_calls_of_a_site_take_it_each_in_its_rows() -> None:
    model, x = randomised(_InHalves()), states()
    with torch.no_grad():
        expected = model(x)
        fold_scale_(model, "", 4.0, inputs=(x,))
        model.scale = 0.25
        assert torch.equal(model(x), expected)


def test_a_call_elsewhere_that_is_not_understood_is_no_obstacle() -> None:
    class OverQueries(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (-1, 8)).transpose(1, 2) for project in (self.q, self.k, self.v))
            return ((q @ k.mT).softmax(-2) @ v).transpose(1, 2).flatten(2)

    model = randomised(nn.Sequential(Attention(), OverQueries()))
    assert fold_scale_(model, "0", 2.0, inputs=(states(),)).parameters == ("0.q.weight", "0.q.bias")


@pytest.mark.parametrize("make", [Attention, WithGain, Latent])
def test_the_model_is_left_as_it_was_but_for_q(make: Callable[[], nn.Module]) -> None:
    model = randomised(make()).train()
    state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    record = fold_scale_(model, "", 2.0, inputs=(states(),))
    assert model.training
    assert torch.equal(state, torch.get_rng_state())
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert all(name.startswith("q") for name in record.parameters)


def test_wrong_arguments() -> None:
    model, inputs = randomised(Attention()), (states(),)
    for ratio in (0.0, -2.0, math.nan, math.inf):
        with pytest.raises(InvalidValueError, match="ratio is a finite number above 0"):
            fold_scale_(model, "", ratio, inputs=inputs)
    with pytest.raises(InvalidValueError, match=r"got 'layers.7', and there are ''"):
        fold_scale_(model, "layers.7", 2.0, inputs=inputs)
    with pytest.raises(InvalidTypeError, match="site is a module path; got 3"):
        fold_scale_(model, 3, 2.0, inputs=inputs)  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match=r"model is an nn.Module; got str"):
        fold_scale_("gpt2", "", 2.0)  # type: ignore[arg-type]
    with sqrtdk.trace(model) as run:
        model(*inputs)
    with pytest.raises(InvalidValueError, match="kept the tensors of its 1 calls; it kept 0"):
        fold_scale_(model, "", 2.0, stats=run)
