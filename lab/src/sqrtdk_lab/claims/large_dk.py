"""large-dk: the head dimension of large models."""

from __future__ import annotations

import json
import statistics
from importlib.resources import files
from typing import NamedTuple

from sqrtdk.messages import Text
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, Series
from sqrtdk_lab.intervals import exact
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

LARGE_FAMILY = 1e9  # parameters
VERY_LARGE = 512  # the largest dimension of S2's own example of saturation, which starts at 32
USUAL = (64, 256)


class ModelFamily(NamedTuple):
    """A row of the table that scripts/head_dims.py makes.

    Attributes:
        model_type: its name in transformers.
        head_dim: d_k, the largest of its attentions.
        d_model: width.
        parameters: of its default config.
    """

    model_type: str
    head_dim: int
    d_model: int
    parameters: int


def _table() -> list[ModelFamily]:
    found = json.loads((files("sqrtdk_lab") / "head_dims.json").read_text(encoding="utf-8"))
    return [ModelFamily(*row) for row in found["families"]]


def measure(run: ExperimentRun) -> ExperimentResult:
    """Median and share of very large dimensions, for small and large models."""
    table = _table()
    sizes = {
        "small": [family for family in table if family.parameters < LARGE_FAMILY],
        "large": [family for family in table if family.parameters >= LARGE_FAMILY],
    }
    figures = []
    for size, families in sizes.items():
        dims = [family._asdict()[run["dimension"]] for family in families]
        low, high = USUAL
        figures += [
            exact("families", len(families), size=size),
            exact("median", statistics.median(dims), size=size),
            exact("largest", max(dims), size=size),
            exact("share_very_large", statistics.mean(dim >= VERY_LARGE for dim in dims), size=size),
            exact("share_of_64_to_256", statistics.mean(low <= dim <= high for dim in dims), size=size),
            exact("median_d_model", statistics.median(family.d_model for family in families), size=size),
        ]
    return ExperimentResult(figures, (_plot(table),))


def _plot(table: list[ModelFamily]) -> Plot:
    parameters = tuple(float(family.parameters) for family in table)
    return Plot(
        "dimensions",
        WORDS("plot.dimensions"),
        "parameters",
        "dimension",
        (
            Series("$d_{model}$", parameters, tuple(float(family.d_model) for family in table), style="points"),
            Series("$d_k$", parameters, tuple(float(family.head_dim) for family in table), style="points"),
        ),
        x_axis="log",
        y_axis="log",
        lines=((f"very large: {VERY_LARGE}", VERY_LARGE),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(name: str, size: str = "large") -> str:
        return f"{figures(name, size=size).value:g}"

    median = figures("median", size="large").value
    return WORDS(
        "why",
        families=found("families"),
        median=found("median"),
        usual=f"{figures('share_of_64_to_256', size='large').value:.0%}",
        very_large=f"{figures('share_very_large', size='large').value:.0%}",
        bar=VERY_LARGE,
        largest=found("largest"),
        small_median=found("median", "small"),
        small_width=found("median_d_model", "small"),
        width=found("median_d_model"),
        std=f"{median**0.5:.1f}",
    )


CLAIM = Claim(
    id="large-dk",
    group="structure",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"d_k = \frac{d_{model}}{h}",
    method=WORDS("method", very_large=VERY_LARGE),
    control=WORDS("control"),
    parameters={"dimension": "head_dim"},
    quick={},
    flipped={"dimension": "d_model"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.most", very_large=VERY_LARGE),
            (Expect("share_very_large", low=0.5, at={"size": "large"}),),
        ),
    ),
    why=why,
)
