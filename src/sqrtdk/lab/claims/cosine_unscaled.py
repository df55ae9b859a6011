"""cosine-unscaled: the range of cosine logits, and what it is good for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import sqrtdk
from sqrtdk.lab._random_rows import own_keys
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import bootstrap, exact, largest, mean, ratio_of_means
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text
from sqrtdk.scores import cosine
from sqrtdk.theory import expected_entropy_nats

MATCH_DIM = 64
RANDOM_KEYS = 64


def measure(run: Run) -> Measured:
    """Range of cosine logits over d_k, and the weight on a key equal to the query over the gain."""
    figures, stds = [], []
    for d_k in run["dims"]:
        query, key = own_keys(run.generator("rows", d_k), run["rows"], RANDOM_KEYS, d_k)
        gain = _gain(run, d_k)
        rows = sqrtdk.measure(query, key, score=cosine(gain=gain))
        extreme = torch.maximum(rows.max.abs(), rows.min.abs()).flatten() / gain
        stds.append((rows.variance.flatten() * RANDOM_KEYS / (RANDOM_KEYS - 1)).sqrt())
        wide = sqrtdk.measure(query, key, score=cosine(gain=d_k**0.5)).entropy_nats.flatten()
        figures += [
            largest("largest_logit_over_gain", extreme, d_k=d_k),
            mean("logit_std", stds[-1], d_k=d_k),
            mean("entropy_nats_at_gain_root_d_k", wide, d_k=d_k),
        ]
    ends = (stds[-1], stds[0])
    figures.append(bootstrap("logit_std_at_largest_over_smallest_d_k", ends, ratio_of_means, seed=run.seed))
    for keys in run["keys"]:
        half = _gain_for_half(keys)
        figures += [
            mean("weight_on_match", _match(run, keys, _gain(run, MATCH_DIM)), keys=keys),
            exact("gain_for_half", half, keys=keys),
            mean("weight_at_gain_for_half", _match(run, keys, half), keys=keys),
        ]
        figures += [mean("weight_by_gain", _match(run, keys, gain), keys=keys, gain=gain) for gain in run["gains"]]
    return Measured(figures, (_plot(Figures(figures), run),))


def _gain(run: Run, d_k: int) -> float:
    return float(run["gain"] * d_k ** run["gain_power"])


def _gain_for_half(keys: int) -> float:
    """The g of g = log(n - 1) + g^2 / (2 d): the match's e^g is the sum of e^(g cos) over keys with cos ~ N(0, 1/d)."""
    return MATCH_DIM - math.sqrt(MATCH_DIM**2 - 2.0 * MATCH_DIM * math.log(keys - 1))


def _match(run: Run, keys: int, gain: float) -> Tensor:
    """Weight on a key that equals the query, among random keys."""
    query, key = own_keys(run.generator("match", keys), run["matches"], keys, MATCH_DIM)
    key[:, :1] = query
    return sqrtdk.measure(query, key, score=cosine(gain=gain)).peak.flatten()


def _plot(figures: Figures, run: Run) -> Plot:
    return Plot(
        "match",
        Text(
            "Weight on a key that is equal to the query, among random keys, over the gain.",
            "与查询相同的键在随机键之中得到的权重，随增益的变化。",
        ),
        "gain",
        "weight on the match",
        tuple(over(f"{keys} keys", figures.all("weight_by_gain", keys=keys), "gain") for keys in run["keys"]),
        x_axis="log",
        lines=(("half", 0.5),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    bare, half, at_half = (
        figures.all(name)[-1] for name in ("weight_on_match", "gain_for_half", "weight_at_gain_for_half")
    )
    entropy = figures.all("entropy_nats_at_gain_root_d_k")[-1]
    small, *_, large = figures.all("logit_std")
    scaled = number(expected_entropy_nats(RANDOM_KEYS, 1.0))
    return Text(
        "A cosine lies in [-1, 1] whatever d_k is, so nothing grows with it. But only the bound is constant: the "
        f"cosines of random vectors shrink as 1/sqrt(d_k), from a standard deviation of {small} at d_k = "
        f"{small.at['d_k']} to {large} at {large.at['d_k']}. And no weight can be more than e^2 times another: over n "
        f"keys the largest is at most e^2/(e^2 + n - 1). Even a key equal to the query gets a weight of {bare} among "
        f"{bare.at['keys']} keys. Cosine attention needs a gain, and that is a scale, usually a learned one. Two "
        "useful values: sqrt(d_k), which keeps random rows alike at every d_k and gives them the entropy of scaled "
        f"dot products ({entropy} nats at d_k = {entropy.at['d_k']}, where logits of standard deviation 1 have "
        f"{scaled}), and the g with g = log(n - 1) + g^2/(2 d_k), at which the match has half of the weight: {half} "
        f"for {half.at['keys']} keys at d_k = {MATCH_DIM}, where it has {at_half}.",
        "无论 d_k 多大，余弦都在 [-1, 1] 之内，没有什么会随 d_k 增长。但不变的只是上界：随机向量的余弦按 1/sqrt(d_k) "
        f"缩小，d_k = {small.at['d_k']} 时标准差为 {small}，d_k = {large.at['d_k']} 时为 {large}。"
        "而且任何权重最多是另一个的 e^2 倍：共有 n 个键时，最大权重不超过 e^2/(e^2 + n - 1)。"
        f"即使某个键与查询完全相同，在 {bare.at['keys']} 个键中它也只得到 {bare} 的权重。余弦注意力需要一个增益，"
        "而增益就是缩放，通常由学习得到。有两个值可供参考：一是 sqrt(d_k)，它使随机行在任何 d_k 下都相同，"
        f"且熵与缩放点积相同（d_k = {entropy.at['d_k']} 时为 {entropy} nat，而标准差为 1 的 logit 为 {scaled} nat）；"
        f"二是满足 g = log(n - 1) + g^2/(2 d_k) 的 g，此时相同的键恰好得到一半的权重：在 d_k = {MATCH_DIM}、"
        f"{half.at['keys']} 个键时 g = {half}，实测权重为 {at_half}。",
    )


CLAIM = Claim(
    id="cosine-unscaled",
    group="factors",
    sources=("S0", "S2"),
    statement=Text("Cosine attention needs no scale.", "余弦注意力不需要缩放。"),
    formula=r"-g \le g \, \frac{q \cdot k}{|q| \, |k|} \le g, \qquad p_{\max} \le \frac{e^{2g}}{e^{2g} + n - 1}",
    method=Text(
        "Cosine scores without a gain, on random rows for several d_k: the largest magnitude of all logits, and the "
        "standard deviation of a row. Then rows in which one key equals the query: the weight on it. No scale needed "
        "means that the bound and the typical range (within a factor of 2) do not depend on d_k, and that such a key "
        "gets at least half of the weight among 64 keys or more.",
        "对若干 d_k 的随机行，使用不带增益的余弦得分，测量所有 logit 的最大绝对值，以及一行的标准差；"
        "再取其中一个键与查询相同的行，测量它得到的权重。“不需要缩放”有三层意思：上界与 d_k 无关；典型范围与 d_k "
        "无关（相差不到一倍）；在 64 个或更多的键中，相同的键至少得到一半的权重。",
    ),
    control=Text(
        "The scores have a gain of 2.5 sqrt(d_k): random rows are alike at every d_k, and the match is found.",
        "得分带有 2.5 sqrt(d_k) 的增益：无论 d_k 多大，随机行的范围都相同，而且能找到相同的键。",
    ),
    parameters={
        "dims": (16, 64, 256, 1024),
        "rows": 500,
        "matches": 60,
        "keys": (64, 1024),
        "gain": 1.0,
        "gain_power": 0.0,
        "gains": (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0),
    },
    quick={"dims": (16, 256), "rows": 100, "matches": 20, "gains": (1.0, 10.0)},
    flipped={"gain": 2.5, "gain_power": 0.5},
    measure=measure,
    parts=(
        Part(
            Text("the logits stay within the gain, whatever d_k", "无论 d_k 多大，logit 都不超出增益"),
            (Expect("largest_logit_over_gain", high=1.0),),
        ),
        Part(
            Text(
                "their standard deviation over random keys does not depend on d_k",
                "logit 在随机键上的标准差与 d_k 无关",
            ),
            (Expect("logit_std_at_largest_over_smallest_d_k", low=0.5, high=2.0),),
        ),
        Part(
            Text(
                "a key equal to the query gets at least half of the weight",
                "与查询相同的键至少得到一半的权重",
            ),
            (Expect("weight_on_match", low=0.5),),
        ),
    ),
    why=why,
)
