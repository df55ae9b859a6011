"""Says in Chinese what a comparison found: the counterpart of the English sentences of `sqrtdk.compare.words`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.compare.outputs import BESIDE, FIRST, FOLLOWS, differing, sizes, unjudged_by_reason, unlike
from sqrtdk.compare.records import DiffReport, PairDiff, lines_of
from sqrtdk.compare.words import (
    Group,
    cancelling,
    groups,
    largest,
    left_out,
    listed,
    lost_stage,
    orphans,
    place_of,
    reached_by,
    share,
    short,
    told,
    where,
)
from sqrtdk.report.diff_causes import caused
from sqrtdk.report.diff_fold import largest_left
from sqrtdk.report.diff_words import STAGE_WORDS
from sqrtdk.report.said import said

COMMA = "、"
MORE = "{} 等，另有 {} 处"


def paragraphs(report: DiffReport) -> tuple[str, ...]:
    """Return one paragraph for each group of pairs that differ for the same reasons, then the remaining remarks.

    Example:
        >>> from sqrtdk.compare.records import SideInfo
        >>> side = SideInfo("demo", "model")
        >>> paragraphs(DiffReport(side, side, (), (), (), ()))
        ('A 的注意力在 B 中都没有对应：没有可比较的。',)
    """
    found = groups(report.pairs)
    own = [group for group in found if group.causes]
    if report.outputs_from.startswith(FIRST):
        # the difference begins before any attention: groups that it merely reaches need no paragraph
        own = [group for group in own if not group.only_reached]
    allows = _allows(report)
    first, after = _of_outputs(report)
    sentences = [*first, *(_caused(group, report, allows) for group in own)]
    sentences += [_unexplained(group, report, allows) for group in found if not group.causes]
    for origin, lost in orphans(report.pairs, found).items():
        sentences.append(f"{_sites([place_of(pair) for pair in lost])} 的差异来自 {origin}。")
    sentences += after
    alone = [(len(report.unpaired_a), "A", "B"), (len(report.unpaired_b), "B", "A")]
    if told := [f"{side} 有 {number} 次注意力在 {other} 中没有对应" for number, side, other in alone if number]:
        sentences.append(f"{'；'.join(told)}。")
    if unjudged := [pair for pair in report.pairs if pair.same is None]:
        reasons = dict.fromkeys(pair.reason for pair in unjudged if pair.reason)
        why = f"：{said(next(iter(reasons)), 'zh')}" if len(reasons) == 1 else ""
        sentences.append(f"{len(report.pairs)} 对中有 {len(unjudged)} 对未能比较{why}。")
    if not report.pairs:
        sentences.append("A 的注意力在 B 中都没有对应：没有可比较的。")
    if same := [pair for pair in report.pairs if pair.same]:
        worst = largest(same, largest_left)
        figures = f"最大差异 {short(largest_left(worst))}，{allows} {short(worst.allowed)}。"
        which = f"全部 {len(same)} 对" if len(same) == len(report.pairs) else f"其余 {len(same)} 对"
        agreed = any(sentence.startswith("注意力一致；") for sentence in first)
        sentences.append(f"注意力的{figures}" if agreed else f"{which}一致：{figures}")
    for stages, members in cancelling(report.pairs).items():
        names = COMMA.join(map(_stage, stages))
        sentences.append(f"{_at(members, report)}，{names}阶段不同，但不影响结果：从输入到输出两侧一致。")
    for (out, rows), members in left_out(report.pairs).items():
        sentences.append(f"{_at(members, report)}，{rows} 行中有 {out} 行看不到任何键，未参与比较。")
    return tuple(sentences)


def _of_outputs(report: DiffReport) -> tuple[list[str], list[str]]:
    """Return sentences to put before and after the others, like `sqrtdk.compare.outputs.of_outputs` in English."""
    after = [f"模型的输出未比较：{caused(report.outputs_missing, 'zh')}。"] if report.outputs_missing else []
    if unjudged := [f"`{one.name}`" for one in report.outputs if one.same is None and one.reason is None]:
        after.append(f"两侧模型的输出都含有 NaN，未能判定：{COMMA.join(unjudged)}。")
    after += [
        f"输出 `{one.name}` 未能判定：{caused(one.reason or '', 'zh')}。"
        for one in report.outputs
        if unjudged_by_reason(one)
    ]
    before = [f"输出 `{one.name}` 的形状不同：{caused(one.reason or '', 'zh')}。" for one in unlike(report.outputs)]
    off, reached = differing(report.outputs), reached_by(report.pairs)
    by, names = sizes(report.outputs)
    size = f"相差{'至多 ' if names else ' '}{by}" if by else "不同，一侧是数而另一侧不是"
    named = f"（{names}）" if names else ""
    first, *more = [f"{caused(half, 'zh')}。" for half in report.outputs_from.split("; ")]
    if reached and report.outputs_from.startswith(FIRST):
        ends_too = f"，模型返回的结果{named}因此{size}" if off else ""
        at = f"{_at(reached, report).removeprefix('在')} 的注意力".replace("起 的", "起的")
        return [f"{first}它影响{at}{ends_too}。{''.join(more)}", *before], after
    if not off:
        return before, after
    if report.outputs_from == FOLLOWS:
        first = "注意力的差异可解释全部。"
    elif report.outputs_from.startswith(BESIDE):
        first = "注意力的差异只解释其中一部分。"
    chain = "".join((first, *more)) if report.outputs_from else ""
    if report.pairs and all(pair.same for pair in report.pairs):
        return [f"注意力一致；输出{named}{size}。{chain}", *before], after
    return before, [f"模型返回的结果{named}{size}。{chain}", *after]


def _allows(report: DiffReport) -> str:
    names = dict.fromkeys(side.dtype for side in (report.a, report.b) if side.dtype)
    return f"{' 与 '.join(names)} 的舍入允许" if names else "舍入允许"


def _caused(group: Group, report: DiffReport, allows: str) -> str:
    worst = group.worst
    texts = [caused(cause.text or f"differs by the cause {cause.name}", "zh") for cause in told(group.causes)]
    first = f"{_at(group.pairs, report)}，B 与 A 的不同在于：{'；'.join(texts)}"
    if group.numbers_differ:
        first += "（数值取自第一处，各处不同）"
    applied = "将其应用于 A " if len(texts) == 1 else f"将这 {len(texts)} 项应用于 A "
    left = f"{short(worst.residue)}，{allows} {short(worst.allowed)}"
    if group.resolved:
        return f"{first}。{applied}之后，输出相差至多 {left}。{_in_code(group)}{_followed(group)}"
    stage = f"（在{_stage(lost)}阶段）" if (lost := lost_stage(worst)) and group.unknown else ""
    rest = f"{applied}之后，差异的 {share(worst.explained)} 消失，仍剩 {left}：其余原因未知{stage}。"
    return f"{first}。{rest}{_in_code(group)}{_followed(group)}"


def _in_code(group: Group) -> str:
    places = lines_of(group.causes, " B 的 {}、A 的 {}", "两侧的 {}")
    return f"代码见{'；'.join(f'{place}（{name}）' for place, name in places)}。" if places else ""


def _unexplained(group: Group, report: DiffReport, allows: str) -> str:
    worst = largest(group.pairs, lambda pair: pair.difference if pair.difference is not None else pair.residue)
    size = worst.difference if worst.difference is not None else worst.residue
    stage = f"首先在{_stage(lost)}阶段" if (lost := lost_stage(worst)) else "输出"
    by = f"相差 {short(size)}，{allows} {short(worst.allowed)}"
    if size is not None and not math.isfinite(size):
        by = f"差异为 {short(size)}，因为有一侧含有非有限值"
    return f"{_at(group.pairs, report)}，{stage}不同，原因未知：{by}。{_followed(group)}"


def _at(members: Sequence[PairDiff], report: DiffReport) -> str:
    if len(members) == len(report.pairs) == 1:
        return f"在 {place_of(members[0])}"
    told = where(members, report.pairs, "从 {} 起", "\0")  # "\0" stands for "nowhere in particular": list the sites
    return told if told != "\0" else f"在 {_sites([place_of(pair) for pair in members])}"


def _followed(group: Group) -> str:
    return f"{_sites([place_of(pair) for pair in group.followers])} 的差异由此而来。" if group.followers else ""


def _stage(stage: str) -> str:
    return STAGE_WORDS[stage].zh if stage in STAGE_WORDS else f" {stage} "


def _sites(sites: list[str]) -> str:
    return listed(sites, MORE, COMMA)
