"""The formula of a side that tells q, k, v and its output alone: found again from float32, and from half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sqrtdk.compare.infer.evidence import Recorded
from sqrtdk.compare.infer.formula import KnownFormula, infer_formula, known_formula
from sqrtdk.compare.infer.options import BIAS, DROPOUT, FILL, MASK, ROUNDING, SCALE, SINKS, SOFTCAP
from sqrtdk.compare.inside.call_numbers import observe
from sqrtdk.compare.inside.compute import compute_output
from sqrtdk.compare.inside.program import Formula
from sqrtdk.tracing.tensors import CallTensors, Term, Vector
from tests.compare.formula_cases import (
    BASES,
    BATCH,
    CASES,
    GROUPS,
    HEAD_DIM,
    HEADS,
    Case,
    learned,
    of_case,
    tokens,
    trial,
    visible,
)

NOWHERE = {  # what no other side tells: tables and random numbers of this side's own
    "each row by a factor of", "multiplies by factors of each head", "has another ALiBi bias",
    "has another relative bias", "for keys after the row alone",
    "has a softcap of z * tanh(z / 1.5) in place of 1.5 *", "before the row alone",
    "hides keys of other documents", "drops weights (rate 0.3), which A does not",
}  # fmt: skip
EITHER = {"multiplies the bias by 0.5 as well"}  # the output can't tell a factor of the bias from another bias
KNOWABLE = [case for case in CASES if case.text not in NOWHERE | EITHER]
UNKNOWABLE = [case for case in CASES if case.text in NOWHERE]


def _recorded(case: Case) -> tuple[Formula, list[Tensor], Tensor, Tensor]:
    """A's formula; vectors, output and lse of B in float32, with roundings of its own."""
    planted = of_case(case)
    vectors = [planted.query.float(), planted.key.float(), planted.value.float()]
    a, b = planted.sides.a.formula, planted.sides.b.formula
    assert a is not None
    assert b is not None
    output, lse = compute_output(*vectors, b)  # type: ignore[arg-type]
    noise = (torch.rand(output.shape, generator=torch.Generator().manual_seed(1)) - 0.5) * torch.finfo(
        torch.float32
    ).eps
    return a, vectors, (output * (1 + noise)).float(), lse.float()


def _left(vectors: list[Tensor], output: Tensor, formula: Formula) -> float:
    return float((compute_output(*vectors, formula)[0] - output).abs().max())  # type: ignore[arg-type]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("number", range(len(KNOWABLE)))
def test_a_formula_is_found_and_has_the_cause(number: int) -> None:
    case = KNOWABLE[number]
    a, (query, key, value), output, lse = _recorded(case)
    formula = infer_formula(Recorded(query, key, value, output, lse if number % 3 == 0 else None), a)
    assert formula is not None
    assert _left([query, key, value], output, formula) < 1e-5 * float(value.abs().max())
    found = trial(a, formula, query.shape[-2], key.shape[-2])
    assert [suspicion.name for suspicion in found.proven()] == [case.name]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", UNKNOWABLE, ids=lambda case: f"{case.base}-{case.name}-{case.text}")
def test_what_the_other_side_does_not_tell_is_not_made_up(case: Case) -> None:
    a, (query, key, value), output, _ = _recorded(case)
    assert infer_formula(Recorded(query, key, value, output, None), a) is None


_CAUSAL, _LEFT = visible(8, 8, 0), tokens(8, True)
TWICE: dict[str, tuple[Formula, Formula, list[str]]] = {
    "scale, mask": (Formula(0.25, visible=_CAUSAL), Formula(1.0, visible=visible(8, 8, -1)), ["mask_offset", "scale"]),
    "scale fitted, mask": (Formula(0.25, visible=_CAUSAL), Formula(0.31), ["mask_offset", "scale"]),
    "offset, padding": (
        Formula(0.25, visible=_CAUSAL & _LEFT), Formula(0.25, visible=visible(8, 8, -1)), ["mask_offset", "padding"],
    ),
    "softcap, padding": (
        Formula(0.25, 1.5, visible=_CAUSAL & _LEFT), Formula(0.25, visible=_CAUSAL), ["padding", "softcap"],
    ),
    "bias, scale": (
        Formula(0.25, bias=learned(1, HEADS, 8, 8)), Formula(1.0), ["bias", "scale"],
    ),
    "bias scaled, mask": (
        Formula(0.25, bias=learned(1, HEADS, 8, 8), visible=_CAUSAL),
        Formula(0.25, bias=learned(1, HEADS, 8, 8), bias_by=0.25, visible=visible(8, 8, 1)),
        ["bias_scaled", "mask_offset"],
    ),
    "sinks, scale": (
        Formula(0.25, sinks=learned(3, HEADS), visible=_CAUSAL), Formula(0.0625, visible=_CAUSAL), ["scale", "sinks"],
    ),
    "window, scale": (
        Formula(0.25, visible=visible(8, 8, 0, 3)), Formula(0.5, visible=visible(8, 8, 0, 4)), ["scale", "window"],
    ),
}  # fmt: skip


def _vectors(rows: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (HEADS, rows), (GROUPS, keys), (GROUPS, keys)
    q, k, v = (torch.randn(BATCH, *shape, HEAD_DIM, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


def _both(a: Formula, formula: Formula, rows: int, keys: int) -> list[str]:
    from tests.compare.formula_cases import names_found

    return sorted(names_found(trial(a, formula, rows, keys)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(TWICE)))
def test_two_changes_are_found(number: int) -> None:
    name, (a, b, causes) = list(TWICE.items())[number]
    query, key, value = _vectors(8, 8)
    output = compute_output(query, key, value, b)[0].float()
    formula = infer_formula(Recorded(query, key, value, output, None), a)
    assert formula is not None
    if "fitted" not in name:
        assert _both(a, formula, 8, 8) == causes
    assert _left([query, key, value], output, formula) < 1e-5


def _eager(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    logits = (q @ k.repeat_interleave(2, 1).mT * scale).masked_fill(~mask, float("-inf"))
    return logits.softmax(-1) @ v.repeat_interleave(2, 1)


def _kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _scaled_query(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    return _eager(q * scale, k, v, 1.0, mask)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", [_eager, _kernel, _scaled_query])
@pytest.mark.parametrize(
    ("scale", "least"), [(0.25, 0), (1.0, 0), (0.0625, 0), (0.25, -1), (0.25, 1), (0.25, -31)], ids=str
)
def test_what_runs_in_other_dtypes_is_found(
    dtype: torch.dtype, attention: Callable[..., Tensor], scale: float, least: int
) -> None:
    query, key, value = _vectors(32, 32, dtype)
    output = attention(query, key, value, scale, visible(32, 32, least))
    formula = infer_formula(Recorded(query, key, value, output, None), Formula(0.25, visible=visible(32, 32, 0)))
    assert formula is not None
    assert formula.scale == scale
    expected = visible(32, 32, least)
    assert torch.equal(expected if formula.visible is None else formula.visible.expand(1, 1, 32, 32), expected)


def known(scale: float | None = None, softcap: float | None = None, visible: Tensor | None = None) -> KnownFormula:
    parts = {SCALE: scale, SOFTCAP: softcap, MASK: visible}
    formula = Formula(1.0 if scale is None else scale, softcap, visible=visible)
    return KnownFormula(formula, {part for part, value in parts.items() if value is not None})


def test_what_is_known_is_not_put_in_question() -> None:
    query, key, value = _vectors(8, 8)
    base = BASES["causal"][2]
    output = compute_output(query, key, value, replace(base, scale=1.0))[0].float()
    everything = torch.ones(8, 8, dtype=torch.bool)
    assert infer_formula(Recorded(query, key, value, output, None), base, known=known(1.0, visible=everything)) is None
    found = infer_formula(
        Recorded(query, key, value, output, None), Formula(0.25), known=known(visible=visible(8, 8, 0))
    )
    assert found is not None
    assert found.scale == 1.0


def test_the_place_of_a_softcap_that_is_known_is_looked_for() -> None:
    query, key, value = _vectors(8, 8)
    b = Formula(1.0, 2.0, "product", 0.25)
    output = compute_output(query, key, value, b)[0].float()
    found = infer_formula(
        Recorded(query, key, value, output, None), Formula(0.25, softcap=2.0), known=known(0.25, softcap=2.0)
    )
    assert found is not None
    assert (found.softcap, found.softcap_at) == (2.0, "product")


def test_known_parts_are_put_into_the_other() -> None:
    other = Formula(1.0, 2.0, "product", 0.25, visible=visible(8, 8, 0))
    base = known(0.5, softcap=3.0, visible=visible(8, 8, 1)).put_into(other)
    assert (base.scale, base.after, base.softcap, base.softcap_at) == (1.0, 0.5, 3.0, "product")
    assert base.visible is not None
    assert not bool(base.visible[0, 0, 0].any())


def test_what_a_call_tells_of_its_formula() -> None:
    """What is named is known; what is not named is not there, but where an operation was not followed."""
    query, key, value = _vectors(8, 8)
    mask, lowest = Term("mask", visible(8, 8, 0), "causal", torch.finfo(torch.float32).min, added=True), -1e4
    terms = (Term("scale", 0.25), mask, Term("mask", tokens(8, True), "padding", lowest, added=True))
    vectors = (Vector(query, 0.5), Vector(key), Vector(value))
    call = CallTensors("attn", 0, *vectors, query, terms, weights_dtype="float16")
    whole = known_formula(call, observe(call))
    assert whole.parts == {SCALE, SOFTCAP, BIAS, MASK, FILL, SINKS, ROUNDING}
    found = whole.put_into(Formula(1.0, 2.0, bias=learned(1, HEADS, 8, 8), sinks=learned(3, HEADS)))
    assert (found.scale, found.softcap, found.bias, found.sinks, found.mask) == (0.125, None, None, None, "mask")
    assert (found.fill, found.fill_added, found.weights_dtype) == (mask.fill, True, "float16")
    assert found.visible is not None
    assert torch.equal(found.visible, visible(8, 8, 0) & tokens(8, True))
    for lost, parts in (
        (Term("unknown", None, "roll"), {MASK, FILL, ROUNDING}),
        (Term("bias", None), {SCALE, SOFTCAP, MASK, FILL, SINKS, ROUNDING}),
        (Term("scale", None), {SOFTCAP, MASK, FILL, SINKS, ROUNDING}),
    ):
        some = replace(call, terms=(*terms, lost))
        assert known_formula(some, observe(some)).parts == parts
    bare = replace(call, terms=None, kept=torch.ones(1, 1, 8, 8).bool())
    assert known_formula(bare, observe(bare)).parts == {ROUNDING, DROPOUT}


def test_what_another_call_had_is_tried_first() -> None:
    """A bias of the side's own is not among the options; a call that has it as well needs to be told."""
    query, key, value = _vectors(8, 8)
    a, b = Formula(0.25, bias=learned(1, HEADS, 8, 8)), Formula(0.25, bias=learned(6, HEADS, 8, 8))
    output = compute_output(query, key, value, b)[0].float()
    found = infer_formula(Recorded(query, key, value, output, None), a, b)
    assert found is b
    few = _vectors(7, 7)
    found = infer_formula(
        Recorded(*few, compute_output(*few, Formula(1.0))[0].float(), None), Formula(0.25), b
    )  # of other sizes
    assert found is not None
    assert (found.scale, found.bias) == (1.0, None)


def test_an_output_that_is_no_number_has_no_formula() -> None:
    query, key, value = _vectors(8, 8)
    output = torch.full((BATCH, HEADS, 8, HEAD_DIM), float("nan"))
    assert infer_formula(Recorded(query, key, value, output, None), Formula(0.25)) is None
