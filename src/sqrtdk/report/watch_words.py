"""Every fixed word of what is shown of a run, in its two languages."""

from __future__ import annotations

from sqrtdk.lab.text import Text
from sqrtdk.report.watch_summary import Missing

SEVERITY_WORDS = {
    "note": Text("note", "提示"),
    "warn": Text("warn", "警告"),
    "fail": Text("fail", "失败"),
    "critical": Text("critical", "严重"),
}

WORST_WORDS = {
    "largest": Text("the head with the largest value", "数值最大的头"),
    "least": Text("the head with the least value", "数值最小的头"),
    "farthest": Text("the head farthest from 1", "离 1 最远的头"),
}

STATISTICS_MEAN = {
    "max_logit": Text(
        "largest logit of a head: signed, scaled, after bias, visible keys only; 50 is a note, 100 a warning, 1e3 a "
        "failure, 1e4 critical",
        "一个头的最大 logit：带符号，缩放及加偏置之后，仅可见键；50 为提示，100 为警告，1e3 为失败，1e4 为严重",
    ),
    "std_logit": Text("root of the mean variance of the logits within a row", "一行之内 logit 方差均值的平方根"),
    "entropy_fraction": Text(
        "mean over rows of the entropy over log(visible keys): 100% is uniform, 0% one-hot",
        "各行的熵除以 log(可见键数) 的均值：100% 为均匀，0% 为单点",
    ),
    "saturated": Text("share of rows whose largest weight is above .99", "最大权重超过 .99 的行的比例"),
    "peak": Text("mean over rows of the largest weight", "各行最大权重的均值"),
    "scale_ratio": Text(
        "effective scale times sqrt(head dimension): 1 is the textbook value",
        "实际缩放乘以 sqrt(头维度)：1 为教科书值",
    ),
    "query_grad_p50": Text(
        "median over rows of the root mean square of dL/dq over channels", "dL/dq 沿通道的均方根，各行的中位数"
    ),
    "query_grad_max": Text(
        "largest over rows of the root mean square of dL/dq over channels", "dL/dq 沿通道的均方根，各行的最大值"
    ),
    "key_grad_p50": Text(
        "median over keys of the root mean square of dL/dk over channels", "dL/dk 沿通道的均方根，各键的中位数"
    ),
    "key_grad_max": Text(
        "largest over keys of the root mean square of dL/dk over channels", "dL/dk 沿通道的均方根，各键的最大值"
    ),
}

MISSING = {
    "damaged": Text("part {what} can't be read{steps}: {reason}", "分片 {what} 无法读取{steps}：{reason}"),
    "gap": Text(
        "steps that were never recorded, as attempt {what} began later: {count}{steps}",
        "{count} 步没有记录{steps}：第 {what} 次运行开始得更晚",
    ),
    "nothing": Text("no step was sampled; steps on record: {count}", "记录了 {count} 步，没有一步被采样"),
    "steps": Text(
        "sampled steps that were not measured: {count}{steps}: {reason}", "{count} 个采样步未能测量{steps}：{reason}"
    ),
    "calls": Text("attention calls without statistics: {count}{steps}", "{count} 次注意力调用没有统计量{steps}"),
    "absent": Text("{what}: samples that it is not in: {count}{steps}", "{what} 在 {count} 个采样中缺失{steps}"),
    "blind_rows": Text(
        "{what}: rows that saw no key, and are in no statistic: {count}", "{what}：{count} 行看不到任何键，不计入统计"
    ),
    "nan_rows": Text(
        "{what}: rows with NaN or infinity, which are in no statistic: {count}",
        "{what}：{count} 行含 NaN 或无穷，不计入统计",
    ),
    "inf_rows": Text(
        "{what}: rows of minus infinity alone, which are in no statistic: {count}",
        "{what}：{count} 行全为负无穷，不计入统计",
    ),
    "statistic": Text(
        "not at every sample{steps}, attentions: {count}: {what}", "{count} 处注意力并非每个采样都有{steps}：{what}"
    ),
    "loss": Text("steps without a loss: {count}", "{count} 步没有损失值"),
}
_STEPS = Text(" (steps {first} to {last})", "（第 {first} 至 {last} 步）")
_STEP = Text(" (step {first})", "（第 {first} 步）")

WORDS = {
    "verb": Text("watch", "训练监视"),
    "against": Text("and", "与"),
    "languages": Text("Language", "语言"),
    "skip": Text("Skip to the time line", "跳到时间线"),
    "alarms": Text("Alarms", "警报"),
    "no_alarms": Text("No alarm was raised.", "没有警报。"),
    "quiet_but": Text(
        "No alarm was raised; not everything was measured, see below.", "没有警报；但并非全部都已测量，见下文。"
    ),
    "good": Text("No alarm", "无警报"),
    "nothing": Text("Not measured", "未测量"),
    "one_alarm": Text("alarm", "次警报"),
    "alarm_count": Text("alarms", "次警报"),
    "steps": Text("steps on record", "步有记录"),
    "sampled": Text("sampled", "步被采样"),
    "attempt": Text("attempt", "次运行"),
    "attempts": Text("attempts", "次运行"),
    "loss": Text("Loss", "损失"),
    "loss_range": Text("loss: first, newest; least {least}", "损失：最初、最新；最小 {least}"),
    "no_loss": Text("no loss on record", "没有损失记录"),
    "missing": Text("Not measured", "未测量"),
    "none_missing": Text(
        "Nothing: every sampled step and attention is on record.", "没有：每个采样步、每处注意力都有记录。"
    ),
    "missing_count": Text("listed as not measured", "项未测量"),
    "time_line": Text("Time line", "时间线"),
    "time_line_means": Text(
        "Loss, alarms, and one row for each attention, all on the same axis of training steps. A cell is the worst "
        "head of one attention at one sample; a click on it shows that head.",
        "损失、警报和每处注意力的一行，共用同一条训练步坐标轴。每个格子是一处注意力在一次采样中最差的头；点击即显示该头。",
    ),
    "same_scale": Text("All runs have the same axes and the same colours.", "各次运行使用相同的坐标轴和颜色。"),
    "statistic": Text("Statistic", "统计量"),
    "site": Text("Attention", "注意力"),
    "head": Text("Head", "头"),
    "median_heads": Text("median of the heads", "各头中位数"),
    "all_maps": Text("Every statistic", "全部统计量"),
    "all_maps_mean": Text(
        "The same map for each statistic; colours are those of its own legend.", "每个统计量一张图；颜色见各自的图例。"
    ),
    "no_value": Text("not measured", "未测量"),
    "lost": Text("the loss is NaN or infinite", "损失为 NaN 或无穷"),
    "gap": Text("never recorded", "没有记录"),
    "thinned": Text(
        "There are more samples than columns: each column is up to {k} samples, of which the worst value is shown.",
        "采样多于列数：每列最多含 {k} 个采样，显示其中最差的值。",
    ),
    "alarms_left": Text(
        "{k} more alarms are in the records; the worst are shown.", "记录中另有 {k} 次警报；此处显示最严重的。"
    ),
    "newest": Text("Newest sample", "最新采样"),
    "newest_means": Text(
        "Of each attention the worst head at its last sample (step in brackets).",
        "每处注意力最近一次采样中最差的头（括号内为步数）。",
    ),
    "step": Text("step", "步"),
    "source": Text("source", "来源"),
    "differences": Text("What differs", "差异"),
    "differences_at": Text(
        "Of each statistic the attention whose worst heads are farthest apart at step {step}, the last that both "
        "measured, and how many attentions differ by more than 10%.",
        "每个统计量在第 {step} 步（双方最近的共同测量）最差头相差最大的注意力，以及相差超过 10% 的注意力数。",
    ),
    "differences_newest": Text(
        "No step was measured in both, so the newest sample of each is compared: the attention whose worst heads are "
        "farthest apart, and how many attentions differ by more than 10%.",
        "没有共同的采样步，因此比较各自的最新采样：最差头相差最大的注意力，以及相差超过 10% 的注意力数。",
    ),
    "largest_difference": Text("farthest apart", "相差最大处"),
    "sites_differ": Text("attentions that differ", "有差异的注意力"),
    "ratio": Text("B / A", "B / A"),
    "only_in": Text("only in {side}", "仅在 {side}"),
    "no_shared": Text(
        "The runs have no attention in common: nothing can be compared.", "两次运行没有共同的注意力：无法比较。"
    ),
    "run": Text("The run", "运行"),
    "no_script": Text(
        "The time line needs JavaScript; the table below does not.", "时间线需要 JavaScript；下面的表格不需要。"
    ),
    "made_by": Text("Made by sqrtdk {version} from the records alone.", "由 sqrtdk {version} 仅根据记录生成。"),
}


def missing_text(entry: Missing) -> Text:
    """What is missing, in a sentence.

    Example:
        >>> missing_text(Missing("absent", "h.0", 2, 10, 20)).en
        'h.0: samples that it is not in: 2 (steps 10 to 20)'
    """
    text = MISSING[entry.kind]
    steps = Text("", "")
    if entry.first_step is not None and entry.last_step is not None:
        steps = _STEP if entry.first_step == entry.last_step else _STEPS
    parts = {"what": entry.what, "count": entry.count, "reason": entry.reason}
    ends = {"first": entry.first_step, "last": entry.last_step}
    return Text(
        text.en.format(steps=steps.en.format(**ends), **parts), text.zh.format(steps=steps.zh.format(**ends), **parts)
    )
