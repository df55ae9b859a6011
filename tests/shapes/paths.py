"""Calls that reach every function of the package whose annotations hold shapes; nothing is compared here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sqrtdk
from sqrtdk import AuxRequest, positions, scales, stats, theory
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl import choice, rows, simplify
from sqrtdk.impl.choice import IMPLEMENTATIONS
from sqrtdk.impl.kernel import load, operators
from sqrtdk.nn import ScaledDotProductAttention
from sqrtdk.stats import _sweep, tiles
from tests.attention.cases import BASE, FUSED, Case, as_leaves
from tests.nn import nn_cases
from tests.positions import positions_cases
from tests.support.kernel_here import unable

Run = Callable[[], Any]
_KEPT: list[torch.library.Library] = []  # operators go with their library


def every_path() -> Iterator[tuple[str, Run]]:
    """Names and calls; tiny ones are several blocks."""
    rows.block_rows = lambda call: 5
    _sweep.TILE, _sweep.MOST_TILE_KEYS = 120, 6
    tiles.SCATTER_COST = 0.0
    if unable():
        stand_in()
    return chain(_battery(), _modules(), OTHERS.items())


def stand_in() -> None:
    """Operators in place of the compiled kernel's, by their schema: results of the right shapes, and no numbers."""
    source = (Path(operators.__file__).parent / "attention.cpp").read_text()
    library = torch.library.Library("sqrtdk_cpu", "DEF")
    for text, function in zip(
        re.findall(r'm\.def\(((?:\s*"[^"]*")+)\)', source),
        (operators._shapes, operators._gradient_shapes, operators._kept_shape),
        strict=True,
    ):
        schema = "".join(re.findall(r'"([^"]*)"', text))
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CPU")
    operators.register()
    load._reason, load._beats_torch = None, True
    _KEPT.append(library)


def _battery() -> Iterator[tuple[str, Run]]:
    interpreted = [case for case in FUSED if case.triton_can][:3]  # a case takes a second there
    for impl in ("auto", *IMPLEMENTATIONS):
        for case in interpreted if impl == "triton" else BASE:
            yield f"{impl} {case.id}", partial(_attention, case, impl)
    for case in BASE:
        yield f"measure {case.id}", partial(_measure, case)


def _attention(case: Case, impl: str) -> None:
    leaves = as_leaves(case.leaves(), case.torch_dtype)
    try:
        sqrtdk.attention(**case.given(leaves), impl=impl).float().sum().backward()
        with torch.no_grad():
            sqrtdk.attention(**case.given(leaves), impl=impl, return_aux=AuxRequest.all())
    except UnsupportedError:
        pass  # the battery knows which implementation runs which case


def _measure(case: Case) -> None:
    arguments = case.given(as_leaves(case.leaves(), case.torch_dtype, False))
    for name in ("value", "sinks"):
        arguments.pop(name, None)
    rows = sqrtdk.measure(**arguments)
    sqrtdk.measure(**arguments, rows=2)
    if rows.keys.ndim > 1:
        stats.head_stats(rows)
        stats.row_summary(rows.max_logit)


def _modules() -> Iterator[tuple[str, Run]]:
    for name, case in nn_cases.CASES.items():
        yield f"nn {name}", partial(_module, case)
    for name in positions_cases.CASES:
        yield f"term {name}", partial(_term, name)


def _module(case: nn_cases.Case) -> None:
    module, inputs = case.make(), case.inputs()
    module(*inputs)
    module(*inputs, is_causal=True, return_aux=AuxRequest.all())


def _term(name: str) -> None:
    positions_cases.made(name).term(*positions_cases.block())


def _masks() -> None:
    for options in ({}, {"add_zero_attn": True}):
        module = nn_cases.multi_head(**options)
        x = nn_cases.model_in()
        length, heads = nn_cases.LENGTH, nn_cases.HEADS
        padding = torch.arange(length).expand(2, length) > 3
        causal = torch.ones(length, length).tril().log()
        for mask in (causal, causal.bool().expand(2 * heads, length, length)):
            module(*x, key_padding_mask=padding, attn_mask=mask)
        for hidden in (padding, torch.zeros(2, length)):
            module(*x, key_padding_mask=hidden, is_causal=True)
        module(*x, is_causal=True, attn_mask=None if options else causal)
    x = torch.randn(nn_cases.LENGTH, nn_cases.MODEL)
    module(x, x, x, key_padding_mask=padding[0], average_attn_weights=False)


def _unclean() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4)
    k[..., 0, :] = v[..., 0, :] = math.nan
    mask = torch.arange(5) > 0
    for impl in ("dense", "tiled"):
        sqrtdk.attention(q, k, v, mask, impl=impl, sinks=torch.zeros(2, 5, 1))
    ScaledDotProductAttention(4)(q, k, v, ~mask, need_weights=True)
    sqrtdk.explain(q, k, v, mask)


def _rotations() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    positions.rope(q, k, positions=torch.arange(10).view(2, 5), rotary_dim=4)
    positions.rope(q[0, 0], k[0, 0], layout="interleaved")
    positions.yarn(q, q, factor=4.0, original_length=16, positions=torch.rand(5))


def _statistics() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask, bias = torch.rand(6, 6) > 0.2, torch.randn(4, 1, 6)
    for options in (
        {},
        {"visible": mask},
        {"bias": bias, "is_causal": True},
        {"float_mask": mask.log(), "softcap": 3.0},
    ):
        stats.head_stats_from_qk(q, k, scale=0.5, future=True, **options)
        stats.attention_row_stats(q, k, k, scale=torch.rand(6, 1), **options)
    logits = torch.randn(2, 4, 6, 6)
    stats.head_stats_from_logits(logits, mask, future=True)
    rows = stats.row_stats(logits[0, 0], mask[0]).merge(stats.row_stats(logits[0, 0]))
    assert rows.l.shape == rows.c3.shape == (6,)


def _scales() -> None:
    q, k = torch.randn(2, 2, 6, 8), torch.randn(2, 1, 6, 8)
    theory.scale_from_entropy(q, k, 1.0, is_causal=True)
    theory.scale_from_entropy(q, k, [1.0, 1.1], visible=torch.ones(6, 6).bool(), per_head=True)
    scales.log_n().beta(scales.sizes(8, visible=torch.tensor([3])))
    theory.logit_distribution(16).log_above(3.0)


def _mods() -> None:
    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.5**h * (q_idx - kv_idx)

    for lead in ((), (2,), (2, 4), (2, 3, 4)):
        q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 3)
        options: dict[str, Any] = {"score_mod": alibi, "mask_mod": lambda b, h, q_idx, kv_idx: q_idx + b >= kv_idx}
        _, _, aux = sqrtdk.attention(q, k, v, **options, return_aux=True, return_weights=True)
        assert aux.max_scores is aux.max_logit
        sqrtdk.attention(q, k[..., :0, :], v[..., :0, :], **options)
        sqrtdk.measure(q, k, score=lambda q, k: q @ k.mT, scale=torch.rand(lead[-1:]), **options)


def _distances() -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    for factor in (1.0, 1e3, 1e9):  # a product in float32, in float64, pairs
        sqrtdk.attention(factor * q, k, k, score="distance", enable_gqa=True, return_weights=True)
    torch.vmap(lambda q: sqrtdk.attention(q, k, k, score="distance", enable_gqa=True))(q[None])
    pairs = (1e9 * q[..., :2, :]).requires_grad_()
    output = sqrtdk.attention(pairs, k, k, score="distance", enable_gqa=True)
    (gradient,) = torch.autograd.grad(output.sum(), pairs, create_graph=True)
    gradient.sum().backward()


def _mods_in_kernels() -> None:
    for module in (choice, simplify):
        module.SMALLEST_READ = 1
    table, relative = torch.randn(4, 6, 7), torch.randn(4, 13)
    document = torch.arange(7) // 2
    mods: tuple[dict[str, Any], ...] = (
        {"score_mod": lambda s, b, h, i, j: s + relative[h, i - j + 6], "mask_mod": lambda b, h, i, j: i >= j},
        {"score_mod": lambda s, b, h, i, j: s + table[h, i, j]},
        {"score_mod": lambda s, b, h, i, j: s + 2.0 * table[h, i, j]},
        {"score_mod": lambda s, b, h, i, j: s * relative[h, i + b]},
        {"score_mod": lambda s, b, h, i, j: torch.where(document[i] == document[j], s * s, -math.inf)},
        {"mask_mod": lambda b, h, i, j: document[i] == document[j]},
    )
    for dtype, lead in product((torch.float32, torch.float64), ((4,), (2, 4), (2, 3, 4))):
        q, k, v = (torch.randn(*lead, n, m, dtype=dtype) for n, m in ((6, 8), (7, 8), (7, 3)))
        for options in mods:
            sqrtdk.attention(q, k, v, **options, return_aux=True)
            sqrtdk.measure(q, k, **options)


def _without_data() -> None:
    with FakeTensorMode():
        q, v = torch.empty(2, 4, 6, 8, requires_grad=True), torch.empty(2, 2, 6, 3)
        k = v[..., :1].expand(2, 2, 6, 8)
        sqrtdk.attention(q, k, v, enable_gqa=True, impl="cpu").sum().backward()
        _twice()


def _twice() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).requires_grad_()
    output = sqrtdk.attention(q, k, v, impl="cpu", sinks=torch.zeros(2), dropout_p=0.2, bias="alibi")
    (gradient,) = torch.autograd.grad(output.sum(), q, create_graph=True)
    gradient.sum().backward()


OTHERS: dict[str, Run] = {
    "masks of a module": _masks,
    "unclean": _unclean,
    "rotations": _rotations,
    "statistics": _statistics,
    "scales": _scales,
    "mods": _mods,
    "distances": _distances,
    "mods in kernels": _mods_in_kernels,
    "without data": _without_data,
    "twice": _twice,
}
