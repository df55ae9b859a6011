"""Programs run in float64, against plain formulas and torch's own functions in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.compare.inside import compute
from sqrtdk.compare.inside.program import (
    Affine,
    Formula,
    LogitPrecision,
    NormStep,
    OpaqueStep,
    Rotation,
    RoundingStep,
    VectorPath,
)
from sqrtdk.errors import InvalidValueError
from tests.tolerances import complaint

B, HQ, H, L, S, E, EV = 2, 4, 2, 7, 9, 8, 5


def heads(count: int = H, length: int = S, features: int = E) -> Tensor:
    return torch.randn(B, count, length, features, dtype=torch.float64)


def same(actual: Tensor, expected: Tensor, logit: float = 10.0) -> None:
    assert complaint(actual, expected, torch.float64, length=S * E, logit=logit) is None


def plain(query: Tensor, key: Tensor, value: Tensor, z: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax with -inf, every row of it seeing a key."""
    z = z.masked_fill(~visible, float("-inf"))
    return z.softmax(-1) @ value.repeat_interleave(HQ // H, 1), z.logsumexp(-1)


def test_projection_is_that_of_linear() -> None:
    weight, bias, x = torch.randn(H * E, 6).double(), torch.randn(H * E).double(), torch.randn(B, L, 6).double()
    affine = Affine("q", weight.view(H, E, 6), bias.view(H, E), torch.arange(H * E).view(H, E))
    same(compute.project_input(affine, x), functional.linear(x, weight, bias).view(B, L, H, E).transpose(1, 2))
    same(compute.project_input(replace(affine, bias=None), x), (x @ weight.T).view(B, L, H, E).transpose(1, 2))


@pytest.mark.parametrize("over", ["head", "heads"])
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_norms_are_those_of_torch(kind: str, over: str) -> None:
    x = heads(H, L)
    gain, shift = torch.randn(H if over == "heads" else 1, E).double(), torch.randn(H, E).double()
    tokens = x.transpose(1, 2).reshape(B, L, H * E) if over == "heads" else x
    flat, size = gain.flatten(), gain.numel()
    if kind == "rms":
        norm = NormStep("rms", gain, eps=0.1, over=over)
        expected = functional.rms_norm(tokens, (size,), flat, 0.1)
    elif kind == "layer":
        shift = shift if over == "heads" else shift[:1]
        norm = NormStep("layer", gain, shift, eps=0.1, over=over)
        expected = functional.layer_norm(tokens, (size,), flat, shift.flatten(), 0.1)
    else:
        norm = NormStep("l2", gain, eps=1.5, over=over)
        expected = functional.normalize(tokens, dim=-1, eps=1.5) * flat
    expected = expected.view(B, L, H, E).transpose(1, 2) if over == "heads" else expected
    same(compute.apply_norm(norm, x), expected)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("first", "width"), [(0, E), (0, 4), (2, 6)])
def test_rotation_turns_each_pair_by_its_angle(layout: str, first: int, width: int) -> None:
    angles, x, pairs = torch.randn(B, L, width // 2).double(), heads(H, L), width // 2
    expected = x.clone()
    for i in range(pairs):
        a, b = (first + i, first + i + pairs) if layout == "half" else (first + 2 * i, first + 2 * i + 1)
        cos, sin = 2 * angles[:, None, :, i].cos(), 2 * angles[:, None, :, i].sin()
        expected[..., a] = x[..., a] * cos - x[..., b] * sin
        expected[..., b] = x[..., b] * cos + x[..., a] * sin
    rotation = Rotation(torch.polar(torch.full_like(angles, 2.0), angles), layout, first)
    before = x.clone()
    same(compute.apply_rotation(rotation, x), expected)
    assert torch.equal(x, before)


def test_a_way_gives_the_values_after_each_step() -> None:
    x = heads(H, L)
    norm, turn = NormStep("rms", torch.ones(1, E)), Rotation(torch.full((1, 1, E // 2), 1j), "half")
    after = compute.follow_path(VectorPath(None, (norm, turn, RoundingStep("float16")), scaled=2.0), x)
    assert len(after) == 3
    same(after[0], functional.rms_norm(x, (E,), eps=0.0))
    same(after[1], torch.cat([-after[0][..., E // 2 :], after[0][..., : E // 2]], -1))
    assert torch.equal(after[2], 2 * after[1].half().double())
    (alone,) = compute.follow_path(VectorPath(scaled=torch.tensor([2.0, 3.0]).view(H, 1, 1)), x)
    assert torch.equal(alone[:, 1], 3 * x[:, 1])


def test_nothing_is_computed_through_an_unknown_step() -> None:
    with pytest.raises(InvalidValueError, match=r"'aten\.foo'"):
        compute.follow_path(VectorPath(None, (OpaqueStep("aten.foo"),)), heads())


def test_heads_are_spread_in_either_order() -> None:
    x = heads(2)
    assert torch.equal(compute.repeat_heads(x, 4), x[:, [0, 0, 1, 1]])
    assert torch.equal(compute.repeat_heads(x, 4, torch.tensor([0, 1, 0, 1])), x.repeat(1, 2, 1, 1))
    with pytest.raises(InvalidValueError, match="3 query heads can't share 2"):
        compute.repeat_heads(x, 3)


@pytest.mark.parametrize("budget", [compute.LOGITS_AT_ONCE, 1, B * HQ * S * 2])
def test_attention_is_that_of_torch(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "LOGITS_AT_ONCE", budget)
    monkeypatch.setattr(compute.chunks, "__defaults__", (budget,))
    query, key, value = heads(HQ, L), heads(), heads(H, S, EV)
    bias, visible = torch.randn(B, HQ, L, S).double(), torch.rand(B, 1, L, S) < 0.7
    visible[..., 0] = True
    formula = Formula(scale=0.3, bias=bias, visible=visible)
    output, lse = compute.compute_output(query, key, value, formula)
    mask = bias.masked_fill(~visible, float("-inf"))
    same(output, functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True))
    z = 0.3 * query @ key.repeat_interleave(2, 1).mT + bias
    same(lse, plain(query, key, value, z, visible)[1])


@pytest.mark.parametrize("place", ["scaled", "product", "masked"])
def test_softcap_at_each_of_its_places(place: str) -> None:
    query, key, value = heads(HQ, L), heads(), heads(H, S, EV)
    bias, visible = torch.randn(HQ, L, S).double(), torch.ones(L, S).tril(1).bool()
    product = query @ key.repeat_interleave(2, 1).mT
    formula = Formula(0.4, 3.0, place, bias=bias, bias_by=0.5, visible=visible)
    if place == "scaled":
        z = 3.0 * (0.4 * product / 3.0).tanh() + 0.5 * bias
    elif place == "product":
        formula = replace(formula, scale=1.0, after=0.4)
        z = 0.4 * 3.0 * (product / 3.0).tanh() + 0.5 * bias
    else:
        z = (0.4 * product + 0.5 * bias).masked_fill(~visible, float("-inf"))
        z = 3.0 * (z / 3.0).tanh()  # hidden keys have -3 then
        visible = torch.ones_like(visible)
    output, lse = compute.compute_output(query, key, value, formula)
    expected = plain(query, key, value, z, visible)
    same(output, expected[0])
    same(lse, expected[1])


def test_scales_of_heads_and_rows() -> None:
    query, key = heads(HQ, L), heads()
    scale = torch.rand(HQ, L, 1).double()
    expected = scale * (query @ key.repeat_interleave(2, 1).mT)
    same(compute.compute_logits(query, key, Formula(scale)), expected)
    cut = compute.some_rows(Formula(scale), slice(2, 5), L)
    same(compute.compute_logits(query[:, :, 2:5], key, cut), expected[..., 2:5, :])


def test_a_row_that_sees_no_key() -> None:
    query, key, value = heads(HQ, L), heads(), heads(H, S, EV)
    visible = torch.ones(L, S).bool()
    visible[3] = False
    output, lse = compute.compute_output(query, key, value, Formula(visible=visible))
    assert output[..., 3, :].eq(0).all()
    assert lse[..., 3].eq(-math.inf).all()
    for fill in (torch.finfo(torch.float32).min, -1e9, torch.finfo(torch.float64).min):
        uniform, _ = compute.compute_output(query, key, value, Formula(visible=visible, fill=fill))
        same(uniform[..., 3, :], value.repeat_interleave(2, 1).mean(-2))
        same(uniform[..., :3, :], output[..., :3, :])
    # float16 has no -1e9: the row is hidden altogether
    assert not compute.compute_output(query, key, value, Formula(visible=visible, fill=-1e9, logits_dtype="float16"))[
        0
    ][..., 3, :].any()


def test_a_fill_that_is_added_keeps_what_the_logits_dtype_can_hold_of_the_logit() -> None:
    query, key = heads(HQ, L), heads()
    z = query @ key.repeat_interleave(2, 1).mT
    hidden = Formula(visible=torch.zeros(L, S).bool(), fill=-8.0, fill_by=0.5, fill_added=True)
    assert torch.equal(compute.compute_logits(query, key, hidden), (z - 4.0).float().double())
    swallowed = replace(hidden, fill=torch.finfo(torch.float32).min, fill_by=1.0)
    assert compute.compute_logits(query, key, swallowed).unique().numel() == 1
    beyond = replace(swallowed, fill_by=8.0)
    assert compute.compute_logits(query, key, beyond).eq(-math.inf).all()


def test_sinks_take_weight_and_have_no_value() -> None:
    query, key, value, sinks = heads(HQ, L), heads(), heads(H, S, EV), torch.randn(HQ)
    z = query @ key.repeat_interleave(2, 1).mT
    column = torch.cat([z, sinks.double().view(1, HQ, 1, 1).expand(B, HQ, L, 1)], -1)
    output, lse = compute.compute_output(query, key, value, Formula(sinks=sinks))
    same(output, column.softmax(-1)[..., :S] @ value.repeat_interleave(2, 1))
    same(lse, column.logsumexp(-1))
    hidden, lse = compute.compute_output(query, key, value, Formula(sinks=sinks, visible=torch.zeros(1, 1).bool()))
    assert not hidden.any()
    assert torch.equal(lse, sinks.double().view(1, HQ, 1).expand_as(lse))


def test_dropout_keeps_and_scales() -> None:
    query, key, value, kept = heads(HQ, L), heads(), heads(H, S, EV), torch.rand(B, HQ, L, S) < 0.5
    weights = (query @ key.repeat_interleave(2, 1).mT).softmax(-1)
    output, _ = compute.compute_output(query, key, value, Formula(kept=kept, dropout=0.25))
    same(output, (weights * kept / 0.75) @ value.repeat_interleave(2, 1))
    assert not compute.compute_output(query, key, value, Formula(kept=kept, dropout=1.0))[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_softmax_in_half_is_that_of_torch(dtype: torch.dtype) -> None:
    query, key, value = heads(HQ, L), heads(), heads(H, S, EV)
    # few bits, so that every product is exact in float32
    query, key = (query * 8).round() / 8, (key * 8).round() / 8
    half = (query @ key.repeat_interleave(2, 1).mT).to(dtype).softmax(-1).double()
    name = str(dtype).removeprefix("torch.")
    weights, _ = compute.compute_weights(query, key, Formula(logits_dtype=name, weights_dtype=name))
    beside = (weights - half).abs() > half * torch.finfo(dtype).eps * 0.51
    assert not beside.any()  # an exponential of float32 may fall on the other side of a tie, by one last place
    assert (weights != half).float().mean() < 0.01
    output, _ = compute.compute_output(query, key, value, Formula(logits_dtype=name, weights_dtype=name))
    same(output, weights @ value.repeat_interleave(2, 1))


@pytest.mark.parametrize("lesser", [("float16", "float16"), ("bfloat16", None), (None, "bfloat16")])
@pytest.mark.parametrize("on_query", [1.0, 0.3])
def test_what_is_rounded_is_computed_in_the_dtype_of_the_side(
    on_query: float, lesser: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very numbers of float32 code: rounded from float64, some fall on the other neighbour."""
    query, key, value = (torch.randn(B, count, length, 16) * 2 for count, length in ((HQ, 96), (H, 96), (H, 96)))
    visible, sinks = torch.ones(96, 96, dtype=torch.bool).tril(), torch.randn(HQ)
    z = (query * on_query) @ key.repeat_interleave(2, 1).mT * (0.3 / on_query)
    z = z.masked_fill(~visible, -math.inf).to(getattr(torch, lesser[0] or "float32"))
    if lesser[1] != lesser[0]:
        z = z.float()
    column = sinks.to(z.dtype)[:, None, None].expand(B, HQ, 96, 1)
    expected = torch.cat([z, column], -1).softmax(-1)[..., :-1].to(getattr(torch, lesser[1] or "float32")).double()
    formula = Formula(0.3, visible=visible, sinks=sinks, logits_dtype=lesser[0], weights_dtype=lesser[1])
    there = replace(formula, own=LogitPrecision("float32", query=on_query))
    recorded = (query * on_query).double() / on_query
    weights, _ = compute.compute_weights(recorded, key, there)
    assert torch.equal(weights, expected)
    assert not torch.equal(compute.compute_weights(recorded, key, formula)[0], expected)
    monkeypatch.setattr(compute, "LOGITS_AT_ONCE", 2**13)
    output, _ = compute.compute_output(recorded, key, value, there)
    same(output, expected @ value.double().repeat_interleave(2, 1))


def test_a_row_that_sees_no_key_has_no_weights_in_half_either() -> None:
    visible = torch.ones(L, S, dtype=torch.bool)
    visible[2] = False
    formula = Formula(visible=visible, logits_dtype="float16", weights_dtype="float16", own=LogitPrecision("float32"))
    weights, lse = compute.compute_weights(heads(HQ, L), heads(), formula)
    assert not weights[:, :, 2].any()
    assert lse[:, :, 2].eq(-math.inf).all()
    assert weights[:, :, [0, 1, 3]].sum(-1).sub(1).abs().max() < S * torch.finfo(torch.float16).eps


def test_values_are_rounded_with_the_factor_that_was_on_them() -> None:
    x = heads()
    factor = torch.tensor([0.3, 0.0], dtype=torch.float64)[:, None, None]
    after = compute.apply_step(RoundingStep("bfloat16", factor), x)
    same(after[:, 0], (x[:, 0] * 0.3).bfloat16().double() / 0.3)
    assert torch.equal(after[:, 1], x[:, 1])  # of nothing, any value is as good


def test_no_keys_and_no_rows() -> None:
    output, lse = compute.compute_output(heads(HQ, L), heads(H, 0), heads(H, 0, EV), Formula())
    assert output.shape == (B, HQ, L, EV)
    assert not output.any()
    assert lse.eq(-math.inf).all()
    assert compute.compute_output(heads(HQ, 0), heads(), heads(H, S, EV), Formula())[0].shape == (B, HQ, 0, EV)


def test_a_dtype_that_there_is_not() -> None:
    with pytest.raises(InvalidValueError, match="'int7'"):
        compute.round_to(torch.ones(1), "int7")


def test_some_heads_have_their_own_factor_of_what_is_rounded_afterwards() -> None:
    own = LogitPrecision("float32", query=torch.tensor([1.0, 2.0, 4.0, 8.0]).view(4, 1, 1))
    scale = torch.full((4, 1, 1), 0.25)
    cut = compute.some_heads(Formula(scale, own=own, sinks=torch.arange(4.0)), torch.tensor([1, 3]), 4)
    assert cut.own is not None
    assert [x.flatten().tolist() for x in (cut.own.query, cut.scale, cut.sinks)] == [
        [2.0, 8.0],
        [0.25, 0.25],
        [1.0, 3.0],
    ]  # type: ignore[union-attr]
