"""amp-scaling: under mixed precision the scale matters more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, Arm, differences, list_figures, train_arms
from sqrtdk_lab._rows import attention_weights, factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, series_over
from sqrtdk_lab.intervals import bootstrap, geometric_mean, mean, ratio_of_means
from sqrtdk_lab.training.models import StoredProducts
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

LOGIT_PLACES = ("kernel", "stored")  # the logits stay in a kernel in float32, or are stored in bfloat16
HALF, TWICE = 0.5, 2.0
GROWS = 0.02  # nats per symbol; a gap equal in both precisions stays below it
LARGEST_FP16 = torch.finfo(torch.float16).max


def measure(run: ExperimentRun) -> ExperimentResult:
    """The gap left by a missing scale, in float32 and in autocast; the rounding error of the weights; the range."""
    trained = [figure for task in run["tasks"] for figure in _trained(run, task)]
    rounded = [figure for kind in LOGIT_PLACES for figure in _rounded(run, kind)]
    found = Figures(trained + rounded)
    gaps = Plot(
        "gap",
        WORDS("plot.gap", d_k=run["d_k"]),
        "precision, place of the logits",
        "loss gap, nats a symbol",
        tuple(
            series_over(task, found.all("loss_gap_nats", task=task), "precision", style="bars") for task in run["tasks"]
        ),
    )
    errors = Plot(
        "rounding",
        WORDS("plot.rounding"),
        "$d_k$",
        "total variation",
        tuple(
            series_over(f"{label}, {kind}", found.all("weight_error", arm=arm, logits=kind), "d_k")
            for kind in LOGIT_PLACES
            for label, arm in (("no scale", "none"), (r"$1/\sqrt{d_k}$", "sqrt_dk"))
        ),
        x_axis="log",
        y_axis="log",
    )
    return ExperimentResult(trained + rounded, (gaps, errors))


def _trained(run: ExperimentRun, task: str) -> list[Figure]:
    bare, d_k = run["bare"], run["d_k"]
    sides = tuple(dict.fromkeys((bare, "sqrt_dk")))
    single = train_arms(run, {side: _design(task, d_k, side) for side in sides})
    pairs = [(side, kind) for side in sides for kind in LOGIT_PLACES]
    mixed = train_arms(
        run,
        {(s, kind): _design(task, d_k, s) | {"precision": "bfloat16", "logits": kind} for s, kind in pairs},
        dict.fromkeys(pairs, run["mixed_rates"]),
    )
    before = differences(single[bare], single["sqrt_dk"])
    figures = [mean("loss_gap_nats", before, task=task, precision="float32")]
    for kind in LOGIT_PLACES:
        after = differences(mixed[bare, kind], mixed["sqrt_dk", kind])
        both = list(zip(before, after, strict=True))
        figures.append(mean("loss_gap_nats", after, task=task, precision=f"bfloat16, {kind}"))
        figures.append(mean("gap_change_nats", [b - a for a, b in both], task=task, logits=kind))
        beyond = [b - (1 + HALF) * a for a, b in both]
        figures.append(mean("gap_beyond_half_more_nats", beyond, task=task, logits=kind))
    products = [_largest_product(curves, bare, d_k) / LARGEST_FP16 for curves in _curves(single[bare])]
    return [*figures, geometric_mean("product_over_fp16_max", products, task=task)]


def _design(task: str, d_k: int, scale: str) -> dict[str, object]:
    return {"task": task, "head_dim": d_k, "scale": scale}


def _curves(arm: Arm) -> list[Mapping[str, list[float]]]:
    return [result["curves"] for result in arm.results[arm.rate]]


def _largest_product(curves: Mapping[str, list[float]], scale: str, d_k: int) -> float:
    """Largest |q . k| observed in a run, before any scale."""
    return max(map(abs, [*curves["max_logit"], *curves["min_logit"]])) / factor(scale, d_k)


def _rounded(run: ExperimentRun, kind: str) -> list[Figure]:
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
    both = tuple(errors.values())  # of the last d_k, the largest
    return [*figures, bootstrap("weight_error_ratio", both, ratio_of_means, seed=run.seed, logits=kind, d_k=d_k)]


def _error(query: Tensor, key: Tensor, kind: str, scale: float) -> Tensor:
    """Total variation between the weights in autocast and the exact ones, for each draw."""
    with torch.autocast("cpu", torch.bfloat16):
        found = attention_weights(
            query.float(), key.float(), scale, score=StoredProducts() if kind == "stored" else None
        )
    exact = attention_weights(query.double(), key.double(), scale)
    return (found.double() - exact).abs().sum(-1).flatten() / 2


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    costs = list_figures(figures.all("loss_gap_nats", precision="float32"))
    kernel = list_figures(figures.all("gap_change_nats", logits="kernel"))
    stored = list_figures(figures.all("gap_change_nats", logits="stored"))
    products = list_figures(figures.all("product_over_fp16_max"))
    inside, outside = (figures("weight_error_ratio", logits=kind) for kind in LOGIT_PLACES)
    return WORDS("why", costs=costs, kernel=kernel, stored=stored, outside=outside, inside=inside, products=products)


def _grows(kind: str) -> ClaimPart:
    return ClaimPart(
        WORDS(f"part.grows_{kind}"), (Expect("gap_beyond_half_more_nats", low=GROWS, at={"logits": kind}),)
    )


def _moves(kind: str) -> ClaimPart:
    return ClaimPart(WORDS(f"part.moves_{kind}"), (Expect("weight_error_ratio", low=TWICE, at={"logits": kind}),))


CLAIM = Claim(
    id="amp-scaling",
    group="precision",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"|\mathrm{bf16}(z) - z| \le 2^{-8} |z|, \qquad \mathrm{sd}(q \cdot k) = \sqrt{d_k}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        **FULL_TRAINING,
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
        _grows("kernel"),
        _grows("stored"),
        _moves("kernel"),
        _moves("stored"),
        ClaimPart(
            WORDS("part.fp16_range"),
            (Expect("product_over_fp16_max", low=1.0),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
