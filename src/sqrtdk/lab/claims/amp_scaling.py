"""amp-scaling: under mixed precision the scale matters more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sqrtdk.lab._arms import FULL, QUICK, Arm, differences, train_arms
from sqrtdk.lab._curves import listed
from sqrtdk.lab._random_rows import factor, weights
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figure, Figures
from sqrtdk.lab.intervals import bootstrap, geometric_mean, mean, ratio_of_means
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.lab.training.attention import StoredProducts

KINDS = ("kernel", "stored")  # where the logits are: in a kernel in float32, or stored in bfloat16
HALF, TWICE = 0.5, 2.0
GROWS = 0.02  # nats a symbol; a gap that is the same in both precisions is short of it
FP16_MAX = torch.finfo(torch.float16).max


def measure(run: Run) -> Measured:
    """The gap that the missing scale leaves, in float32 and in autocast; what rounding does to weights; the range."""
    trained = [figure for task in run["tasks"] for figure in _trained(run, task)]
    rounded = [figure for kind in KINDS for figure in _rounded(run, kind)]
    found = Figures(trained + rounded)
    gaps = Plot(
        "gap",
        Text(
            f"Held-out loss without the scale minus the loss with it, d_k = {run['d_k']}.",
            f"不缩放与缩放的留出损失之差，d_k = {run['d_k']}。",
        ),
        "precision, place of the logits",
        "loss gap, nats a symbol",
        tuple(over(task, found.all("loss_gap_nats", task=task), "precision", style="bars") for task in run["tasks"]),
    )
    errors = Plot(
        "rounding",
        Text(
            "How far bfloat16 moves the weights of a row (total variation), random q and k.",
            "bfloat16 使一行权重偏移的程度（全变差距离），q、k 为随机向量。",
        ),
        "$d_k$",
        "total variation",
        tuple(
            over(f"{label}, {kind}", found.all("weight_error", arm=arm, logits=kind), "d_k")
            for kind in KINDS
            for label, arm in (("no scale", "none"), (r"$1/\sqrt{d_k}$", "sqrt_dk"))
        ),
        x_axis="log",
        y_axis="log",
    )
    return Measured(trained + rounded, (gaps, errors))


def _trained(run: Run, task: str) -> list[Figure]:
    bare, d_k = run["bare"], run["d_k"]
    sides = tuple(dict.fromkeys((bare, "sqrt_dk")))
    single = train_arms(run, {side: _design(task, d_k, side) for side in sides})
    pairs = [(side, kind) for side in sides for kind in KINDS]
    mixed = train_arms(
        run,
        {(s, kind): _design(task, d_k, s) | {"precision": "bfloat16", "logits": kind} for s, kind in pairs},
        dict.fromkeys(pairs, run["mixed_rates"]),
    )
    before = differences(single[bare], single["sqrt_dk"])
    figures = [mean("loss_gap_nats", before, task=task, precision="float32")]
    for kind in KINDS:
        after = differences(mixed[bare, kind], mixed["sqrt_dk", kind])
        both = list(zip(before, after, strict=True))
        figures.append(mean("loss_gap_nats", after, task=task, precision=f"bfloat16, {kind}"))
        figures.append(mean("gap_change_nats", [b - a for a, b in both], task=task, logits=kind))
        beyond = [b - (1 + HALF) * a for a, b in both]
        figures.append(mean("gap_beyond_half_more_nats", beyond, task=task, logits=kind))
    products = [_largest_product(curves, bare, d_k) / FP16_MAX for curves in _curves(single[bare])]
    return [*figures, geometric_mean("product_over_fp16_max", products, task=task)]


def _design(task: str, d_k: int, scale: str) -> dict[str, object]:
    return {"task": task, "head_dim": d_k, "scale": scale}


def _curves(arm: Arm) -> list[Mapping[str, list[float]]]:
    return [result["curves"] for result in arm.results[arm.rate]]


def _largest_product(curves: Mapping[str, list[float]], scale: str, d_k: int) -> float:
    """Largest |q . k| that a run was seen to have, before any scale."""
    return max(map(abs, [*curves["max_logit"], *curves["min_logit"]])) / factor(scale, d_k)


def _rounded(run: Run, kind: str) -> list[Figure]:
    """Error of the weights in autocast against float64, from the same q and k."""
    figures = []
    for d_k in run["rounding_dims"]:
        rng = run.generator("rounding", d_k)
        query, key = (torch.randn(run["draws"], 1, n, d_k, generator=rng).bfloat16() for n in (1, run["keys"]))
        errors = {
            arm: _error(query, key, kind, factor(scale, d_k))
            for arm, scale in (("none", run["bare"]), ("sqrt_dk", "sqrt_dk"))
        }
        figures += [mean("weight_error", error, arm=arm, logits=kind, d_k=d_k) for arm, error in errors.items()]
    both = tuple(errors.values())  # of the last, largest d_k
    return [*figures, bootstrap("weight_error_ratio", both, ratio_of_means, seed=run.seed, logits=kind, d_k=d_k)]


def _error(query: Tensor, key: Tensor, kind: str, scale: float) -> Tensor:
    """Total variation between the weights in autocast and the exact ones, for each draw."""
    with torch.autocast("cpu", torch.bfloat16):
        found = weights(query.float(), key.float(), scale, score=StoredProducts() if kind == "stored" else None)
    exact = weights(query.double(), key.double(), scale)
    return (found.double() - exact).abs().sum(-1).flatten() / 2


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    costs, costs_zh = listed(figures.all("loss_gap_nats", precision="float32"))
    kernel, kernel_zh = listed(figures.all("gap_change_nats", logits="kernel"))
    stored, stored_zh = listed(figures.all("gap_change_nats", logits="stored"))
    products, products_zh = listed(figures.all("product_over_fp16_max"))
    inside, outside = (figures("weight_error_ratio", logits=kind) for kind in KINDS)
    return Text(
        f"In float32 the missing scale costs {costs} nats a symbol. In bfloat16 autocast this gap changes "
        f"by {kernel} where the kernel keeps the logits in float32, and by {stored} where the products are stored in "
        "bfloat16. Saturation does the damage, and it is there in every precision. What rounding "
        "does to the weights of a row is another matter. bfloat16 keeps 8 bits, so that a product z is wrong by up to "
        "|z| / 256, and the softmax turns an absolute error of the logit into a relative one of the weight. Where the "
        f"products are stored, the weights move {outside} times as far without the scale; where they are not, {inside} "
        f"times. In float16 the range could end, but the largest products of these runs are only {products} of 65504; "
        "and a scale that follows the product would not keep it in range.",
        f"在 float32 下，省略缩放的代价（nat/符号）为 {costs_zh}。在 bfloat16 自动混合精度下，"
        f"若内核以 float32 保存 logits，这一差距的变化为 {kernel_zh}；若点积以 bfloat16 存储，则为 {stored_zh}。"
        "损害来自饱和，而饱和在任何精度下都存在。但舍入对一行权重的影响就不同了：bfloat16 只有 8 位有效位，"
        "点积 z 的误差可达 |z| / 256，而 softmax 把 logit 的绝对误差变成权重的相对误差。"
        f"点积被存储时，不缩放的权重偏移是缩放时的 {outside} 倍；不存储时为 {inside} 倍。"
        f"float16 还有范围问题，但这些运行中最大的点积只有 65504 的 {products_zh}倍；"
        "而且若先做乘积再缩放，缩放也无法使点积留在范围之内。",
    )


def _grows(kind: str, en: str, zh: str) -> Part:
    return Part(Text(en, zh), (Expect("gap_beyond_half_more_nats", low=GROWS, at={"logits": kind}),))


def _moves(kind: str, en: str, zh: str) -> Part:
    return Part(Text(en, zh), (Expect("weight_error_ratio", low=TWICE, at={"logits": kind}),))


CLAIM = Claim(
    id="amp-scaling",
    group="precision",
    sources=("S2",),
    statement=Text(
        "Under mixed precision the scale matters more.",
        "在混合精度下，缩放更加重要。",
    ),
    formula=r"|\mathrm{bf16}(z) - z| \le 2^{-8} |z|, \qquad \mathrm{sd}(q \cdot k) = \sqrt{d_k}",
    method=Text(
        "Train with and without the scale, in float32 and from the same seeds in bfloat16 autocast: with logits that a "
        "kernel keeps in float32, and with dot products stored in bfloat16 before the scale; each at its own best "
        "learning rate. The scale matters more if the gap in held-out loss grows by half and by 0.02 nats, seed by "
        "seed. Beside "
        "training: how far the weights of random rows move by the rounding, and the largest products of the runs "
        "against the range of float16.",
        "分别在有、无缩放时训练：先用 float32，再用相同的种子在 bfloat16 自动混合精度下训练，"
        "后者一种由内核以 float32 保存 logits，另一种在缩放之前把点积存为 bfloat16；各取自己的最佳学习率。"
        "若留出损失之差逐种子比较增大一半再加 0.02 nat 以上，则认为缩放更加重要。此外还测量：舍入使随机行的权重偏移"
        "多少，以及各次运行中最大的点积与 float16 范围之比。",
    ),
    control=Text(
        "The runs and rows without the scale are given it: no gap is left to grow, and rounding moves both alike.",
        "给不缩放的运行与随机行也加上缩放：没有可以增大的差距，舍入对两者的影响也相同。",
    ),
    parameters={
        **FULL,
        "seeds": 6,
        "bare": "none",
        "tasks": ("text", "strings"),
        "d_k": 512,
        "mixed_rates": (1e-3, 3e-3),
        "rounding_dims": (16, 64, 512),
        "draws": 2000,
        "keys": 64,
    },
    quick={
        **QUICK,
        "tasks": ("strings",),
        "d_k": 64,
        "mixed_rates": QUICK["rates"],
        "rounding_dims": (16, 512),
        "draws": 300,
    },
    flipped={"bare": "sqrt_dk"},
    measure=measure,
    parts=(
        _grows(
            "kernel",
            "the gap in the loss grows by half where a kernel keeps the logits in float32",
            "内核以 float32 保存 logits 时，损失之差增大一半以上",
        ),
        _grows(
            "stored",
            "it grows by half where the products are stored in bfloat16",
            "点积以 bfloat16 存储时，损失之差增大一半以上",
        ),
        _moves(
            "kernel",
            "without the scale rounding moves the weights twice as far, in a kernel that keeps logits in float32",
            "内核以 float32 保存 logits 时，不缩放会使舍入造成的权重偏移加倍",
        ),
        _moves("stored", "it does so where the products are stored", "点积以 bfloat16 存储时，偏移加倍"),
        Part(
            Text("products leave the range of float16 in training", "训练中的点积超出 float16 的范围"),
            (Expect("product_over_fp16_max", low=1.0),),
        ),
    ),
    why=why,
)
