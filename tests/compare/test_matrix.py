"""Every cause planted in small models of every style: found, named, proven; and nothing named where nothing is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from sqrtdk.compare.diff import sides_diff
from sqrtdk.compare.records import DiffReport
from tests.compare.ports.answers import alarms
from tests.compare.ports.built import build, inputs
from tests.compare.ports.config import BASES
from tests.compare.ports.pairs import Case, compare, judge, near_pairs, pairs_of_causes, run, side_a
from tests.compare.ports.planted import HARMLESS, cases, cross_section
from tests.compare.ports.planting import Planting, case_name
from tests.compare.ports.styles import STYLES
from tests.support.kernel_here import unable

TWO = 20  # pairs of two causes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HERE = tuple(style for style in STYLES if style != "cpu" or unable() is None)
BATCHES = ((1, None), (2, "left"), (3, "right"))  # and where the last sequence has padding
CACHE = {"cache_k": "once", "cache_v": "once"}
PAIRS = tuple(itertools.permutations(DTYPES, 2))
ROTATED = tuple(base for base, port in BASES.items() if port.rope)
PART = [(base, ((cause, planting),)) for cause, planting, base in cross_section()]  # two variants of each cause
EVERY = [(base, style, dtype) for base in BASES for style in HERE for dtype in DTYPES]
SOME = random.Random(0).sample(EVERY, len(EVERY))[::8]  # every base and every style
APART = [(base, *dtypes, style) for base in BASES for dtypes in PAIRS for style in HERE]
Way = tuple[str, torch.dtype, torch.dtype]


def named(every: Iterable[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in every]


def tell(capsys: pytest.CaptureFixture[str], what: str, count: int, wrong: Sequence[Sequence[str]], fault: str) -> None:
    """Print how many cases there are and how many of them are wrong, and ask that none is."""
    wrong = [case for case in wrong if case]
    with capsys.disabled():
        print(f"\n{what}: {count} cases, {count - len(wrong)} right, {len(wrong)} {fault}")
    assert not wrong, "\n".join(line for case in wrong for line in case)


def judged(capsys: pytest.CaptureFixture[str], what: str, every: Sequence[Case]) -> None:
    tell(capsys, what, len(every), [judge(case) for case in every], "wrong")


# -- what is planted is named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", named(Case(*part, single=True) for part in PART[::2]))
def test_a_planted_cause_is_named_and_proven(case: Case) -> None:
    """In one layer; the others have three."""
    assert not judge(case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", named(Case(*part) for part in PART[1::2]))
def test_another_variant_of_a_cause_is_named_and_proven(case: Case) -> None:
    assert not judge(case)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", named(pairs_of_causes(TWO)))
def test_two_causes_at_once_are_both_named(case: Case) -> None:
    assert not judge(case)


@pytest.mark.slow
def test_every_cause_on_every_base_is_named_and_proven(capsys: pytest.CaptureFixture[str]) -> None:
    judged(capsys, "one cause", [Case(base, ((cause, planting),)) for cause, planting, base in cases()])


@pytest.mark.slow
def test_many_pairs_of_causes_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    judged(capsys, "two causes", list(pairs_of_causes(10 * TWO, seed=1)))


@pytest.mark.slow
def test_two_causes_of_one_group_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Scale and softcap, base and layout of a rotation, a window and padding."""
    judged(capsys, "two causes of one group", [case for seed in range(3) for case in near_pairs(seed)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("base", "common", "planted", "expected"),
    [
        ("rope", {}, {"biases": "qvo"}, {("projection_bias", "key")}),
        ("sdpa", {}, {"biases": "qko", "cache_k": "never"}, {("projection_bias", "value"), ("kv_scale", "key")}),
        ("eager", {"qk_norm": "rms"}, {"qk_norm_over": "heads"}, {("qk_norm_axis", "query norm")}),
        ("rope", {}, {"rope_base": 1e6, "cache_k": "twice"}, {("rope_base", "query rotation"), ("kv_scale", "key")}),
    ],
)
def test_what_differs_on_either_side_of_a_cache(
    base: str, common: dict[str, Any], planted: dict[str, Any], expected: set[tuple[str, str]]
) -> None:
    """Neither side's program knows what a cache does, which stands between what is judged before and behind it."""
    common = common | CACHE
    report = compare(base, build(base, common=common, **planted), **common)
    for pair in report.pairs:
        assert pair.same is False
        assert {(cause.name, cause.stage) for cause in pair.causes} == expected
        assert pair.explained is not None
        assert pair.explained >= 0.99


def test_another_cache_behind_the_same_values_is_not_passed_over() -> None:
    """Twice as coarse: what comes into the step is the same, what it gives is not."""
    b = build("eager", common=CACHE)
    for layer in b.blocks():
        layer.attn.k_step.mul_(2)
    report = compare("eager", b, **CACHE)
    assert report.pairs[0].same is False
    assert [cause.name for cause in report.pairs[0].causes] == ["unknown"]


# -- nothing is named where nothing is planted -------------------------------------------------------------------------


def same(base: str, style: str, dtype: torch.dtype, batch: int = 2, **common: Any) -> list[str]:
    """Alarms of a base against itself in another style."""
    b = build(base, dtype=dtype, common={**common, "style": style})
    said = alarms(compare(base, b, dtype=dtype, batch=batch, **common), BASES[base].layers)
    return [f"{base}, {style}, {dtype}, batch {batch}, {common}: {alarm}" for alarm in said]


def written_otherwise(planting: Planting, base: str) -> list[str]:
    """Alarms of a base against itself with something harmless."""
    common = planting.shared(base)
    report = compare(base, build(base, common=common, **planting.changes(base)), **common)
    return [f"{case_name('harmless', planting, base)}: {alarm}" for alarm in alarms(report, BASES[base].layers)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("base", "style", "dtype"), SOME, ids=str)
def test_styles_of_one_model_raise_no_alarm(base: str, style: str, dtype: torch.dtype) -> None:
    assert not same(base, style, dtype)


@pytest.mark.slow
def test_no_style_dtype_or_batch_raises_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    every = [(case, batch, padded) for case in EVERY for batch, padded in BATCHES]
    wrong = [same(*case, batch=batch, padded=padded) for case, batch, padded in every]
    tell(capsys, "nothing planted", len(every), wrong, "false alarms")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(len(HARMLESS)), ids=[planting.name for planting in HARMLESS])
def test_what_is_written_otherwise_raises_no_alarm(number: int) -> None:
    planting = HARMLESS[number]
    assert not written_otherwise(planting, planting.bases[number % len(planting.bases)])


@pytest.mark.slow
def test_nothing_written_otherwise_raises_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    every = [(planting, base) for planting in HARMLESS for base in planting.bases]
    tell(capsys, "written otherwise", len(every), [written_otherwise(*case) for case in every], "false alarms")


@pytest.mark.parametrize("base", ["rope", pytest.param("gqa", marks=pytest.mark.full)])
def test_a_cache_on_both_sides_is_no_difference(base: str) -> None:
    assert not alarms(compare(base, build(base, common=CACHE, style="einsum"), **CACHE), 3)


# -- two sides of two dtypes -------------------------------------------------------------------------------------------


def compared(way: Way, **fields: Any) -> DiffReport:
    """What is said of a base in one dtype, which is A, and of B in another."""
    base, dtype, other = way
    return sides_diff(side_a(base, dtype, 2, ()), run(build(base, dtype=other, **fields), "B", inputs(base, batch=2)))


def alarms_between(way: Way, style: str) -> list[str]:
    """Alarms of a base against itself in another style and dtype."""
    said = alarms(compared(way, common={"style": style}), BASES[way[0]].layers)
    return [f"{way}, {style}: {alarm}" for alarm in said]


def planted_in(base: str) -> dict[str, dict[str, Any]]:
    """Fields of B, by the name of the cause that they are."""
    port = BASES[base]
    changes: dict[str, dict[str, Any]] = {"scale": {"scale": 1.5 * port.factor}}
    if port.causal:
        changes["mask_offset"] = {"offset": 1}
    return changes | ({"rope_base": {"rope_base": 1000.0}} if port.rope else {})


def missed(way: Way, name: str, **fields: Any) -> list[str]:
    """Pairs of which something else is said than that they differ by one cause, and what came of it before them."""
    found = [(pair.same, {cause.name for cause in pair.causes} - {"input"}) for pair in compared(way, **fields).pairs]
    return [f"{way}, {fields}: {answer}" for answer in found if answer != (False, {name})]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("base", "dtype", "other", "style"), random.Random(3).sample(APART, 6), ids=str)
def test_two_dtypes_raise_no_alarm(base: str, dtype: torch.dtype, other: torch.dtype, style: str) -> None:
    assert not alarms_between((base, dtype, other), style)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_what_is_planted_is_found_between_two_dtypes(dtype: torch.dtype, other: torch.dtype) -> None:
    base = ROTATED[PAIRS.index((dtype, other)) % len(ROTATED)]
    for name, fields in planted_in(base).items():
        assert not missed((base, dtype, other), name, **fields)


@pytest.mark.slow
def test_no_two_dtypes_raise_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [alarms_between(tuple(way), style) for *way, style in APART]
    tell(capsys, "two dtypes, nothing planted", len(APART), wrong, "false alarms")


@pytest.mark.slow
def test_everything_planted_is_found_between_two_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    every = [((base, *two), *change) for base in BASES for two in PAIRS for change in planted_in(base).items()]
    wrong = [missed(way, name, **fields) for way, name, fields in every]
    tell(capsys, "two dtypes, one cause", len(every), wrong, "wrong")
