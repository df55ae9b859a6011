"""Laws of single scores: norms and gains, splits of weights, distances far out; what modules keep."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import scales, scores
from sqrtdk.scores import FoldedScore, LearnedGain, PairScore
from tests.tolerances import allowed, complaint, half_complaint

HALVES = (torch.float16, torch.bfloat16)


def pairs(score: PairScore, query: Tensor, key: Tensor) -> Tensor:
    return score.pairs(*score.prepare(query, key))


def products(score: FoldedScore, query: Tensor, key: Tensor) -> Tensor:
    query, key = score.fold(query, key)
    return query @ key.mT


# dot


def test_dot_leaves_both_as_they_are() -> None:
    query, key = torch.randn(2, 3), torch.randn(4, 3)
    folded = scores.dot().fold(query, key)
    assert folded[0] is query
    assert folded[1] is key


# norms


def test_norms_are_torchs() -> None:
    q, k = torch.randn(2, 5, 9, dtype=torch.float64), torch.randn(2, 4, 9, dtype=torch.float64)
    for score, norm in (
        (scores.cosine(), lambda x: functional.normalize(x, dim=-1)),
        (scores.cosine("rms"), lambda x: functional.rms_norm(x, (9,), eps=1e-6)),
        (scores.cosine("layer"), lambda x: functional.layer_norm(x, (9,), eps=1e-5)),
        (scores.cosine("rms", eps=0.5), lambda x: functional.rms_norm(x, (9,), eps=0.5)),
        (scores.cosine("layer", eps=0.5), lambda x: functional.layer_norm(x, (9,), eps=0.5)),
    ):
        for found, expected in zip(score.fold(q, k), (norm(q), norm(k)), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
def test_the_length_of_a_vector_does_not_matter(norm: str) -> None:
    q, k = torch.randn(5, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)
    score = scores.cosine(norm, eps=1e-30)
    torch.testing.assert_close(products(score, 1e3 * q, 1e-3 * k), products(score, q, k))


def test_the_range_of_a_cosine() -> None:
    q = torch.randn(50, 3)
    found = products(scores.cosine(gain=5.0), q, torch.cat([q, -q]))
    assert found.abs().max() <= 5.0 * (1 + 1e-6)
    torch.testing.assert_close(found.diagonal(), torch.full((50,), 5.0))
    for norm in ("rms", "layer"):
        scaled = products(scores.cosine(norm), q, q) * scales.sqrt_dk().beta(scales.sizes(3))
        assert scaled.abs().max() <= math.sqrt(3) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_the_gradient_of_l2_at_a_zero_vector_is_zero(dtype: torch.dtype) -> None:
    query = torch.zeros(2, 4, dtype=dtype)
    query[1] = torch.tensor([3.0, 4.0, 0.0, 0.0])
    query.requires_grad_()
    key = torch.randn(3, 4).to(dtype)
    found = products(scores.cosine(gain=100.0), query, key)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(found.sum(), query, create_graph=True)
    assert gradient[0].tolist() == [0.0] * 4
    assert gradient[1].isfinite().all()
    assert gradient[1].abs().max() > 0
    (second,) = torch.autograd.grad(gradient.square().sum(), query)
    assert second.isfinite().all()
    assert second[0].tolist() == [0.0] * 4


def test_l2_at_its_bound() -> None:
    short = torch.tensor([[1e-3, 0.0], [3e-3, 4e-3]], dtype=torch.float64)
    unit, _ = scores.cosine(eps=2e-3).fold(short, short)
    torch.testing.assert_close(unit, torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64))


@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
def test_half_types_at_both_ends_of_float16(norm: str) -> None:
    # squares of 300 overflow float16, those of 1e-4 vanish in it
    base = torch.tensor([[3.0, -4.0, 1.0, 0.0]])
    expected, _ = scores.cosine(norm, eps=1e-20).fold(base, base)
    for factor in (2.0**-13, 2.0**6):
        for found in scores.cosine(norm, eps=1e-20).fold(factor * base.half(), factor * base.half()):
            assert found.dtype == torch.float16
            assert half_complaint(found, expected.double(), [], torch.float16) is None


@pytest.mark.parametrize("norm", ["l2", "rms", "layer"])
def test_a_nan_in_a_vector_stays_in_its_row(norm: str) -> None:
    key = torch.randn(3, 4)
    key[1, 2] = math.nan
    found = products(scores.cosine(norm), torch.randn(2, 4), key)
    assert found.isnan().tolist() == [[False, True, False]] * 2


# gains


def test_swin_v2s_gain() -> None:
    gain = LearnedGain(4)
    parameters = torch.tensor([-1.0, math.log(10), math.log(100) - 1e-3, 7.0])
    with torch.no_grad():
        gain.logit_scale.copy_(parameters.view(4, 1, 1))
    expected = torch.clamp(gain.logit_scale, max=math.log(1.0 / 0.01)).exp()
    assert torch.equal(gain(), expected)
    single = allowed(torch.float32, length=1, logit=math.log(100.0), magnitude=1.0)
    assert gain().max().item() == pytest.approx(100.0, rel=single)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
    swin = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT * expected
    assert complaint(products(scores.cosine(gain=gain), q, k), swin, torch.float32, length=8, logit=0.0) is None


def test_the_clamp_of_a_gain_stops_its_gradient_only_above() -> None:
    gain = LearnedGain(3, init=2.0, maximum=4.0)
    with torch.no_grad():
        gain.logit_scale.copy_(torch.tensor([0.0, math.log(3.9), math.log(4.1)]).view(3, 1, 1))
    gain().sum().backward()
    expected = torch.tensor([1.0, 3.9, 0.0], dtype=torch.float64)
    assert complaint(gain.logit_scale.grad.flatten(), expected, torch.float32, length=1, logit=math.log(4)) is None
    assert gain.logit_scale.grad[2] == 0


def test_a_gain_is_folded_into_the_query_alone() -> None:
    q, k = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
    plain, with_gain = scores.cosine().fold(q, k), scores.cosine(gain=torch.tensor([1.0, -2.0, 0.5])).fold(q, k)
    torch.testing.assert_close(with_gain[0], plain[0] * torch.tensor([1.0, -2.0, 0.5]).view(3, 1, 1))
    assert torch.equal(with_gain[1], plain[1])


@pytest.mark.parametrize("gain", [torch.tensor(3.0), torch.tensor([3.0]), torch.full((1, 1, 1), 3.0), 3, 3.0])
def test_gains_of_one_number(gain: Tensor | float) -> None:
    for query in (torch.randn(2, 4), torch.randn(5, 2, 4), torch.randn(1, 5, 2, 4)):
        folded, _ = scores.cosine(gain=gain).fold(query, query)
        torch.testing.assert_close(folded, 3.0 * functional.normalize(query, dim=-1))
        assert folded.shape == query.shape


def test_a_gain_that_is_computed_gets_its_gradient() -> None:
    root = torch.tensor([0.5, 1.5], requires_grad=True)
    q = torch.randn(2, 3, 4)
    products(scores.cosine(gain=root.square()), q, q).diagonal(dim1=-2, dim2=-1).sum().backward()
    expected = torch.tensor([2 * 0.5 * 3, 2 * 1.5 * 3], dtype=torch.float64)  # 3 rows of 2 batches share a gain
    assert complaint(root.grad, expected, torch.float32, length=4, logit=0.0, uses=2 * 3) is None


# weights


def test_concat_is_additive_with_its_weight_split() -> None:
    q, k = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    v, w = torch.randn(7, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)
    split = scores.additive(v, w[:5], w[5:])
    assert torch.equal(pairs(scores.luong_concat(v, w), q, k), pairs(split, q, k))


def test_the_keras_form_is_additive_without_projections() -> None:
    q, k = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    v, one = torch.randn(5, dtype=torch.float64), torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(pairs(scores.keras_additive(v), q, k), pairs(scores.additive(v, one, one), q, k))
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(pairs(scores.keras_additive(), q, k), pairs(scores.keras_additive(ones), q, k))


def test_an_additive_score_is_bounded_by_v() -> None:
    score = scores.fresh_additive(4, 4, 16)
    found = pairs(score, 1e4 * torch.randn(8, 4), 1e4 * torch.randn(8, 4))
    assert found.abs().max() <= score.v.abs().sum() * (1 + 1e-6)


def test_projections_are_made_before_the_blocks() -> None:
    score = scores.fresh_additive(4, 6, 8, bias=True)
    query, key = score.prepare(torch.randn(2, 3, 4), torch.randn(2, 5, 6))
    assert (query.shape, key.shape) == ((2, 3, 8), (2, 5, 8))
    whole = score.pairs(query, key)
    blocks = [score.pairs(query[:, i : i + 1], key) for i in range(3)]
    torch.testing.assert_close(torch.cat(blocks, -2), whole)


def test_bilinear_with_the_identity_is_the_dot_product() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 4)
    assert torch.equal(products(scores.bilinear(torch.eye(4)), q, k), q @ k.mT)
    weight = torch.randn(4, 4)
    assert torch.equal(products(scores.luong_general(weight), q, k), products(scores.bilinear(weight), q, k))


def test_weights_for_one_head_serve_inputs_without_heads() -> None:
    q, k = torch.randn(3, 5), torch.randn(4, 5)
    w, v, bias = torch.randn(1, 5, 5), torch.randn(1, 5), torch.randn(1, 5)
    assert torch.equal(products(scores.bilinear(w), q, k), products(scores.bilinear(w[0]), q, k))
    shared = scores.additive(v[0], w[0], w[0], bias[0])
    assert torch.equal(pairs(scores.additive(v, w, w, bias), q, k), pairs(shared, q, k))
    joined = torch.randn(1, 10, 5)
    assert torch.equal(pairs(scores.luong_concat(v, joined), q, k), pairs(scores.luong_concat(v[0], joined[0]), q, k))


def test_a_concat_weight_for_each_head() -> None:
    q, k, v, w = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 8), torch.randn(2, 10, 8)
    heads = [pairs(scores.luong_concat(v[h], w[h]), q[h], k[h]) for h in range(2)]
    torch.testing.assert_close(pairs(scores.luong_concat(v, w), q, k), torch.stack(heads))


# distance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_distances_do_not_cancel_far_out(dtype: torch.dtype) -> None:
    q, k = torch.randn(6, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    q, k = 2.0**12 + q, 2.0**12 + k  # rounded here, and exact from here on
    expected = -torch.cdist(q.double(), k.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    assert complaint(pairs(scores.distance(), q, k), expected, dtype, length=8, logit=0.0, each=True) is None


def test_a_distance_to_itself_is_zero_with_zero_gradient() -> None:
    q = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    found = pairs(scores.distance(), q, q.detach()).diagonal()
    assert found.tolist() == [0.0] * 3
    found.sum().backward()
    assert q.grad.abs().max() == 0


def test_second_derivatives_of_distances() -> None:
    q, k = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    k = torch.cat([k, q[:1].detach()]).requires_grad_()  # one distance is 0
    assert torch.autograd.gradcheck(lambda q, k: pairs(scores.distance(), q, k), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: pairs(scores.distance(), q, k), (q, k))
    total = pairs(scores.distance(), q, k).pow(3).sum()
    plain, again = (torch.autograd.grad(total, (q, k), create_graph=kept, retain_graph=True) for kept in (False, True))
    torch.testing.assert_close(again, plain)


def test_distances_of_many_features_are_the_same_under_a_transform() -> None:
    q, k = torch.randn(2, 3, 20, dtype=torch.float64), torch.randn(2, 4, 20, dtype=torch.float64)
    found = torch.vmap(lambda q, k: pairs(scores.distance(), q, k))(q, k)
    torch.testing.assert_close(found, pairs(scores.distance(), q, k))


def test_the_product_of_a_distance_is_the_distance() -> None:
    q, k = (torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def of_product(q: Tensor, k: Tensor) -> Tensor:
        query, key = scores.distance().product(q, k)
        return query @ key.mT

    torch.testing.assert_close(of_product(q, k), pairs(scores.distance(), q, k))
    torch.testing.assert_close(of_product(q + 3.0, k + 3.0), of_product(q, k))


def test_distances_of_float16_do_not_overflow() -> None:
    found = pairs(scores.distance(), torch.full((1, 4), 500.0).half(), torch.full((1, 4), -500.0).half())
    assert found.tolist() == [[-4e6]]


# modules


def test_parameters_are_found_and_tensors_are_kept() -> None:
    p = nn.Parameter(torch.randn(2, 2))
    v = nn.Parameter(torch.randn(2))
    for score, names in (
        (scores.bilinear(p), ["weight"]),
        (scores.luong_general(p), ["weight"]),
        (scores.additive(v, p, p.detach(), v), ["v", "query_weight"]),  # v serves twice
        (scores.keras_additive(v), ["v"]),
        (scores.keras_additive(), []),
        (scores.luong_concat(v, nn.Parameter(torch.randn(4, 2))), ["v", "weight"]),
        (scores.cosine(gain=v), ["gain"]),
        (scores.cosine(gain=LearnedGain(2)), ["gain.logit_scale"]),
        (scores.cosine(gain=v.detach()), []),
        (scores.bilinear(p.detach()), []),
    ):
        assert [name for name, _ in score.named_parameters()] == names
    assert [name for name, _ in scores.cosine(gain=v.detach()).named_buffers()] == ["gain"]
    assert [name for name, _ in scores.bilinear(p.detach()).named_buffers()] == ["weight"]


def test_a_score_is_saved_copied_and_converted() -> None:
    q, k = torch.randn(2, 3, 4), torch.randn(2, 5, 6)
    score, twin = scores.fresh_additive(4, 6, 8, heads=2, bias=True), scores.fresh_additive(4, 6, 8, heads=2, bias=True)
    assert not torch.equal(pairs(score, q, k), pairs(twin, q, k))
    twin.load_state_dict(score.state_dict())
    assert torch.equal(pairs(score, q, k), pairs(twin, q, k))
    assert torch.equal(pairs(copy.deepcopy(score), q, k), pairs(score, q, k))
    assert score.double().v.dtype == torch.float64


def test_modules_show_what_they_are() -> None:
    assert repr(scores.cosine("rms", 2)) == "Cosine(norm='rms', gain=2.0)"
    assert repr(LearnedGain(3, maximum=50)) == "LearnedGain(heads=3, maximum=50.0)"
    assert repr(scores.bilinear(torch.eye(2))) == "Bilinear(weight=(2, 2), default_scale=SqrtDk())"
    assert repr(scores.fresh_additive(2, 3, 4)) == "Additive(query_weight=(2, 4), key_weight=(3, 4))"
    assert repr(scores.luong_concat(torch.ones(4), torch.ones(3, 4))) == "LuongConcat(weight=(3, 4))"


def test_fresh_weights() -> None:
    score = scores.fresh_additive(6, 10, 50, heads=4, key_heads=2, bias=True, dtype=torch.float64)
    shapes = {name: tuple(p.shape) for name, p in score.named_parameters()}
    assert shapes == {"v": (4, 50), "query_weight": (4, 6, 50), "key_weight": (2, 10, 50), "bias": (4, 50)}
    assert {p.dtype for p in score.parameters()} == {torch.float64}
    assert not score.bias.any()
    for weight, fans in ((score.v, 51), (score.query_weight, 56), (score.key_weight, 60)):
        bound = math.sqrt(6 / fans)
        assert 0.9 * bound < weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert scores.fresh_additive(6, 10, 5).bias is None
    bilinear = scores.fresh_bilinear(30, 20, heads=3)
    assert bilinear.weight.shape == (3, 30, 20)
    assert 0.9 * math.sqrt(6 / 50) < bilinear.weight.abs().max() <= math.sqrt(6 / 50)
    assert bilinear.default_scale == scales.sqrt_dk()
