"""Statistics from query and key against dense float64 logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats import AttentionRows, _block, _sweep, attention_row_stats
from tests.stats.stats_oracle import STATISTICS, oracle
from tests.tolerances import complaint

WIDTH = 8  # of query and key


def dense(
    query: Tensor,
    key: Tensor,
    scale: float | Tensor,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(product, logits) in float64."""
    key = key.double().repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    product = query.double() @ key.mT
    logits = product * (scale.double() if isinstance(scale, Tensor) else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return product, logits if bias is None else logits + bias.double()


def assert_matches(result: AttentionRows, product: Tensor, logits: Tensor, visible: Tensor | None = None) -> None:
    expected = oracle(logits, visible)
    size = max(1.0, logits.abs().max().item())
    length = max(logits.shape[-1], WIDTH)
    for name in STATISTICS:
        magnitude = 1.0 + size if name == "variance" else 1.0
        actual = getattr(result.rows, name)
        text = complaint(actual, expected[name], actual.dtype, length=length, logit=size, magnitude=magnitude)
        assert text is None, f"{name}: {text}"
    shown = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand(logits.shape)
    largest = product.abs().masked_fill(~shown, 0.0).amax(-1)
    assert complaint(result.max_product, largest, result.max_product.dtype, length=WIDTH, logit=0.0) is None


@pytest.fixture(params=[(2**18, 2**10), (300, 2**10), (100, 6)], ids=["one tile", "many tiles", "split keys"])
def _tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, width = request.param
    monkeypatch.setattr(_sweep, "TILE", tile)
    monkeypatch.setattr(_sweep, "MOST_TILE_KEYS", width)


pytestmark = pytest.mark.usefixtures("_tile")


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("length", "keys"), [(40, 40), (40, 13), (13, 40), (1, 9)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_and_causal(length: int, keys: int, kv_heads: int, is_causal: bool) -> None:
    query, key = torch.randn(2, 4, length, 8), torch.randn(2, kv_heads, keys, 8)
    visible = torch.ones(length, keys, dtype=torch.bool).tril() if is_causal else None
    result = attention_row_stats(query, key, scale=0.3, is_causal=is_causal)
    assert_matches(result, *dense(query, key, 0.3), visible)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", [(1, 1, 1, 20), (3, 1, 1, 20), (3, 1, 15, 20), (1, 4, 15, 20), (15, 20), (15, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks_of_every_shape(shape: tuple[int, ...], is_causal: bool) -> None:
    query, key = torch.randn(3, 4, 15, 8), torch.randn(3, 2, 20, 8)
    visible = torch.rand(shape) > 0.5
    both = visible & torch.ones(15, 20, dtype=torch.bool).tril() if is_causal else visible
    result = attention_row_stats(query, key, scale=0.3, visible=visible, is_causal=is_causal)
    assert_matches(result, *dense(query, key, 0.3), both)


@pytest.mark.parametrize("fill", [-math.inf, torch.finfo(torch.float32).min, -65504.0])
def test_float_masks_hide_at_their_fill(fill: float) -> None:
    query, key = torch.randn(2, 4, 15, 8), torch.randn(2, 4, 15, 8)
    visible = torch.rand(2, 1, 15, 15) > 0.5
    slope = torch.randn(2, 1, 15, 15)
    result = attention_row_stats(query, key, scale=0.3, float_mask=slope.masked_fill(~visible, fill))
    assert_matches(result, *dense(query, key, 0.3, bias=slope), visible)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("scale", [-0.5, 0.0, (4, 1, 1), (2, 1, 15, 1)], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [None, (4, 1, 15), (1, 4, 15, 15)], ids=str)
def test_scale_then_softcap_then_bias(
    scale: float | tuple[int, ...], softcap: float | None, bias: tuple[int, ...] | None
) -> None:
    query, key = torch.randn(2, 4, 15, 8), torch.randn(2, 2, 15, 8)
    visible = torch.rand(2, 1, 15, 15) > 0.3
    factor = torch.rand(scale) + 0.1 if isinstance(scale, tuple) else scale
    added = None if bias is None else torch.randn(bias)
    result = attention_row_stats(query, key, scale=factor, softcap=softcap, bias=added, visible=visible)
    assert_matches(result, *dense(query, key, factor, softcap, added), visible)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_leading_dimensions(lead: tuple[int, ...]) -> None:
    query, key = torch.randn(*lead, 4, 9, 8), torch.randn(*lead, 2, 9, 8)
    visible = torch.rand(*lead, 1, 1, 9) > 0.4
    result = attention_row_stats(query, key, scale=0.3, visible=visible)
    assert result.max_product.shape == (*lead, 4, 9)
    assert_matches(result, *dense(query, key, 0.3), visible)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    query, key = torch.randn(1, 2, 9, 8).to(dtype), torch.randn(1, 2, 9, 8).to(dtype)
    result = attention_row_stats(query, key, scale=0.3)
    assert result.rows.keys.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches(result, *dense(query, key, 0.3))


def test_autocast_does_not_narrow_the_product() -> None:
    query, key = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = attention_row_stats(query, key, scale=0.3)
    assert_matches(result, *dense(query, key, 0.3))


@pytest.mark.parametrize("mask", ["none", "causal", "explicit"])
def test_future_weight(mask: str) -> None:
    query, key = torch.randn(2, 4, 33, 8), torch.randn(2, 4, 33, 8)
    visible = torch.rand(2, 1, 33, 33) > 0.3 if mask == "explicit" else None
    result = attention_row_stats(query, key, scale=1.0, visible=visible, is_causal=mask == "causal", future=True)
    _, logits = dense(query, key, 1.0)
    shown = torch.ones(33, 33, dtype=torch.bool) if visible is None else visible
    shown = shown.tril() if mask == "causal" else shown
    weights = logits.masked_fill(~shown, -math.inf).softmax(-1).nan_to_num(0.0)
    assert result.future is not None
    size = logits.abs().max().item()
    assert complaint(result.future, weights.triu(1).sum(-1), torch.float32, length=33, logit=size) is None


def test_future_weight_needs_a_square_call() -> None:
    assert attention_row_stats(torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), scale=1.0, future=True).future is None


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((0, 2, 3, 4), (0, 2, 3, 4)),
        ((1, 0, 3, 4), (1, 0, 3, 4)),
        ((1, 2, 0, 4), (1, 2, 3, 4)),
        ((1, 2, 3, 4), (1, 2, 0, 4)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_dimensions(query: tuple[int, ...], key: tuple[int, ...], is_causal: bool) -> None:
    result = attention_row_stats(torch.zeros(query), torch.zeros(key), scale=1.0, is_causal=is_causal)
    assert result.rows.keys.shape == query[:-1]
    assert not result.rows.keys.any()


def test_head_dimension_zero_is_uniform() -> None:
    result = attention_row_stats(torch.zeros(1, 2, 3, 0), torch.zeros(1, 2, 5, 0), scale=1.0)
    torch.testing.assert_close(result.rows.effective_keys, torch.full((1, 2, 3), 5.0))


def test_refusals() -> None:
    q = torch.zeros(1, 4, 3, 8)
    with pytest.raises(InvalidValueError, match="alike"):
        attention_row_stats(q, torch.zeros(1, 4, 3, 6), scale=1.0)
    with pytest.raises(InvalidValueError, match="divide"):
        attention_row_stats(q, torch.zeros(1, 3, 3, 8), scale=1.0)
    with pytest.raises(InvalidValueError, match="bias"):
        attention_row_stats(q, q, scale=1.0, bias=torch.zeros(5, 3))
    with pytest.raises(InvalidTypeError, match="query"):
        attention_row_stats(q.long(), q, scale=1.0)


def test_inputs_and_gradients_are_left_alone() -> None:
    query = torch.randn(1, 2, 9, 8, requires_grad=True)
    before = query.detach().clone()
    result = attention_row_stats(query, query, scale=0.3, softcap=3.0)
    assert torch.equal(query.detach(), before)
    assert not result.rows.max_logit.requires_grad


@pytest.mark.parametrize("explicit", [False, True])
def test_the_hidden_triangle_is_skipped(explicit: bool) -> None:
    visible = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() if explicit else None
    masks = _block.Masks(visible=visible, is_causal=not explicit)
    mask, start, stop = masks.window(_block.Block(0, 1, 0, 2, 16, 32, 0, 64), torch.float32, torch.device("cpu"))
    assert mask is not None
    assert stop == 32
    assert start in (16, 17)  # the first row sees key 16, so that key is hidden from none
    assert mask.shape[-1] == stop - start
