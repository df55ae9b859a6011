"""relative-scale: which position scores add to the variance that the scale must undo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk.positions import alibi, deberta, rope, shaw, t5_bias
from sqrtdk.scales import disentangled
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

HEADS, HEAD_DIM = 4, 64
LAYER_WIDTH = HEADS * HEAD_DIM
FRESH_STD = 0.02  # initial value in published code for these tables


def _deberta(length: int, std: float, rng: torch.Generator) -> Any:
    term = deberta(HEADS, HEAD_DIM, max_distance=length)
    nn.init.normal_(term.embedding, std=std, generator=rng)
    for projection in (term.key_proj, term.query_proj):
        assert isinstance(projection, nn.Linear)
        nn.init.normal_(projection.weight, std=LAYER_WIDTH**-0.5, generator=rng)
    return term.double()


def _shaw(length: int, std: float, rng: torch.Generator) -> Any:
    term = shaw(HEAD_DIM, max_distance=length, heads=HEADS)
    nn.init.normal_(term.table, std=std, generator=rng)
    return term.double()


def _t5(length: int, std: float, rng: torch.Generator) -> Any:
    term = t5_bias(HEADS)
    nn.init.normal_(term.embedding.weight, std=std, generator=rng)
    return term.double()


def _alibi(length: int, std: float, rng: torch.Generator) -> Any:
    return alibi(HEADS, symmetric=True)


BIAS_BY_NAME: dict[str, Callable[[int, float, torch.Generator], Any]] = {
    "none": lambda length, std, rng: None,
    "DeBERTa": _deberta,
    "DeBERTa, fresh": lambda length, std, rng: _deberta(length, FRESH_STD * std, rng),
    "Shaw": _shaw,
    "RoPE": lambda length, std, rng: None,
    "T5": _t5,
    "ALiBi": _alibi,
}
ROTATED = {"RoPE"}
OWN_SCALES: dict[str, Any] = {"DeBERTa": disentangled(3), "T5": 1.0}  # scales of the papers that are not 1/sqrt(d_k)


def measure(run: ExperimentRun) -> ExperimentResult:
    """Variance over the keys of a row of everything that the scale multiplies, over d_k, one number per new layer."""
    figures = []
    for kind in BIAS_BY_NAME:
        layers = [_layer(run, kind, draw) for draw in range(run["draws"])]
        figures.append(
            mean("scaled_variance_over_d_k", [(one(1.0) - one(0.0)) / HEAD_DIM for one in layers], kind=kind)
        )
        if kind in OWN_SCALES:
            stds = [math.sqrt(one(OWN_SCALES[kind])) for one in layers]
            figures.append(mean("logit_std_at_its_own_scale", stds, kind=kind))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _layer(run: ExperimentRun, kind: str, draw: int) -> Callable[[Any], float]:
    """Build a new layer; return the variance of its logits over the keys of a row, as a function of the scale."""
    rng, length = run.generator(kind, draw), run["length"]
    query, key = (torch.randn(HEADS, length, HEAD_DIM, generator=rng, dtype=torch.float64) for _ in range(2))
    if kind in ROTATED:
        query, key = rope(query, key)
    with torch.no_grad():
        term = BIAS_BY_NAME[kind](length, run["table_std"], rng)

    def variance(scale: Any) -> float:
        return float(sqrtdk.measure(query, key, scale=scale, bias=term).variance.mean() * length / (length - 1))

    return variance


def _plot(figures: Figures) -> Plot:
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "position term",
        "variance / $d_k$",
        (series_over("measured", figures.all("scaled_variance_over_d_k"), "kind", style="bars"),),
        lines=(("product alone", 1.0), ("three terms", 3.0)),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def found(kind: str) -> str:
        return str(figures("scaled_variance_over_d_k", kind=kind))

    std, bare = (figures("logit_std_at_its_own_scale", kind=kind) for kind in OWN_SCALES)
    return WORDS(
        "why",
        deberta=found("DeBERTa"),
        std=std,
        shaw=found("Shaw"),
        fresh_std=FRESH_STD,
        fresh=found("DeBERTa, fresh"),
        rope=found("RoPE"),
        t5=found("T5"),
        alibi=found("ALiBi"),
        bare=bare,
    )


def _changes(name: str, kind: str, low: float = 1.5, high: float = 4.0) -> ClaimPart:
    expect = Expect("scaled_variance_over_d_k", low=low, high=high, at={"kind": kind})
    return ClaimPart(WORDS(f"part.{name}"), (expect,))


CLAIM = Claim(
    id="relative-scale",
    group="factors",
    sources=("S0", "arXiv:2006.03654", "arXiv:1803.02155"),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}[ q_i \cdot k_j + q_i \cdot r_{ij} + s_{ij} \cdot k_j ] = 3 d_k",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"draws": 40, "length": 64, "table_std": 1.0},
    quick={"draws": 8, "length": 48},
    flipped={"table_std": 0.0},
    measure=measure,
    parts=(
        _changes("deberta", "DeBERTa", 2.7, 3.3),
        _changes("fresh", "DeBERTa, fresh"),
        _changes("shaw", "Shaw"),
        _changes("rope", "RoPE"),
        _changes("t5", "T5"),
        _changes("alibi", "ALiBi"),
    ),
    why=why,
    condition=WORDS("condition"),
)
