"""Every fixed word of the page of a comparison, in its two languages."""

from __future__ import annotations

from sqrtdk.messages import Text
from sqrtdk.report.diff_fold import CANCELS, DIFFERS, FOLLOWS, SAME, UNJUDGED

STAGE_WORDS = {
    "input": Text("input", "输入"),
    "query": Text("query", "查询"),
    "key": Text("key", "键"),
    "value": Text("value", "值"),
    "query norm": Text("query norm", "查询规范化"),
    "key norm": Text("key norm", "键规范化"),
    "query rotation": Text("query rotation", "查询旋转"),
    "key rotation": Text("key rotation", "键旋转"),
    "scale": Text("scale", "缩放"),
    "softcap": Text("softcap", "软上限"),
    "bias": Text("bias", "偏置"),
    "mask": Text("mask", "掩码"),
    "sinks": Text("sinks", "汇点"),
    "weights": Text("weights", "权重"),
    "output": Text("output", "输出"),
}

OUTCOME_WORDS = {
    SAME: Text("same", "一致"),
    DIFFERS: Text("differs", "不同"),
    FOLLOWS: Text("follows", "随之而异"),
    CANCELS: Text("cancels", "相抵"),
    UNJUDGED: Text("not compared", "未比较"),
}

OUTCOMES_MEAN = {
    SAME: Text("within what rounding allows", "在舍入允许的范围内"),
    DIFFERS: Text("a difference of its own", "自身存在差异"),
    FOLLOWS: Text("what came before differs", "差异来自之前"),
    CANCELS: Text(
        "differs and makes no difference: from the input to the output both are the same",
        "此处不同，但不影响结果：从输入到输出两侧一致",
    ),
    UNJUDGED: Text("one side does not tell, or has no such step", "有一侧没有给出，或没有这一步"),
}

RESULTS = {
    "same": Text("Same", "两侧一致"),
    "same attentions": Text("Same; outputs not compared", "两侧一致；未比较输出"),
    "different": Text("Different", "两侧不同"),
    "not judged": Text("Not judged", "未能判定"),
}

WORDS = {
    # head
    "verb": Text("diff", "比较"),
    "skip": Text("Skip to the pairs", "跳到各对"),
    "languages": Text("Language", "语言"),
    "against": Text("against", "对比"),
    "call": Text("attention", "次注意力调用"),
    "calls": Text("attentions", "次注意力调用"),
    "result": Text("Result", "结果"),
    "exit": Text("exit code {code}, fail-on {fail_on}", "退出码 {code}，fail-on {fail_on}"),
    "pairs_counted": Text("pairs of attentions", "对注意力"),
    "pair_counted": Text("pair of attentions", "对注意力"),
    "causes_counted": Text("causes, each proven", "个原因，均经验证"),
    "cause_counted": Text("cause, proven", "个原因，经验证"),
    "open": Text("without a partner, or not compared", "无对应或未比较"),
    "only_in": Text("only in {side}", "仅 {side} 有"),
    # what was found
    "found": Text("What was found", "结论"),
    # pairs
    "pairs": Text("Pairs", "各对"),
    "pairs_mean": Text(
        "One line a pair of sites; equal layers are folded. Each mark is a stage, from the input of the attention to "
        "its output, and compares B with what A's formula gives for what B had before that stage. Open a line for the "
        "causes, the formulas and the logits.",
        "每行是一对调用位置，相同的层合并显示。每个标记是一个阶段，从注意力的输入到输出：用 A 的公式从 B 在该阶段之前"
        "的值算出结果，再与 B 的值相比。展开一行可以看到原因、公式和 logit。",
    ),
    "no_pairs": Text("No attention of A has a partner in B.", "A 的注意力在 B 中都没有对应。"),
    "site": Text("site", "调用位置"),
    "sites": Text("sites", "个调用位置"),
    "each_site": Text("Each site", "各调用位置"),
    "first": Text("First difference", "首个差异"),
    "cause": Text("cause", "原因"),
    "explained": Text("explained", "已解释"),
    "residue": Text("residue", "剩余"),
    "allowed": Text("allowed", "允许"),
    "difference": Text("difference", "差异"),
    "follows_from": Text("follows from", "来自"),
    "reason": Text("Reason", "理由"),
    # inside a pair
    "causes": Text("Causes", "原因"),
    "meaning": Text("meaning", "含义"),
    "stage": Text("stage", "阶段"),
    "formulas": Text("Formulas", "公式"),
    "no_formula": Text("not known", "未知"),
    "ladder": Text("Difference of the outputs, on a logarithmic scale", "输出的差异（对数刻度）"),
    "before": Text("before", "之前"),
    "left": Text("with all causes applied", "应用全部原因之后"),
    "rounding": Text("what rounding allows", "舍入允许的范围"),
    "logits": Text("Logits, A against B", "logit：A 对 B"),
    "logits_mean": Text(
        "A sample of entries of one head; on the line both are the same. The arrow keys go through the points, the "
        "farthest apart first.",
        "一个头的部分元素；落在线上表示两侧相同。用方向键逐点查看，相差最大的在前。",
    ),
    "head": Text("Head", "头"),
    "chosen_site": Text("Site", "调用位置"),
    "on_line": Text("the same", "相同"),
    "off_line": Text("apart by over a thousandth of the range", "相差超过取值范围的千分之一"),
    "dropped": Text("not finite, not drawn", "非有限值，未画出"),
    "masks": Text("Masks, where they differ first", "掩码首先不同之处"),
    "masks_mean": Text(
        "Queries down, keys across. The arrow keys go through the cells.", "纵向为查询，横向为键。用方向键逐格查看。"
    ),
    "both_see": Text("visible in both", "两侧可见"),
    "both_hide": Text("hidden in both", "两侧遮住"),
    "a_sees": Text("visible in A alone", "仅 A 可见"),
    "b_sees": Text("visible in B alone", "仅 B 可见"),
    "no_script": Text(
        "It is drawn by the page's own script, which is switched off here.",
        "此图由页面自带的脚本绘制，脚本在此处被禁用。",
    ),
    "stages": Text("Stages", "各阶段"),
    "how": Text("result", "结果"),
    "largest": Text("largest difference", "最大差异"),
    # outputs
    "outputs": Text("Outputs of the models", "模型的输出"),
    "outputs_mean": Text(
        "Every floating tensor that both models return. The difference is a share of the size of A's tensor.",
        "两个模型都返回的每个浮点张量。差异是相对于 A 的张量大小的比例。",
    ),
    "output": Text("output", "输出"),
    # aside
    "alone": Text("Without a partner, or not compared", "无对应或未比较"),
    "none_alone": Text("Every attention has a partner and was compared.", "每次注意力都有对应并已比较。"),
    # run
    "run": Text("Run", "运行"),
    "forwards": Text("forwards of A and B", "A 与 B 的前向次数"),
    "seed": Text("seed", "随机种子"),
    "made_by": Text("Page made by sqrtdk {version}.", "页面由 sqrtdk {version} 生成。"),
}

TERMINAL = {
    "site": Text("site", "调用位置"),
    "first": Text("first difference", "首个差异"),
    "cause": Text("cause", "原因"),
    "explained": Text("explained", "已解释"),
    "residue": Text("residue", "剩余"),
    "allowed": Text("allowed", "允许"),
    "attention": Text("{count} attention", "{count} 处注意力"),
    "attentions": Text("{count} attentions", "{count} 处注意力"),
    "more": Text("... and {count} more: see --json or --html", "……另有 {count} 条：见 --json 或 --html"),
    "follows_from": Text("follows from {site}", "来自 {site}"),
    "only_in": Text("Only in {side}, {count}: ", "仅 {side} 有，{count} 处："),
    "not_compared": Text("Not compared, {count}: ", "未比较，{count} 处："),
    "no_reason": Text("no reason given", "未给出理由"),
    "colon": Text(": ", "："),
    "comma": Text(", ", "，"),
    "semicolon": Text("; ", "；"),
    "pair": Text("{count} pair of attentions", "{count} 对注意力"),
    "pairs": Text("{count} pairs of attentions", "{count} 对注意力"),
    "same": Text("{count} same", "{count} 对一致"),
    "differs": Text("{count} differs", "{count} 对不同"),
    "differ": Text("{count} differ", "{count} 对不同"),
    "follows from it": Text("{count} follows from it", "{count} 对的差异由此而来"),
    "follow from it": Text("{count} follow from it", "{count} 对的差异由此而来"),
    "follows from these": Text("{count} follows from these", "{count} 对的差异由此而来"),
    "follow from these": Text("{count} follow from these", "{count} 对的差异由此而来"),
    "not compared": Text("{count} not compared", "{count} 对未比较"),
    "alone": Text("{count} without a partner", "{count} 处没有对应"),
    "outputs": Text("outputs differ", "输出不同"),
    "stop": Text(". ", "。"),
    "exit": Text(". Exit code {code} (fail-on: {fail_on}).", "。退出码 {code}（fail-on：{fail_on}）。"),
}
