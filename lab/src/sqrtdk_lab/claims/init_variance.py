"""init-variance: the standard deviation of the logits under each initialisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sqrtdk.messages import Text
from sqrtdk_lab._rows import factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

WIDTH, HEADS = 768, 12
HEAD_DIM = WIDTH // HEADS
# Rows of the matrix that is drawn, where it is not that of all heads: q, k and v in one, as in
# torch.nn.MultiheadAttention; or the matrix of one head alone, as formulas write it.
MATRIX_ROWS = {"Xavier packed": 3 * WIDTH, "Xavier, one head": HEAD_DIM}
PACKED_START = "Xavier packed"

INITS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "Xavier uniform": lambda w, rng: nn.init.xavier_uniform_(w, generator=rng),
    "Xavier normal": lambda w, rng: nn.init.xavier_normal_(w, generator=rng),
    "orthogonal": lambda w, rng: nn.init.orthogonal_(w, generator=rng),
    "LeCun normal": lambda w, rng: nn.init.normal_(w, std=WIDTH**-0.5, generator=rng),  # variance 1 / fan_in
    "Xavier packed": lambda w, rng: nn.init.xavier_uniform_(w, generator=rng),
    "Xavier, one head": lambda w, rng: nn.init.xavier_uniform_(w, generator=rng),
    "Kaiming normal": lambda w, rng: nn.init.kaiming_normal_(w, generator=rng),
    "nn.Linear": lambda w, rng: nn.init.kaiming_uniform_(w, a=5**0.5, generator=rng),
    "N(0, 0.02)": lambda w, rng: nn.init.normal_(w, std=0.02, generator=rng),
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Standard deviation of the logits of fresh layers on normalised inputs."""
    figures = []
    for name in INITS:
        products = _product_std(run, name)
        for case in ("with the scale", "without"):
            figures.append(mean("logit_std", factor(run[case], HEAD_DIM) * products, init=name, case=case))
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _product_std(run: ExperimentRun, name: str) -> Tensor:
    """Root mean square of q . k in the first head, one number for each freshly initialised layer."""
    rng, found = run.generator("layers", name), []
    rows = MATRIX_ROWS.get(name, WIDTH)
    for _ in range(run["layers"]):
        x = nn.functional.layer_norm(torch.randn(run["tokens"], WIDTH, generator=rng), (WIDTH,))
        packed = INITS[name](torch.empty(rows, WIDTH), rng)
        other = packed[WIDTH:] if name == PACKED_START else INITS[name](torch.empty(rows, WIDTH), rng)
        query, key = (x @ weight[:HEAD_DIM].T for weight in (packed, other))
        product = query @ key.T
        away = ~torch.eye(len(x), dtype=torch.bool)  # a token with itself has another distribution
        found.append(product[away].double().square().mean().sqrt())
    return torch.stack(found)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "std",
        WORDS("plot.std"),
        "initialisation",
        "standard deviation of the logits",
        tuple(
            series_over(case, figures.all("logit_std", case=case), "init", style="bars")
            for case in ("with the scale", "without")
        ),
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def scaled(name: str) -> str:
        return str(figures("logit_std", init=name, case="with the scale"))

    plain = figures("logit_std", init="Xavier uniform", case="without")
    return WORDS(
        "why",
        xavier=scaled("Xavier uniform"),
        packed=scaled("Xavier packed"),
        head_dim=HEAD_DIM,
        one_head=scaled("Xavier, one head"),
        kaiming=scaled("Kaiming normal"),
        linear=scaled("nn.Linear"),
        fixed=scaled("N(0, 0.02)"),
        plain=plain,
    )


# 15%: the intervals of the quick run reach 4%, and the starts that are not 1 are off by half or more.
ABOUT_ONE = (0.85, 1.15)


def _part(name: str) -> ClaimPart:
    return ClaimPart(
        WORDS("part.scaled", name=name),
        (Expect("logit_std", *ABOUT_ONE, {"init": name, "case": "with the scale"}),),
    )


CLAIM = Claim(
    id="init-variance",
    group="gradients",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\mathrm{std}\left[ \frac{q \cdot k}{\sqrt{d_k}} \right] = d_{\mathrm{model}} \, \mathrm{Var}[W]",
    method=WORDS("method", width=WIDTH, heads=HEADS, head_dim=HEAD_DIM),
    control=WORDS("control"),
    parameters={"layers": 40, "tokens": 128, "with the scale": "sqrt_dk", "without": "none"},
    quick={"layers": 8, "tokens": 64},
    flipped={"with the scale": "none"},
    measure=measure,
    parts=(
        *map(_part, INITS),
        ClaimPart(
            WORDS("part.unscaled"),
            (Expect("logit_std", *ABOUT_ONE, {"case": "without"}),),
        ),
    ),
    why=why,
    condition=WORDS("condition"),
)
