"""The headline in words, and the consequences under their cause."""

from __future__ import annotations

import dataclasses
import re

import pytest

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import CheckReport, Finding, JudgedCall
from sqrtdk.messages import Message, joined, said
from sqrtdk.report.check.consequences import consequences
from sqrtdk.report.check.headline import headline
from sqrtdk.tracing.records import BY_BLOCK, Factor
from tests.report.sample_report import head_stats, healthy, judged, leaking, sick, static, unjudged


def report(*calls: JudgedCall, findings: tuple[Finding, ...] = ()) -> CheckReport:
    return dataclasses.replace(healthy(1, 1), calls=calls, findings=findings)


def wrong(site: str, ratio: float | None = 8.0, mistake: str | None = "missing", **more: object) -> JudgedCall:
    return judged(site, ratio=ratio, verdict="unexplained", mistake=mistake, **more)  # type: ignore[arg-type]


def finding(rule: str, severity: str, site: str, value: float = 8.0, message: str = "m") -> Finding:
    return Finding(rule, severity, site, value, 1.0, message, "fix", "source")


def test_the_scale_in_words() -> None:
    told = headline(report(*(wrong(f"h.{i}") for i in range(3))))
    assert told.en == "The scale is 8 times too large in 3 of 3 attentions: no 1/sqrt(head_dim) was applied"
    assert told.zh == "全部 3 次注意力调用的缩放因子是应有值的 8 倍：没有乘以 1/sqrt(head_dim)"


def test_too_small_and_of_several_sizes() -> None:
    calls = (judged("h.0"), wrong("h.1", 0.125, "twice"), wrong("h.2", 1 / 16, "twice", head_dim=256))
    told = headline(report(*calls))
    assert told.en.startswith("The scale is 8 to 16 times too small in 2 of 3 attentions: it is 1/head_dim in place")
    assert told.zh.startswith("3 次注意力调用中有 2 次的缩放因子只有应有值的 1/8 到 1/16：")


def test_several_mistakes_are_joined() -> None:
    told = headline(report(wrong("h.0"), wrong("h.1", 0.125, "twice"), wrong("h.2", 1.0, "cosine")))
    first, second, third = told.en.split("; ")
    assert first.startswith("The scale is 8 times too large in 1 of 3 attentions: no ")
    assert second.startswith("the scale is 8 times too small in 1 of 3 attentions: it is ")
    assert third.startswith("the scale is wrong in 1 of 3 attentions: a cosine, ")
    assert told.zh.count("；") == 2


def test_a_broken_declaration_and_unlike_blocks() -> None:
    declared = dataclasses.replace(wrong("h.0", 0.5, "unknown", declared_by="config.x = 1"), expected=0.0125)
    told = headline(report(declared))
    assert told.en == "The scale is 5 times too large in 1 of 1 attention: it is not what was declared"
    call = wrong("h.0", None, None).call
    blocks = dataclasses.replace(
        call, scale=dataclasses.replace(call.scale, factors=(Factor(0.5, "logits", BY_BLOCK),))
    )
    assert (
        headline(report(dataclasses.replace(wrong("h.0"), call=blocks))).en
        == "Blocks of keys have unlike scales in 1 of 1 attention"
    )


def test_a_scale_whose_heads_differ_has_no_size() -> None:
    call = wrong("h.0").call
    scale = dataclasses.replace(call.scale, per_head=(1.0, 0.5))
    call = dataclasses.replace(call, scale=scale)
    assert headline(report(dataclasses.replace(wrong("h.0"), call=call))).en.startswith("The scale is wrong in 1 of 1")


def test_nothing_wrong() -> None:
    assert headline(healthy(3)).en == "All 3 attentions have the textbook scale"
    assert headline(healthy(3)).zh == "全部 3 次注意力调用的缩放因子都是教科书的值"
    assert headline(healthy(1)).en == "The one attention has the textbook scale"
    assert headline(healthy(1)).zh == "唯一一次注意力调用的缩放因子是教科书的值"
    only_declared = dataclasses.replace(judged("h.0", ratio=0.5, verdict="declared", stats=head_stats()), health="ok")
    assert headline(report(only_declared)).zh == "唯一一次注意力调用的缩放因子与声明一致"
    assert headline(report(only_declared, only_declared)).en == "All 2 attentions have the declared scale"
    told = headline(static())
    assert told.en.startswith("All 48 attentions have the right scale, 40 the textbook's and 8 as declared (scales and")
    assert told.zh.endswith("40 次是教科书的值，8 次与声明一致（只检查了缩放因子和公式）")


def test_other_faults_are_told_beside_right_scales() -> None:
    told = headline(leaking())
    assert told.en == (
        "All 3 attentions have the textbook scale; something else is wrong: the causal mask is off by one (h.1.attn)"
    )
    warned = report(
        judged("h.0", stats=head_stats()), findings=(finding("unused", "warn", "h.0", message=joined(["x", "y"])),)
    )
    assert headline(warned).en == "The one attention has the textbook scale; with a warning: x (h.0)"
    many = tuple(finding(f"r{i}", "fail", "", message=f"fault {i}") for i in range(4))
    assert headline(report(judged("h.0"), findings=many)).en.endswith(": fault 0; fault 1; 2 more")


def test_what_was_not_judged_is_told() -> None:
    told = headline(unjudged())
    assert told.en == (
        "1 of 2 attentions have the textbook scale; 1 of 2 attentions could not be judged; 1 attention not measured"
    )
    assert told.zh.endswith("2 次注意力调用中有 1 次未能判定；1 次注意力调用未测量")
    nothing = report(judged("h", ratio=None, verdict="unmeasured"))
    assert headline(nothing).en == "No scale could be judged; 1 of 1 attention could not be judged"
    assert headline(nothing).zh == "没有任何缩放因子可以判定；唯一一次注意力调用未能判定"
    assert headline(report()).en == "No attention was seen"


def test_a_sick_model_names_what_is_no_consequence() -> None:
    told = headline(sick())
    assert told.en.startswith("The scale is 8 times too large in 4 of 10 attentions: no 1/sqrt(head_dim) was applied; ")
    assert "also: 512 rows of head 5 hold NaN logits (decoder.h.4.attn)" in told.en
    assert "max logit" not in told.en  # the missing scale explains it


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_has_its_chinese(mistake: str) -> None:
    told = headline(report(wrong("h", 8.0, mistake)))
    assert told.en.endswith(f": {MISTAKES[mistake].happened}")
    happened = told.zh.partition("：")[2]
    assert re.search("[\u4e00-\u9fff]", happened), happened
    assert mistake not in happened


def test_a_finding_beside_the_scale_is_told_in_chinese() -> None:
    message = Message("rules.mask_audit.ahead_by_one")
    told = headline(report(judged("h.0"), findings=(finding("mask_audit", "critical", "h.0", message=message),)))
    assert told.en.endswith(f"something else is wrong: {message} (h.0)")
    assert told.zh.endswith("但另有错误：" + said(message, "zh") + "（h.0）")
    assert said(message, "zh") != message


def test_consequences_stand_under_their_cause() -> None:
    causes = consequences(sick().findings)
    told = [(one.cause.first.rule, [item.first.rule for item in one.consequences]) for one in causes]
    assert told == [
        ("scale_ledger", ["max_logit", "saturation"]),
        ("scale_ledger", []),
        ("nan_rows", []),
        ("eager_against_sdpa", []),
    ]
    assert [len(item.findings) for item in causes[0].consequences] == [4, 1]


@pytest.mark.parametrize(
    ("cause", "rule", "under"),
    [
        (finding("scale_ledger", "fail", "h.0"), "entropy", True),
        (finding("scale_ledger", "fail", "h.0"), "flat", False),
        (finding("scale_ledger", "fail", "h.0", 0.125), "flat", True),
        (finding("scale_ledger", "fail", "h.0", 0.125), "entropy", False),
        (finding("scale_ledger", "fail", "h.0", 1.0), "flat", True),  # a cosine that was divided
        (finding("declared_vs_actual", "fail", "h.0"), "max_logit", True),
        (finding("scale_ledger", "note", "h.0"), "entropy", False),
        (finding("scale_ledger", "fail", "h.1"), "entropy", False),
        (finding("mask_audit", "fail", "h.0"), "entropy", False),
        (finding("scale_ledger", "fail", "h.0"), "mask_audit", False),
    ],
)
def test_only_a_scale_that_explains_it_is_a_cause(cause: Finding, rule: str, under: bool) -> None:
    causes = consequences([finding(rule, "warn", "h.0"), cause])
    assert [len(one.consequences) for one in causes] == ([1] if under else [0, 0])


def test_every_finding_is_told_once() -> None:
    findings = sick().findings
    folds = [fold for one in consequences(findings) for fold in (one.cause, *one.consequences)]
    assert sorted(id(finding) for fold in folds for finding in fold.findings) == sorted(map(id, findings))
