"""The whole way of a pair: what rounding does stays within what is allowed, and what is no rounding is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.diff import diff
from sqrtdk.compare.inside import compute, segments
from sqrtdk.compare.inside.build import program_of
from sqrtdk.compare.inside.call_numbers import observe
from sqrtdk.compare.inside.pair import precision_of
from sqrtdk.compare.inside.program import Affine, Formula, NormStep, Program, Rotation, RoundingStep, VectorPath
from sqrtdk.compare.inside.segments import joined_segments, of_measured, run_segment, segment_gap
from sqrtdk.compare.rounding.attention import output_allowed
from sqrtdk.compare.rounding.precision import Precision, Precisions
from sqrtdk.compare.rounding.vectors import Steps, VectorErrors, errors_along, projection_errors
from sqrtdk.tracing.tensors import CallTensors
from sqrtdk.tracing.trace import Trace
from tests.compare.ports.built import build, inputs

EXACT = Precision(torch.float64)


def kept(base: str, dtype: torch.dtype = torch.float32, **planted: Any) -> CallTensors:
    """The first attention of a model."""
    model = build(base, dtype=dtype, **planted)
    with Trace(model, stats=False, numeric=False, keep=True) as run, torch.no_grad():
        model(**inputs(base))
    return run.tensors[0]


def whole_of(a: CallTensors, b: CallTensors) -> tuple[segments.Segment, Program]:
    seen = observe(b)
    program = program_of(a, observe(a))
    every = segments.segments(b, seen, program, (precision_of(a), precision_of(b)), None)
    return joined_segments(every, program), program


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("begin", ["input", "projected", "used"])
def test_rounding_of_the_way_is_within_it(begin: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_begin", lambda *_: begin)
    for base, style in (("rope_gqa", "eager"), ("sdpa", "eager"), ("rope", "einsum"), ("rope_fused", "sdpa")):
        part, program = whole_of(kept(base, dtype), kept(base, dtype, style=style))
        assert segment_gap(part, program).within, base
        values, allowed = run_segment(part, program)
        ratio = (values - part.target.double()).abs() / allowed(None)
        assert float(ratio.max()) > 0.01, base


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("base", "common", "planted"),
    [
        ("eager", {"qk_norm": "rms"}, {"qk_norm_eps": 1e-5}),
        ("rope_gqa", {"qk_norm": "rms"}, {"qk_norm_eps": 1e-5}),
        ("sdpa", {}, {"scale": 12**-0.5 * (1 + 1e-4)}),
        ("eager", {"bias": "alibi"}, {"bias_steepness": 1 + 1e-4}),
        ("eager", {"bias": "t5"}, {"bias_steepness": 1 + 1e-4}),
        ("rope", {}, {"rope_base": 10001.0}),
    ],
)
def test_small_differences_are_seen(base: str, common: dict[str, Any], planted: dict[str, Any]) -> None:
    part, program = whole_of(kept(base, common=common), kept(base, common=common, **planted))
    assert not segment_gap(part, program).within
    part, program = whole_of(kept(base, common=common), kept(base, common=common))
    assert segment_gap(part, program).within


def test_what_cancels_over_the_whole_way_is_the_same() -> None:
    a, b = kept("rope", dtype=torch.float32), kept("rope", shift_q=3, shift_k=3)
    part, program = whole_of(a, b)
    assert segment_gap(part, program).within
    part, program = whole_of(a, kept("rope", shift_q=3))
    assert not segment_gap(part, program).within


def test_some_rows_are_allowed_what_they_are_among_all() -> None:
    part, program = whole_of(kept("rope_gqa"), kept("rope_gqa", shift_q=1, shift_k=1))
    rows = torch.tensor([3, 17, 9])
    _, allowed = run_segment(part, program)
    torch.testing.assert_close(allowed(rows), allowed(None)[:, :, rows])


def test_a_lesser_dtype_of_the_logits_counts_where_both_have_it() -> None:
    half, whole_numbers = Precision(logits_dtype=torch.float16, weights_dtype=torch.float16), Precision()
    assert of_measured((half, whole_numbers))[0] == Precision(logits_dtype=torch.float32, weights_dtype=torch.float32)
    assert of_measured((half, half))[0] == half
    own = Precision(torch.float16, torch.float32, torch.float16)
    assert of_measured((own, whole_numbers))[0] == own


def test_errors_of_vectors_move_the_output_by_no_more() -> None:
    """Errors of each entry, and of whole vectors, as large as their deviations say."""
    q, k, v = (torch.randn(2, 3, 40, 16, dtype=torch.float64) for _ in range(3))
    k = k + 5 * torch.randn(16)  # what all keys have in common cancels
    formula = Formula(0.3, visible=torch.ones(40, 40).tril().bool(), softcap=20.0)
    expected = compute.compute_output(q, k, v, formula)[0]
    for each, row in ((1e-4, 0.0), (0.0, 1e-4), (1e-5, 1e-4)):
        offs = [
            VectorErrors(torch.full_like(x, each), torch.full_like(x[..., :1], row), torch.zeros_like(x))
            for x in (q, k, v)
        ]
        limit = output_allowed(q, k, v, formula, (EXACT, EXACT), offs)
        moved = [x * (1 + row * torch.randn(2, 3, 40, 1)) + each * torch.randn(x.shape) for x in (q, k, v)]
        ratio = (compute.compute_output(*moved, formula)[0] - expected).abs() / limit
        assert 0.05 < float(ratio.max()) <= 1.0


def test_the_deviations_of_a_way_are_those_of_its_rounding() -> None:
    x, weight = torch.randn(2, 30, 64), torch.randn(4, 16, 64)
    affine = Affine("q", weight, None, torch.arange(64).view(4, 16))
    way = VectorPath(affine, (NormStep("rms", torch.ones(1, 16), eps=1e-6), RoundingStep("bfloat16")))
    exact, off = errors_along(way, *projection_errors(affine, x, (EXACT, Precision())), (EXACT, Precision()))
    its: Tensor = torch.einsum("bld,hed->bhle", x, weight)
    its = (its * (its.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16().double()
    torch.testing.assert_close(exact, compute.follow_path(way, compute.project_input(affine, x))[-1])
    assert bool(((its - exact).abs() <= 8 * off.each).all())
    assert float((off.each > 0).double().mean()) < 0.05  # few are near enough to the middle of two numbers


def norm_of(kind: str, over: str = "head") -> NormStep:
    return NormStep(kind, 1 + 0.5 * torch.randn(3, 16), torch.randn(3, 16) if kind == "layer" else None, over=over)


def turn_of(layout: str, first: int) -> Rotation:
    angles = torch.arange(10.0)[:, None] * torch.rand(5)
    return Rotation(torch.polar(1 + torch.rand(10, 5), angles)[None], layout, first)


@pytest.mark.parametrize(
    "steps",
    [
        lambda: (norm_of("rms"),),
        lambda: (norm_of("layer"),),
        lambda: (norm_of("l2", "heads"),),
        lambda: (turn_of("half", 2),),
        lambda: (turn_of("interleaved", 0), norm_of("rms", "heads")),
        lambda: (norm_of("layer"), turn_of("half", 6)),
    ],
)
def test_no_error_before_a_step_is_more_behind_it_than_its_bound(steps: Callable[[], Steps]) -> None:
    """Errors of any signs, and those that lie along the vector, or all to one side, and change length and mean most."""
    x, way = torch.randn(2, 3, 10, 16, dtype=torch.float64), VectorPath(steps=steps())
    size = 1e-6 * torch.rand(x.shape, dtype=torch.float64)
    limit = errors_along(way, x, VectorErrors.none(x).plus(size), (EXACT, EXACT))[1].bound
    highest = 0.0
    for signs in (torch.randn(x.shape).sign(), x.sign(), -x.sign(), torch.ones_like(x)):
        moved = (compute.follow_path(way, x + signs * size)[-1] - compute.follow_path(way, x)[-1]).abs()
        assert bool((moved <= limit * (1 + 1e-4)).all())
        highest = max(highest, float((moved / limit).max()))
    assert highest > 0.5


def test_what_was_made_of_one_input_bit_for_bit_alike_is_the_same_whatever_made_it() -> None:
    call = kept("eager")
    seen, program = observe(call), program_of(call, observe(call))
    assert seen["query"].projected is not None
    off = {**seen, "query": replace(seen["query"], projected=seen["query"].projected * 1.01)}
    precisions: Precisions = (precision_of(call), precision_of(call))
    for alike in (False, True):
        told = {**off, "query": replace(off["query"], alike=alike)}
        part = next(one for one in segments.segments(call, told, program, precisions, None) if one.name == "query")
        assert segment_gap(part, program).within is alike
        other = replace(program.query.affine, weight=2 * program.query.affine.weight)  # type: ignore[type-var, union-attr]
        assert not segment_gap(part, replace(program, query=replace(program.query, affine=other))).within


def test_one_attention_in_two_orders_of_the_channels_differs_by_its_base_alone() -> None:
    """Rows of q and k and the gains of their norms laid out for the other pairing, as a port of another library has."""

    class Attention(torch.nn.Module):
        def __init__(self, base: float, paired: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))
            self.gains = torch.nn.ParameterList([torch.nn.Parameter(0.5 + torch.rand(8)) for _ in range(2)])
            self.paired, self.base = paired, base
            if paired:
                order = torch.arange(8).view(2, 4).T.flatten()
                rows = torch.cat([order, order + 8])
                with torch.no_grad():
                    for layer in (self.q, self.k):
                        layer.weight.copy_(layer.weight[rows])
                    for gain in self.gains:
                        gain.copy_(gain[order])

        def turned(self, x: Tensor, gain: Tensor) -> Tensor:
            x = torch.nn.functional.rms_norm(x.unflatten(-1, (2, 8)).transpose(1, 2), (8,), gain, 1e-6)
            angles = torch.arange(x.shape[-2])[:, None] * self.base ** (-torch.arange(4) / 4)
            cosine, sine = angles.cos(), angles.sin()
            one, two = (x[..., ::2], x[..., 1::2]) if self.paired else x.chunk(2, -1)
            turned = one * cosine - two * sine, one * sine + two * cosine
            return torch.stack(turned, -1).flatten(-2) if self.paired else torch.cat(turned, -1)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.turned(self.q(x), self.gains[0]), self.turned(self.k(x), self.gains[1])
            v = self.v(x).unflatten(-1, (2, 8)).transpose(1, 2)
            return (q @ k.mT * 8**-0.5).softmax(-1) @ v

    x = torch.randn(2, 12, 16)
    same, differs = (diff(Attention(1e4, False), Attention(base, True), {"x": x}) for base in (1e4, 1e3))
    assert same.same
    assert [cause.name for pair in differs.pairs for cause in pair.causes] == ["rope_base"]
    assert differs.pairs[0].residue <= differs.pairs[0].allowed


def test_a_difference_is_told_by_an_entry_that_is_beyond_its_own_allowance() -> None:
    """One entry may be off by less than what another, larger one is allowed."""
    difference, limits = torch.tensor([[4.7e-7, 1e-7, 2e-6]]), torch.tensor([[1e-7, 1e-6, 6.3e-6]])
    gap = segments._beyond(2e-6, 1e-6, difference, limits)
    assert (gap.largest, gap.allowed, gap.within) == (pytest.approx(4.7e-7), pytest.approx(1e-7), False)
    plain = segments._beyond(1e-5, 1e-6, 5 * difference, limits)
    assert (plain.largest, plain.allowed) == (1e-5, pytest.approx(6.3e-6))
