"""few-positions: how many keys hold the unscaled weights, and whether those keys are the first or the last."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk.models.demo import load_demo
from sqrtdk.theory import expected_effective_keys
from sqrtdk_lab._rows import demo_weights, factor, products, windows
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series, format_figure
from sqrtdk_lab.intervals import bootstrap, exact, geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

D_K, KEYS = 64, 64
DEMO_BY_SCALE = {"none": "demo:unscaled", "sqrt_dk": "demo"}
FEW_EFFECTIVE_KEYS = 6.0  # effective keys: fewer than a tenth of 64
# The ends are an example of such places if the largest weight is there more than twice as often as by chance: most of
# these rows would then not be there by chance.
FAVOURED = 2.0
AT_ALL = 1e-9  # more rows than with the scale, however few; equal sides differ by exactly 0
PLACES = ("first", "last", "an end")


def measure(run: ExperimentRun) -> ExperimentResult:
    """Effective keys, and the place of the largest weight, over random keys and in the embedded model."""
    random = _of_random(run)
    text = windows(run["windows"], run["length"], run.generator("text"))
    model, twin = (_of_model(rule, text, run) for rule in (run["scale"], "sqrt_dk"))
    seen = torch.arange(run["first_row"], run["length"], dtype=torch.float64) + 1  # keys of each row
    chance = {"random keys": 1 / KEYS, "model": float((1 / seen).mean())}
    figures = [exact("chance_of_a_place", share, of=of) for of, share in chance.items()]
    for of, one in (("random keys", random), ("model", model), ("scaled twin", twin)):
        figures.append(mean("effective_keys", one["effective"], of=of))
        by_chance = chance.get(of, chance["model"])
        for place in PLACES:
            # as often as one of two places would be by chance, if it may be either end
            share = one[place] / (by_chance * (2 if place == "an end" else 1))
            figures.append(bootstrap("share_over_chance", share, np.mean, seed=run.seed, of=of, place=place))
    figures.append(geometric_mean("effective_keys_over_scaled_twin", model["effective"] / twin["effective"]))
    ends = {"random keys": random["an end"] - random["an end, scaled"], "model": model["an end"] - twin["an end"]}
    figures += [mean("more_there_than_with_the_scale", more, of=of) for of, more in ends.items()]
    return ExperimentResult(
        figures, _plots(random["behind"], {"trained unscaled": model["behind"], "scaled twin": twin["behind"]})
    )


def _of_random(run: ExperimentRun) -> dict[str, Tensor]:
    """One number a row of random keys; and how often each place has the largest weight."""
    product = products(run.generator("rows"), draws=run["rows"], keys=KEYS, d_k=D_K)[:, 0]
    weights, scaled = ((product * factor(rule, D_K)).softmax(-1) for rule in (run["scale"], "sqrt_dk"))
    place, place_scaled = weights.argmax(-1), scaled.argmax(-1)
    first, last = (place == 0).double(), (place == KEYS - 1).double()
    return {
        "effective": _effective(weights),
        "first": first,
        "last": last,
        "an end": first + last,
        "an end, scaled": ((place_scaled == 0) | (place_scaled == KEYS - 1)).double(),
        "behind": torch.bincount(place, minlength=KEYS) / len(place),
    }


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
        "an end": ((largest == 0) | (behind == 0)).double().mean((1, 2, 3)),
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
        ),
        Plot(
            "model",
            WORDS("plot.model"),
            "bytes before the current one",
            "share of rows",
            tuple(curve_series(of, range(near), places[:near].tolist()) for of, places in behind.items()),
        ),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    random, model, twin = (figures("effective_keys", of=of) for of in ("random keys", "model", "scaled twin"))
    at = {
        f"{of}_{place}": figures("share_over_chance", of=name, place=place)
        for of, name in (("random", "random keys"), ("model", "model"), ("twin", "scaled twin"))
        for place in PLACES[:2]
    }
    chance = {of: format_figure(figures("chance_of_a_place", of=of).value) for of in ("random keys", "model")}
    more = figures("more_there_than_with_the_scale", of="model")
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
        random_chance=chance["random keys"],
        model_chance=chance["model"],
        more=more,
        **at,
    )


def _ends(of: str) -> ClaimPart:
    expects = (
        Expect("share_over_chance", low=FAVOURED, at={"of": of, "place": "an end"}),
        Expect("more_there_than_with_the_scale", low=AT_ALL, at={"of": of}),
    )
    return ClaimPart(WORDS(f"part.{of.split()[0]}_ends"), expects)


CLAIM = Claim(
    id="few-positions",
    group="saturation",
    sources=("S0", "S3"),
    statement=WORDS("statement"),
    formula=r"n_{\mathrm{eff}} = \frac{1}{\sum_j p_j^{2}}, \qquad "
    r"\mathrm{P}[\text{arg max}_j \, z_j = i] = \frac{1}{n} \text{ for exchangeable keys}",
    method=WORDS("method", few=f"{FEW_EFFECTIVE_KEYS:g}"),
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
            WORDS("part.random_few", few=f"{FEW_EFFECTIVE_KEYS:g}", keys=KEYS),
            (Expect("effective_keys", high=FEW_EFFECTIVE_KEYS, at={"of": "random keys"}),),
        ),
        ClaimPart(
            WORDS("part.model_few", few=f"{FEW_EFFECTIVE_KEYS:g}"),
            (
                Expect("effective_keys", high=FEW_EFFECTIVE_KEYS, at={"of": "model"}),
                Expect("effective_keys_over_scaled_twin", high=0.5),
            ),
        ),
        *(_ends(of) for of in ("random keys", "model")),
    ),
    why=why,
    condition=WORDS("condition"),
)
