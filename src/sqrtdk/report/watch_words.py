"""The fixed words of a run's page and terminal output, in English and Chinese."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk.report.said import said
from sqrtdk.report.watch_summary import Missing

SEVERITY_WORDS = {
    "note": Text("note", "提示"),
    "warn": Text("warn", "警告"),
    "fail": Text("fail", "失败"),
    "critical": Text("critical", "严重"),
}

ALARM_WORDS = {  # Chinese names of alarms, for alarms whose recorded sentence has no translation
    "bf16_offset": "bfloat16 行偏移",
    "checkpoint": "检查点",
    "collapsed": "注意力头退化",
    "entropy": "熵过低",
    "entropy_trend": "熵在下降",
    "fp16_range": "float16 范围",
    "growth": "logit 增长",
    "idle": "step() 从未被调用",
    "ledger": "缩放改变",
    "lost": "注意力未被测到",
    "max_logit": "最大 logit",
    "nonfinite": "NaN 或无穷",
    "records": "记录未写入",
    "saturation": "饱和",
    "schedule": "采样计划出错",
    "sink": "日志接收端出错",
    "unmeasured": "未测量",
    # rules of the audit, which checkpoints raise
    "blocks": "各块缩放不一",
    "declared_vs_actual": "实际缩放与声明不符",
    "dropout": "评估时的 dropout",
    "eager_vs_sdpa": "eager 与 sdpa 不一致",
    "flat": "注意力过平",
    "mask_audit": "掩码检查",
    "padding": "填充与掩码",
    "range_forecast": "数值范围预测",
    "responsiveness": "缩放不随属性变化",
    "scale_ledger": "缩放台账",
    "sliding_window": "滑动窗口",
    "softmax_axis": "softmax 的轴",
    "unused": "已建而未用的部件",
}

HOW_WORDS = {
    "as is": Text("as is", "按原样运行"),
    "eager": Text("eager", "以 eager 方式运行"),
}

GROUP_WORDS = {True: Text("Most used", "常用"), False: Text("More", "更多")}

MODEL_WORDS = {
    "class": Text("class", "类"),
    "parameters": Text("parameters", "参数量"),
    "every": Text("sampled steps", "采样步"),
    "rows": Text("rows of a sequence that are measured", "每个序列测量的行"),
    "of": Text("records of", "记录来自"),
    "run": Text("directory", "目录"),
    "attn": Text("implementation", "实现"),
    "text": Text("text", "文本"),
    "input_file": Text("inputs", "输入"),
    "batch": Text("sequences a batch", "每批序列数"),
    "seq_len": Text("tokens a sequence", "每个序列的词元数"),
    "device": Text("device", "设备"),
    "dtype": Text("dtype", "数据类型"),
    "seed": Text("seed", "随机种子"),
    "trust_remote_code": Text("code of the model", "模型自带的代码"),
    "notes": Text("notes", "备注"),
}

MISSING = {
    "damaged": Text("part {what} can't be read{steps}: {reason}", "分片 {what} 无法读取{steps}：{reason}"),
    "gap": Text(
        "steps that were never recorded, as attempt {what} began later: {count}{steps}",
        "{count} 步没有记录{steps}：第 {what} 次尝试开始得更晚",
    ),
    "nothing": Text("no step was sampled; steps on record: {count}", "记录了 {count} 步，没有一步被采样"),
    "steps": Text(
        "sampled steps that were not measured: {count}{steps}: {reason}", "{count} 个采样步未能测量{steps}：{reason}"
    ),
    "calls": Text(
        "attentions without statistics, and what else samples lack: {count}{steps}",
        "没有统计量的注意力及样本中其他未测量之处，共 {count} 项{steps}",
    ),
    "unmeasured": Text("{what}: {reason}{steps}", "{what}：{reason}{steps}"),
    "absent": Text("{what}: samples that it is not in: {count}{steps}", "{what} 在 {count} 个样本中缺失{steps}"),
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
        "not at every sample{steps}, attentions: {count}: {what}", "{count} 处注意力并非每个样本都有{steps}：{what}"
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
    "one_alarm": Text("alarm", "条警报"),
    "alarm_count": Text("alarms", "条警报"),
    "one_step": Text("step on record", "步有记录"),
    "steps": Text("steps on record", "步有记录"),
    "sampled": Text("sampled", "步被采样"),
    "attempt": Text("attempt", "次尝试"),
    "attempts": Text("attempts", "次尝试"),
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
        "head of one attention at one sample; a click on it shows that head, and so does Enter after the arrow keys.",
        "损失、警报和每处注意力的一行，共用同一条训练步坐标轴。每个格子是一处注意力在一个样本中最差的头；点击即显示该头，"
        "也可用方向键移动后按回车。",
    ),
    "same_scale": Text("All runs have the same axes and the same colours.", "各次运行使用相同的坐标轴和颜色。"),
    "statistic": Text("Statistic", "统计量"),
    "site": Text("Attention", "注意力"),
    "head": Text("Head", "头"),
    "median_heads": Text("median of the heads", "各头中位数"),
    "all_maps": Text("Every statistic", "全部统计量"),
    "all_maps_mean": Text(
        "The same map for each statistic, with a scale of its own; its name shows it above.",
        "每个统计量一张图，各有自己的色标；点击名称即在上方显示。",
    ),
    "infinite": Text("infinite", "无穷"),
    "points": Text(
        "In the trend of a single head each point is up to {k} samples, of which the worst value is shown.",
        "单个头的趋势中每个点最多含 {k} 个样本，显示其中最差的值。",
    ),
    "nothing_recorded": Text(
        "No attention is on record yet: there is nothing to draw.", "尚无注意力的记录：没有可画的内容。"
    ),
    "old_browser": Text(
        "This browser can't unpack the data of the page (it lacks DecompressionStream); the table below shows the "
        "newest values.",
        "此浏览器无法解开页面数据（缺少 DecompressionStream）；下表显示最新的数值。",
    ),
    "notes": Text("{k} notes", "{k} 条提示"),
    "all_rows": Text("all", "全部"),
    "no_value": Text("not measured", "未测量"),
    "lost": Text("the loss is NaN or infinite", "损失为 NaN 或无穷"),
    "gap": Text("never recorded", "没有记录"),
    "thinned": Text(
        "There are more samples than columns: each column is up to {k} samples, of which the worst value is shown.",
        "样本多于列数：每列最多含 {k} 个样本，显示其中最差的值。",
    ),
    "alarms_left": Text(
        "{k} more alarms are in the records; the worst are shown.", "记录中另有 {k} 条警报；此处显示最严重的。"
    ),
    "newest": Text("Newest sample", "最新样本"),
    "newest_means": Text(
        "Of each attention the worst head at its last sample (step in brackets).",
        "每处注意力最近一个样本中最差的头（括号内为步数）。",
    ),
    "at_step": Text("step {k}", "第 {k} 步"),
    "scrolls": Text("{what}: table that scrolls", "{what}：可滚动的表格"),
    "source": Text("source", "来源"),
    "differences": Text("What differs", "差异"),
    "differences_at": Text(
        "Compared are {k} samples of each run, the last ones of the steps that both went through: A at {a}, B at {b}. "
        "Of each attention the median over them of the worst head's value. The difference is a share of the larger "
        "value, and its median over the attentions says which statistic is listed first.",
        "比较双方都经历过的训练步中最后的各 {k} 个样本：A 在第 {a} 步，B 在第 {b} 步。每处注意力取最差头的数值在"
        "这些样本上的中位数。差异为占较大值的比例，各统计量按其在各处注意力上的中位数排序。",
    ),
    "differences_newest": Text(
        "The runs have no step in common, so the newest samples are compared, {k} of each: A at {a}, B at {b}. Of each "
        "attention the median over them of the worst head's value. The difference is a share of the larger value, and "
        "its median over the attentions says which statistic is listed first.",
        "两次运行没有共同的训练步，因此比较各自最新的 {k} 个样本：A 在第 {a} 步，B 在第 {b} 步。每处注意力取最差头的"
        "数值在这些样本上的中位数。差异为占较大值的比例，各统计量按其在各处注意力上的中位数排序。",
    ),
    "by_order": Text(
        "No attention has the same name in both runs, but there are as many: the first of A stands beside the first of "
        "B, and so on.",
        "两次运行中没有同名的注意力，但数目相同：按先后顺序一一对应。",
    ),
    "typical_difference": Text("median difference", "差异中位数"),
    "largest_difference": Text("farthest apart", "相差最大处"),
    "sites_differ": Text("attentions that differ by more than 10%", "相差超过 10% 的注意力"),
    "ratio": Text("B / A", "B / A"),
    "only_in": Text("only in {side}", "仅在 {side}"),
    "no_shared": Text(
        "The runs have no attention in common, by name or in number: nothing can be compared.",
        "两次运行没有同名的注意力，数目也不同：无法比较。",
    ),
    "run": Text("The run", "运行"),
    "no_script": Text(
        "The time line needs JavaScript; the table below does not.", "时间线需要 JavaScript；下面的表格不需要。"
    ),
    "made_by": Text("Made by sqrtdk {version} from the records alone.", "由 sqrtdk {version} 仅根据记录生成。"),
}


TERMINAL = {
    "parameter": Text("{count} parameter", "{count} 个参数"),
    "parameters": Text("{count} parameters", "{count} 个参数"),
    "nothing": Text("  nothing is recorded yet", "  尚无记录"),
    "steps": Text(
        "steps {first} to {last}, {samples} ({ways}), {attempts}, {attentions}",
        "第 {first} 步到第 {last} 步，{samples}（{ways}），{attempts}，{attentions}",
    ),
    "sample": Text("{count} sample", "{count} 个样本"),
    "samples": Text("{count} samples", "{count} 个样本"),
    "attempt": Text("{count} attempt", "{count} 次尝试"),
    "attempts": Text("{count} attempts", "{count} 次尝试"),
    "attention": Text("{count} attention", "{count} 处注意力"),
    "attentions": Text("{count} attentions", "{count} 处注意力"),
    "comma": Text(", ", "，"),
    "colon": Text(": ", "："),
    "alarms with": Text("{count} {what}", "{count} 条{what}"),
    "samples with": Text("{count} {what}", "{count} 个{what}"),
    "loss": Text("loss  ", "损失  "),
    "unmeasured": Text("not measured", "未测量"),
    "worst": Text("  the worst head of each sample; {scale}", "  每个样本中最差的头；{scale}"),
    "logarithmic": Text(", logarithmic", "，对数刻度"),
    "site": Text("site", "调用位置"),
    "trend": Text("trend", "趋势"),
    "newest": Text("newest", "最新"),
    "head": Text("head", "头"),
    "first": Text("first", "最初"),
    "median": Text("median", "中位数"),
    "step": Text("step", "步"),
    "better_1": Text("and {count} attention that is better", "另有 {count} 处注意力更好"),
    "better": Text("and {count} attentions that are better", "另有 {count} 处注意力更好"),
    "no_alarms": Text("no alarms", "没有警报"),
    "no_alarms_nothing": Text("no alarms, and nothing was measured", "没有警报，也没有测量到任何内容"),
    "alarms": Text("alarms", "警报"),
    "more_alarms": Text(
        "  the worst {shown}, and of these the newest; {count} more: --json lists all",
        "  最严重的 {shown} 条，其中取最新的；另有 {count} 条：--json 列出全部",
    ),
    "at_step": Text(" step {step}  ", " 第 {step} 步  "),
    "source": Text("source: ", "来源："),
    "missing_1": Text("not measured: {count} entry", "未测量：{count} 项"),
    "missing": Text("not measured: {count} entries", "未测量：{count} 项"),
    "more": Text("  and {count} more: --json lists all", "  另有 {count} 项：--json 列出全部"),
    "only_in": Text("only in {side}: {names}", "仅 {side} 有：{names}"),
    "and_more": Text(" and {count} more", " 等，另有 {count} 处"),
    "no_shared": Text(
        "no attention in common, by name or in number: nothing can be compared",
        "没有同名的注意力，数目也不同：无法比较",
    ),
    "at": Text("steps {a}", "第 {a} 步"),
    "at_both": Text("steps {a} of A and {b} of B", "A 的第 {a} 步与 B 的第 {b} 步"),
    "no_overlap": Text("; the runs have no step in common", "；两次运行没有共同的步"),
    "in_order": Text(
        "; no attention has the same name in both: they are matched in order",
        "；两次运行没有同名的注意力：按先后顺序对应",
    ),
    "differs": Text("what differs", "差异"),
    "medians": Text("  worst heads, medians over {at}{why}", "  最差的头，取{at}的中位数{why}"),
    "statistic": Text("statistic", "统计量"),
    "apart": Text("apart", "相差"),
    "over": Text("over {bar}", "超过 {bar}"),
    "farthest": Text("farthest apart at", "相差最大处"),
    "count_of": Text("{count} of {all}", "{count}/{all}"),
    "apart_means": Text(
        "apart: median over attentions of the difference, as a share of the larger value; the largest is first",
        "相差：各处注意力差异的中位数，为占较大值的比例；最大的在前",
    ),
    "verified": Text(
        "verified: {count} parts, every one is there and read whole; {unsigned} of them have no checksum",
        "已核验：{count} 个分片齐全，均完整读出；其中 {unsigned} 个没有校验和",
    ),
    "nowhere": Text("nowhere over {bar}", "均未超过 {bar}"),
    "unmeasured_both": Text("not measured in both", "并非两次运行都测量"),
}


def missing_text(entry: Missing) -> Text:
    """Return a missing measurement as a sentence.

    Example:
        >>> missing_text(Missing("absent", "h.0", 2, 10, 20)).en
        'h.0: samples that it is not in: 2 (steps 10 to 20)'
    """
    text = MISSING[entry.kind]
    steps = Text("", "")
    if entry.first_step is not None and entry.last_step is not None:
        steps = _STEP if entry.first_step == entry.last_step else _STEPS
    parts = {"what": entry.what, "count": entry.count}
    ends = {"first": entry.first_step, "last": entry.last_step}
    return Text(
        text.en.format(steps=steps.en.format(**ends), reason=entry.reason, **parts),
        text.zh.format(steps=steps.zh.format(**ends), reason=said(entry.reason, "zh"), **parts),
    )
