"""dynamic: whether the scale adjusts itself to its inputs."""

from __future__ import annotations

from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._rows import attention_weights, factor, own_keys
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, Series, curve_series, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)


def measure(run: ExperimentRun) -> ExperimentResult:
    """The factor that the weights of each input show, and the standard deviation of its logits."""
    figures, factors = [], {}
    d_k, inputs = run["d_k"], run["inputs"]
    for std in run["component_stds"]:
        query, key = own_keys(run.generator("inputs", std), inputs, run["keys"], d_k, queries=run["keys"], std=std)
        product = query @ key.mT
        deviation = product.flatten(1).std(-1)
        factors[std] = _factor_of(_weights(query, key, run["rule"], deviation), product)
        place = {"component_std": std}
        figures += [
            mean("factor", factors[std], **place),
            mean("deviation_of_the_logits", factors[std] * deviation, **place),
            mean("deviation_without_the_scale", deviation, **place),
        ]
    least, most = min(factors), max(factors)
    figures.append(geometric_mean("factor_of_small_over_large_inputs", factors[least] / factors[most]))
    return ExperimentResult(figures, (_plot(Figures(figures), run),))


def _weights(query: Tensor, key: Tensor, rule: str, deviation: Tensor) -> Tensor:
    d_k = query.shape[-1]
    if rule != "measured":
        return attention_weights(query, key, factor(rule, d_k))
    # a factor for each input, from the input itself
    return attention_weights(query / deviation[:, None, None], key, 1.0)


def _factor_of(weights: Tensor, product: Tensor) -> Tensor:
    """Return the factor on the products of each input: the slope of log p against q . k within its rows."""
    y, x = (rows - rows.mean(-1, keepdim=True) for rows in (weights.log(), product))
    return (x * y).sum((-1, -2)) / (x * x).sum((-1, -2))


def _plot(figures: Figures, run: ExperimentRun) -> Plot:
    scaled, unscaled = (figures.all(name) for name in ("deviation_of_the_logits", "deviation_without_the_scale"))
    stds = run["component_stds"]
    series: tuple[Series, ...] = (
        series_over("unscaled", unscaled, "component_std"),
        series_over("scaled", scaled, "component_std"),
        curve_series("adjusted to each input", stds, (1.0 for _ in stds), style="dashed"),
    )
    return Plot(
        "deviation",
        WORDS("plot.deviation", d_k=run["d_k"]),
        "standard deviation of the components",
        "standard deviation of the logits",
        series,
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    found = figures.all("deviation_of_the_logits")
    least, most = found[0], found[-1]
    return WORDS(
        "why",
        ratio=figures("factor_of_small_over_large_inputs"),
        factor=figures("factor", component_std=least.at["component_std"]),
        small=least.at["component_std"],
        least=least,
        large=most.at["component_std"],
        most=most,
    )


CLAIM = Claim(
    id="dynamic",
    group="statistics",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"s = \frac{1}{\sqrt{d_k}}, \qquad \frac{\partial s}{\partial q} = \frac{\partial s}{\partial k} = 0",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "component_stds": (0.5, 0.7, 1.0, 1.4, 2.0),
        "d_k": 64,
        "keys": 16,
        "inputs": 2000,
        "rule": "sqrt_dk",
    },
    quick={"component_stds": (0.5, 1.0, 2.0), "inputs": 200},
    flipped={"rule": "measured"},
    measure=measure,
    parts=(
        # a factor that followed its inputs would differ by 16 between these; 2 is far from both that and 1
        ClaimPart(WORDS("part.factor"), (Expect("factor_of_small_over_large_inputs", low=2.0),)),
        ClaimPart(WORDS("part.deviation"), (Expect("deviation_of_the_logits", low=0.9, high=1.1),)),
    ),
    why=why,
)
