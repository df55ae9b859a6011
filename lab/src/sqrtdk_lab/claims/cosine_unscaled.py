"""cosine-unscaled: the range of cosine logits, and its consequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk.scores import cosine
from sqrtdk.theory import expected_entropy_nats
from sqrtdk_lab._rows import own_keys
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, format_figure, series_over
from sqrtdk_lab.intervals import bootstrap, exact, largest_draw, mean, ratio_of_means
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

MATCH_DIM = 64
RANDOM_KEYS = 64
FEWEST_KEYS = 3  # of 2 keys the match has at least half of the weight under any gain


def measure(run: ExperimentRun) -> ExperimentResult:
    """Range of cosine logits over d_k, and the weight on a key equal to the query over the gain."""
    figures, stds = [], []
    for d_k in run["dims"]:
        query, key = own_keys(run.generator("rows", d_k), run["rows"], RANDOM_KEYS, d_k)
        gain = _gain(run, d_k)
        rows = sqrtdk.measure(query, key, score=cosine(gain=gain))
        extreme = torch.maximum(rows.max_logit.abs(), rows.min_logit.abs()).flatten() / gain
        stds.append((rows.variance.flatten() * RANDOM_KEYS / (RANDOM_KEYS - 1)).sqrt())
        wide = sqrtdk.measure(query, key, score=cosine(gain=d_k**0.5)).entropy_nats.flatten()
        figures += [
            largest_draw("largest_logit_over_gain", extreme, d_k=d_k),
            mean("logit_std", stds[-1], d_k=d_k),
            mean("entropy_nats_at_gain_root_d_k", wide, d_k=d_k),
        ]
    ends = (stds[-1], stds[0])
    figures.append(bootstrap("logit_std_at_largest_over_smallest_d_k", ends, ratio_of_means, seed=run.seed))
    for keys in run["keys"]:
        figures.append(mean("weight_on_match", _match(run, keys, _gain(run, MATCH_DIM)), keys=keys))
        if keys > FEWEST_KEYS:
            half = _gain_for_half(keys)
            figures.append(exact("gain_for_half", half, keys=keys))
            figures.append(mean("weight_at_gain_for_half", _match(run, keys, half), keys=keys))
        figures += [mean("weight_by_gain", _match(run, keys, gain), keys=keys, gain=gain) for gain in run["gains"]]
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _gain(run: ExperimentRun, d_k: int) -> float:
    return float(run["gain"] * d_k ** run["gain_power"])


def _gain_for_half(keys: int) -> float:
    """Solve g = log(n - 1) + g^2 / (2 d): the match's e^g equals the sum of e^(g cos) over keys with cos ~ N(0,
    1/d)."""
    return MATCH_DIM - math.sqrt(MATCH_DIM**2 - 2.0 * MATCH_DIM * math.log(keys - 1))


def _match(run: ExperimentRun, keys: int, gain: float) -> Tensor:
    """Weight on a key that equals the query, among random keys."""
    query, key = own_keys(run.generator("match", keys), run["matches"], keys, MATCH_DIM)
    key[:, :1] = query
    return sqrtdk.measure(query, key, score=cosine(gain=gain)).peak.flatten()


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    return Plot(
        "match",
        WORDS("plot.match"),
        "gain",
        "weight on the match",
        tuple(series_over(f"{keys} keys", figures.all("weight_by_gain", keys=keys), "gain") for keys in run["keys"]),
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
    scaled = format_figure(expected_entropy_nats(RANDOM_KEYS, 1.0))
    return WORDS(
        "why",
        small=small,
        small_dim=small.at["d_k"],
        large=large,
        large_dim=large.at["d_k"],
        few=figures("weight_on_match", keys=FEWEST_KEYS),
        few_keys=FEWEST_KEYS,
        bare=bare,
        bare_keys=bare.at["keys"],
        entropy=entropy,
        entropy_dim=entropy.at["d_k"],
        scaled=scaled,
        half=half,
        half_keys=half.at["keys"],
        match_dim=MATCH_DIM,
        at_half=at_half,
    )


def _finds_match(name: str, *keys: int) -> ClaimPart:
    """Without a scale a key equal to the query still outweighs all others together."""
    return ClaimPart(
        WORDS(f"part.{name}"), tuple(Expect("weight_on_match", low=0.5, at={"keys": count}) for count in keys)
    )


CLAIM = Claim(
    id="cosine-unscaled",
    group="factors",
    sources=("S0", "S2"),
    statement=WORDS("statement"),
    formula=r"-g \le g \, \frac{q \cdot k}{|q| \, |k|} \le g, \qquad p_{\max} \le \frac{e^{2g}}{e^{2g} + n - 1}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 64, 256, 1024),
        "rows": 500,
        "matches": 60,
        "keys": (FEWEST_KEYS, 64, 1024),
        "gain": 1.0,
        "gain_power": 0.0,
        "gains": (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0),
    },
    quick={"dims": (16, 256), "rows": 100, "matches": 20, "gains": (1.0, 10.0)},
    flipped={"gain": 2.5, "gain_power": 0.5},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.bounded"),
            (Expect("largest_logit_over_gain", high=1.0),),
        ),
        _finds_match("few", FEWEST_KEYS),
        _finds_match("many", 64, 1024),
    ),
    why=why,
    condition=WORDS("condition"),
)
