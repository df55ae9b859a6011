"""Distances as dot products: right wherever they are taken, and not taken where they would round too much."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk import AuxRequest, positions
from sqrtdk._resolve import resolve_arguments
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl import fused as fused_module
from sqrtdk.impl import product as product_module
from sqrtdk.impl.call import Call
from sqrtdk.impl.product import as_product
from sqrtdk.scores import distance
from tests.attention import formulas
from tests.attention.calls import close, close_gradients
from tests.attention.oracle import STATISTICS, WITH_GRADIENT, attend
from tests.support.kernel_here import needs_kernel, unable
from tests.tolerances import allowed, complaint, gradient_complaints

F32, F64 = torch.float32, torch.float64
HEADS, LENGTH, KEYS, DIM = 4, 7, 9, 8
OF_ALL_KEYS = ("min_logit", "mean", "variance")  # as large as the largest logit
KERNELS = (*(() if unable() else ("cpu",)), "fused")


def normal(keys: int = KEYS) -> list[Tensor]:
    """q, k and v; two query heads share a key head."""
    sizes = ((2, HEADS, LENGTH, DIM), (2, 2, keys, DIM), (2, 2, keys, DIM))
    return [torch.randn(size, dtype=F64) for size in sizes]


def far() -> list[Tensor]:
    """Far from the origin, each head elsewhere; float32 rounds them here, and from here on they are exact."""
    q, k, v = normal()
    place = 2.0**10 * torch.tensor([1.0, -2.0], dtype=F64)[:, None, None]
    return [(q + place.repeat_interleave(2, 0)).float().double(), (k + place).float().double(), v]


def clusters(apart: float, spread: float) -> list[Tensor]:
    """Two clusters in each head: a product of float32 can't tell apart what is in one of them."""
    q, k, v = normal()
    q, k = (t * spread + apart * (torch.arange(t.shape[-2])[:, None] % 2) for t in (q, k))
    return [q.float().double(), k.float().double(), v]


# name -> tensors, and the dtype of the dot product that float32 gets, or None: it stays pairs
DATA: dict[str, tuple[Callable[[], list[Tensor]], torch.dtype | None]] = {
    "normal": (normal, F32),
    "far": (far, F32),
    "clusters": (lambda: clusters(300.0, 1.0), F64),
    "far clusters": (lambda: clusters(3e5, 1.0), None),
    "one key": (lambda: normal(1), F32),
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, sinks": {"is_causal": True, "sinks": torch.linspace(-3.0, 0.0, HEADS)},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": torch.linspace(-1.0, 1.0, KEYS).expand(LENGTH, KEYS)},
}


def form(*tensors: Tensor, **options: Any) -> Call:
    options = {"score": "distance", "enable_gqa": True} | options
    return as_product(resolve_arguments(*tensors, **options))


@dataclass(frozen=True)
class Wanted:
    """What the oracle says of a call."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the sum of the squares of output, lse and entropy
    size: float  # of the largest logit
    near: float  # of the largest logit that has a weight: small distances beside large ones keep their digits


def wanted(tensors: list[Tensor], scale: Tensor, options: dict[str, Any]) -> Wanted:
    leaves = [t.clone().requires_grad_() for t in (*tensors, scale)]
    answer = attend(*leaves[:3], scale=leaves[3][:, None, None], score=formulas.distance, **options)
    results = {"output": answer.output} | answer.statistics
    near = answer.logits[answer.weights > 1e-12].abs().max().item()
    return Wanted({name: t.detach() for name, t in results.items()}, gradients(results, leaves), answer.size, near)


def gradients(results: dict[str, Tensor], leaves: list[Tensor]) -> dict[str, Tensor]:
    total = sum((results[name].double().square().sum() for name in ("output", *WITH_GRADIENT)), torch.zeros(()))
    found = torch.autograd.grad(total, leaves)
    return dict(zip(("query", "key", "value", "scale"), found, strict=True))


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("impl", [*KERNELS, "dense", "tiled"])
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("called", CALLS)
def test_agrees_with_the_oracle(
    called: str, name: str, impl: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, statistics, and gradients of q, k, v and of a temperature of each head."""
    monkeypatch.setattr("sqrtdk.impl.rows.BLOCK_PAIRS", 2 * HEADS * KEYS * 3)
    (made, product), options = DATA[name], dict(CALLS[called])
    if name == "one key" and "bias" in options:
        options["bias"] = options["bias"][:, :1]
    tensors = [t.to(dtype).double() for t in made()]
    scale = torch.linspace(0.02, 0.1, HEADS, dtype=dtype)
    expected = wanted(tensors, scale.double(), options)
    leaves = [t.to(dtype).requires_grad_() for t in (*tensors, scale)]
    options |= {"score": "distance", "scale": leaves[3], "enable_gqa": True, "impl": impl}
    try:
        with torch.no_grad():
            output, aux = sqrtdk.attention(*leaves[:3], return_aux=True, **options)
    except UnsupportedError:
        folded = product == F32 or (dtype, product) == (F32, F64)
        taken = {"cpu": (dtype, product) == (F32, F32), "fused": folded and called in ("plain", "bias")}
        assert not taken.get(impl, True)
        return
    for field in ("output", *STATISTICS):
        found = output if field == "output" else getattr(aux, field)
        assert found.dtype == dtype
        magnitude = 1.0 + expected.size if field == "variance" else 1.0
        logit = expected.size if field in OF_ALL_KEYS else expected.near
        told = complaint(found, expected.results[field], dtype, length=KEYS, logit=logit, magnitude=magnitude)
        assert told is None, f"{field}: {told}"
    if impl == "fused":  # torch's kernels give no gradient of lse
        return
    output, aux = sqrtdk.attention(*leaves[:3], return_aux=AuxRequest(lse=True, entropy_nats=True), **options)
    mine = gradients({"output": output, "lse": aux.lse, "entropy_nats": aux.entropy_nats}, leaves)
    given = {"length": KEYS, "logit": expected.near, "rows": 2 * HEADS * LENGTH}
    wrong = gradient_complaints(mine, expected.gradients, dtype, **given)
    assert not wrong, wrong


@pytest.mark.parametrize("dim", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("kind", ["normal", "uniform", "clusters", "sparse"])
def test_a_product_rounds_no_more_than_its_bound(kind: str, dim: int) -> None:
    """And every head has a logit as large as a ninth of the sizes that the bound is made of."""
    q, k = torch.randn(2, 3, 100, dim), torch.randn(2, 3, 100, dim)
    if kind == "uniform":
        q, k = 100.0 + q.sigmoid(), 100.0 + k.sigmoid()
    elif kind == "clusters":
        q, k = (0.1 * t + 10.0 * torch.randn(8, dim)[torch.randint(8, (100,))] for t in (q, k))
    elif kind == "sparse":
        q, k = (30.0 * t * (torch.rand_like(t) < 0.1) for t in (q, k))
    scale = torch.tensor([0.3, -0.1, 0.2])[:, None, None]
    exact = scale * -torch.cdist(q.double(), k.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    query, key = distance().product(q, k)
    bound = product_module._error(scale, query, key, 3) * torch.finfo(F32).eps / 2
    assert (scale * (query.double() @ key.double().mT) - exact).abs().max() <= bound
    assert (scale * (query @ key.mT) - exact).abs().max() <= bound
    assert bound <= 9 * math.sqrt(dim + 6) * exact.abs().max() * torch.finfo(F32).eps / 2


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_where_the_dtype_of_the_product_changes(dtype: torch.dtype) -> None:
    """One key, which is the mean, and a query at distance r: the error is sqrt(E + 6) r^2 scale u."""
    k = torch.full((1, 1, 1, 3), 7.0, dtype=dtype)
    for scale in (0.5, -0.5, torch.tensor([[[-0.5]], [[0.25]]], dtype=dtype)):
        for limit, below, above in ((2.0**13, dtype, F64 if dtype == F32 else None), (2.0**29, F64, None)):
            if dtype == F64 and limit > 2.0**13:
                continue  # nothing is wider
            r = math.sqrt(limit / (3.0 * 0.5))
            for factor, product in ((0.999, below), (1.001, above)):
                q = k + torch.tensor([r * factor, 0.0, 0.0], dtype=dtype)
                made = form(q.expand(1, 2, 1, 3), k, k, scale=scale)
                assert (None if made.score is not None else made.query.dtype) == product


@pytest.mark.parametrize("kind", ["per head", "query heads", "batches", "no heads"])
def test_query_and_key_of_other_dimensions(kind: str) -> None:
    """One mean of all keys where a head's mean does not fit the query; the query keeps its shape."""
    shapes = {
        "per head": ((2, 4, LENGTH, DIM), (1, 2, KEYS, DIM)),
        "query heads": ((2, 1, LENGTH, DIM), (2, 4, KEYS, DIM)),
        "batches": ((1, 4, LENGTH, DIM), (3, 2, KEYS, DIM)),
        "no heads": ((LENGTH, DIM), (4, KEYS, DIM)),
    }
    q, k = (100.0 + torch.randn(size, dtype=F64) for size in shapes[kind])
    given = {"score": "distance", "scale": 0.1, "enable_gqa": kind != "query heads"}
    call = form(q, k, k, scale=0.1, enable_gqa=given["enable_gqa"])
    assert call.score is None
    assert call.query.shape == (*q.shape[:-1], DIM + 2)
    expected = attend(q, k, k, scale=0.1, score=formulas.distance).output
    for impl in ("dense", "fused", "auto"):
        close(sqrtdk.attention(q, k, k, impl=impl, **given), expected)
        close(sqrtdk.attention(q.float(), k.float(), k.float(), impl=impl, **given), expected, logit=1e3)


@pytest.mark.parametrize("impl", [*KERNELS, "dense", "tiled"])
def test_no_rows_and_no_keys(impl: str) -> None:
    q, k = torch.randn(2, HEADS, LENGTH, DIM), torch.randn(2, HEADS, KEYS, DIM)
    output, aux = sqrtdk.attention(q, k[..., :0, :], k[..., :0, :], score="distance", impl=impl, return_aux=True)
    assert output.shape == q.shape
    assert not output.any()
    assert not aux.keys.any()
    assert form(q, k[..., :0, :], k[..., :0, :]).query.isfinite().all()
    assert sqrtdk.attention(q[..., :0, :], k, k, score="distance", impl=impl).shape == (2, HEADS, 0, DIM)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
def test_a_hidden_key_counts_for_nothing(bad: float, impl: str) -> None:
    """Neither in the mean of the keys nor in a gradient."""
    q, k, v = (t.float() for t in normal())
    hidden = torch.arange(KEYS) >= KEYS - 2
    given = {"attn_mask": ~hidden, "score": "distance", "enable_gqa": True, "impl": impl}
    results = []
    for fill in (bad, 0.0):
        filled = [t.masked_fill(hidden[:, None], fill) for t in (k, v)]
        leaves = [t.clone().requires_grad_() for t in (q, *filled)]
        output, aux = sqrtdk.attention(*leaves, return_aux=AuxRequest(lse=True, entropy_nats=True), **given)
        found = torch.autograd.grad(output.square().sum() + aux.lse.sum() + aux.entropy_nats.sum(), leaves)
        results.append((output, aux.lse, found))
    for mine, clean in zip(results[0][:2], results[1][:2], strict=True):
        close(mine, clean)
    close_gradients(results[0][2], results[1][2], rows=2 * HEADS * LENGTH)


def test_numbers_whose_squares_overflow() -> None:
    """A distance that is infinite has the weight 0 and the gradient 0."""
    q, k = torch.zeros(1, 1, 1, 2, requires_grad=True), torch.tensor([[[[0.0, 1.0], [1e25, 0.0]]]], requires_grad=True)
    output = sqrtdk.attention(q, k, torch.tensor([[[[3.0], [5.0]]]]), score="distance")
    assert output.item() == 3.0
    output.sum().backward()
    assert not q.grad.any()
    assert not k.grad.any()


KEPT: dict[str, tuple[dict[str, Any], float, str]] = {
    "score_mod": ({"score_mod": lambda s, b, h, i, j: s - 1}, 1.0, "score_mod gets distances"),
    "term": ({"bias": positions.shaw(DIM, max_distance=3)}, 1.0, "a position term may depend on q and k"),
    "infinity": ({}, math.inf, "q or k holds NaN, infinity"),
    "overflow": ({}, 1e25, "squares overflow"),
    "too large": ({}, 1e9, "distances as dot products in float32 would round the logits by up to"),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_reason_is_told_where_pairs_are_kept(name: str) -> None:
    options, factor, reason = KEPT[name]
    q, k, v = (t.float() for t in normal())
    given = {"score": "distance", "enable_gqa": True} | options
    assert reason in sqrtdk.explain(factor * q, k, v, **given).reason
    with pytest.raises(UnsupportedError, match=reason):
        sqrtdk.attention(factor * q, k, v, impl="fused", **given)


@needs_kernel
def test_the_reason_is_told_where_float64_is_taken() -> None:
    q, k, v = (t.float() for t in clusters(300.0, 1.0))
    given = {"score": "distance", "enable_gqa": True}
    taken = sqrtdk.explain(q, k, v, **given)
    assert taken.impl == "fused"
    assert "not the compiled kernel: distances as dot products in float32 would round the logits" in taken.reason
    with pytest.raises(UnsupportedError, match="in float32 would round"):
        sqrtdk.attention(q, k, v, impl="cpu", **given)
    assert sqrtdk.explain(*normal(), **given).reason.endswith("it takes float32, bfloat16, float16")


def test_a_term_of_the_distance_alone_and_masks_by_function_are_no_reason() -> None:
    q, k, v = normal()
    for options in ({"bias": "alibi", "is_causal": True}, {"mask_mod": lambda b, h, i, j: i >= j}):
        assert form(q, k, v, **options).score is None


@pytest.mark.parametrize("product", [F32, F64])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_results_have_the_dtypes_of_the_call(dtype: torch.dtype, product: torch.dtype) -> None:
    made = normal() if product == F32 else clusters(300.0, 1.0)
    q, k, v = (t.to(dtype) for t in made)
    assert form(q, k, v).query.dtype == product
    given = {"score": "distance", "enable_gqa": True, "return_aux": True}
    output, aux = sqrtdk.attention(q, k, v, **given)
    beside, weights, _ = sqrtdk.attention(q, k, v, return_weights=True, **given)
    assert {output.dtype, beside.dtype, weights.dtype} == {dtype}
    assert {field.dtype for field in aux} == {F32}
    expected = attend(q, k, v, scale=1.0, score=formulas.distance)
    rounding = allowed(F32, length=KEYS, logit=20.0, magnitude=1.0) + (0.0 if dtype == F32 else torch.finfo(dtype).eps)
    for found, true in ((output, expected.output), (beside, expected.output), (weights, expected.weights)):
        assert (found.double() - true).abs().max() <= rounding * true.abs().max()


def test_a_subclass_with_other_pairs_keeps_them() -> None:
    class Twice(type(distance())):  # type: ignore[misc]
        def pairs(self, query: Tensor, key: Tensor) -> Tensor:
            return 2.0 * super().pairs(query, key)

    q, k, v = normal()
    found = sqrtdk.attention(q, k, v, score=Twice(), enable_gqa=True)
    close(found, attend(q, k, v, scale=2.0, score=formulas.distance).output)


def test_torch_gets_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fast kernels take no other."""
    seen: list[int] = []

    def noted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.extend(t.shape[-1] for t in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **options)

    monkeypatch.setattr(fused_module, "torch_attention", noted)
    q, k, v = (t.float() for t in normal())
    assert sqrtdk.attention(q, k, v, score="distance", enable_gqa=True, impl="fused").shape == q.shape
    assert len(set(seen)) == 1


class Layer(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sqrtdk.attention(q, k, v, score="distance", scale=0.1, enable_gqa=True)


def test_a_trace_that_enlarges_queries_enlarges_them_before_the_score() -> None:
    q, k, v = (t.float() for t in normal())
    with sqrtdk.trace(layer := Layer(), enlarge={("", 0): 3.0}) as run:
        found = layer(q, k, v)
    close(found, layer(3.0 * q, k, v), logit=50.0)
    assert run.calls[0].score == "distance"


def test_transforms_of_torch_func() -> None:
    """They give no numbers to look at, so the pairs are kept: first and second derivatives are those of the product."""
    q, k, v = normal()
    close(torch.vmap(Layer())(q, k, v), Layer()(q, k, v))

    def total(query: Tensor) -> Tensor:
        return sqrtdk.attention(query, k, v, score="distance", scale=0.1, enable_gqa=True, impl="dense").square().sum()

    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(total(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    close(torch.func.grad(total)(q), first)
    close(torch.func.grad(lambda x: torch.func.grad(total)(x).square().sum())(q), second, logit=100.0)
    tangent = torch.randn_like(q)
    close(torch.func.jvp(total, (q,), (tangent,))[1], (first * tangent).sum())


def test_forward_mode_differentiation() -> None:
    q, k, v = normal()
    tangent = torch.randn_like(q)
    leaf = q.clone().requires_grad_()
    output = Layer()(leaf, k, v)
    (along,) = torch.autograd.grad(output.sum(), leaf)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        found = torch.autograd.forward_ad.unpack_dual(Layer()(dual, k, v)).tangent
    close(found.sum(), (along * tangent).sum())


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic: bool) -> None:
    torch.compiler.reset()
    leaves = [t.float().requires_grad_() for t in normal()]
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, expected = compiled(*leaves), Layer()(*leaves)
    close(found, expected)
    mine, beside = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected))
    close_gradients(mine, beside, rows=2 * HEADS * LENGTH)
