"""Heads that meet: mixed before or after the softmax, averaged, combined with another softmax."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.tracing import AttentionCall
from tests.attentions.each import each
from tests.attentions.heads import (
    AFTER,
    COMBINED,
    MIXED,
    ROOT,
    Attend,
    B,
    E,
    H,
    Heads,
    L,
    capped,
    causal,
    heads_last,
    linear,
    logits,
    mixed,
    mixed_and_masked,
    over_devices,
    read,
    trace,
    weighed,
)


def products(model: Heads, x: Tensor) -> Tensor:
    """Q . k times the scale, (B, H, L, L)."""
    q, k = (part(x).view(B, L, H, E).transpose(1, 2) for part in (model.q, model.k))
    return q @ k.transpose(2, 3) / math.sqrt(E)


def after(call: AttentionCall) -> list[str]:
    return [stage.name for stage in call.stages if stage.where == "weights"]


def is_right(call: AttentionCall, device: str) -> None:
    """Heads, batch and scale are those of the module, by both readings."""
    assert (call.batch, call.heads, call.kv_heads, call.head_dim) == (B, H, H, E)
    assert (call.query_len, call.key_len, call.self_attention) == (L, L, True)
    assert call.unknown == ()
    assert call.scale.symbolic == call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if device == "cpu" else None)


# -- logits ------------------------------------------------------------------------------------------------------------


@over_devices
@pytest.mark.parametrize("name", MIXED)
def test_heads_mixed_before_the_softmax_are_undone(name: str, device: str) -> None:
    attend, matrix = MIXED[name]
    model, x, run = trace(attend, device)
    (call,) = run.calls
    is_right(call, device)
    assert call.formula == "softmax(mix(0.25 * q.k))"
    assert [stage.name for stage in call.stages if stage.where == "logits"] == ["product", "scale", "mix"]
    if device == "cpu":
        assert call.stats is not None
        z = torch.einsum("gh,bhij->bgij", matrix(model), products(model, x))
        bias = {"linear": model.before, "convolution with a bias": model.pixel_after}.get(name.split(",")[0])
        z = z if bias is None else z + bias.bias.view(-1, 1, 1)
        assert call.stats.max_logit == pytest.approx(z.amax((0, 2, 3)).tolist())
        entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
        assert call.stats.entropy_nats == pytest.approx(entropy.tolist())


@over_devices
def test_a_factor_stands_before_or_after_the_mixing(device: str) -> None:
    call = read(lambda m, q, k, v: (linear(m.before, q @ k.mT) * ROOT).softmax(-1) @ v, device)
    is_right(call, device)
    assert call.formula == "softmax(0.25 * mix(q.k))"


@over_devices
def test_a_mask_hides_what_was_mixed(device: str) -> None:
    call = read(mixed_and_masked, device)
    is_right(call, device)
    assert call.formula == "softmax(mix(0.25 * q.k) + causal)"
    assert after(call) == ["mix"]
    assert call.mask is not None
    assert call.mask.masked_weight == (0.0 if device == "cpu" else None)


@over_devices
@each("attend", [heads_last, capped])
def test_other_layouts_and_steps_stand_beside_a_mixing(attend: Attend, device: str) -> None:
    is_right(read(attend, device), device)


def test_a_mask_of_some_heads_hides_all_that_they_were_mixed_into() -> None:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = ~causal(q) & (torch.arange(H) < 2)[:, None, None]
        return linear(m.before, logits(m, q, k)).masked_fill(hidden, -1e9).softmax(-1) @ v

    is_right(read(attend), "cpu")


@each("turned", [False, True])
def test_a_mask_that_is_mixed_hides_only_where_the_heads_keep_its_sign(turned: bool) -> None:
    """Head g adds -1e9 times the sum of its row of the matrix: below 0, it shows what was hidden, and nothing else."""

    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = logits(m, q, k) + torch.full((L, L), -1e9, dtype=q.dtype).triu(1)
        sign = torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=q.dtype) if turned else 1.0
        return torch.einsum("bhij,hg->bgij", z, torch.eye(H, dtype=q.dtype) * sign + 0.01 * m.mix.abs()).softmax(-1) @ v

    call = read(attend)
    is_right(call, "cpu")
    assert call.formula == "softmax(mix(0.25 * q.k + causal))"
    assert call.mask is not None
    assert call.mask.masked_weight == pytest.approx(float(turned))


def test_a_mixing_that_cannot_be_undone_is_read_by_its_factors_alone() -> None:
    call = read(mixed(lambda m, z: torch.einsum("bhij,hg->bgij", z, m.mix[:1].expand(H, H))))
    assert (call.scale.effective, call.scale.numeric, call.scale.agree) == (ROOT, None, None)
    assert call.scale.reason == "the mixing of the heads can't be undone"


def test_heads_may_be_mixed_into_more() -> None:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = torch.einsum("bhij,hg->bgij", logits(m, q, k), m.wider).softmax(-1)
        return torch.einsum("bgij,hg->bhij", w, m.wider) @ v

    call = read(attend)
    assert (call.batch, call.heads, call.kv_heads, call.unknown) == (B, 6, H, ())
    assert (call.scale.effective, call.scale.agree) == (ROOT, None)


def test_a_convolution_over_queries_and_keys_is_no_mixing() -> None:
    wide = nn.Conv2d(H, H, 3, padding=1).double()
    call = read(mixed(lambda m, z: wide(z)))
    assert (call.unknown, call.scale.effective) == (("convolution",), None)
    assert after(read(weighed(lambda m, w: wide(w)))) == ["unknown"]


# -- weights -----------------------------------------------------------------------------------------------------------


@over_devices
@pytest.mark.parametrize("name", AFTER)
def test_weights_over_the_heads_are_told(name: str, device: str) -> None:
    change, stages = AFTER[name]
    call = read(weighed(change), device)
    is_right(call, device)
    assert (call.formula, after(call)) == ("softmax(0.25 * q.k)", stages)


def test_a_bias_of_a_mixing_shows_hidden_keys() -> None:
    """Each hidden key gets the bias of its head: the first row, which sees one key, gets most."""

    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        w = logits(m, q, k).masked_fill(~causal(q), -math.inf).softmax(-1)
        return linear(m.after, w) @ v

    model, _, run = trace(attend)
    (call,) = run.calls
    assert call.mask is not None
    assert call.mask.masked_weight == pytest.approx(float(model.after.bias.detach().abs().max()) * (L - 1))


@over_devices
@each(
    "change, name",
    [
        (lambda m, w: w.sum(1, keepdim=True), "sum"),
        (lambda m, w: w * 0.5, "mul"),
        (lambda m, w: w.amax(1)[:, None], "amax"),
    ],
)
def test_weights_that_are_no_average_are_not_judged(change: object, name: str, device: str) -> None:
    call = read(weighed(change), device)  # type: ignore[arg-type]
    assert call.unknown == (f"{name} on the weights",)


KEPT = {
    "rand_like": lambda w: (torch.rand_like(w) > 0.1).to(w.dtype),
    "rand": lambda w: (torch.rand(w.shape, device=w.device) < 0.9).double(),
    "bernoulli": lambda w: torch.empty_like(w).bernoulli_(0.9),
    "a key at a time": lambda w: torch.bernoulli(torch.full((B, 1, 1, L), 0.9, device=w.device).double()),
}


@over_devices
@pytest.mark.parametrize("way", KEPT)
@each(
    "rescale", [lambda w, keep: w * keep / 0.9, lambda w, keep: w * (keep / 0.9), lambda w, keep: w * keep * (1 / 0.9)]
)
def test_dropout_by_hand_is_dropout(rescale: object, way: str, device: str) -> None:
    call = read(weighed(lambda m, w: rescale(w, KEPT[way](w))), device)  # type: ignore[operator]
    is_right(call, device)
    assert (call.dropout, after(call)) == (pytest.approx(0.1), [])


@over_devices
def test_a_mask_of_half_the_entries(device: str) -> None:
    """By the probability that `bernoulli_` takes without one."""
    call = read(weighed(lambda m, w: w * torch.empty_like(w).bernoulli_() * 2), device)
    is_right(call, device)
    assert (call.dropout, after(call)) == (0.5, [])


@over_devices
def test_dropout_that_is_not_made_up_for_is_not_silent(device: str) -> None:
    call = read(weighed(lambda m, w: w * KEPT["rand"](w)), device)
    assert (call.dropout, call.unknown) == (pytest.approx(0.1), ("mul on the weights",))
    call = read(weighed(lambda m, w: (kept := w * KEPT["rand"](w)) / kept.sum(-1, keepdim=True)), device)
    assert (call.dropout, call.unknown) == (pytest.approx(0.1), ())


def by_hand(z: Tensor) -> Tensor:
    e = z.exp()
    return e / e.sum(-1, keepdim=True)


DIVIDED: dict[str, object] = {
    "div": lambda w: w / w.sum(-1, keepdim=True),
    "reciprocal": lambda w: w * w.sum(-1, keepdim=True).reciprocal(),
    "one by": lambda w: w * (1 / w.sum(-1, keepdim=True)),
    "power": lambda w: w * w.sum(-1, keepdim=True) ** -1,
    "guarded": lambda w: w / w.sum(-1, keepdim=True).clamp_min(1e-9),
    "without its axis": lambda w: w / w.sum(-1)[..., None],
    "in place": lambda w: w.div_(w.sum(dim=-1).unsqueeze(-1)),
}


@over_devices
@pytest.mark.parametrize("way", DIVIDED)
@each("softmax", [lambda z: z.softmax(-1), by_hand])
def test_weights_divided_by_their_sum(softmax: object, way: str, device: str) -> None:
    def masked(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return DIVIDED[way](softmax(logits(m, q, k)) * causal(q)) @ v  # type: ignore[operator]

    def then_gated(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return DIVIDED[way](softmax(logits(m, q, k))) * m.gate.view(H, 1, 1) @ v  # type: ignore[operator]

    call = read(masked, device)
    is_right(call, device)
    assert after(call) == ["mask", "normalise"]
    call = read(then_gated, device)
    is_right(call, device)
    assert after(call) == []


# -- two softmaxes -----------------------------------------------------------------------------------------------------


@over_devices
@pytest.mark.parametrize("name", COMBINED)
def test_each_of_two_softmaxes_is_read(name: str, device: str) -> None:
    attend, heads, others, words = COMBINED[name]
    _, _, run = trace(attend, device)
    assert [call.heads for call in run.calls] == heads
    assert ["join those of an attention" in other.reason for other in run.not_attention] == [True] * others
    assert run.not_measured == ()
    for call in run.calls:
        assert (call.batch, call.head_dim, call.unknown) == (B, E, ())
        assert call.formula.startswith("softmax(0.25 * q.k")
        assert [stage.detail for stage in call.stages if stage.name == "combined"] == [words]
        assert call.scale.effective == pytest.approx(ROOT)
        assert call.scale.agree is (True if device == "cpu" else None)
    assert ("normalise" in after(run.calls[0])) == (name == "convit")


def test_each_of_two_softmaxes_has_its_own_scale() -> None:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (0.5 * logits(m, q, k).softmax(-1) + 0.5 * (k @ q.mT).softmax(-1)) @ v

    _, _, run = trace(attend)
    assert [call.scale.effective for call in run.calls] == [ROOT, 1.0]
    assert [call.formula for call in run.calls] == ["softmax(0.25 * q.k)", "softmax(q.k)"]


def test_what_one_of_two_softmaxes_went_through_is_not_silent() -> None:
    _, _, run = trace(lambda m, q, k, v: (logits(m, q, k).softmax(-1) ** 2 + logits(m, k, q).softmax(-1)) @ v)
    assert [call.unknown for call in run.calls] == [("pow on the weights",)] * 2


def test_keys_that_are_folded_onto_others_are_not_silent() -> None:
    call = read(weighed(lambda m, w: torch.cat([w[..., :3] + w[..., 3:6], w[..., 3:]], -1)))
    assert call.unknown == ("add on the weights",)
