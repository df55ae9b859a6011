"""Rows of random attention, and the embedded model's weights, that claims measure."""

import math

import pytest
import torch

from sqrtdk.models.demo import load_demo
from sqrtdk_lab import _rows
from sqrtdk_lab._rows import attention_weights, demo_weights, factor, own_keys, products, windows
from tests.tolerances import complaint


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_products_have_the_variance_of_their_dimension() -> None:
    product = products(rng(), draws=20_000, keys=1, d_k=64).flatten()
    assert product.dtype == torch.float64
    error = 64 * math.sqrt(2.0 / 20_000)  # standard error of a variance of 64
    assert (product**2).mean().item() == pytest.approx(64, abs=6 * error)


def test_every_draw_has_keys_of_its_own_and_the_rows_of_a_draw_share_theirs() -> None:
    singular = torch.linalg.matrix_rank(products(rng(), draws=4, keys=6, d_k=2, queries=5))
    assert singular.tolist() == [2, 2, 2, 2]  # five rows over the same keys of two dimensions
    rows = products(rng(), draws=6, keys=6, d_k=2)[:, 0]
    assert torch.linalg.matrix_rank(rows) == 6


def test_many_draws_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rows, "LARGEST_BLOCK", 40)  # two draws of (4 + 1) * 4 numbers
    product = products(rng(), draws=7, keys=4, d_k=4)
    assert product.shape == (7, 1, 4)
    assert len(set(product.flatten().tolist())) == product.numel()


def test_rows_have_keys_of_their_own_with_the_given_moments() -> None:
    query, key = own_keys(rng(), 400, 5, 32, std=2.0, mean=1.0)
    assert query.dtype == key.dtype == torch.float64
    assert key.mean().item() == pytest.approx(1.0, abs=0.05)
    assert key.std().item() == pytest.approx(2.0, abs=0.05)
    assert not torch.equal(key[0], key[1])


def test_products_are_those_of_the_rows() -> None:
    query, key = own_keys(rng(), 3, 5, 4, queries=2)
    torch.testing.assert_close(products(rng(), draws=3, keys=5, d_k=4, queries=2), query @ key.mT)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_are_the_softmax_of_the_scaled_products(is_causal: bool) -> None:
    query, key = own_keys(rng(), 3, 6, 4, queries=6)
    logits = 0.5 * query @ key.mT
    if is_causal:
        logits = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
    torch.testing.assert_close(attention_weights(query, key, 0.5, is_causal=is_causal), logits.softmax(-1))


@pytest.mark.parametrize(("rule", "value"), [("none", 1.0), ("sqrt_dk", 0.25), ("dk", 0.0625)])
def test_factor_of_a_rule(rule: str, value: float) -> None:
    assert factor(rule, 16) == value


@pytest.mark.parametrize(("variant", "scale"), [("demo", 64**-0.5), ("demo:unscaled", 1.0)])
def test_demo_weights_are_those_of_the_forward_pass(variant: str, scale: float) -> None:
    model, text = load_demo(variant), windows(2, 40, rng())
    found = demo_weights(model, text, scale)
    seen: dict[str, torch.Tensor] = {}
    v_proj, o_proj = (model.get_submodule(f"blocks.1.attention.{name}_proj") for name in "vo")
    v_proj.register_forward_hook(lambda _m, _a, out: seen.update(value=out))
    o_proj.register_forward_pre_hook(lambda _m, args: seen.update(out=args[0]))
    with torch.no_grad():
        model(text)
    value = seen["value"].view(2, 40, 2, 64).transpose(1, 2)
    out = (found[:, 1] @ value).transpose(1, 2).flatten(-2)
    largest = 300.0 * scale  # logit: 223 of the one without the scale
    assert complaint(out, seen["out"], torch.float32, length=64, logit=largest) is None


def test_demo_weights_leave_no_hook_behind() -> None:
    model = load_demo()
    demo_weights(model, windows(1, 8, rng()), 0.125)
    assert not any(module._forward_hooks for module in model.modules())
