"""The fixed words of a check in the terminal and in a pull request comment, in English and Chinese."""

from __future__ import annotations

from sqrtdk._language import Language
from sqrtdk._sites import ROOT
from sqrtdk.messages import Text, say

WORDS = {
    # head
    "parameter": Text("{count} parameter", "{count} 个参数"),
    "parameters": Text("{count} parameters", "{count} 个参数"),
    "static": Text("formulas alone", "仅公式"),
    "dynamic": Text("model run", "运行了模型"),
    "seed": Text("seed {seed}", "随机种子 {seed}"),
    "comma": Text(", ", "，"),
    "colon": Text(": ", "："),
    "semicolon": Text("; ", "；"),
    "stop": Text(". ", "。"),
    "of": Text("{done} of {total}", "{done}/{total}"),
    "list comma": Text(", ", "、"),
    "calls with": Text("{count} {what}", "{count} 次{what}"),
    "attentions with": Text("{count} {what}", "{count} 处{what}"),
    "findings with": Text("{count} {what}", "{count} 个{what}"),
    "list more": Text("{sites} and {count} more", "{sites} 等，另有 {count} 处"),
    "more": Text("... and {count} more: see --json or --html", "……另有 {count} 条：见 --json 或 --html"),
    "more_json": Text("... and {count} more: see --json", "……另有 {count} 条：见 --json"),
    # table
    "site": Text("site", "调用位置"),
    "formula": Text("formula", "公式"),
    "ratio": Text("ratio", "缩放比"),
    "verdict": Text("verdict", "判定"),
    "health": Text("health", "健康"),
    "max logit": Text("max logit", "最大 logit"),
    "entropy nats": Text("entropy nats", "熵 nat"),
    "peak": Text("peak", "峰值"),
    "saturated": Text("saturated", "饱和"),
    "legend": Text(
        "Figures of the worst head: largest max logit, lowest entropy (and share of log n), largest peak, share of "
        "rows with a peak over .99.",
        "数值取自最差的头：最大的最大 logit、最低的熵（及其占 log n 的比例）、最大的峰值、峰值超过 .99 的行的比例。",
    ),
    "declared by": Text("declared by {by}", "声明来源：{by}"),
    "declared at": Text("declared by {by} at {at}", "声明来源：{by}，见 {at}"),
    "unmeasured_why": Text("unmeasured: {why}", "未测量：{why}"),
    "no statistics": Text("no statistics: {why}", "没有统计量：{why}"),
    "after_softmax": Text("the weights after the softmax: {steps}", "softmax 之后的权重：{steps}"),
    "written": Text("written: {places}", "代码位置：{places}"),
    "what at": Text("{what} at {at}", "{what}，位于 {at}"),
    "factor on": Text("{value} on {where}", "{value} 乘在 {where} 上"),
    "by kernel": Text("{value} by the kernel", "{value}（由内核乘上）"),
    "no reason": Text("no reason given", "未给出理由"),
    "all sites": Text("all sites", "全部调用位置"),
    "in_brackets": Text(" ({sites})", "（{sites}）"),
    # findings
    "findings_title": Text("Findings", "问题"),
    "leads to": Text("which leads to:", "由此引起："),
    "site_count": Text("{count} site", "{count} 个调用位置"),
    "site_counts": Text("{count} sites", "{count} 个调用位置"),
    "found": Text("found {value}", "测得 {value}"),
    "expected": Text("expected {value}", "应为 {value}"),
    "expected bound": Text("expected {value}", "应{value}"),
    "fix": Text("fix: {fix}", "处理办法：{fix}"),
    "source": Text("source: {source}", "来源：{source}"),
    "not attention": Text("Not attention", "不是注意力"),
    "not measured": Text("Not measured", "未测量"),
    "at": Text("at {at}", "位于 {at}"),
    # last line
    "call": Text("{count} attention call", "{count} 次注意力调用"),
    "calls": Text("{count} attention calls", "{count} 次注意力调用"),
    "unjudged": Text("{count} attention not judged", "{count} 处注意力未能判定"),
    "unjudged_more": Text("{count} attentions not judged", "{count} 处注意力未能判定"),
    "finding": Text("{count} finding", "{count} 个问题"),
    "findings": Text("{count} findings", "{count} 个问题"),
    "no findings": Text("No findings", "没有问题"),
    "formulas": Text(", on scales and formulas alone", "（仅检查缩放因子与公式）"),
    "exit": Text(". Exit code {code} (fail-on: {fail_on}).", "。退出码 {code}（fail-on：{fail_on}）。"),
    # forecast of a cache
    "no cache": Text("No cache: {why}{sites}", "没有缓存：{why}{sites}"),
    # comment on a pull request
    "title": Text("Attention of {model}: {outcome}", "{model} 的注意力：{outcome}"),
    "more_calls_1": Text("and {count} more call", "另有 {count} 次调用"),
    "more_calls": Text("and {count} more calls", "另有 {count} 次调用"),
    "more_findings_1": Text("{count} more finding", "另有 {count} 个问题"),
    "more_findings": Text("{count} more findings", "另有 {count} 个问题"),
    "bold_fix": Text(". **Fix:** {fix}", "。**处理办法**：{fix}"),
    "how": Text("How it was read", "读取方式"),
    # baseline
    "attention": Text("{count} attention", "{count} 处注意力"),
    "attentions": Text("{count} attentions", "{count} 处注意力"),
    "change": Text("{count} change", "{count} 处改变"),
    "changes": Text("{count} changes", "{count} 处改变"),
    "kept": Text("{findings} that will not fail later.", "{findings}，以后不会因此失败。"),
    "nothing changed": Text("Nothing changed that counts", "没有计入的改变"),
    "more not counted": Text("{count} more that do not count", "另有 {count} 处不计入"),
    "as before": Text("{attentions} as in the baseline", "{attentions}与基线一致"),
    "not judged": Text("{attentions} not judged", "{attentions}未能判定"),
    "against": Text("{model} against {file}, {mode}", "{model} 与 {file} 对照，{mode}"),
    "fails": Text("fails", "失败"),
    "told": Text("told ", "不计"),
    "side": Text("{what} {value}", "{what}：{value}"),
    "if meant": Text(
        "If the change is meant: sqrtdk baseline write --force, and review the file.",
        "若改变是有意的：运行 sqrtdk baseline write --force，并评审该文件。",
    ),
    "as in baseline": Text("as in the baseline", "与基线一致"),
    "changed": Text("changed", "有改变"),
    "baseline file": Text("Baseline: {file}.", "基线：{file}。"),
    "before": Text("before", "之前"),
    "now": Text("now", "现在"),
    "column change": Text("change", "改变"),
    "write anew": Text("If it is meant, write the baseline anew and review it.", "若是有意的，请重新写出基线并评审。"),
    "changes not shown": Text("{count} more changes are not shown.", "另有 {count} 处改变未显示。"),
    "more change": Text("{count} more change, not counted", "另有 {count} 处改变，不计入"),
    "more changes": Text("{count} more changes, not counted", "另有 {count} 处改变，不计入"),
    "cut": Text("... the rest is cut: see the JSON or HTML report", "……其余已略去：见 JSON 或 HTML 报告"),
}
ENVIRONMENT = {  # entries of the environment other than names of libraries
    "platform": Text("platform", "平台"),
    "compiler": Text("compiler", "编译器"),
    "kernel": Text("kernel", "内核"),
    "device": Text("device", "设备"),
    "dtype": Text("dtype", "数据类型"),
}
OUTCOMES = {
    "failed": Text("failed", "未通过"),
    "findings": Text("findings, none at the bar", "有问题，但未达到阈值"),
    "incomplete": Text("not all of it could be judged", "有一部分未能判定"),
    "warnings": Text("passed, with warnings", "通过，有警告"),
    "scales": Text("scales passed, nothing else was looked at", "缩放因子通过，未检查其他内容"),
    "passed": Text("passed", "通过"),
}
SEVERITIES = {
    "ok": Text("ok", "良好"),
    "note": Text("note", "提示"),
    "warn": Text("warn", "警告"),
    "fail": Text("fail", "失败"),
    "critical": Text("critical", "严重"),
    "unmeasured": Text("not measured", "未测量"),
}


def word(key: str, language: Language, /, **parts: object) -> str:
    """Return a fixed text with its braces filled.

    Example:
        >>> word("fix", "zh", fix="x")
        '处理办法：x'
    """
    return say(WORDS[key], language, **parts)


def bracketed(sites: str, language: Language) -> str:
    """Return sites in brackets, to be put behind a text; the root has brackets already.

    Example:
        >>> bracketed("h.0, h.1", "en"), bracketed("(root)", "en")
        (' (h.0, h.1)', ' (root)')
    """
    return f" {ROOT}" if sites == ROOT else word("in_brackets", language, sites=sites)


def counted(one: str, several: str, number: int, language: Language) -> str:
    """Return a count with its noun in the singular or the plural.

    Example:
        >>> counted("call", "calls", 1200, "en"), counted("call", "calls", 1, "zh")
        ('1,200 attention calls', '1 次注意力调用')
    """
    return word(one if number == 1 else several, language, count=f"{number:,}")


def named(table: dict[str, Text], name: str, language: Language) -> str:
    """Return the display name from a table, or the name itself if the table does not list it.

    Example:
        >>> named(OUTCOMES, "passed", "zh"), named(OUTCOMES, "another", "zh")
        ('通过', 'another')
    """
    return say(table[name], language) if name in table else name
