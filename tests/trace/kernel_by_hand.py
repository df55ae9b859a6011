"""A call of one of the project's own kernels against the same call by the dense formula, field by field."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from sqrtdk.stats.heads import HeadStats
from sqrtdk.tracing import AttentionCall, EffectiveScale
from tests.attentions.compiled import CASES, E, L, only, traced, without_fit
from tests.tolerances import allowed

SAME = (
    "site", "index", "module_class", "score", "batch", "heads", "kv_heads", "head_dim", "padded_head_dim", "value_dim",
    "model_dim", "query_len", "key_len", "self_attention", "dtype", "logits_dtype", "device", "formula", "terms",
    "norm", "rope", "softcap", "bias", "bias_scaled_by", "sinks", "dropout", "unknown", "stats_reason",
)  # fmt: skip
COUNTS = ("heads", "rows", "blind_rows", "nan_rows", "saturated")


@functools.cache
def both(name: str, impl: str = "cpu", grad: bool = False) -> tuple[AttentionCall, AttentionCall]:
    """The same call by the dense formula, without what it returns beside its output, and by a kernel."""
    one = CASES[name]
    # an output that comes with its lse is one call for the trace, whoever computes it
    alone = dataclasses.replace(one, options={key: x for key, x in one.options.items() if key != "return_aux"})
    dense = traced(alone.model("dense"), *one.inputs(), grad=grad)
    return only(dense, "eager"), only(traced(one.model(impl), *one.inputs(), grad=grad))


def check_same(dense: AttentionCall, kernel: AttentionCall, *, fit: bool = True) -> None:
    """Formula, sizes and scale, with the fitted slope where `fit`."""
    assert {field: getattr(kernel, field) for field in SAME} == {field: getattr(dense, field) for field in SAME}
    check_scale(dense.scale, kernel.scale, fit=fit)


def check_scale(dense: EffectiveScale, kernel: EffectiveScale, *, fit: bool) -> None:
    assert (kernel.agree, without_fit(kernel.reason)) == (dense.agree, without_fit(dense.reason))
    room = allowed(torch.float32, length=E, logit=10.0, magnitude=1.0)
    single = allowed(torch.float32, length=4, logit=0.0, magnitude=1.0)  # factors
    if dense.symbolic is None:  # a scale that changes with the row
        assert (kernel.symbolic, kernel.effective, kernel.ratio) == (None, dense.effective, dense.ratio)
    else:
        assert kernel.symbolic == kernel.effective == pytest.approx(dense.symbolic, rel=single)
        assert kernel.ratio == pytest.approx(dense.ratio, rel=single)
        if fit:
            assert kernel.numeric == pytest.approx(dense.numeric, rel=room)
            assert kernel.r_squared == pytest.approx(dense.r_squared, abs=room)
    assert kernel.per_head == (None if dense.per_head is None else pytest.approx(dense.per_head, rel=single))
    named = [{f.source for f in scale.factors if f.learned} for scale in (dense, kernel)]
    assert named[0] == named[1]
    assert all(f.source in ("sqrtdk scale", "number", "tensor", "rows") or f.learned for f in kernel.factors)


def check_mask(dense_call: AttentionCall, kernel_call: AttentionCall) -> None:
    dense, kernel = dense_call.mask, kernel_call.mask
    assert (kernel is None) == (dense is None)
    if dense is None or kernel is None:
        return
    for field in ("kind", "blind_rows", "uniform_rows", "fill", "scaled_by"):
        assert getattr(kernel, field) == getattr(dense, field), field
    if kernel.masked_weight is not None:  # the kernel does not show it where masked keys have finite logits
        assert kernel.masked_weight == dense.masked_weight == 0.0
    assert (kernel.masked_weight is None) == math.isfinite(dense.fill or 0.0)


def check_statistics(dense: AttentionCall, kernel: AttentionCall) -> None:
    assert dense.stats is not None
    assert kernel.stats is not None
    single = functools.partial(allowed, torch.float32, length=max(L, E), logit=max(dense.stats.max_abs_logit))
    for field in dataclasses.fields(HeadStats):
        one, two = getattr(dense.stats, field.name), getattr(kernel.stats, field.name)
        if field.name in COUNTS:
            assert two == one, field.name
        elif not field.name.endswith("histogram"):
            assert two == pytest.approx(one, abs=single(magnitude=max(map(abs, one)))), field.name
    for field in ("future_weight", "output_rms"):
        one, two = getattr(dense, field), getattr(kernel, field)
        assert (one is None) == (two is None), field
        assert one is None or two == pytest.approx(one, rel=single(magnitude=1.0)), field
    assert kernel.max_product is not None
    assert dense.max_product is not None
    if dense.mask is None:  # the dense product is stored at hidden keys, too
        assert kernel.max_product == pytest.approx(dense.max_product, rel=single(magnitude=1.0))
    assert kernel.max_product <= dense.max_product * (1.0 + single(magnitude=1.0))
    assert sum(kernel.stats.logit_histogram[0].counts) == sum(dense.stats.logit_histogram[0].counts)
