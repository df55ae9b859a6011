"""Calls that can't be clipped say why and are left as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import sqrtdk
from sqrtdk.repair import plan_of, qk_clip_
from sqrtdk.tracing.tape.stance import fast_path_off
from tests.repair.layouts import IDS, Layout
from tests.repair.modules import Attention, WithGain, randomised, states


class Adapted(nn.Module):
    """A linear layer with low-rank adapters, as peft lays them out."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class Quantised(nn.Module):
    """A linear layer with a weight of whole numbers, and one size for all or one for each feature."""

    def __init__(self, base: nn.Linear, *axis: int) -> None:
        super().__init__()
        size = base.weight.detach().abs().amax(*axis) / 127
        whole = (base.weight.detach() / size[..., None]).round().to(torch.int8)
        self.weight, self.size = nn.Parameter(whole, requires_grad=False), nn.Parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype)) * self.size


class Packed(nn.Module):
    """The same with the numbers in a buffer, read as the forward runs."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("packed", base.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.packed)


def _l2(own: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return functional.normalize(q, dim=-1) * 8, functional.normalize(k, dim=-1) * 8


def _gained(own: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    gain = torch.linspace(0.5, 1.5, 8, dtype=q.dtype)
    return functional.rms_norm(q, (8,)) * gain, functional.rms_norm(k, (8,)) * gain


def _alike(own: Attention) -> None:
    noise = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.1, -0.1, 0.1, -0.1])
    own.q_gain, own.k_gain = (nn.Parameter(torch.linspace(0.5, 1.5, 8) + noise) for _ in "qk")


def _other_bias(own: Attention) -> None:
    own.extra = nn.Parameter(torch.ones(32))
    own.q.forward = lambda x: functional.linear(x, own.q.weight) + own.extra


def _named(own: Attention) -> None:
    own.first, own.second = (nn.Parameter(torch.full((8,), 1.3)) for _ in range(2))
    own.between = lambda own, q, k: (
        functional.rms_norm(q, (8,)) * own.first,
        functional.rms_norm(k, (8,)) * own.second,
    )


def _of_two(own: Attention) -> None:
    """The gains are neither of two parameters, though their numbers are those of both."""
    _named(own)
    own.between = lambda own, q, k: tuple(
        functional.rms_norm(x, (8,)) * torch.minimum(own.first, own.second) for x in (q, k)
    )


def _one_sided(own: Attention) -> None:
    own.k_norm = nn.RMSNorm(8)
    own.between = lambda own, q, k: (functional.rms_norm(q, (8,)), own.k_norm(k))


def _values_normed(own: Attention) -> None:
    own.q_norm, own.k_norm = nn.RMSNorm(8), nn.RMSNorm(8)
    own.between = lambda own, q, k: (own.q_norm(q), own.k_norm(k))
    with torch.no_grad():
        own.k_norm.weight.mul_(1.3)
    own.of_values = lambda v: own.k_norm(v)


def _with(change: Callable[[Attention], Any], **options: Any) -> Layout:
    model = randomised(Attention(**options))
    change(model)
    return Layout(model.double(), (states(),))


def _set(**modules: Callable[[Attention], nn.Module]) -> Callable[[Attention], None]:
    def change(attention: Attention) -> None:
        for name, make in modules.items():
            setattr(attention, name, make(attention))

    return change


def _nothing(_: Attention) -> None:
    pass


def _alibi(_: Attention, logits: Tensor) -> Tensor:
    at = torch.arange(logits.shape[-1])
    return logits - 0.5 * (at[:, None] - at).abs()


REFUSED: dict[str, tuple[Callable[[], Layout], str]] = {
    "LoRA": (lambda: _with(_set(q=lambda own: Adapted(own.q))), r"LoRA: q is the sum of .*lora_A"),
    "LoRA, beside a quantised v": (
        lambda: _with(_set(k=lambda own: Adapted(own.k), v=lambda own: Quantised(own.v))),
        "LoRA: k is the sum of",
    ),
    "int8": (lambda: _with(_set(k=lambda own: Quantised(own.k))), r"k.weight is quantised \(int8\)"),
    "int8, a size each": (
        lambda: _with(_set(k=lambda own: Quantised(own.k, 1))),
        r"k went through a step .* \(k.weight is quantised \(int8\)",
    ),
    "a buffer": (lambda: _with(_set(k=lambda own: Packed(own.k))), "is no parameter"),
    "weight_norm": (
        lambda: _with(_set(q=lambda own: parametrizations.weight_norm(own.q))),
        "no parameter: it is made while the model runs",
    ),
    "l2 without a gain": (lambda: _with(_nothing, between=_l2), r"q is normalised \(l2\) without a gain"),
    "a gain that is elsewhere": (
        lambda: _with(_nothing, between=_gained),
        r"q is normalised \(rms\) without a gain that is a parameter of its own",
    ),
    "a gain much like a parameter": (
        lambda: _with(_alike, between=_gained),
        r"q is normalised \(rms\) without a gain that is a parameter of its own",
    ),
    "a bias that is another": (lambda: _with(_other_bias), "q.bias is not the bias that was added to q"),
    "a norm of zeros": (lambda: _zeros(), "q is all zeros, which does not tell the gain"),
    "a gain of two parameters": (
        lambda: _with(_of_two),
        r"q is normalised \(rms\) without a gain that is a parameter of its own",
    ),
    "no gain, beside one of ones": (lambda: _with(_one_sided), r"q is normalised \(rms\) without a gain"),
    "k and v of one norm": (lambda: _with(_values_normed), "k_norm.weight gives both k and v"),
    "ALiBi": (lambda: _with(_nothing, after=_alibi), "a bias .* is added to its logits"),
    "relative (T5)": (
        lambda: Layout(randomised(hf.T5EncoderModel(hf.T5Config(**_T5))), (IDS,)),
        r"a bias \(relative\) is added to its logits",
    ),
    "a factor after the softcap": (
        lambda: _with(_nothing, after=lambda own, z: 5 * (3 * (z / 3).tanh())),
        "its logits go through scale",
    ),
    "a clamp": (lambda: _with(_nothing, after=lambda own, z: z.clamp(-5, 5)), "clamp"),
    "q is k": (lambda: _with(_set(k=lambda own: own.q)), "q.weight gives both q and k"),
    "k is v": (lambda: _with(_set(v=lambda own: own.k)), "k.weight gives both k and v"),
    "one q/k norm for both": (lambda: _one_norm(), "norm.weight gives both q and k"),
}
_T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 1, "d_ff": 32, "vocab_size": 16}


def _zeros() -> Layout:
    model = randomised(WithGain())
    with torch.no_grad():
        model.q.weight.zero_()
        model.q.bias.zero_()
    return Layout(model, (states(),))


def _one_norm() -> Layout:
    model = Attention(lambda own, q, k: (own.norm(q), own.norm(k)))
    model.norm = nn.RMSNorm(8)
    return Layout(randomised(model), (states(),))


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_clip_it_leaves_and_says_why(name: str) -> None:
    make, reason = REFUSED[name]
    layout = make()
    with sqrtdk.trace(layout.model, keep=True) as run:
        layout.run()
    before = {name: parameter.clone() for name, parameter in layout.model.named_parameters()}
    records = qk_clip_(layout.model, run, threshold=1e-3)
    assert records[0].refused is not None
    assert re.search(reason, records[0].refused), records[0].refused
    assert records[0].clipped == ()
    assert torch.equal(records[0].predicted, records[0].measured)
    assert all(torch.equal(parameter, before[name]) for name, parameter in layout.model.named_parameters())


def test_of_two_gains_of_one_value_each_has_its_name() -> None:
    layout = _with(_named)
    with sqrtdk.trace(layout.model, keep=True) as run:
        layout.run()
    (plan,) = plan_of(layout.model, run)
    assert [(rows.name, rows.side) for rows in plan.rows] == [("first", "q"), ("second", "k")]


def test_the_fast_path_is_refused_with_the_switch_that_helps() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = states().float()
    with torch.no_grad(), sqrtdk.trace(layer, keep=True) as run:
        layer(x, x, x)
    (record,) = qk_clip_(layer, run, threshold=1e-3)
    assert record.refused is not None
    assert "set_fastpath_enabled(False)" in record.refused
    with fast_path_off(), torch.no_grad(), sqrtdk.trace(layer, keep=True) as run:
        layer(x, x, x)
    assert qk_clip_(layer, run, threshold=1e-3)[0].clipped == (0, 1, 2, 3)


# -- what several calls share -----------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two attentions that share the projection of q, one after the other."""

    def __init__(self, **second: Any) -> None:
        super().__init__()
        self.one, self.two = Attention(), Attention(**second)
        self.two.q.weight, self.two.q.bias = self.one.q.weight, self.one.q.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(0.7 * x)


def test_a_shared_projection_is_scaled_once_by_the_largest_of_its_sites() -> None:
    model, x = randomised(Twice()), states()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
    before = torch.stack([torch.tensor(call.stats.max_logit) for call in run.calls if call.stats])
    threshold = float(before.median())
    weight = model.one.q.weight.clone()
    one, two = qk_clip_(model, run, threshold, balance=1.0)
    gamma = (threshold / before.amax(0).double()).clamp(max=1.0)
    assert torch.equal(one.gamma, two.gamma)
    torch.testing.assert_close(one.gamma, gamma)
    torch.testing.assert_close(model.one.q.weight, weight * gamma.repeat_interleave(8)[:, None])
    with sqrtdk.trace(model) as run:
        model(x)
    for record, call in zip((one, two), run.calls, strict=True):
        torch.testing.assert_close(torch.tensor(call.stats.max_logit).double(), record.predicted)


def test_a_site_that_runs_twice_is_scaled_by_both_of_its_calls() -> None:
    model, (x, y) = randomised(Attention()), (states(), 3 * states(5))
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
        model(y)
    threshold = 1e-2
    one, two = qk_clip_(model, run, threshold)
    assert [(record.site, record.index) for record in (one, two)] == [("", 0), ("", 1)]
    torch.testing.assert_close(one.gamma, threshold / torch.maximum(one.measured, two.measured))
    assert torch.equal(one.gamma, two.gamma)


def test_what_shares_a_projection_with_a_refused_call_is_refused_too() -> None:
    model, x = randomised(Twice(after=_alibi)), states()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
    before = model.one.q.weight.clone()
    one, two = qk_clip_(model, run, threshold=1e-3)
    assert two.refused is not None
    assert "bias" in two.refused
    assert one.refused is not None
    assert "one.q.weight is also used by two, call 0" in one.refused
    assert torch.equal(before, model.one.q.weight)


def test_a_gain_that_a_refused_call_reads_too_is_left_alone() -> None:
    model = randomised(WithGain())
    with sqrtdk.trace(model, keep=True) as run:
        model(states())
        model.after = _alibi
        model(states())
    before = model.q_gain.clone()
    one, two = qk_clip_(model, run, threshold=1e-3)
    assert two.refused is not None
    assert one.refused is not None
    assert "q_gain is also used by the root, call 1" in one.refused
    assert torch.equal(before, model.q_gain)


def test_keys_of_another_layer_are_scaled_with_all_that_read_them() -> None:
    """Gemma 3n's last layers read the keys of an earlier one."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.q = Attention(), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.q, self.one.k, self.one.v))
            return self.one(x) + (5 * q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2)

    model, x = randomised(Shared()), states()
    with sqrtdk.trace(model, keep=True) as run:
        model(x)
    first, second = qk_clip_(model, run, threshold=1e-2)
    assert torch.equal(first.gamma, second.gamma)
    assert first.clipped == (0, 1, 2, 3)
