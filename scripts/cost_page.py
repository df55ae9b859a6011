"""Write the tables of figures in docs/en/cost.md and docs/zh/cost.md from the records in benchmarks/results.

What stands between `<!-- NAME -->` and `<!-- end of NAME -->` is written here, all else by hand. `--check` writes
nothing, and exits 1 where a page says something else than the records.

    python scripts/cost_page.py [--check]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import cliffs_figure
from made import ROOT, settle_texts, with_part

RESULTS = ROOT / "benchmarks" / "results"
LANGUAGES = ("en", "zh")
MIB = 2**20


@cache
def record(name: str) -> Mapping[str, Any]:
    """A record, by its name in benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def table(language: str, heads: Iterable[tuple[str, str]], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown, with the heads of a language."""
    names = [head[LANGUAGES.index(language)] for head in heads]
    head, *body = ("| " + " | ".join(line) + " |" for line in (names, *rows))
    return "\n".join((head, "|---" * len(names) + "|", *body)).replace("|  |", "| |").replace("|  |", "| |")


def caption(language: str, name: str, *facts: str) -> str:
    """The line under a table: what it was measured on and when, and where the record is."""
    link = f"[{name}.json](../../benchmarks/results/{name}.json)"
    if language == "zh":
        return "\n" + "，".join((*facts, f"记录：{link}。"))
    return "\n" + ", ".join((*facts, f"record: {link}."))


def when(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Machine, versions and day of a record."""
    here = found.get("environment", found)
    cpu, versions = here.get("cpu", here.get("machine")), here.get("versions", here)
    torch = versions["torch"].split("+")[0] if "torch" in versions else None
    day = found.get("date") or found["started"][:10]
    return (cpu, *([f"torch {torch}"] if torch else []), day)


def load_text(language: str, load: float, cpus: int) -> str:
    """How busy the machine was."""
    return (f"load average {load:.0f} on {cpus} CPUs", f"{cpus} 个 CPU，平均负载 {load:.0f}")[language == "zh"]


def startup(language: str) -> str:
    """CPU time of imports and of the program's start."""
    found = record("startup")
    heads = (("command", "命令"), ("CPU seconds, median", "CPU 秒数，中位数"), ("least to largest", "最小到最大"))
    names = {"python": "`python -c ''`", "import sqrtdk": "`import sqrtdk`", "import torch": "`import torch`"}
    rows = [
        (names.get(name, f"`{name}`"), f"{spread['median']:.2f}", f"{spread['least']:.2f} – {spread['largest']:.2f}")
        for name, spread in found["cpu_s"].items()
    ]
    busy = load_text(language, found["load_before"], found["environment"]["cpus"])
    return table(language, heads, rows) + "\n" + caption(language, "startup", *when(found), busy)


def room(language: str) -> str:
    """What the package and its dependencies take on the disk."""
    found = record("startup")["bytes"]
    needed = sorted(found["needed"].items(), key=lambda item: -item[1])
    shown, rest = needed[:5], needed[5:]
    more = (f"{len(rest)} others", f"其余 {len(rest)} 个")[language == "zh"]
    whole = ("all of it", "合计")[language == "zh"]
    rows = [("`sqrtdk`", found["sqrtdk"]), *((f"`{name}`", size) for name, size in shown)]
    rows += [(more, sum(size for _, size in rest)), (whole, found["sqrtdk"] + sum(found["needed"].values()))]
    text = table(language, (("distribution", "软件包"), ("MiB", "MiB")), ((name, f"{b / MIB:.0f}") for name, b in rows))
    heads = (("extra", "可选依赖"), ("adds, MiB", "增加的 MiB"), ("most of it", "其中最大的"))
    extras = [
        (
            f"`sqrtdk[{extra}]`",
            f"{sum(parts.values()) / MIB:.0f}",
            (", ", "、")[language == "zh"].join(f"`{name}`" for name in sorted(parts, key=parts.__getitem__)[:-4:-1]),
        )
        for extra, parts in found["extras"].items()
    ]
    return f"{text}\n\n{table(language, heads, extras)}\n{caption(language, 'startup', *when(record('startup')))}"


def static(language: str) -> str:
    """A check of a large config without weights."""
    found = record("static_check")
    heads = (("what", "内容"), ("figure", "数值"))
    names = (
        ("parameters of the config", "配置的参数数量", f"{found['parameters'] / 1e9:.1f}e9"),
        ("attentions, all `exact`", "注意力次数，全部 `exact`", f"{found['exact']}"),
        ("CPU seconds of the process", "进程的 CPU 秒数", f"{found['cpu_s']:.1f}"),
        ("largest memory, GB", "最大内存，GB", f"{found['peak_gb']:.2f}"),
    )
    rows = [(name[language == "zh"], name[2]) for name in names]
    busy = load_text(language, found["load"], found["cpus"])
    return table(language, heads, rows) + "\n" + caption(language, "static_check", *when(found), busy)


def traced(language: str) -> str:
    """A forward pass under the trace."""
    found = record("trace")
    heads = (
        ("forward pass", "前向传播"),
        ("time over that without", "与不跟踪时的时间之比"),
        ("p10 – p90", "p10 – p90"),
    )
    names = {
        "traced sdpa / plain sdpa": ("traced, SDPA", "跟踪，SDPA"),
        "traced eager / plain eager": ("traced, eager", "跟踪，eager"),
    }
    rows = [(both[language == "zh"], *spread(found["ratios"][name])) for name, both in names.items()]
    return table(language, heads, rows) + "\n" + caption(language, "trace", *when(found))


def spread(figures: Mapping[str, float]) -> tuple[str, str]:
    """Median, and the range of eight tenths of the rounds."""
    return f"{figures['median']:.2f}", f"{figures['p10']:.2f} – {figures['p90']:.2f}"


WORKLOADS = ("training", "long-64", "causal-64", "long-128", "gqa", "decode")
DTYPES = ("float32", "bfloat16", "float16")


def bench(language: str) -> str:
    """The compiled kernel with all statistics over SDPA without any, for each workload."""
    names = ("bench", "bench-long", "bench-float16")
    cells = {
        (one["workload"], one["pass"], one["dtype"]): f"{one['ratio']['median']:.2f}"
        for name in names
        for one in record(name)["measured"]
        if one["way"] == "cpu-stats"
    }
    shapes = {shape: sizes for name in names for shape, sizes in record(name)["workloads"].items()}
    passes = {"forward": ("forward", "前向"), "training": ("forward and backward", "前向和反向")}
    rows = [
        (
            f"`{shape}`",
            size_text(language, shapes[shape]),
            passes[way][language == "zh"],
            *(cells.get((shape, way, dtype), "") for dtype in DTYPES),
        )
        for shape in WORKLOADS
        for way in passes
        if any((shape, way, dtype) in cells for dtype in DTYPES)
    ]
    heads = (("workload", "任务"), ("sizes", "大小"), ("pass", "过程"), *((dtype, dtype) for dtype in DTYPES))
    found = record("bench")
    threads = (f"{found['environment']['threads']} threads", f"{found['environment']['threads']} 个线程")
    notes = [caption(language, name, *when(record(name)), threads[language == "zh"]).strip() for name in names]
    return table(language, heads, rows) + "\n\n" + "\n".join(f"- {note}" for note in notes)


TARGETS = {"attention-kernel": "AVX-512", "attention-kernel-avx2": "AVX2"}
SDPA_PAIRS = {  # group of benchmarks/attention.py, ratio in it, and what it is
    "statistics": {
        "sqrtdk 4096, all statistics / sdpa 4096": ("all statistics, forward", "全部统计量，前向"),
        "products alone 4096 / sdpa 4096": ("the two matrix products alone", "仅两次矩阵乘法"),
    },
    "training": {
        "sqrtdk 4096, backward / sdpa 4096, backward": ("backward", "反向"),
        "sqrtdk 4096, forward and backward / sdpa 4096, forward and backward": (
            "all statistics, forward and backward",
            "全部统计量，前向和反向",
        ),
    },
    "learning": {
        "sqrtdk 2048, dropout / sdpa 2048, dropout": ("dropout, forward and backward", "dropout，前向和反向"),
        "sqrtdk 2048, learned bias / sdpa 2048, learned bias": (
            "a learned bias, forward and backward",
            "学习的偏置，前向和反向",
        ),
    },
    "decode": {
        f"sqrtdk, {rows} rows, all statistics / sdpa, {rows} rows": (
            f"all statistics of {rows} row{'s' * (rows > 1)} over 8192 keys",
            f"{rows} 行对 8192 个键，全部统计量",
        )
        for rows in (1, 4, 16)
    },
}


def targets(language: str) -> str:
    """The compiled kernel over SDPA for each kind of CPU, and the machine's limit."""
    heads = [("over SDPA's time", "与 SDPA 的时间之比")]
    heads += [(f"{text}, {dtype}",) * 2 for text in TARGETS.values() for dtype in DTYPES[:2]]
    groups = [(name, suffix) for name in TARGETS for suffix in ("", "_bf16")]
    rows = [
        (
            both[language == "zh"],
            *(f"{record(n)[group + suffix]['ratio'][pair]['median']:.2f}" for n, suffix in groups),
        )
        for group, pairs in SDPA_PAIRS.items()
        for pair, both in pairs.items()
    ]
    notes = [caption(language, name, *when(record(name)), text).strip() for name, text in TARGETS.items()]
    return table(language, heads, rows) + "\n\n" + "\n".join(f"- {note}" for note in notes)


def size_text(language: str, sizes: Mapping[str, int]) -> str:
    """Batch, heads, queries and keys in words."""
    heads = f"{sizes['heads']} x {sizes['width']}"
    grouped = sizes["key_heads"] != sizes["heads"]
    words = (
        ("batch {batch}, heads {heads}", "{length} queries, {keys} keys", "{key_heads} of k and v", "causal"),
        ("批量 {batch}，头 {heads}", "{length} 个查询、{keys} 个键", "k 和 v 有 {key_heads} 个头", "因果"),
    )[language == "zh"]
    parts = [words[0], *([words[2]] if grouped else []), words[1], *([words[3]] if sizes["is_causal"] else [])]
    values = {name: value for name, value in sizes.items() if name != "heads"}
    return ("，" if language == "zh" else ", ").join(parts).format(heads=heads, **values)


def fused(language: str) -> str:
    """The same without the compiled kernel."""
    cells = [one for one in record("bench-fused")["measured"] if one["way"] == "fused-stats"]
    heads = (("dtype", "类型"), ("time over SDPA's", "与 SDPA 的时间之比"), ("p10 – p90", "p10 – p90"))
    rows = [(one["dtype"], *spread(one["ratio"])) for one in cells]
    return table(language, heads, rows) + "\n" + caption(language, "bench-fused", *when(record("bench-fused")))


LEAST_LENGTH, STEP = 1024, 1.5  # rows of a cell that is counted; growth of a cliff


def cliffs(language: str) -> str:
    """Every kind of call next to torch's: the ratios, the cells above 1, the memory, and what grows by steps."""
    chinese, found = language == "zh", record("cliffs")
    cells = found["cliffs"]
    longest = max(cell["length"] for cell in cells)
    heads = [("kind of call", "调用种类")]
    heads += [(f"{both[0]}: median, largest", f"{both[1]}：中位数，最大值") for both in cliffs_figure.PASSES.values()]
    heads += [("cells above 1", "高于 1 的格子"), (f"MiB at {longest}", f"{longest} 时的 MiB")]
    rows = []
    for kind, name in cliffs_figure.KINDS.items():
        long = [cell for cell in cells if cell["kind"] == kind and cell["length"] >= LEAST_LENGTH]
        ratios = {way: [c["ratio"]["median"] for c in long if c["pass"] == way] for way in cliffs_figure.PASSES}
        above = sum(cell["ratio"]["median"] > 1 for cell in long)
        most = max(cell["added_mib"] for cell in long if cell["length"] == longest)
        spans = [f"{median(values):.2f}, {max(values):.2f}" for values in ratios.values()]
        rows.append((name if chinese else kind, *spans, f"{above} / {len(long)}", f"{most:.0f}"))
    threads = ("1 thread, CPU seconds", "1 个线程，CPU 秒数")[chinese]
    note = caption(language, "cliffs", *when(found), threads)
    return f"{table(language, heads, rows)}\n\n{steps_text(cells, language)}\n{note}"


def steps_text(cells: Iterable[Mapping[str, Any]], language: str) -> str:
    """Which cells grow by a step from the length before."""
    steps = [cell for cell in cells if cell["growth"] is not None and cell["growth"] > STEP]
    if not steps:
        return (f"No cell is such a step of over {STEP}.", f"没有一个格子有超过 {STEP} 的台阶。")[language == "zh"]
    names = [
        (cell["kind"], cell["pass"])
        if language == "en"
        else (cliffs_figure.KINDS[cell["kind"]], cliffs_figure.PASSES[cell["pass"]][1])
        for cell in steps
    ]
    listed = [
        f"{kind}, {way}, {cell['dtype']}, {cell['length']}: {cell['growth']:.1f}"
        for (kind, way), cell in zip(names, steps, strict=True)
    ]
    head = (f"Steps of over {STEP}: ", f"超过 {STEP} 的台阶：")[language == "zh"]
    return head + "; ".join(listed) + "."


def watch(language: str) -> str:
    """A training step with a watch over one without."""
    found = record("watch")
    part = found["all rows"]
    heads = (("training step", "训练的一步"), ("time over that without a watch", "与没有监视时的时间之比"))
    rows = [
        (("sampled", "采样的一步")[language == "zh"], f"{part['ratios']['sampled / plain']['median']:.2f}"),
        (
            ("not sampled: `step()` alone", "没有采样：只有 `step()`")[language == "zh"],
            f"{part['step() alone / plain']:.0e}",
        ),
        (("on average at `every=100`", "`every=100` 时平均")[language == "zh"], f"{part['every=100 / plain']:.4f}"),
    ]
    return table(language, heads, rows) + "\n" + caption(language, "watch", *when(found))


ARMS = {
    "no_scale": ("without the scale", "没有缩放"),
    "muon": ("growing logits", "logit 不断增大"),
    "fp16": ("beyond the range of float16", "超出 float16 的范围"),
    "muon fast": ("diverges right after the warm-up", "预热之后立即发散"),
    "healthy": ("healthy", "健康"),
}


def divergence(language: str) -> str:
    """How long before the loss diverges the alarms come, and what QK-clip does."""
    found = record("watch_divergence")
    heads = (
        ("5 seeds each", "各 5 个种子"),
        ("diverge", "发散"),
        ("alarmed before", "事先有警报"),
        ("steps before, least", "最少提前的步数"),
        ("diverge with `qk_clip_`", "用 `qk_clip_` 后发散"),
    )
    rows = []
    for name, both in ARMS.items():
        arm, clipped = found["arms"][name], found["arms"].get(f"{name} clipped")
        alarmed = sum(
            run["lead"] is not None if run["diverged"] else run["announced"] is not None for run in arm["runs"]
        )
        lead = arm["least_lead"]
        rows.append(
            (
                both[language == "zh"],
                str(arm["diverged"]),
                str(alarmed),
                "" if lead is None else str(lead),
                "" if clipped is None else str(clipped["diverged"]),
            )
        )
    return table(language, heads, rows) + "\n" + caption(language, "watch_divergence", *when(found))


def lab(language: str) -> str:
    """Minutes of a run of all claims."""
    found = record("lab")
    heads = (("run", "运行"), ("minutes", "分钟"))
    same = sum(one["same"] for one in found["claims"])
    text = (
        f"{same} of {len(found['claims'])} claims have the same verdict in both.",
        f"{len(found['claims'])} 条说法中有 {same} 条在两种运行中判定相同。",
    )[language == "zh"]
    rows = [
        ("`sqrtdk lab run all --quick`", f"{found['minutes']['quick']:.1f}"),
        ("`sqrtdk lab run all`", f"{found['minutes']['full']:.0f}"),
    ]
    return f"{table(language, heads, rows)}\n{caption(language, 'lab', *when(found))}\n{text}"


PARTS: dict[str, Callable[[str], str]] = {
    "startup": startup,
    "room": room,
    "static": static,
    "trace": traced,
    "bench": bench,
    "targets": targets,
    "fused": fused,
    "cliffs": cliffs,
    "watch": watch,
    "divergence": divergence,
    "lab": lab,
}


def page(language: str) -> Path:
    """The page of figures."""
    return ROOT / "docs" / language / "cost.md"


def written(language: str) -> str:
    """The page with every part as the records have it; each part stands there once."""
    text = page(language).read_text(encoding="utf-8")
    for name, part in PARTS.items():
        text = with_part(page(language), text, name, part(language))
    return text


def main() -> None:
    """The command."""
    settle_texts(__doc__, {page(language): written(language) for language in LANGUAGES})


if __name__ == "__main__":
    main()
