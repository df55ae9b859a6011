"""The fixed words of a check's page, in English and Chinese."""

from __future__ import annotations

from sqrtdk.audit.records import OK, UNMEASURED
from sqrtdk.messages import Text

RESULTS = {  # outcome of a report -> its word and its tone
    "failed": (Text("Failed", "未通过"), "bad"),
    "findings": (Text("Findings", "有问题"), "bad"),
    "incomplete": (Text("Incomplete", "不完整"), "doubtful"),
    "warnings": (Text("Passed", "通过"), "doubtful"),
    "scales": (Text("Scales passed", "缩放因子通过"), ""),
    "passed": (Text("Passed", "通过"), "good"),
}

VERDICT_WORDS = {
    "exact": Text("exact", "相符"),
    "declared": Text("declared", "已声明"),
    "unexplained": Text("unexplained", "无法解释"),
    UNMEASURED: Text("unmeasured", "未测量"),
}

SEVERITY_WORDS = {
    "note": Text("note", "提示"),
    "warn": Text("warn", "警告"),
    "fail": Text("fail", "失败"),
    "critical": Text("critical", "严重"),
}
HEALTH_WORDS = {OK: Text("ok", "良好"), **SEVERITY_WORDS, UNMEASURED: VERDICT_WORDS[UNMEASURED]}

MODES = {
    "dynamic": Text("model run", "运行了模型"),
    "static": Text("without weights", "仅公式"),
}

STEPS = {  # the usual steps; a step that is not listed keeps its own name
    "projection": Text("projection", "投影"),
    "input": Text("input", "输入"),
    "norm": Text("norm", "规范化"),
    "scale": Text("scale", "缩放"),
    "rope": Text("rope", "旋转位置编码"),
    "repeat": Text("repeat", "重复"),
    "cache": Text("cache", "缓存"),
    "product": Text("product", "点积"),
    "distance": Text("distance", "距离"),
    "score": Text("score", "评分函数"),
    "softcap": Text("softcap", "软上限"),
    "bias": Text("bias", "偏置"),
    "mask": Text("mask", "掩码"),
    "sinks": Text("sinks", "汇点"),
    "unknown": Text("unknown", "未知"),
}

WORDS = {
    # head
    "verb": Text("attention check", "注意力检查"),
    "skip": Text("Skip to the sites", "跳到各调用位置"),
    "languages": Text("Language", "语言"),
    "parameter": Text("parameter", "个参数"),
    "parameters": Text("parameters", "个参数"),
    "seed": Text("seed {seed}", "随机种子 {seed}"),
    "exit": Text("exit code {code}, fail-on {fail_on}", "退出码 {code}，fail-on {fail_on}"),
    "call_counted": Text("attention call", "次注意力调用"),
    "calls_counted": Text("attention calls", "次注意力调用"),
    "failing_otherwise": Text("failing otherwise", "另有错误"),
    "finding_counted": Text("finding", "个问题"),
    "findings_counted": Text("findings", "个问题"),
    "unjudged_counted": Text("attention not judged", "处注意力未能判定"),
    "unjudged_counted_many": Text("attentions not judged", "处注意力未能判定"),
    "n_not_measured": Text("{n} not measured", "{n} 处未测量"),
    "n_not_attention": Text("{n} not attention", "{n} 处不是注意力"),
    # sections
    "findings": Text("Findings", "问题"),
    "sites": Text("Sites", "调用位置"),
    "heads": Text("Heads", "头"),
    "cache": Text("Cache", "缓存"),
    "not_measured": Text("Not measured", "未测量"),
    "run": Text("Run", "运行环境"),
    # findings
    "n_sites": Text("{n} sites", "{n} 个调用位置"),
    "fix": Text("Fix", "处理办法"),
    "found": Text("found", "测得"),
    "expected": Text("expected", "应为"),
    "rule": Text("rule", "规则"),
    "source": Text("source", "来源"),
    "each_site": Text("each site", "各调用位置"),
    "leads_to": Text("which leads to", "由此引起"),
    "more": Text("fix and source", "处理办法与来源"),
    # sites
    "sites_mean": Text(
        "One line a site; equal layers are folded. The verdict is on the scale alone; health is the worst finding "
        "there. The figures are those of the worst head. Open a line for the steps between projection and softmax.",
        "每行是一个调用位置，相同的层合并为一行。判定只针对缩放因子，健康是该处最严重的问题。各项数值取自最差的头。"
        "展开一行可以看到从投影到 softmax 的各个步骤。",
    ),
    "filter": Text("Filter by site, formula, file or verdict", "按调用位置、公式、文件或判定筛选"),
    "site": Text("site", "调用位置"),
    "formula": Text("formula", "公式"),
    "scale_ratio": Text("scale ratio", "缩放比"),
    "verdict": Text("verdict", "判定"),
    "health": Text("health", "健康"),
    "max_logit": Text("max logit", "最大 logit"),
    "entropy": Text("entropy", "熵"),
    "peak": Text("peak", "峰值"),
    "saturated": Text("saturated", "饱和"),
    "no_calls": Text("No attention call was seen.", "没有发现注意力调用。"),
    # inside a site
    "declared_by": Text("Declared by", "声明来源"),
    "reason": Text("Reason", "理由"),
    "scale": Text("Scale", "缩放"),
    "not_followed": Text("Not followed", "未能跟踪"),
    "no_statistics": Text("No statistics", "没有统计量"),
    "no_reason": Text("no reason given", "未给出理由"),
    "steps": Text("Steps from projection to softmax", "从投影到 softmax 的步骤"),
    "effective_scale": Text("effective scale", "有效缩放因子"),
    "symbolic": Text("symbolic", "由公式读出"),
    "numeric": Text("numeric", "由数值读出"),
    "head_dim": Text("head dim", "头维度"),
    "for_kv": Text("{n} for k, v", "k、v 为 {n}"),
    "padded_to": Text("padded to {n}", "填充到 {n}"),
    "shape": Text("batch × queries × keys", "批量 × 查询 × 键"),
    "score": Text("score", "评分函数"),
    "norm": Text("q, k norm", "QK 规范化"),
    "softcap": Text("softcap", "软上限"),
    "bias": Text("bias", "偏置"),
    "mask": Text("mask", "掩码"),
    "none": Text("none", "无"),
    "dropout": Text("dropout", "dropout"),
    "dtype": Text("dtype", "数据类型"),
    "logits_in": Text("logits {dtype}", "logit 为 {dtype}"),
    "module": Text("module", "模块"),
    "operation": Text("operation", "算子"),
    "written": Text("written", "代码位置"),
    "factors": Text("Factors", "因子"),
    "value": Text("value", "值"),
    "on": Text("on", "乘在"),
    "from": Text("from", "来自"),
    "learned": Text("learned", "可学习"),
    "per_head": Text("one a head", "每头一个"),
    "each_of": Text("Each site of this line", "这一行的各调用位置"),
    # heads
    "heads_mean": Text(
        "Layers down, heads across; a layer with a failing finding has its number in red. Choose a head for its "
        "distributions; the arrow keys move, Enter chooses.",
        "纵向为层，横向为头；有错误的层，层号为红色。选择一个头可以看到它的分布；方向键移动，回车键选择。",
    ),
    "no_script": Text(
        "The page's own script, which draws the maps and filters the sites, is switched off here.",
        "绘制热图和筛选调用位置的脚本在此未运行。",
    ),
    "statistic": Text("Statistic", "统计量"),
    "colours": Text("Colours", "颜色"),
    # not measured
    "among_findings": Text("What was not judged stands among the findings.", "未能判定之处已列在问题之中。"),
    "nothing_to_measure": Text(
        "Scales and formulas alone: there were no values to measure.", "只检查了缩放因子和公式：没有可以测量的数值。"
    ),
    "all_measured": Text("Everything that ran was measured.", "所有运行过的注意力都已测量。"),
    "not_attention": Text("A softmax, but not attention", "有 softmax，但不是注意力"),
    "kv_forecast": Text("Forecast of the cache", "缓存的预测"),
}

SCRIPT_WORDS = {  # words that the page's script inserts
    "by_value": Text("by value", "按数值"),
    "by_rank": Text("by rank", "按排名"),
    "no_data": Text("no data", "无数据"),
    "hatched": Text("hatched", "斜线"),
    "scale": Text("colour scale", "色标"),
    "map": Text("{title}: layers down, heads across", "{title}：纵向为层，横向为头"),
    "cell": Text("{site}, head {head}: {name} {value}", "{site}，第 {head} 头：{name} {value}"),
    "fails": Text("fails", "有错误"),
    "title": Text("{site} · head {head}", "{site} · 第 {head} 头"),
    "logits": Text("Logits", "logit"),
    "logits_mean": Text("visible logits of the sampled rows", "抽样各行的可见 logit"),
    "normal": Text("normal curve, mean {mean}, std {std}", "正态曲线，均值 {mean}，标准差 {std}"),
    "entropy": Text("Entropy", "熵"),
    "entropy_mean": Text("nats, one value a row", "单位 nat，每行一个值"),
    "measured": Text("measured mean {value}", "测得均值 {value}"),
    "expected": Text(
        "Gaussian logits of this std over {keys} keys: {value}", "标准差相同的高斯 logit，{keys} 个键：{value}"
    ),
    "limit": Text("log n = {value}, uniform attention", "log n = {value}，均匀注意力"),
    "quantiles": Text("Entropy 5% / 50% / 95%", "熵 5% / 50% / 95%"),
    "nothing": Text("No row of this head could be measured.", "这个头没有一行可以测量。"),
    "shown": Text("{n} of {all} sites shown", "显示 {all} 个调用位置中的 {n} 个"),
}

_NATS, _KEYS, _ROWS, _NONE, _PERCENT = (
    Text("nats", "nat"), Text("keys", "个键"), Text("rows", "行"), Text("", ""), Text("%", "%")
)  # fmt: skip

# field of HeadStats, or "scale_ratio" -> title, unit, explanation
STATISTICS: dict[str, tuple[Text, Text, Text]] = {
    "max_logit": (
        Text("Max logit", "最大 logit"),
        _NONE,
        Text("Largest visible logit: signed, scaled, after bias.", "可见 logit 的最大值：带符号，已缩放，已加偏置。"),
    ),
    "scale_ratio": (
        Text("Scale ratio", "缩放比"),
        _NONE,
        Text(
            "Effective scale times sqrt(head dimension): 1 is the textbook value.",
            "有效缩放因子乘以 sqrt(头维度)：1 为教科书的值。",
        ),
    ),
    "entropy_nats": (
        Text("Entropy", "熵"),
        _NATS,
        Text(
            "Mean entropy of a row's weights; low means few keys get all the weight.",
            "每行权重的平均熵；低说明权重集中在少数键上。",
        ),
    ),
    "entropy_fraction": (
        Text("Entropy / log n", "熵 / log n"),
        _PERCENT,
        Text(
            "Share of the largest possible entropy; 100% is uniform attention.",
            "占最大可能熵的比例；100% 为均匀注意力。",
        ),
    ),
    "effective_keys": (
        Text("Effective keys", "有效键数"),
        _KEYS,
        Text("Mean of 1 / sum p²: how many keys a row really uses.", "1 / sum p² 的均值：一行真正用到多少个键。"),
    ),
    "peak": (
        Text("Peak weight", "峰值"),
        _NONE,
        Text("Mean over the rows of the largest weight.", "每行最大权重的均值。"),
    ),
    "peak_max": (Text("Largest peak", "最大峰值"), _NONE, Text("Largest weight of any row.", "所有行中最大的权重。")),
    "saturated": (
        Text("Saturated rows", "饱和行"),
        _PERCENT,
        Text("Share of rows that put more than .99 on one key.", "把超过 .99 的权重放在一个键上的行的比例。"),
    ),
    "std_logit": (
        Text("Logit std", "logit 标准差"),
        _NONE,
        Text("Spread of the logits within a row.", "一行之内 logit 的离散程度。"),
    ),
    "mean_logit": (Text("Mean logit", "logit 均值"), _NONE, Text("Mean of the visible logits.", "可见 logit 的均值。")),
    "min_logit": (Text("Min logit", "最小 logit"), _NONE, Text("Smallest visible logit.", "可见 logit 的最小值。")),
    "max_abs_logit": (
        Text("Max |logit|", "最大 |logit|"),
        _NONE,
        Text("Largest visible logit by size.", "可见 logit 绝对值的最大值。"),
    ),
    "max_above_mean": (
        Text("Max above mean", "最大值高出均值"),
        _NONE,
        Text(
            "Largest visible logit less the mean of its row: what the softmax sees of it.",
            "可见 logit 的最大值减去该行均值：softmax 所感受到的大小。",
        ),
    ),
    "row_offset": (
        Text("Row offset", "行偏移"),
        _NONE,
        Text(
            "Largest |mean of a row|: what a low-precision store of the logits loses to.",
            "各行均值绝对值的最大值：以低精度存储 logit 时，精度损失由它决定。",
        ),
    ),
    "jacobian_norm": (
        Text("Jacobian norm", "雅可比矩阵范数"),
        _NONE,
        Text(
            "Frobenius norm of the softmax Jacobian: how much gradient passes.",
            "softmax 雅可比矩阵的 Frobenius 范数：有多少梯度能够通过。",
        ),
    ),
    "keys": (
        Text("Visible keys", "可见键"),
        _KEYS,
        Text("Mean number of keys that the mask lets a row see.", "掩码允许一行看到的键的平均个数。"),
    ),
    "nan_rows": (
        Text("NaN rows", "NaN 行"),
        _ROWS,
        Text(
            "Rows with a NaN or +inf logit; left out of everything else.",
            "含 NaN 或 +inf logit 的行；不计入其他统计量。",
        ),
    ),
    "blind_rows": (
        Text("Blind rows", "看不到键的行"),
        _ROWS,
        Text("Rows that see no key; left out of everything else.", "看不到任何键的行；不计入其他统计量。"),
    ),
}
