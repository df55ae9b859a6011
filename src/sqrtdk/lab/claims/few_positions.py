"""few-positions: on how many keys unscaled weights lie, and whether those are the first or the last."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.lab._demo_weights import demo_weights, windows
from sqrtdk.lab._random_rows import factor, products
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import exact, mean, proportion
from sqrtdk.lab.plots import Plot, curve
from sqrtdk.lab.text import Text
from sqrtdk.models.demo import DemoModel, load_demo
from sqrtdk.theory import expected_effective_keys

VARIANTS = {"none": "demo:unscaled", "sqrt_dk": "demo"}
OFTEN = 0.1  # of the rows


def measure(run: Run) -> Measured:
    """Effective keys, and the place of the largest weight, over random keys and in the embedded model."""
    d_k, keys = run["d_k"], run["keys"]
    weights = (
        products(run.generator("rows"), draws=run["rows"], keys=keys, d_k=d_k) * factor(run["scale"], d_k)
    ).softmax(-1)
    figures = [mean("effective_keys", _effective(weights)[:, 0], of="random keys")]
    places = weights.argmax(-1)[:, 0]
    figures.append(exact("chance_of_a_place", 1 / keys, of="random keys"))
    for place, index in (("first", 0), ("last", keys - 1)):
        hits = int((places == index).sum())
        figures.append(proportion("largest_weight_there", hits, run["rows"], of="random keys", place=place))
    text = windows(run["windows"], run["length"], run.generator("text"))
    models = {"model": _model(run), "scaled twin": (load_demo("demo"), "sqrt_dk")}
    found = {of: _of_model(model, rule, text, run) for of, (model, rule) in models.items()}
    seen = torch.arange(run["first_row"], run["length"], dtype=torch.float64) + 1  # keys of each row
    figures.append(exact("chance_of_a_place", float((1 / seen).mean()), of="model"))
    for of in models:
        figures.append(mean("effective_keys", found[of]["effective"], of=of))
        figures += [mean("largest_weight_there", found[of][place], of=of, place=place) for place in ("first", "last")]
    counts = torch.bincount(places, minlength=keys) / len(places)
    return Measured(figures, _plots(counts, {of: found[of]["behind"] for of in models}, run))


def _effective(weights: Tensor) -> Tensor:
    return weights.square().sum(-1).reciprocal()


def _model(run: Run) -> tuple[DemoModel, str]:
    name = VARIANTS[run["scale"]]
    if run["trained"]:
        return load_demo(name), run["scale"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.generator("weights").initial_seed())
        return DemoModel(name), run["scale"]


def _of_model(model: DemoModel, rule: str, text: Tensor, run: Run) -> dict[str, Tensor]:
    """Means over the layers, heads and later rows of each window, as windows are what is independent."""
    length, first = run["length"], run["first_row"]
    weights = demo_weights(model, text, factor(rule, run["d_k"]))[..., first:, :]
    row = torch.arange(first, length)
    largest = weights.argmax(-1)
    behind = row - largest
    return {
        "effective": _effective(weights.double()).mean((1, 2, 3)),
        "first": (largest == 0).double().mean((1, 2, 3)),
        "last": (behind == 0).double().mean((1, 2, 3)),
        "behind": torch.bincount(behind.flatten(), minlength=length) / behind.numel(),
    }


def _plots(random_places: Tensor, behind: dict[str, Tensor], run: Run) -> tuple[Plot, Plot]:
    keys, near = run["keys"], 16
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
                curve("measured", range(keys), random_places.tolist()),
                curve("chance", (0, keys - 1), (1 / keys,) * 2, style="dashed"),
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
    random, model = (figures("effective_keys", of=of) for of in ("random keys", "model"))
    at = {
        (of, place): figures("largest_weight_there", of=of, place=place)
        for of in ("random keys", "model", "scaled twin")
        for place in ("first", "last")
    }
    chance = {of: number(figures("chance_of_a_place", of=of).value) for of in ("random keys", "model")}
    theory = number(expected_effective_keys(64, 8.0)), number(expected_effective_keys(64, 1.0))
    return Text(
        f"Unscaled weights do lie on few keys: on {random} of 64 random ones at d_k = 64 (theory: {theory[0]}; with "
        f"the scale {theory[1]}), and on {model} in a model trained without the scale. The place is another matter. "
        "Random keys are exchangeable, and no scale can tell the first from the last: the shares of rows whose largest "
        f"weight is there are {at['random keys', 'first']} and {at['random keys', 'last']}, where chance gives "
        f"{chance['random keys']}. A trained causal model has learned where to look: at the current byte, the last key "
        f"that it sees, in a share of {at['model', 'last']}, and at the first in {at['model', 'first']}, where chance "
        f"gives {chance['model']}. That is what it learned, not what the missing scale did: its twin, trained with the "
        f"scale, has {at['scaled twin', 'last']} and {at['scaled twin', 'first']}.",
        f"未缩放的权重确实集中在少数键上：在 d_k = 64 时，64 个随机键中有效的键数为 {random}（理论值 {theory[0]}；"
        f"有缩放时为 {theory[1]}），在不用缩放训练的模型中为 {model}。位置则是另一回事。"
        "随机键可以互换，任何缩放都无从区分最前与最后：最大权重落在这两处的行所占比例分别为 "
        f"{at['random keys', 'first']} 和 {at['random keys', 'last']}，而随机水平是 {chance['random keys']}。"
        "训练好的因果模型学会了该看哪里：最大权重落在当前字节（即它看到的最后一个键）的比例为 "
        f"{at['model', 'last']}，落在第一个键的比例为 {at['model', 'first']}，而随机水平是 {chance['model']}。"
        "这是模型学到的，而不是缺少缩放造成的："
        f"用缩放训练的对照模型中，这两个比例为 {at['scaled twin', 'last']} 和 {at['scaled twin', 'first']}。",
    )


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
        "Python's standard library; beside it its twin, trained with the scale. "
        f"Often means at least {OFTEN:.0%} of the rows.",
        "测量有效的键数与最大权重所在的位置：一是 d_k = 64 时 64 个随机键，二是内置的、不用缩放训练的字节级解码器"
        f"（d_k = 64，因果，旋转位置），输入为 Python 标准库的文本；"
        f"并与用缩放训练的同一模型对照。“往往”指至少占各行的 {OFTEN:.0%}。",
    ),
    control=Text(
        "The scale is put back, and the model's weights are those before training: neither concentration nor place.",
        "恢复缩放，模型的参数换成训练之前的参数：既不集中，也不偏向任何位置。",
    ),
    parameters={
        "d_k": 64,
        "keys": 64,
        "rows": 40_000,
        "scale": "none",
        "trained": True,
        "windows": 128,
        "length": 128,
        "first_row": 32,
    },
    quick={"rows": 3000, "windows": 24},
    flipped={"scale": "sqrt_dk", "trained": False},
    measure=measure,
    parts=(
        Part(
            Text("random keys: the weights lie on fewer than 6 of 64", "随机键：权重集中在 64 个键中的不到 6 个上"),
            (Expect("effective_keys", high=6.0, at={"of": "random keys"}),),
        ),
        Part(
            Text("random keys: often the first or the last", "随机键：往往是最前或最后"),
            (Expect("largest_weight_there", low=OFTEN, at={"of": "random keys"}),),
        ),
        Part(
            Text("trained model: the weights lie on fewer than 6", "训练好的模型：权重集中在不到 6 个键上"),
            (Expect("effective_keys", high=6.0, at={"of": "model"}),),
        ),
        Part(
            Text("trained model: often the first", "训练好的模型：往往是最前"),
            (Expect("largest_weight_there", low=OFTEN, at={"of": "model", "place": "first"}),),
        ),
        Part(
            Text("trained model: often the last, the current one", "训练好的模型：往往是最后，即当前位置"),
            (Expect("largest_weight_there", low=OFTEN, at={"of": "model", "place": "last"}),),
        ),
    ),
    why=why,
)
