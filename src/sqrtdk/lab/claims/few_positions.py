"""few-positions: how many keys hold the unscaled weights, and whether those keys are the first or the last."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk.lab._rows import demo_weights, factor, products, windows
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figures, Plot, curve_series, format_figure
from sqrtdk.lab.intervals import bootstrap, exact, geometric_mean, mean, proportion
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.models.demo import load_demo
from sqrtdk.theory import expected_effective_keys

WORDS = words_of(__name__)

D_K, KEYS = 64, 64
DEMO_BY_SCALE = {"none": "demo:unscaled", "sqrt_dk": "demo"}
EFFECTIVE_KEYS_CLAIMED = 6.0  # keys
OFTEN = 0.1  # of the rows
MORE = 0.02  # of the rows, above the scaled twin
ENDS = ("first", "last")


def measure(run: ExperimentRun) -> ExperimentResult:
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
    return ExperimentResult(figures, _plots(counts, {of: one["behind"] for of, one in found.items()}))


def _effective(weights: Tensor) -> Tensor:
    return weights.square().sum(-1).reciprocal()


def _of_model(rule: str, text: Tensor, run: ExperimentRun) -> dict[str, Tensor]:
    """Means over layers, heads and later rows of the model trained with a scale, one for each window of text."""
    length, first = run["length"], run["first_row"]
    weights = demo_weights(load_demo(DEMO_BY_SCALE[rule]), text, factor(rule, D_K))[..., first:, :]
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
            WORDS("plot.random"),
            "position of the key",
            "share of rows",
            (
                curve_series("measured", range(KEYS), random_places.tolist()),
                curve_series("chance", (0, KEYS - 1), (1 / KEYS,) * 2, style="dashed"),
            ),
            lines=(("often", OFTEN),),
        ),
        Plot(
            "model",
            WORDS("plot.model"),
            "bytes before the current one",
            "share of rows",
            tuple(curve_series(of, range(near), places[:near].tolist()) for of, places in behind.items()),
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
    chance = {of: format_figure(figures("chance_of_a_place", of=of).value) for of in ("random keys", "model")}
    more = figures("more_there_than_scaled_twin", place="last")
    theory = format_figure(expected_effective_keys(KEYS, D_K**0.5)), format_figure(expected_effective_keys(KEYS, 1.0))
    return WORDS(
        "why",
        random=random,
        keys=KEYS,
        d_k=D_K,
        expected=theory[0],
        expected_scaled=theory[1],
        model=model,
        twin=twin,
        random_first=at["random keys", "first"],
        random_last=at["random keys", "last"],
        random_chance=chance["random keys"],
        model_last=at["model", "last"],
        model_first=at["model", "first"],
        model_chance=chance["model"],
        twin_last=at["scaled twin", "last"],
        twin_first=at["scaled twin", "first"],
        more=more,
    )


def _often(place: str) -> ClaimPart:
    absolute = Expect("largest_weight_there", low=OFTEN, at={"of": "model", "place": place})
    return ClaimPart(
        WORDS(f"part.model_{place}"), (absolute, Expect("more_there_than_scaled_twin", low=MORE, at={"place": place}))
    )


CLAIM = Claim(
    id="few-positions",
    group="saturation",
    sources=("S0", "S3"),
    statement=WORDS("statement"),
    formula=r"n_{\mathrm{eff}} = \frac{1}{\sum_j p_j^{2}}, \qquad "
    r"\mathrm{P}[\text{arg max}_j \, z_j = i] = \frac{1}{n} \text{ for exchangeable keys}",
    method=WORDS("method", few=f"{EFFECTIVE_KEYS_CLAIMED:g}", often=f"{OFTEN:.0%}", more=f"{MORE:.0%}"),
    control=WORDS("control"),
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
        ClaimPart(
            WORDS("part.random_few", few=f"{EFFECTIVE_KEYS_CLAIMED:g}", keys=KEYS),
            (Expect("effective_keys", high=EFFECTIVE_KEYS_CLAIMED, at={"of": "random keys"}),),
        ),
        ClaimPart(
            WORDS("part.random_ends"),
            (Expect("largest_weight_there", low=OFTEN, at={"of": "random keys"}),),
        ),
        ClaimPart(
            WORDS("part.model_few", few=f"{EFFECTIVE_KEYS_CLAIMED:g}"),
            (
                Expect("effective_keys", high=EFFECTIVE_KEYS_CLAIMED, at={"of": "model"}),
                Expect("effective_keys_over_scaled_twin", high=0.5),
            ),
        ),
        _often("first"),
        _often("last"),
    ),
    why=why,
    condition=WORDS("condition"),
)
