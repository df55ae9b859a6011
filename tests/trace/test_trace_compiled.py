"""The project's own compiled kernel is one opaque operation, and is read as well as the dense formula that it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.stats.heads import HeadStats
from sqrtdk.tracing import AttentionCall
from sqrtdk.tracing.read import bands, own
from sqrtdk.tracing.read.patterns import pattern
from sqrtdk.tracing.read.reading import Layout
from tests.attentions.compiled import (
    CASES,
    PLAIN,
    WIDTH,
    B,
    E,
    H,
    L,
    checked,
    load_kernel,
    only,
    told,
    traced,
    without_fit,
)
from tests.support.kernel_here import needs_kernel
from tests.tolerances import allowed

OP = "sqrtdk_cpu.forward"

pytestmark = needs_kernel


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_kernel()


over_cases = pytest.mark.parametrize("name", CASES)


@functools.cache
def both(name: str, grad: bool = False) -> tuple[AttentionCall, AttentionCall]:
    """The same call by the kernel and by the dense formula."""
    one = CASES[name]
    dense, compiled = (traced(one.model(impl), *one.inputs(), grad=grad) for impl in ("dense", "cpu"))
    return only(dense, "eager"), only(compiled)


# -- what is read ------------------------------------------------------------------------------------------------------

SAME = (
    "site", "index", "module_class", "score", "batch", "heads", "kv_heads", "head_dim", "padded_head_dim", "value_dim",
    "model_dim", "query_len", "key_len", "self_attention", "dtype", "logits_dtype", "device", "formula", "terms",
    "norm", "rope", "softcap", "bias", "bias_scaled_by", "sinks", "dropout", "unknown", "stats_reason",
)  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
@over_cases
def test_formula(name: str, grad: bool) -> None:
    """With a gradient a learned scale is folded into q before the kernel, without one it is an argument."""
    dense, compiled = both(name, grad)
    assert compiled.formula == CASES[name].formula
    assert {field: getattr(compiled, field) for field in SAME} == {field: getattr(dense, field) for field in SAME}
    assert (compiled.op, dense.op.split(".")[0]) == (OP, "aten")


@pytest.mark.parametrize("grad", [False, True])
@over_cases
def test_scale(name: str, grad: bool) -> None:
    dense, compiled = (call.scale for call in both(name, grad))
    assert (compiled.agree, without_fit(compiled.reason)) == (dense.agree, without_fit(dense.reason))
    room = allowed(torch.float32, length=E, logit=10.0, magnitude=1.0)
    single = allowed(torch.float32, length=4, logit=0.0, magnitude=1.0)  # factors
    if dense.symbolic is None:  # a scale that changes with the row
        assert (compiled.symbolic, compiled.effective, compiled.ratio) == (None, dense.effective, dense.ratio)
    else:
        assert compiled.symbolic == compiled.effective == pytest.approx(dense.symbolic, rel=single)
        assert compiled.ratio == pytest.approx(dense.ratio, rel=single)
        assert compiled.numeric == pytest.approx(dense.numeric, rel=room)
        assert compiled.r_squared == pytest.approx(dense.r_squared, abs=room)
    assert compiled.per_head == (None if dense.per_head is None else pytest.approx(dense.per_head, rel=single))
    named = [{f.source for f in scale.factors if f.learned} for scale in (dense, compiled)]
    assert named[0] == named[1]
    assert all(f.source in ("sqrtdk scale", "number", "tensor", "rows") or f.learned for f in compiled.factors)


def test_a_scale_of_the_call_is_no_factor_of_q() -> None:
    _, call = both("twice")
    assert [(f.where, f.value) for f in call.scale.factors] == [("q", 0.25), ("op", 0.25)]
    _, call = both("gain_a_head")
    assert [(f.where, f.source) for f in call.scale.factors] == [("op", "parameter gains")]


@over_cases
def test_mask(name: str) -> None:
    dense, compiled = (call.mask for call in both(name))
    if dense is None:
        assert compiled is None
        return
    assert compiled is not None
    for field in ("kind", "blind_rows", "uniform_rows", "fill", "scaled_by"):
        assert getattr(compiled, field) == getattr(dense, field), field
    if compiled.masked_weight is not None:  # the kernel does not show it where masked keys have finite logits
        assert compiled.masked_weight == dense.masked_weight == 0.0
    assert (compiled.masked_weight is None) == math.isfinite(dense.fill or 0.0)


@pytest.mark.parametrize(
    ("name", "form"),
    [("causal", "implicit"), ("window", "implicit"), ("lower_right", "implicit"), ("bool_causal", "bool"),
     ("padding_and_causal", "bool"), ("float_causal", "bool"), ("float_lowest", "float")],
)  # fmt: skip
def test_form_of_a_mask(name: str, form: str) -> None:
    mask = both(name)[1].mask
    assert mask is not None
    assert mask.form == form


@over_cases
def test_stages(name: str) -> None:
    """As the dense call's, in its order; the dense formula repeats shared heads, and adds sinks to its sum by hand."""
    dense, compiled = both(name)
    apart = ("scale", "repeat", "sinks")
    read = [[(s.where, s.name) for s in call.stages if s.name not in apart] for call in (dense, compiled)]
    assert read[0] == read[1]
    assert [s.name for s in compiled.stages].count("sinks") == compiled.sinks


COUNTS = ("heads", "rows", "blind_rows", "nan_rows", "saturated")


@over_cases
def test_statistics(name: str) -> None:
    dense, compiled = both(name)
    assert dense.stats is not None
    assert compiled.stats is not None
    size = max(dense.stats.max_abs_logit)
    single = functools.partial(allowed, torch.float32, length=max(L, E), logit=size)
    for field in dataclasses.fields(HeadStats):
        one, two = getattr(dense.stats, field.name), getattr(compiled.stats, field.name)
        if field.name in COUNTS:
            assert two == one, field.name
        elif not field.name.endswith("histogram"):
            assert two == pytest.approx(one, abs=single(magnitude=max(map(abs, one)))), field.name
    for field in ("future_weight", "output_rms"):
        one, two = getattr(dense, field), getattr(compiled, field)
        assert (one is None) == (two is None), field
        assert one is None or two == pytest.approx(one, rel=single(magnitude=1.0)), field
    assert compiled.max_product is not None
    assert dense.max_product is not None
    if dense.mask is None:  # the dense product is stored at hidden keys, too
        assert compiled.max_product == pytest.approx(dense.max_product, rel=single(magnitude=1.0))
    assert compiled.max_product <= dense.max_product * (1.0 + single(magnitude=1.0))
    assert sum(compiled.stats.logit_histogram[0].counts) == sum(dense.stats.logit_histogram[0].counts)


def test_statistics_see_what_the_logits_have_that_the_product_has_not() -> None:
    """The softcap bounds them, the bias moves them, the sinks are no keys of theirs."""
    plain, capped, biased, sunk = (both(name)[1].stats for name in ("plain", "softcap", "bias", "sinks"))
    assert plain is not None and capped is not None and biased is not None  # noqa: PT018
    assert max(plain.max_abs_logit) > 5.0 >= max(capped.max_abs_logit)
    assert biased.max_logit != plain.max_logit
    assert sunk == plain


# -- verdicts ----------------------------------------------------------------------------------------------------------


@over_cases
def test_verdicts_are_those_of_the_dense_call(name: str) -> None:
    one = CASES[name]
    dense, compiled = (checked(one.model(impl), one.inputs()) for impl in ("dense", "cpu"))
    assert told(compiled) == told(dense)
    assert {j.call.kind for j in compiled.calls} == {"compiled"}


@pytest.mark.parametrize(
    ("name", "verdict", "mistake"),
    [("plain", "exact", None), ("grouped", "exact", None), ("softcap", "exact", None), ("scaled_on_q", "exact", None),
     ("twice", "unexplained", "twice"), ("missing", "unexplained", "missing"),
     ("inverted", "unexplained", "inverted")],
)  # fmt: skip
def test_mistakes_are_named(name: str, verdict: str, mistake: str | None) -> None:
    (judged,) = checked(CASES[name].model("cpu"), CASES[name].inputs()).calls
    assert (judged.verdict, judged.mistake) == (verdict, mistake)


@pytest.mark.parametrize(
    ("name", "message"),
    [("bool_inverted", "the mask looks inverted"), ("one_ahead", "the causal mask is off by one"),
     ("zero_one", "a float mask of 0 and 1"), ("float_uniform_row", "have every key at -3.4"),
     ("bool_blind_row", "rows see no key")],
)  # fmt: skip
def test_wrong_masks_are_found(name: str, message: str) -> None:
    report = checked(CASES[name].model("cpu"), CASES[name].inputs())
    assert any(f.rule == "mask_audit" and message in f.message for f in report.findings)


def test_q_is_enlarged_in_a_call_of_the_kernel() -> None:
    """With small logits, a comparison of implementations would not see a lost softcap."""
    one = CASES["gain_a_head"]
    model = one.model("cpu")
    plain, larger = (only(traced(model, *one.inputs(), **options)) for options in ({}, {"enlarge": {("", 0): 30.0}}))
    assert plain.stats is not None
    assert larger.stats is not None
    single = allowed(torch.float32, length=E, logit=10.0, magnitude=1.0)
    assert larger.stats.max_logit == pytest.approx([30.0 * z for z in plain.stats.max_logit], rel=single)
    assert larger.output_rms != plain.output_rms
    assert larger.formula == plain.formula


# -- the trace is an observer ------------------------------------------------------------------------------------------


def outputs(model: nn.Module, inputs: tuple[Tensor, ...], trace: bool) -> list[Tensor]:
    """Output and gradients, with the backward pass inside the block."""
    model.zero_grad()
    with sqrtdk.trace(model) if trace else contextlib.nullcontext() as run:
        out = model(*inputs)
        out.square().sum().backward()
    assert run is None or len(run.calls) == 1
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@over_cases
def test_outputs_and_gradients_are_bit_equal(name: str) -> None:
    model = CASES[name].model("cpu")
    pairs = zip(*(outputs(model, CASES[name].inputs(), trace) for trace in (False, True)), strict=True)
    assert all(torch.equal(plain, observed) for plain, observed in pairs)
    with torch.no_grad():
        plain = model(*CASES[name].inputs())
        with sqrtdk.trace(model):
            assert torch.equal(model(*CASES[name].inputs()), plain)


def test_what_runs_again_in_the_backward_pass_is_counted_once() -> None:
    model = CASES["causal"].model("cpu")
    (x,) = CASES["causal"].inputs()
    with sqrtdk.trace(model) as run:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert only(run).formula == CASES["causal"].formula


def test_a_compiled_model_runs_eagerly() -> None:
    model = CASES["causal"].model("cpu")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), sqrtdk.trace(model) as run:
        compiled(*CASES["causal"].inputs())
    assert only(run).formula == CASES["causal"].formula


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "gain_a_head", "grouped", "alibi"])
def test_half_types(name: str, dtype: torch.dtype) -> None:
    """A scale of such a type is widened where it is spread; it is the parameter all the same."""
    model = CASES[name].model("cpu").to(dtype)
    inputs = [x.to(dtype) for x in CASES[name].inputs()]
    for grad in (False, True):
        call = only(traced(model, *inputs, grad=grad))
        assert call.formula == CASES[name].formula
        assert call.scale.agree is True
        assert call.logits_dtype == "float32"
        assert call.stats is not None


def test_one_query() -> None:
    """A step of decoding: another way through the kernel, the same operator."""
    one = dataclasses.replace(CASES["grouped"], keys=600)
    model, (x, memory) = one.model("cpu"), one.inputs()
    model.options = {"causal_lower_right": True}
    assert only(traced(model, x[:, :1], memory)).formula == f"softmax({PLAIN})"


def test_statistics_that_the_kernel_gives_start_no_attention() -> None:
    """What a model makes of them is followed no further than to the kernel."""
    model = CASES["statistics"].model("cpu")

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            q = k = v = self.inner.q(x).unflatten(-1, (H, E)).transpose(1, 2)
            output, aux = sqrtdk.attention(q, k, v, impl="cpu", return_aux=sqrtdk.AuxRequest(lse=True))
            assert isinstance(output, Tensor)
            return output * (aux.lse.unsqueeze(-1) - 1.0).sigmoid()

    only(traced(Read(), *CASES["plain"].inputs()))


def test_the_output_is_known_as_that_of_the_kernel() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, H * E)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (H, E)).transpose(1, 2)
            again = sqrtdk.attention(q, q, q, impl="cpu")
            return sqrtdk.attention(again, q, q, impl="cpu")

    first, second = traced(Twice(), *CASES["plain"].inputs()).calls
    assert (first.unknown, second.unknown) == ((), ("sqrtdk_cpu::forward",))


def test_as_many_rows_as_heads_are_not_taken_for_them() -> None:
    """A number a row is no number a head, though it is spread to the same shape."""
    one = CASES["plain"]
    formulas = {}
    for impl in ("dense", "cpu"):
        model = one.model(impl)
        model.rows = nn.Parameter(torch.linspace(0.1, 0.4, H).view(H, 1))
        model.options = {"scale": "rows"}
        (call,) = traced(model, one.inputs()[0][:, :H]).calls
        formulas[impl] = call.formula
    assert formulas["cpu"] == formulas["dense"] == "softmax(rows * q.k)"


def test_what_is_shared_by_heads_is_held_once() -> None:
    """A mask or a bias that was spread over batch and heads is read at its own size."""
    layout = Layout(B, H, L, L, E, E)
    assert own._shaped(torch.ones(L, L).expand(B, H, L, L), layout).shape == (1, 1, L, L)
    assert own._shaped(torch.ones(B, 1, 1, L).expand(B, H, L, L), layout).shape == (B, 1, 1, L)
    assert own._shaped(torch.ones(1).expand(1, B * H, L, L), layout).shape == (1, 1, 1, L)


def test_fake_tensors_are_not_measured_and_not_an_error() -> None:
    with FakeTensorMode():
        model = CASES["causal"].model("cpu")
        x = torch.empty(B, L, WIDTH)
        with torch.no_grad(), sqrtdk.trace(model) as run:
            output = model(x)
    assert output.shape == (B, H, L, E)
    assert run.calls == ()
    (missed,) = run.not_measured
    assert "DataDependent" in missed.reason


# -- windows as masks --------------------------------------------------------------------------------------------------


def test_a_band_is_named_as_its_mask_is() -> None:
    bounds = (None, *range(-6, 7))
    for rows, keys, above, below in itertools.product(range(1, 6), range(1, 6), bounds, bounds):
        mask = bands.mask(rows, keys, above, below, torch.device("cpu"))
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        seen = (j <= i + keys if above is None else j <= i + above) & (below is None or j >= i - (below or 0))
        assert torch.equal(mask[0, 0], seen)
        assert bands.kind(rows, keys, above, below) == pattern(mask), (rows, keys, above, below)


@pytest.mark.parametrize(
    ("name", "kind"), [("window", "window"), ("lower_right", "causal_lower_right"), ("padding_and_window", "mask")]
)
def test_a_window_too_large_to_hold_is_named_and_not_measured(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bands, "LARGEST", 20)
    one = CASES[name]
    call = only(traced(one.model("cpu"), *one.inputs()))
    assert call.formula == f"softmax({PLAIN} + {kind})"
    assert call.mask is not None
    assert (call.mask.kind, call.mask.blind_rows) == (kind, None)
    assert (call.scale.agree, call.stats) == (True, None)
    assert call.stats_reason == f"a window of {L} rows and {one.keys or L} keys would have to be held as a mask"
    (judged,) = checked(one.model("cpu"), one.inputs()).calls
    assert judged.verdict == "exact"
