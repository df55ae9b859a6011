import dataclasses
import math

import pytest

from sqrtdk.audit.records import Finding
from sqrtdk.messages import Text
from sqrtdk.report.check.fold import FoldedFinding, expected_text, fold_calls, fold_findings, values
from sqrtdk.report.figures import worst_head
from tests.report.sample_report import head_stats, healthy, judged, sick, static


def test_equal_layers_are_one_line() -> None:
    (fold,) = fold_calls(healthy().calls)
    assert fold.site == "model.layers.0-31.self_attn"
    assert len(fold.calls) == 32


def test_alternating_layers_are_two_lines() -> None:
    sites = [(fold.site, len(fold.calls)) for fold in fold_calls(static().calls)]
    assert sites == [("model.layers.0-4,6-10,..,42-46.self_attn", 40), ("model.layers.5,11,..,47.self_attn", 8)]


def test_only_one_integer_may_differ() -> None:
    calls = [judged(f"stages.{stage}.blocks.{block}.attn") for stage in range(2) for block in range(3)]
    assert [fold.site for fold in fold_calls(calls)] == ["stages.0.blocks.0-2.attn", "stages.1.blocks.0-2.attn"]


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 1.01},
        {"verdict": "declared"},
        {"mistake": "twice"},
        {"formula": "softmax(q.k)"},
        {"declared_by": "x"},
        {"kind": "eager"},
        {"index": 1},
        {"heads": 2},
        {"stats": head_stats()},
        {"reason": "x"},
    ],
)
def test_what_a_reader_sees_keeps_layers_apart(change: dict[str, object]) -> None:
    same = {"formula": "softmax(rope(q).rope(k))"}
    calls = [judged("h.0.attn", **same), judged("h.1.attn", **(same | change))]  # type: ignore[arg-type]
    assert len(fold_calls(calls)) == 2


def test_what_no_reader_sees_does_not() -> None:
    (fold,) = fold_calls([judged("h.0.attn"), judged("h.1.attn", ratio=1.0 + 1e-6, formula=judged("").call.formula)])
    assert fold.site == "h.0-1.attn"


def test_every_call_is_in_exactly_one_fold() -> None:
    for report in (healthy(), static(), sick()):
        folded = [judged for fold in fold_calls(report.calls) for judged in fold.calls]
        assert sorted(map(id, folded)) == sorted(map(id, report.calls))


@pytest.mark.parametrize(
    ("rule", "numbers", "bound", "told", "wanted"),
    [
        ("flat", (0.99971,), 0.999, "0.99971", "at most 0.99900"),
        ("flat", (0.99904, 0.99999), 0.999, "0.999040 to 0.999990", "at most 0.999000"),
        ("max_logit", (100.004,), 100.0, "100.0040", "at most 100.0000"),
        ("max_logit", (223.07,), 100.0, "223.1", "at most 100"),
        ("saturation", (0.9685,), 0.5, "0.9685", "at most 0.5"),
        ("padding", (0.4999,), 0.5, "0.49990", "at least 0.50000"),
        ("padding", (0.5,), 0.5, "0.5", "0.5"),
        ("sliding_window", (513,), 512, "513", "512"),
        ("max_logit", (math.nan,), 100.0, "nan", "100"),
        ("max_logit", (math.inf,), 100.0, "inf", "at most 100"),
    ],
)
def test_a_value_and_its_bound_never_look_the_same(
    rule: str, numbers: tuple[float, ...], bound: float, told: str, wanted: str
) -> None:
    found = tuple(Finding(rule, "warn", f"h.{i}", one, bound, "m", "f", "s") for i, one in enumerate(numbers))
    folded = FoldedFinding("h.0", found)
    assert (values(folded).en, expected_text(folded).en) == (told, wanted)


def test_root_and_second_call_are_named() -> None:
    assert [fold.site for fold in fold_calls([judged(""), judged("a", index=2)])] == ["(root)", "a #2"]


def test_figures_are_of_the_worst_head() -> None:
    calm, wild = head_stats(sigma=0.5), head_stats(sigma=3.0, seed=1, nan_head=1)
    worst = worst_head([judged("h.0", stats=calm), judged("h.1", stats=wild)])
    known = [value for value in wild.max_logit if not math.isnan(value)]
    assert worst.max_logit == max(known)
    assert worst.entropy_nats == min(value for value in wild.entropy_nats if not math.isnan(value))
    assert worst.entropy_nats is not None
    assert worst.entropy_fraction == wild.entropy_fraction[wild.entropy_nats.index(worst.entropy_nats)]


def test_figures_of_nothing_and_of_nan_differ() -> None:
    assert worst_head([judged("h.0")]).max_logit is None
    only_nan = worst_head([judged("h.0", stats=head_stats(1, nan_head=0))])
    assert only_nan.max_logit is not None
    assert math.isnan(only_nan.max_logit)
    assert only_nan.entropy_nats is not None
    assert math.isnan(only_nan.entropy_nats)


def test_findings_fold_over_layers_and_keep_their_order() -> None:
    folded = fold_findings(sick().findings)
    assert [(item.site, len(item.findings)) for item in folded[:3]] == [
        ("decoder.h.3-6.attn", 4),
        ("decoder.h.3-6.attn", 4),
        ("", 1),
    ]
    assert [item.first.severity for item in folded] == ["critical", "fail", "fail", "fail", "warn", "note"]
    assert values(folded[0]) == Text("12349 to inf", "12349 到 inf")


def test_findings_of_other_words_stay_apart() -> None:
    first = sick().findings[0]
    other = dataclasses.replace(first, site="decoder.h.9.attn", message="another message")
    assert len(fold_findings([first, other])) == 2
