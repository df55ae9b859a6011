"""The project's own compiled kernel is one opaque operation, and is read as well as the dense formula that it runs."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.tracing.readback import addends, fused
from sqrtdk.tracing.readback.reading import Layout
from tests.attentions.compiled import (
    CASES,
    PLAIN,
    WIDTH,
    Attend,
    B,
    E,
    H,
    L,
    checked,
    load_kernel,
    only,
    told,
    traced,
)
from tests.attentions.each import each
from tests.support.kernel_here import needs_kernel
from tests.tolerances import allowed
from tests.trace.kernel_by_hand import both, check_mask, check_same, check_statistics

pytestmark = needs_kernel


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    load_kernel()


# -- what is read ------------------------------------------------------------------------------------------------------


def outputs(model: nn.Module, inputs: tuple[Tensor, ...], trace: bool) -> list[Tensor]:
    """Output and gradients, with the backward pass inside the block."""
    model.zero_grad()
    with sqrtdk.trace(model) if trace else contextlib.nullcontext() as run:
        out = model(*inputs)
        out.square().sum().backward()
    assert run is None or len(run.calls) == 1
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_read_as_the_dense_formula(name: str) -> None:
    """With a gradient a learned scale is folded into q before the kernel, without one it is an argument.

    The stages are the dense call's, in its order: the dense formula repeats shared heads, and adds sinks to its sum by
    hand. The verdicts are the dense call's, and a trace changes neither outputs nor gradients.
    """
    one = CASES[name]
    for grad in (False, True):
        dense, compiled = both(name, grad=grad)
        check_same(dense, compiled)
        if not grad:
            check_mask(dense, compiled)
            check_statistics(dense, compiled)
        assert compiled.formula == one.formula
        assert (compiled.op, dense.op.split(".")[0]) == ("sqrtdk_cpu.forward", "aten")
        apart = ("scale", "repeat", "sinks")
        read = [[(s.where, s.name) for s in call.stages if s.name not in apart] for call in (dense, compiled)]
        assert read[0] == read[1]
        assert [s.name for s in compiled.stages].count("sinks") == compiled.sinks
    model = one.model("cpu")
    pairs = zip(*(outputs(model, one.inputs(), trace) for trace in (False, True)), strict=True)
    assert all(torch.equal(plain, observed) for plain, observed in pairs)
    with torch.no_grad():
        plain = model(*one.inputs())
        with sqrtdk.trace(model):
            assert torch.equal(model(*one.inputs()), plain)
    dense_report, report = (checked(one.model(impl), one.inputs()) for impl in ("dense", "cpu"))
    assert told(report) == told(dense_report)
    assert {j.call.kind for j in report.calls} == {"compiled"}


def test_a_scale_of_the_call_is_no_factor_of_q() -> None:
    _, call = both("twice")
    assert [(f.where, f.value) for f in call.scale.factors] == [("q", 0.25), ("op", 0.25)]
    _, call = both("gain_a_head")
    assert [(f.where, f.source) for f in call.scale.factors] == [("op", "parameter gains")]


@each(
    "name, form",
    [("causal", "implicit"), ("window", "implicit"), ("lower_right", "implicit"), ("bool_causal", "bool"),
     ("padding_and_causal", "bool"), ("float_causal", "bool"), ("float_lowest", "float")],
)  # fmt: skip
def test_form_of_a_mask(name: str, form: str) -> None:
    mask = both(name)[1].mask
    assert mask is not None
    assert mask.form == form


def test_statistics_see_what_the_logits_have_that_the_product_has_not() -> None:
    """The softcap bounds them, the bias moves them, the sinks are no keys of theirs."""
    plain, capped, biased, sunk = (both(name)[1].stats for name in ("plain", "softcap", "bias", "sinks"))
    assert plain is not None and capped is not None and biased is not None  # noqa: PT018
    assert max(plain.max_abs_logit) > 5.0 >= max(capped.max_abs_logit)
    assert biased.max_logit != plain.max_logit
    assert sunk == plain


def test_the_rate_of_dropout_is_an_argument_that_changes_no_verdict() -> None:
    model, inputs = Attend("cpu", dropout_p=0.3), CASES["plain"].inputs()
    call = only(traced(model, *inputs))
    assert (call.dropout, call.formula) == (0.3, CASES["plain"].formula)
    report = checked(model, inputs)
    assert [j.verdict for j in report.calls] == ["exact"]
    assert [f.rule for f in report.findings] == ["dropout"]  # it is on in eval mode


# -- verdicts ----------------------------------------------------------------------------------------------------------


@each(
    "name, verdict, mistake",
    [("plain", "exact", None), ("grouped", "exact", None), ("softcap", "exact", None), ("scaled_on_q", "exact", None),
     ("twice", "unexplained", "twice"), ("missing", "unexplained", "missing"),
     ("inverted", "unexplained", "inverted")],
)  # fmt: skip
def test_mistakes_are_named(name: str, verdict: str, mistake: str | None) -> None:
    (judged,) = checked(CASES[name].model("cpu"), CASES[name].inputs()).calls
    assert (judged.verdict, judged.mistake) == (verdict, mistake)


@each(
    "name, message",
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


@each("dtype", [torch.bfloat16, torch.float16])
@each("name", ["causal", "gain_a_head", "grouped", "alibi"])
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
    assert fused._shaped(torch.ones(L, L).expand(B, H, L, L), (B, H), layout, L).shape == (1, 1, L, L)
    assert fused._shaped(torch.ones(B, 1, 1, L).expand(B, H, L, L), (B, H), layout, L).shape == (B, 1, 1, L)
    assert fused._shaped(torch.ones(1).expand(1, B * H, L, L), (1, B * H), layout, L).shape == (1, 1, 1, L)


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


@pytest.mark.parametrize(
    ("name", "kind"), [("window", "window"), ("lower_right", "causal_lower_right"), ("padding_and_window", "mask")]
)
def test_a_window_too_large_to_hold_is_named_and_not_measured(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addends, "MOST_MASK_ELEMENTS", 20)
    one = CASES[name]
    call = only(traced(one.model("cpu"), *one.inputs()))
    assert call.formula == f"softmax({PLAIN} + {kind})"
    assert call.mask is not None
    assert (call.mask.kind, call.mask.blind_rows) == (kind, None)
    assert (call.scale.agree, call.stats) == (True, None)
    assert call.stats_reason == f"a window of {L} rows and {one.keys or L} keys would have to be held as a mask"
    (judged,) = checked(one.model("cpu"), one.inputs()).calls
    assert judged.verdict == "exact"
