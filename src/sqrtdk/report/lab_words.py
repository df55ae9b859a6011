"""The fixed words of the lab's page and of its terminal tables, in English and Chinese."""

from __future__ import annotations

from sqrtdk.messages import Text

ANSWERS = {
    "holds": Text("holds", "成立"),
    "fails": Text("fails", "不成立"),
    "partly": Text("partly", "部分成立"),
    "depends": Text("depends", "视条件而定"),
    "undecided": Text("undecided", "未定"),
}

ANSWERS_MEAN = {
    "holds": Text("every part of the claim is met", "说法的每一部分都满足"),
    "fails": Text("no part of the claim is met", "说法的任何部分都不满足"),
    "partly": Text("some parts of the claim are met and others are not", "说法有的部分满足，有的部分不满足"),
    "depends": Text(
        "one and the same part is met under one condition and not under another, which is named",
        "同一部分在一种条件下满足，在另一种条件下不满足，条件已写明",
    ),
    "undecided": Text("an interval lies across a bar: more samples are needed", "有置信区间跨越判据，需要更多样本"),
}

TALLY = {  # number of claims by verdict; "_1" is the singular
    "all": Text("{count} claims: {parts}.", "{count} 条说法：{parts}。"),
    "all_1": Text("{count} claim: {parts}.", "{count} 条说法：{parts}。"),
    "holds": Text("{count} hold", "{count} 条成立"),
    "holds_1": Text("{count} holds", "{count} 条成立"),
    "fails": Text("{count} fail", "{count} 条不成立"),
    "fails_1": Text("{count} fails", "{count} 条不成立"),
    "partly": Text("{count} hold in part", "{count} 条部分成立"),
    "partly_1": Text("{count} holds in part", "{count} 条部分成立"),
    "depends": Text("{count} depend", "{count} 条视条件而定"),
    "depends_1": Text("{count} depends", "{count} 条视条件而定"),
    "undecided": Text("{count} undecided", "{count} 条未定"),
    "undecided_1": Text("{count} undecided", "{count} 条未定"),
    "comma": Text(", ", "，"),
}

TERMINAL = {
    "unsound": Text("unsound", "不足为凭"),
    "control_same": Text("the control has the same verdict ({answer})", "对照的判定相同（{answer}）"),
    "control_undecided": Text("the control is undecided", "对照未定"),
    "kept": Text("kept", "沿用"),
    "seconds": Text("{seconds:.1f} s", "{seconds:.1f} 秒"),
    "records": Text("{counts} Records: {folder}", "{counts}记录：{folder}"),
    "parameters": Text("Parameters", "参数"),
    "true_if": Text("True if", "判据"),
    "condition": Text("Condition", "条件"),
    "finding": Text("{met}: {part}", "{met}：{part}"),
    "semicolon": Text("; ", "；"),
    "bars": Text("{part}  ({bars})", "{part}（{bars}）"),
    "bar at": Text("{bar} at {at}", "{bar}，{at}"),
    "quick": Text("{parameter}  (--quick: {value})", "{parameter}（--quick：{value}）"),
}

MET = {
    True: Text("met", "满足"),
    False: Text("missed", "不满足"),
    None: Text("undecided", "未定"),
}

PARTS = {  # headings over the parts of a claim, by answer
    True: Text("Holds", "成立的部分"),
    False: Text("Does not hold", "不成立的部分"),
    None: Text("Undecided", "未定的部分"),
}

WORDS = {
    # head
    "verb": Text("lab", "实验室"),
    "title": Text("Claims about √d_k, measured", "关于 √d_k 的说法，逐条实测"),
    "lead": Text(
        "Popular explanations say a good deal about the 1/√d_k of attention. Here each claim is an experiment. Its "
        "figures come with {level} confidence intervals, and the verdict rests on the intervals. A control turns the "
        "premise round and must come to another verdict.",
        "关于注意力中的 1/√d_k，常见的讲解有许多说法。这里把每条说法做成一个实验：数值都带有 {level} 置信区间，"
        "判定依据的是区间而不是单个数值；对照实验把前提反过来，必须得出不同的判定。",
    ),
    "skip": Text("Skip to the register", "跳到说法总表"),
    "languages": Text("Language", "语言"),
    "claims": Text("claims", "条说法"),
    "claim_one": Text("claim", "条说法"),
    "mixed": Text("Records of different settings", "这些记录的设置不一致"),
    "mixed_means": Text(
        "Their figures are not those of one run. Where settings differ, the number of records stands behind each.",
        "它们的数值并非出自同一次运行。设置有别之处，各值后面括号内为记录条数。",
    ),
    "unsound_some": Text("Controls that decide nothing", "未起作用的对照"),
    "unsound_some_means": Text(
        "With the premise turned round, the verdict must be another one. For these claims it was the same or "
        "undecided, so their verdicts say nothing:",
        "前提反过来之后，判定必须改变。以下说法的对照判定相同或未定，因此其判定不足为凭：",
    ),
    "missing_some": Text("Not run: {count} of the {total} claims", "未运行：{total} 条说法中的 {count} 条"),
    "missing_some_means": Text("They have no record here:", "这里没有它们的记录："),
    # settings
    "run": Text("Run", "运行"),
    "quick": Text("quick", "快速"),
    "full": Text("full", "完整"),
    "kind": Text("Kind of run", "运行方式"),
    "seed": Text("Seed", "随机种子"),
    "level": Text("Confidence level", "置信水平"),
    "started": Text("Started", "开始时间"),
    "total": Text("Total time", "总用时"),
    "duration": Text("Time", "用时"),
    "command": Text("Command", "命令"),
    "python_call": Text("called from Python", "从 Python 调用"),
    "second": Text("s", "秒"),
    "made_by": Text("Page made by sqrtdk {version}.", "页面由 sqrtdk {version} 生成。"),
    # controls
    "filter": Text("Filter", "筛选"),
    "all": Text("all", "全部"),
    "search": Text("Search", "搜索"),
    "shown": Text("shown", "条显示"),
    "none_found": Text("No claim fits.", "没有符合条件的说法。"),
    # register
    "register": Text("Register", "说法总表"),
    "claim": Text("Claim", "说法"),
    "sources": Text("Sources", "出处"),
    "sources_mean": Text(
        "S0 to S4 are five widely read explanations, whose statements stand here in our own words:",
        "S0 至 S4 是以下五篇流传甚广的讲解，此处用我们自己的话转述其说法：",
    ),
    "verdict": Text("Verdict", "判定"),
    "meanings": Text("What the verdicts mean", "各种判定的含义"),
    # one claim
    "back": Text("Register", "总表"),
    "formula": Text("Formula", "公式"),
    "why": Text("Why", "原因"),
    "plots": Text("Plots", "图"),
    "checks": Text("What counts as true, and what was measured", "判据与测量结果"),
    "figure": Text("Figure", "量"),
    "place": Text("Where", "条件"),
    "value": Text("Value", "数值"),
    "interval": Text("{level} interval", "{level} 区间"),
    "bar": Text("Bar", "判据"),
    "met": Text("Result", "结果"),
    "exact": Text("exact", "精确"),
    "observed": Text("extreme of the draws", "抽样中的极值"),
    "method": Text("Method", "方法"),
    "control": Text("Control", "对照"),
    "control_gives": Text("Its verdict", "对照的判定"),
    "control_changes": Text("What differs", "改动"),
    "sound": Text("another verdict: the experiment can say no", "判定不同：该实验能够否定说法"),
    "unsound": Text("control decides nothing", "对照未起作用"),
    "control_same": Text(
        "The control came to the same verdict, so this experiment can't tell the claim from its opposite.",
        "对照得出相同的判定，因此该实验无法区分这条说法与其反面。",
    ),
    "control_undecided": Text(
        "The control is undecided, so nothing shows that this experiment can tell the claim from its opposite.",
        "对照未定，因此无从表明该实验能够区分这条说法与其反面。",
    ),
    "control_checks": Text("Checks of the control", "对照的检验"),
    # details
    "settings": Text("Parameters and run", "参数与运行"),
    "parameter": Text("Parameter", "参数"),
    "experiment": Text("Experiment", "实验"),
    "figures": Text("All figures", "全部数值"),
    "low": Text("Low", "下界"),
    "high": Text("High", "上界"),
    "interval_by": Text("Interval by", "区间算法"),
    "samples": Text("Samples", "样本数"),
}
