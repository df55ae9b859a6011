"""Each difference of two formulas has one cause that is proven, with its name and numbers; its neighbours are not."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.program import Formula, NormStep, Program, RoundingStep, VectorPath
from sqrtdk.compare.inside.suspect import Sides
from tests.compare.formula_cases import BASES, CASES, HEADS, Case, learned, names_found, of_case, tokens, trial, visible

_IDS = [f"{number}-{case.base}-{case.name}" for number, case in enumerate(CASES)]


def _says(said: str | float | None, expected: str | float | None) -> bool:
    if isinstance(said, str) and isinstance(expected, str):
        return expected in said
    return said == expected


@pytest.mark.parametrize("case", CASES, ids=_IDS)
def test_one_cause_is_proven(case: Case) -> None:
    planted = of_case(case)
    assert planted.left(planted.sides.a) > 1e4 * planted.tiny
    proven = planted.proven()
    assert [suspicion.name for suspicion in proven] == [case.name]
    (cause,) = proven
    assert _says(cause.a, case.a), cause.a
    assert _says(cause.b, case.b), cause.b
    assert case.text in cause.text
    rows, keys, formula = BASES[case.base]
    back = trial(case.plant(formula), formula, rows, keys)
    assert [suspicion.name for suspicion in back.proven()] == [case.name]


@pytest.mark.parametrize("base", BASES)
def test_nothing_is_suspected_of_what_is_the_same(base: str) -> None:
    rows, keys, formula = BASES[base]
    held = replace(formula, scale=torch.as_tensor(formula.scale).float())
    assert not list(trial(formula, held, rows, keys).suspicions())


def test_every_cause_of_a_formula_has_a_case() -> None:
    names = list(CAUSES)
    assert {case.name for case in CASES} == {"length_factor", *names[names.index("scale") :]}


def _fields(case: Case) -> set[str]:
    """The fields of the formula that a case plants something in."""
    formula = BASES[case.base][2]
    planted = case.plant(formula)
    return {field.name for field in fields(formula) if getattr(formula, field.name) is not getattr(planted, field.name)}


def _both_show(first: Case, second: Case) -> bool:
    """Whether neither hides the other: the order of a softcap that is missing, say, shows nowhere."""
    rows, keys, formula = BASES[first.base]
    both = second.plant(first.plant(formula))
    alone = (trial(case.plant(formula), both, rows, keys) for case in (first, second))
    return all(one.left(one.sides.a) > one.tiny for one in alone)


def _two_at_once(base: str) -> list[tuple[Case, Case]]:
    return [
        (first, second)
        for first, second in combinations((case for case in CASES if case.base == base), 2)
        if first.name != second.name and not _fields(first) & _fields(second)
        # a bias that is off by a scale which is not there any more is just another bias
        if not (first.name == "scale" and second.name == "bias_scaled" and "bias" in _fields(second))
        if _both_show(first, second)
    ]


PAIRS = {"causal": 60, "capped": 4, "alibi": 6}  # at least so many


@pytest.mark.parametrize("base", BASES)
def test_two_at_once_are_both_found(base: str) -> None:
    rows, keys, formula = BASES[base]
    pairs = _two_at_once(base)
    assert len(pairs) >= PAIRS.get(base, 0)
    for number, (first, second) in enumerate(pairs):
        planted = trial(formula, second.plant(first.plant(formula)), rows, keys, seed=number)
        assert sorted(names_found(planted)) == sorted([first.name, second.name]), (first.text, second.text)


_LEFT, _RIGHT = tokens(8, True), tokens(8, False)
_WIDE = tokens(9, False)[..., -9:]
MASKS = {  # A's mask, B's, what is found
    "offset, padding lost": (visible(8, 8, 0) & _LEFT, visible(8, 8, -1), ["mask_offset", "padding"]),
    "offset, other padding": (visible(8, 8, 0) & _LEFT, visible(8, 8, 1) & _RIGHT, ["mask_offset", "padding"]),
    "offset, window": (visible(8, 8, 0, 3), visible(8, 8, -1, 4), ["mask_offset", "window"]),
    "window, padding": (visible(8, 8, 0, 3) & _RIGHT, visible(8, 8, 0, 4), ["padding", "window"]),
    "alignment, offset": (visible(4, 9, -5), visible(4, 9, -1), ["mask_alignment", "mask_offset"]),
    "alignment, window": (visible(4, 9, -5, -4), visible(4, 9, 0, 2), ["mask_alignment", "window"]),
    "alignment, padding": (visible(4, 9, -5), visible(4, 9, 0) & _WIDE, ["mask_alignment"]),
    "offset, window, padding": (
        visible(8, 8, 0, 3) & _LEFT, visible(8, 8, -1, 4), ["mask_offset", "padding", "window"],
    ),
    "no mask": (visible(8, 8, 0) & _LEFT, None, ["mask_offset", "padding"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_differ_twice(name: str) -> None:
    a, b, expected = MASKS[name]
    rows, keys = a.shape[-2:]
    assert sorted(names_found(trial(Formula(0.25, visible=a), Formula(0.25, visible=b), rows, keys))) == expected


_STRICT = visible(8, 8, 1) & _LEFT
_ITS_OWN = torch.eye(8, dtype=torch.bool)[None, None]


def _blind_see(mask: Tensor, what: Tensor) -> Tensor:
    return mask | (~mask.any(-1, keepdim=True) & what)


BLIND = {  # A's mask, B's; rows that see no key see themselves; what is found
    "offset": (visible(8, 8, 0), visible(8, 8, 1), ["mask_offset"]),
    "offset, padding stays": (visible(8, 8, 0) & _LEFT, _STRICT, ["mask_offset"]),
    "padding lost": (visible(8, 8, 0) & _LEFT, visible(8, 8, 0), ["padding"]),
    "padding on the other side": (visible(8, 8, 0) & _LEFT, visible(8, 8, 0) & _RIGHT, ["padding"]),
    "window, left": (visible(8, 8, 0, 3) & _LEFT, visible(8, 8, 0, 2) & _LEFT, ["window"]),
    "window gone, left": (visible(8, 8, 0, 3) & _LEFT, visible(8, 8, 0) & _LEFT, ["window"]),
    "window, right": (visible(8, 8, 0, 1) & _RIGHT, visible(8, 8, 0, 2) & _RIGHT, ["window"]),
    "no causal mask, left": (visible(8, 8, 0) & _LEFT, _LEFT.expand(3, 1, 8, 8), ["mask_offset"]),
    "offset, padding lost": (visible(8, 8, 0) & _LEFT, visible(8, 8, 1), ["mask_offset", "padding"]),
    "window, padding lost": (visible(8, 8, 0, 3) & _LEFT, visible(8, 8, 0, 4), ["padding", "window"]),
}


@pytest.mark.parametrize("name", BLIND)
def test_rows_of_padding_follow(name: str) -> None:
    *masks, expected = BLIND[name]
    for what, (a, b) in product((_ITS_OWN, torch.ones_like(_ITS_OWN)), (masks, masks[::-1])):
        formulas = (Formula(0.25, visible=_blind_see(mask, what)) for mask in (a, b))
        planted = trial(*formulas, 8, 8)
        assert sorted(suspicion.name for suspicion in planted.suspicions()) == expected
        assert sorted(names_found(planted)) == expected


def test_rows_of_padding_that_see_other_keys() -> None:
    mask = visible(8, 8, 0) & _LEFT
    a, b = (Formula(0.25, visible=_blind_see(mask, what)) for what in (torch.ones_like(_ITS_OWN), _ITS_OWN))
    (cause,) = trial(a, b, 8, 8).proven()
    assert (cause.name, cause.a, cause.b) == ("padding", "5 rows see every key", "5 rows see their own")
    assert cause.text == "lets rows of padding see their own key alone"


def test_documents_end_to_end_keep_their_borders() -> None:
    """A band that is off by one within documents, which are a rest of the mask, is still an offset and no more."""
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    alike = (document[:, None] == document)[None, None]
    planted = trial(
        Formula(0.25, visible=visible(8, 8, 0) & alike), Formula(0.25, visible=visible(8, 8, -1) & alike), 8, 8
    )
    assert [suspicion.name for suspicion in planted.proven()] == ["mask_offset"]


def test_a_mask_without_a_pattern_is_told_by_its_rows_and_keys() -> None:
    hidden = visible(8, 8, 0) & (torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(4)) > 0.4)
    hidden = hidden | torch.eye(8, dtype=torch.bool) | visible(8, 8, 7)
    planted = trial(Formula(0.25, visible=visible(8, 8, 0)), Formula(0.25, visible=hidden), 8, 8)
    (cause,) = planted.proven()
    assert (cause.name, cause.text) == ("mask", "hides some of the keys 0 to 6 on rows 2, 4 to 7, which A shows")


@pytest.mark.parametrize("vector", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_a_vector_that_is_rounded(vector: str, dtype: str) -> None:
    start = trial(*[BASES["causal"][2]] * 2, 8, 8)
    b = start.sides.b
    b = replace(b, **{vector: replace(getattr(b, vector), steps=(RoundingStep(dtype),))})
    planted = replace(start, sides=replace(start.sides, b=b))
    (cause,) = planted.proven()
    assert (cause.name, cause.stage, cause.a, cause.b) == ("rounding", vector, "its own dtype", dtype)
    assert cause.text == f"rounds {vector} to {dtype}"
    back = replace(start, sides=replace(start.sides, a=b, b=start.sides.a))
    assert [suspicion.text for suspicion in back.proven()] == [f"does not round {vector} to {dtype}"]


def test_a_rounding_is_put_where_the_other_has_it() -> None:
    norm = NormStep("l2", torch.ones(1, 16))
    start = trial(*[BASES["causal"][2]] * 2, 8, 8)
    a = replace(start.sides.a, query=VectorPath(steps=(norm, RoundingStep("float16"))))
    b = replace(start.sides.b, query=VectorPath(steps=(RoundingStep("bfloat16"), norm)))
    (cause,) = CAUSES["rounding"](replace(start.sides, a=a, b=b))
    assert cause.change(a).query.steps == (RoundingStep("bfloat16"), norm)
    (cause,) = CAUSES["rounding"](replace(start.sides, a=replace(a, query=b.query), b=a))
    assert cause.change(b).query.steps == (norm, RoundingStep("float16"))


def test_what_no_output_shows_is_not_suspected() -> None:
    causal = visible(8, 8, 0)
    far = Formula(0.25, visible=causal, fill=-1e4, fill_added=True)
    bias = learned(1, 1, HEADS, 8, 8)
    shifted = bias + learned(2, 1, HEADS, 8, 1) + torch.ones(8, 8, dtype=torch.float64).triu(1)
    for a, b in (
        (Formula(0.25, visible=causal), far),
        (far, replace(far, fill=torch.finfo(torch.float32).min, fill_added=False)),
        (Formula(0.25, visible=causal, bias=bias), Formula(0.25, visible=causal, bias=shifted)),
        (Formula(0.25, sinks=torch.full((HEADS,), float("-inf"))), Formula(0.25)),
        (Formula(0.25), Formula(0.5, after=0.5)),
        (Formula(0.25, visible=torch.ones(1, 1, 8, 8, dtype=torch.bool)), Formula(0.25)),
    ):
        planted = trial(a, b, 8, 8)
        assert planted.left(planted.sides.a) <= planted.tiny
        assert not list(planted.suspicions())


def test_its_own_dtype_is_no_rounding() -> None:
    own = Formula(0.25, logits_dtype="float32", weights_dtype="torch.float32")
    assert not list(trial(Formula(0.25), own, 8, 8).suspicions())


def test_numbers_held_in_half_precision_are_the_same() -> None:
    bias, sinks = learned(1, 1, HEADS, 8, 8), learned(3, HEADS)
    a = Formula(0.0883883, bias=bias, sinks=sinks)
    b = Formula(float(torch.tensor(a.scale).bfloat16()), bias=bias.bfloat16(), sinks=sinks.bfloat16())
    start = trial(a, b, 8, 8)
    assert {suspicion.name for suspicion in start.suspicions()} == {"scale", "bias", "sinks"}
    half = replace(start.sides, b=replace(start.sides.b, dtype=torch.bfloat16))
    assert not list(replace(start, sides=half).suspicions())


def test_with_sinks_a_shift_of_the_bias_shows() -> None:
    bias = learned(1, 1, HEADS, 8, 8)
    sinks = learned(3, HEADS)
    planted = trial(Formula(0.25, bias=bias, sinks=sinks), Formula(0.25, bias=bias + 1.0, sinks=sinks), 8, 8)
    assert [suspicion.name for suspicion in planted.proven()] == ["bias"]


def test_the_mask_that_the_scale_multiplies() -> None:
    """A fill of -40 hides; a quarter of it leaks. It is one factor, whether the trace saw it or only its result."""
    a = Formula(0.25, visible=visible(8, 8, 0), fill=-40.0, fill_added=True)
    for b in (replace(a, fill_by=0.25), replace(a, fill=-10.0)):
        (cause,) = trial(a, b, 8, 8).proven()
        assert (cause.name, cause.stage, cause.a, cause.b) == ("bias_scaled", "mask", 1.0, 0.25)


def test_dropout_that_drew_otherwise() -> None:
    drawn = [torch.rand(1, HEADS, 8, 8, generator=torch.Generator().manual_seed(s)) > 0.2 for s in (1, 2)]
    planted = trial(*(Formula(0.25, kept=kept, dropout=0.2) for kept in drawn), 8, 8)
    (cause,) = planted.proven()
    assert (cause.name, cause.text) == ("dropout", "drops other weights at the same rate (0.2)")


def test_an_unknown_formula_is_not_judged() -> None:
    start = trial(*[BASES["causal"][2]] * 2, 8, 8)
    lost = replace(start.sides.b, formula=None)
    assert not [s for suspect in CAUSES.values() for s in suspect(replace(start.sides, b=lost))]


@pytest.mark.parametrize(
    ("a", "b", "name"),
    [
        (visible(9, 9, 0, 3), visible(9, 9, 1, 4), "mask_offset"),  # the band as a whole
        (visible(9, 9, -2, 2), visible(9, 9, -3, 3), "window"),
        (visible(7, 9, -2), visible(7, 9, -1), "mask_offset"),  # between the two corners
    ],
)
def test_one_part_of_a_mask_is_suspected(a: Tensor, b: Tensor, name: str) -> None:
    planted = trial(Formula(0.25, visible=a), Formula(0.25, visible=b), *a.shape[-2:])
    assert [suspicion.name for suspicion in planted.suspicions()] == [name]
    assert [suspicion.name for suspicion in planted.proven()] == [name]


def test_a_scale_is_changed_where_the_softcap_leaves_it() -> None:
    planted = trial(BASES["capped product"][2], Formula(0.5, 2.0), 8, 8)
    a = planted.sides.a
    (cause,) = CAUSES["scale"](planted.sides)
    formula = cause.change(a).formula
    assert formula is not None
    assert (formula.scale, formula.after, formula.softcap_at) == (1.0, 0.5, "product")


def test_a_row_that_an_offset_leaves_without_keys_is_what_the_other_makes_of_it() -> None:
    strict = visible(8, 8, 1)
    opened = strict | ~strict.any(-1, keepdim=True)
    planted = trial(Formula(0.25, visible=visible(8, 8, 0)), Formula(0.25, visible=opened), 8, 8)
    assert [suspicion.name for suspicion in planted.proven()] == ["mask_offset"]


# -- factors of the rows: what is a length, and what is a scale ------------------------------------------------------

WIDTH, LENGTH = 12, 24
ROOT = WIDTH**-0.5
CAUSAL = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
PADDED = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
PADDED[1, ..., 17:] = False
VISIBLE = {"causal": CAUSAL, "padded": PADDED}


def logs(visible: Tensor, base: float, by: float = ROOT) -> Tensor:
    return by * visible.sum(-1, keepdim=True).double().log() / math.log(base)


def named(a: Tensor | float, b: Tensor | float, visible: Tensor) -> list[str]:
    return factors_named(Formula(a, visible=visible), Formula(b, visible=visible))


def factors_named(a: Formula, b: Formula) -> list[str]:
    one, other = (Program(VectorPath(), VectorPath(), VectorPath(), formula) for formula in (a, b))
    sides = Sides(one, other, WIDTH, 4 * WIDTH, 4, self_attention=True)
    return [found.name for cause in ("length_factor", "scale") for found in CAUSES[cause](sides)]


@pytest.mark.parametrize("rows", VISIBLE)
def test_logs_of_the_keys_that_rows_see_are_a_length(rows: str) -> None:
    visible = VISIBLE[rows]
    assert named(logs(visible, 8), ROOT, visible) == ["length_factor"]
    assert named(ROOT, logs(visible, 8), visible) == ["length_factor"]
    assert named(logs(visible, 8), logs(visible, 16), visible) == ["length_factor"]
    assert named(logs(visible, 8), logs(visible, 8), visible) == []


@pytest.mark.parametrize("rows", VISIBLE)
def test_a_length_is_one_wherever_a_softcap_stands(rows: str) -> None:
    """The scale and the logs stand on one side of a softcap, or on both."""
    visible = VISIBLE[rows]
    a = Formula(logs(visible, 8), 3.0, visible=visible)
    for bare, root in ((1.0, ROOT), (logs(visible, 16, 1.0), ROOT), (1.0, logs(visible, 16))):
        b = Formula(bare, 3.0, "product", root, visible=visible)
        assert factors_named(a, b) == factors_named(b, a) == ["length_factor"]
    b = Formula(logs(visible, 8, 1.0), 3.0, "product", ROOT, visible=visible)
    assert factors_named(a, b) == []
    assert factors_named(b, replace(b, after=1.0)) == ["scale"]


@pytest.mark.parametrize("rows", VISIBLE)
@pytest.mark.parametrize("wrong", [1.0, 1 / WIDTH, WIDTH**0.5])
def test_another_scale_beside_the_same_length(wrong: float, rows: str) -> None:
    visible = VISIBLE[rows]
    assert named(logs(visible, 10), logs(visible, 10, wrong), visible) == ["scale"]


def test_factors_of_sequences_that_are_no_logs() -> None:
    """Of one number each sequence, which is not that of its keys."""
    factors = torch.tensor([0.5, 0.3]).double()[:, None, None, None].expand(2, 1, LENGTH, 1)
    assert named(factors, ROOT, PADDED) == ["scale"]
    assert named(factors, ROOT, CAUSAL) == ["scale"]


def test_factors_of_rows_that_are_no_logs() -> None:
    assert named(torch.rand(1, 1, LENGTH, 1).double() + 0.5, ROOT, CAUSAL) == ["length_factor"]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (Formula(0.25, 50.0), Formula(0.005, 1.0), "does not multiply by the softcap (50) behind the tanh"),
        (Formula(0.005, 1.0), Formula(0.25, 50.0), "multiplies by the softcap (50) behind the tanh, where A does not"),
        (Formula(0.25, 50.0), Formula(0.125, 25.0), "has a softcap of 25"),
    ],
)
def test_a_softcap_that_is_not_multiplied_back_is_said(one: Formula, other: Formula, text: str) -> None:
    """`tanh(z / 50)` reads as a softcap of 1, of logits that are divided by 50."""
    said = [suspicion.text for suspicion in trial(one, other, 5, 5).suspicions()]
    assert any(text in each for each in said)
    assert ("behind the tanh" in said[0]) == ("behind the tanh" in text)
