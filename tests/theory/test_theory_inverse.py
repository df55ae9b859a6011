"""The scale that gives an entropy: against float64 softmax, at its ends, and for every way to call it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import expected_entropy_nats, scale_from_entropy
from sqrtdk.theory._numeric import falling_roots

ENOUGH = {torch.float64: 1e-11, torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}


def entropies(query: Tensor, key: Tensor, scale: Tensor, visible: Tensor) -> Tensor:
    """(H,) mean entropy in float64 over the rows that see at least two keys."""
    key = key.double().repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    logits = (scale.view(-1, 1, 1) * query.double() @ key.mT).masked_fill(~visible, -math.inf)
    rows = torch.special.entr(logits.softmax(-1)).sum(-1)
    choice = (visible.sum(-1) > 1).expand(rows.shape)
    heads = [i for i in range(rows.ndim) if i != rows.ndim - 2]
    return torch.where(choice, rows, 0.0).sum(heads) / choice.sum(heads)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    spread = torch.tensor([0.3, 1.0, 2.0, 5.0]).view(4, 1, 1)
    return (torch.randn(2, 4, 33, 16) * spread).to(dtype), torch.randn(2, 2, 33, 16).to(dtype)


@pytest.mark.parametrize("dtype", ENOUGH)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("masking", ["none", "causal", "visible"])
def test_the_scale_gives_the_entropy(dtype: torch.dtype, per_head: bool, masking: str) -> None:
    query, key = tensors(dtype)
    seen = {
        "none": torch.ones(33, 33, dtype=torch.bool),
        "causal": torch.ones(33, 33, dtype=torch.bool).tril(),
        "visible": torch.rand(2, 1, 33, 33) < 0.3,
    }[masking]
    arguments = {"visible": seen if masking == "visible" else None, "is_causal": masking == "causal"}
    for wanted in (0.05, 0.7, 1.6):
        scale = scale_from_entropy(query, key, wanted, per_head=per_head, **arguments)
        if per_head:
            assert isinstance(scale, Tensor)
            assert (scale.shape, scale.dtype) == ((4,), torch.float64)
        found = entropies(query, key, torch.as_tensor(scale, dtype=torch.float64).expand(4), seen)
        for entropy in found if per_head else [_mean(query, key, scale, seen)]:
            # a logit of size z is rounded by z eps, and at low entropies it is large
            assert float(entropy) == pytest.approx(wanted, abs=20 * ENOUGH[dtype], rel=0.0)


def _mean(query: Tensor, key: Tensor, scale: float, seen: Tensor) -> Tensor:
    """All heads have the same rows with a choice: the mean over heads is the mean over rows."""
    return entropies(query, key, torch.full((4,), scale, dtype=torch.float64), seen).mean()


def test_one_entropy_for_each_head() -> None:
    query, key = tensors(torch.float64)
    wanted = [0.2, 1.0, 2.0, 3.0]
    scales = scale_from_entropy(query, key, wanted, per_head=True)
    found = entropies(query, key, scales, torch.ones(33, 33, dtype=torch.bool))
    assert found.tolist() == pytest.approx(wanted, abs=1e-11)
    for head, want in enumerate(wanted):
        alone = scale_from_entropy(query[:, head : head + 1], key[:, head // 2 : head // 2 + 1], want)
        assert alone == pytest.approx(scales[head].item(), rel=1e-9)


def test_two_keys_have_a_closed_form() -> None:
    query, key = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[[0.0], [2.0]]], dtype=torch.float64)
    weight = 1 / (1 + math.exp(-2 * 0.35))
    entropy = -weight * math.log(weight) - (1 - weight) * math.log(1 - weight)
    assert scale_from_entropy(query, key, entropy) == pytest.approx(0.35, rel=1e-10)


def test_gaussian_keys_need_the_scale_of_the_table() -> None:
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(8, 512, 256, generator=generator) for _ in range(2))
    scale = scale_from_entropy(query, key, expected_entropy_nats(512, 1.5))
    assert scale * 16 == pytest.approx(1.5, rel=0.01)  # sigma = scale |q|, |q| about sqrt(256)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.floats(0.02, 0.98), st.floats(-6, 6), st.randoms(use_true_random=False))
def test_any_size_of_the_products(keys: int, share: float, magnitude: float, source: object) -> None:
    generator = torch.Generator().manual_seed(source.randrange(2**30))  # type: ignore[attr-defined]
    query = torch.randn(1, 3, 4, dtype=torch.float64, generator=generator) * 10**magnitude
    key = torch.randn(1, keys, 4, dtype=torch.float64, generator=generator)
    scale = scale_from_entropy(query, key, share * math.log(keys))
    found = entropies(query, key, torch.tensor([scale], dtype=torch.float64), torch.ones(3, keys, dtype=torch.bool))
    assert found.item() == pytest.approx(share * math.log(keys), abs=1e-10)


def test_ties_bound_the_entropy_from_below() -> None:
    key = torch.tensor([[[1.0], [1.0], [0.0], [-1.0]]], dtype=torch.float64)
    query = torch.ones(1, 3, 1, dtype=torch.float64)
    assert scale_from_entropy(query, key, 0.7) > 4.0  # log 2 = 0.693 is the infimum
    for wanted in (0.6, math.log(2), 0.0, -1.0):
        with pytest.raises(InvalidValueError, match=r"between 0\.693147 nats .* and 1\.38629 .*; got"):
            scale_from_entropy(query, key, wanted)


def test_refusals() -> None:
    query, key = tensors(torch.float32)
    for wanted in (math.log(33), 4.0):
        with pytest.raises(InvalidValueError, match=r"and 3\.49651 \(all keys alike\); got"):
            scale_from_entropy(query, key, wanted)
    with pytest.raises(InvalidValueError, match="finite number; got nan"):
        scale_from_entropy(query, key, math.nan)
    with pytest.raises(InvalidTypeError, match="entropy_nats is a real number"):
        scale_from_entropy(query, key, "1")  # type: ignore[call-overload]
    with pytest.raises(InvalidValueError, match="sees at least two keys"):
        scale_from_entropy(query[..., :1, :], key[..., :1, :], 0.5)
    with pytest.raises(InvalidValueError, match="3 for 4 heads"):
        scale_from_entropy(query, key, [1.0, 1.0, 1.0], per_head=True)
    with pytest.raises(InvalidValueError, match="are finite"):
        scale_from_entropy(query * math.nan, key, 1.0)
    with pytest.raises(InvalidValueError, match=r"between 3\.49651 nats"):
        scale_from_entropy(query * 0.0, key, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 9)), min_size=1, max_size=4))
def test_falling_roots_finds_each(cases: list[tuple[float, float]]) -> None:
    found = falling_roots(
        lambda xs: [math.expm1(steep * (root - x)) for x, (root, steep) in zip(xs, cases, strict=True)],
        [-6.0] * len(cases),
        [7.0] * len(cases),
    )
    assert found == pytest.approx([root for root, _ in cases], abs=1e-10)


def test_falling_roots_of_a_step_and_at_an_end() -> None:
    assert falling_roots(lambda xs: [1.0 if xs[0] < 0.3 else -1.0], [0.0], [1.0]) == pytest.approx([0.3], rel=1e-11)
    assert falling_roots(lambda xs: [-xs[0]], [0.0], [1.0]) == [0.0]
