"""A quantised cache of one side: what it rounds and cuts off, against float64; and how often a comparison runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.compare.fixes import fix_of
from sqrtdk.errors import InvalidValueError

MOST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}


def read_back(dtype: str, scale: float) -> Callable[[Tensor], Tensor]:
    """As an engine stores numbers with one fixed scale, and reads them."""

    def store(x: Tensor) -> Tensor:
        small = (x / scale).clamp(-MOST[dtype], MOST[dtype])
        return (small.round() if dtype == "int8" else small.to(getattr(torch, dtype)).to(x.dtype)) * scale

    return store


class Attention(nn.Module):
    def __init__(self, key: Callable[[Tensor], Tensor] | None = None, value: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.stores = key, value

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 16)).transpose(1, 2) for p in (self.q, self.k, self.v))
        key, value = self.stores
        k, v = k if key is None else key(k), v if value is None else value(v)
        heads = (q @ k.mT * 0.25).softmax(-1) @ v
        return self.o(heads.transpose(1, 2).flatten(2))


X = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))


def causes(b: Attention, **options: object) -> list[tuple[str, str, str]]:
    report = sqrtdk.diff(Attention(), b, (X,), **options)
    return [(cause.name, cause.stage, cause.text) for pair in report.pairs for cause in pair.causes]


def beyond(projection: str, limit: float) -> float:
    """Share of k or v beyond a limit, in float64."""
    numbers = getattr(Attention().double(), projection)(X.double())
    return float((numbers.abs() > limit).double().mean())


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("letter", ["k", "v"])
def test_what_a_fixed_scale_cuts_off_is_told_beside_the_rounding(dtype, letter):
    name = {"k": "key", "v": "value"}[letter]
    limit = 0.7
    report = causes(Attention(**{name: read_back(dtype, limit / MOST[dtype])}))
    share = beyond(letter, limit)
    assert 0.05 < share < 0.5
    assert report == [
        ("rounding", name, f"rounds {name} to {dtype} ({100 * share:.2g}% of {letter} beyond 0.7 were cut off)")
    ]


@pytest.mark.parametrize(("letter", "name"), [("k", "key"), ("v", "value")])
def test_a_scale_of_which_the_numbers_tell_nothing_is_named_by_the_user(letter, name):
    b = Attention(**{name: read_back("int8", 0.03)})  # 3.8 is beyond every number
    assert beyond(letter, 0.03 * 127) == 0.0
    assert [cause for cause, *_ in causes(b)] == ["unknown"]
    assert causes(b, kv_scale=0.03) == [("rounding", name, f"rounds {name} to int8")]


def test_a_scale_of_each_head_comes_from_its_largest_number():
    def store(x: Tensor) -> Tensor:
        scale = x.abs().amax((0, 2, 3), keepdim=True) / 127
        return (x / scale).round() * scale

    assert causes(Attention(store)) == [("rounding", "key", "rounds key to int8")]


def test_what_is_no_storing_stays_unknown():
    noise = torch.randn(2, 2, 24, 16, generator=torch.Generator().manual_seed(2))
    assert [
        name for name, *_ in causes(Attention(lambda k: (k + 0.05 * noise.to(k)).clamp(-0.7, 0.7)), kv_scale=1)
    ] == ["unknown"]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(InvalidValueError, match="kv_scale"):
        sqrtdk.diff(Attention(), Attention(), (X,), kv_scale=scale)


@pytest.mark.parametrize(("by", "most"), [(1.0, 1), (1.5, 3)])
def test_how_often_a_side_runs(by, most):
    """Once where both are the same; in float64, and once more with B's outputs in A, where they differ."""
    counts = [0, 0]
    sides = Attention(), Attention(lambda k: k * by if by != 1.0 else k)
    original = Attention.forward

    def counted(self: Attention, x: Tensor) -> Tensor:
        counts[self.stores[0] is not None] += 1
        return original(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "forward", counted)
        report = sqrtdk.diff(*sides, (X,))
    assert report.same is (by == 1.0)
    assert counts == list(report.forwards)
    assert max(counts) <= most


@pytest.mark.parametrize("factor", [0.5, 0.707, 3.0])
def test_a_constant_factor_on_v_is_no_quantised_cache(factor):
    report = sqrtdk.diff(Attention(), Attention(value=lambda v: v * factor), (X,))
    (cause,) = report.pairs[0].causes
    assert (cause.name, cause.stage, cause.text) == ("kv_scale", "value", f"has v times {factor}")
    assert fix_of(cause) == f"multiply v by 1, as A does, not by {factor:g}"
    assert "cache" not in str(fix_of(cause))


def test_a_scale_applied_twice_to_what_is_stored_in_8_bits_is_that_of_the_cache():
    store = read_back("int8", 0.02)
    a, b = Attention(value=store), Attention(value=lambda v: store(v) * 0.02)
    (cause,) = sqrtdk.diff(a, b, (X,), kv_scale=0.02).pairs[0].causes
    assert (cause.name, cause.stage) == ("kv_scale", "value")
    assert cause.text == "has v times 0.02: the scale of a quantised cache applied twice, or not at all"
