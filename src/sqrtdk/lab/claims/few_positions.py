"""few-positions: on how many keys unscaled weights lie, and whether those are the first or the last."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk.lab._demo_weights import demo_weights, windows
from sqrtdk.lab._random_rows import factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import bootstrap, exact, geometric_mean, mean, proportion
from sqrtdk.lab.plots import Plot, curve
from sqrtdk.lab.text import Text
from sqrtdk.models.demo import load_demo
from sqrtdk.theory import expected_effective_keys

D_K, KEYS = 64, 64
VARIANTS = {"none": "demo:unscaled", "sqrt_dk": "demo"}
FEW = 6.0  # keys
OFTEN = 0.1  # of the rows
MORE = 0.02  # of the rows, than in the scaled twin
ENDS = ("first", "last")


def measure(run: Run) -> Measured:
    """Effective keys, and the place of the largest weight, over random keys and in the embedded model."""
    product = products(run.generator("rows"), draws=run["rows"], keys=KEYS, d_k=D_K)[:, 0]
    weights = (product * factor(run["scale"], D_K)).softmax(-1)
    figures = [mean("effective_keys", _effective(weights), of="random keys")]
    places = weights.argmax(-1)
    figures.append(exact("chance_of_a_place", 1 / KEYS, of="random keys"))
    for place, index in zip(ENDS, (0, KEYS - 1), strict=True):
        hits = int((places == index).sum())
        figures.append(proportion("largest_weight_there", hits, run["rows"], of="random keys", place=place))
    text = windows(run["windows"], run["length"], run.generator("text"))
    found = {of: _of_model(rule, text, run) for of, rule in (("model", run["scale"]), ("scaled twin", "sqrt_dk"))}
    seen = torch.arange(run["first_row"], run["length"], dtype=torch.float64) + 1  # keys of each row
    figures.append(exact("chance_of_a_place", float((1 / seen).mean()), of="model"))
    for of, one in found.items():
        figures.append(mean("effective_keys", one["effective"], of=of))
        figures += [
            bootstrap("largest_weight_there", one[place], np.mean, seed=run.seed, of=of, place=place) for place in ENDS
        ]
    model, twin = found["model"], found["scaled twin"]
    figures.append(geometric_mean("effective_keys_over_scaled_twin", model["effective"] / twin["effective"]))
    figures += [mean("more_there_than_scaled_twin", model[place] - twin[place], place=place) for place in ENDS]
    counts = torch.bincount(places, minlength=KEYS) / len(places)
    return Measured(figures, _plots(counts, {of: one["behind"] for of, one in found.items()}))


def _effective(weights: Tensor) -> Tensor:
    return weights.square().sum(-1).reciprocal()


def _of_model(rule: str, text: Tensor, run: Run) -> dict[str, Tensor]:
    """Of the model trained with a scale: means over layers, heads and later rows, one for each window of text."""
    length, first = run["length"], run["first_row"]
    weights = demo_weights(load_demo(VARIANTS[rule]), text, factor(rule, D_K))[..., first:, :]
    row = torch.arange(first, length)
    largest = weights.argmax(-1)
    behind = row - largest
    return {
        "effective": _effective(weights.double()).mean((1, 2, 3)),
        "first": (largest == 0).double().mean((1, 2, 3)),
        "last": (behind == 0).double().mean((1, 2, 3)),
        "behind": torch.bincount(behind.flatten(), minlength=length) / behind.numel(),
    }


def _plots(random_places: Tensor, behind: dict[str, Tensor]) -> tuple[Plot, Plot]:
    near = 16
    return (
        Plot(
            "random",
            Text(
                "Place of the largest weight over random keys: every place is as likely.",
                "随机键中最大权重所在的位置：每个位置的可能性相同。",
            ),
            "position of the key",
            "share of rows",
            (
                curve("measured", range(KEYS), random_places.tolist()),
                curve("chance", (0, KEYS - 1), (1 / KEYS,) * 2, style="dashed"),
            ),
            lines=(("often", OFTEN),),
        ),
        Plot(
            "model",
            Text(
                "Place of the largest weight in the model trained without the scale and in its scaled twin, in bytes "
                "before the current one.",
                "不用缩放训练的模型及其有缩放的对照模型中最大权重所在的位置：在当前字节之前的字节数。",
            ),
            "bytes before the current one",
            "share of rows",
            tuple(curve(of, range(near), places[:near].tolist()) for of, places in behind.items()),
            lines=(("often", OFTEN),),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    random, model, twin = (figures("effective_keys", of=of) for of in ("random keys", "model", "scaled twin"))
    at = {
        (of, place): figures("largest_weight_there", of=of, place=place)
        for of in ("random keys", "model", "scaled twin")
        for place in ENDS
    }
    chance = {of: number(figures("chance_of_a_place", of=of).value) for of in ("random keys", "model")}
    more = figures("more_there_than_scaled_twin", place="last")
    theory = number(expected_effective_keys(KEYS, D_K**0.5)), number(expected_effective_keys(KEYS, 1.0))
    return Text(
        f"Unscaled weights do lie on few keys: on {random} of {KEYS} random ones at d_k = {D_K} (theory: {theory[0]}; "
        f"with the scale {theory[1]}), and on {model} in a model trained without the scale, where its twin, trained "
        f"with it, has {twin}. The place is another matter. Random keys are exchangeable, and no scale can tell the "
        f"first from the last: the shares of rows whose largest weight is there are {at['random keys', 'first']} and "
        f"{at['random keys', 'last']}, where chance gives {chance['random keys']}. A trained model can tell places. "
        "The one without the scale looks at the current byte, the last key that it sees, in a share of "
        f"{at['model', 'last']} of the rows and at the first in {at['model', 'first']}, where chance gives "
        f"{chance['model']}; its scaled twin in {at['scaled twin', 'last']} and {at['scaled twin', 'first']}. At the "
        f"last key they differ, window by window, by {more}. The intervals are over windows of text; there is one "
        "trained model of each kind, and whether another pair would differ as much, or why, is not seen here.",
        f"未缩放的权重确实集中在少数键上：在 d_k = {D_K} 时，{KEYS} 个随机键中有效的键数为 {random}（理论值 "
        f"{theory[0]}；有缩放时为 {theory[1]}）；在不用缩放训练的模型中为 {model}，而用缩放训练的对照模型为 {twin}。"
        "位置则是另一回事。随机键可以互换，任何缩放都无从区分最前与最后：最大权重落在这两处的行所占比例分别为 "
        f"{at['random keys', 'first']} 和 {at['random keys', 'last']}，而随机水平是 {chance['random keys']}。"
        "训练好的因果模型则能分辨位置。在不用缩放训练的模型中，最大权重落在当前字节（即它看到的最后一个键）的比例为 "
        f"{at['model', 'last']}，落在第一个键的比例为 {at['model', 'first']}，而随机水平是 {chance['model']}；"
        f"对照模型的这两个比例为 {at['scaled twin', 'last']} 和 {at['scaled twin', 'first']}。"
        f"就最后一个键逐个窗口相比，两者之差为 {more}。这些区间只反映文本窗口的波动；每种模型只训练了一个，"
        "换一对模型是否有同样的差别、原因何在，这里看不出来。",
    )


def _often(place: str, en: str, zh: str) -> Part:
    absolute = Expect("largest_weight_there", low=OFTEN, at={"of": "model", "place": place})
    return Part(Text(en, zh), (absolute, Expect("more_there_than_scaled_twin", low=MORE, at={"place": place})))


CLAIM = Claim(
    id="few-positions",
    group="saturation",
    sources=("S0", "S3"),
    statement=Text(
        "Without the scale the weights concentrate on a few positions, often the first or the last.",
        "没有缩放时，权重集中在少数位置上，往往是最前或最后的位置。",
    ),
    formula=r"n_{\mathrm{eff}} = \frac{1}{\sum_j p_j^{2}}, \qquad "
    r"\mathrm{P}[\text{arg max}_j \, z_j = i] = \frac{1}{n} \text{ for exchangeable keys}",
    method=Text(
        "Effective keys and the place of the largest weight: over 64 random keys at d_k = 64, and in the embedded "
        "byte-level decoder that was trained without the scale (d_k = 64, causal, rotary positions), on text of "
        f"Python's standard library; beside it its twin, trained with the scale. Few means fewer than {FEW:g}, and in "
        f"the model less than half of the twin's; often means at least {OFTEN:.0%} of the rows, and in the model at "
        f"least {MORE:.0%} more of them than in the twin, window by window of text.",
        "测量有效的键数与最大权重所在的位置：一是 d_k = 64 时 64 个随机键，二是内置的、"
        "不用缩放训练的字节级解码器（d_k = 64，因果，旋转位置），输入为 Python 标准库的文本；"
        f"并与用缩放训练的同一模型对照。“少数”指少于 {FEW:g} 个，模型中还须少于对照模型的一半；“往往”指至少占各行的 "
        f"{OFTEN:.0%}，模型中还须逐个文本窗口平均比对照模型至少多 {MORE:.0%}。",
    ),
    control=Text(
        "The scale is put back, and the model is its scaled twin: more keys, and nothing that the twin does not have.",
        "恢复缩放，模型换成用缩放训练的对照模型：键数变多，也没有任何超出对照模型之处。",
    ),
    parameters={
        "rows": 40_000,
        "scale": "none",
        "windows": 128,
        "length": 128,
        "first_row": 32,
    },
    quick={"rows": 3000, "windows": 24},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        Part(
            Text(
                f"random keys: the weights lie on fewer than {FEW:g} of {KEYS}",
                f"随机键：权重集中在 {KEYS} 个键中的不到 {FEW:g} 个上",
            ),
            (Expect("effective_keys", high=FEW, at={"of": "random keys"}),),
        ),
        Part(
            Text("random keys: often the first or the last", "随机键：往往是最前或最后"),
            (Expect("largest_weight_there", low=OFTEN, at={"of": "random keys"}),),
        ),
        Part(
            Text(
                f"trained model: the weights lie on fewer than {FEW:g}, less than half of the scaled twin's",
                f"训练好的模型：权重集中在不到 {FEW:g} 个键上，少于对照模型的一半",
            ),
            (
                Expect("effective_keys", high=FEW, at={"of": "model"}),
                Expect("effective_keys_over_scaled_twin", high=0.5),
            ),
        ),
        _often("first", "trained model: often the first", "训练好的模型：往往是最前"),
        _often("last", "trained model: often the last, the current one", "训练好的模型：往往是最后，即当前位置"),
    ),
    why=why,
)
