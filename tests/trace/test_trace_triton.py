"""The Triton kernel is read as the dense formula that it runs, and as the compiled kernel is read."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from sqrtdk.impl.gpu.load import interpreted
from sqrtdk.stats.heads import HeadStats
from sqrtdk.tracing import AttentionCall
from tests.attentions.compiled import CASES, E, L, checked, only, told, traced, without_fit
from tests.tolerances import allowed

OP = "sqrtdk_gpu.forward"
COUNTS = ("heads", "rows", "blind_rows", "nan_rows", "saturated")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not interpreted(), reason="a GPU is there, and Triton's interpreter is not asked for"),
]
over_cases = pytest.mark.parametrize("name", CASES)


@functools.cache
def both(name: str, grad: bool = False) -> tuple[AttentionCall, AttentionCall]:
    """The same call by the dense formula and by the Triton kernel."""
    one = CASES[name]
    dense, kernel = (traced(one.model(impl), *one.inputs(), grad=grad) for impl in ("dense", "triton"))
    return only(dense, "eager"), only(kernel)


SAME = (
    "site", "index", "module_class", "score", "batch", "heads", "kv_heads", "head_dim", "padded_head_dim", "value_dim",
    "model_dim", "query_len", "key_len", "self_attention", "dtype", "logits_dtype", "device", "formula", "terms",
    "norm", "rope", "softcap", "bias", "bias_scaled_by", "sinks", "dropout", "unknown", "stats_reason",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "grad"), [(name, False) for name in CASES] + [(name, True) for name in ("bias", "gain_softcap", "sinks")]
)
def test_formula(name: str, grad: bool) -> None:
    dense, kernel = both(name, grad)
    assert kernel.formula == CASES[name].formula
    assert {field: getattr(kernel, field) for field in SAME} == {field: getattr(dense, field) for field in SAME}
    assert kernel.op == OP


@over_cases
def test_scale(name: str) -> None:
    dense, kernel = (call.scale for call in both(name))
    assert (kernel.agree, without_fit(kernel.reason)) == (dense.agree, without_fit(dense.reason))
    single = allowed(torch.float32, length=4, logit=0.0, magnitude=1.0)  # factors
    if dense.symbolic is None:  # a scale that changes with the row
        assert (kernel.symbolic, kernel.effective, kernel.ratio) == (None, dense.effective, dense.ratio)
    else:
        assert kernel.symbolic == kernel.effective == pytest.approx(dense.symbolic, rel=single)
    assert kernel.per_head == (None if dense.per_head is None else pytest.approx(dense.per_head, rel=single))
    named = [{f.source for f in scale.factors if f.learned} for scale in (dense, kernel)]
    assert named[0] == named[1]


@over_cases
def test_mask(name: str) -> None:
    dense, kernel = (call.mask for call in both(name))
    assert (kernel is None) == (dense is None)
    if dense is not None and kernel is not None:
        for field in ("kind", "blind_rows", "uniform_rows", "fill", "scaled_by"):
            assert getattr(kernel, field) == getattr(dense, field), field


@over_cases
def test_statistics(name: str) -> None:
    dense, kernel = both(name)
    assert dense.stats is not None
    assert kernel.stats is not None
    size = max(dense.stats.max_abs_logit)
    single = functools.partial(allowed, torch.float32, length=max(L, E), logit=size)
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


@pytest.mark.parametrize("name", ["grouped", "gain_a_head", "twice", "bool_inverted", "alibi", "sinks_and_window"])
def test_verdicts_are_those_of_the_dense_call(name: str) -> None:
    one = CASES[name]
    dense, kernel = (checked(one.model(impl), one.inputs()) for impl in ("dense", "triton"))
    assert told(kernel) == told(dense)
