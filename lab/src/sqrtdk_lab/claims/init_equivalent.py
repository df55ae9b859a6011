"""init-equivalent: whether small q and k at the start have the effect of the scale, then and in training."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.messages import Text
from sqrtdk_lab._arms import FULL_TRAINING, QUICK, Arm, curve_plots, train_arms
from sqrtdk_lab._rows import dot_products
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Plot, series_over
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

ADAM_RATE = 1e-3
WIDTH, TOKENS = 64, 16  # of the layer whose first step is measured


def measure(run: ExperimentRun) -> ExperimentResult:
    """Variance at the start for both readings, the first step of Adam, and the held-out losses."""
    figures: list[Figure] = []
    for d_k in run["dims"]:
        product = dot_products(run.generator("pairs", d_k), run["pairs"], d_k)
        for reading, power in run["powers"].items():
            variance = d_k**-power
            figures.append(mean("variance_at_the_start", (variance * product) ** 2, d_k=d_k, reading=reading))
        moved = [_moved_over_scaled(run, d_k, number) for number in range(run["layers"])]
        figures.append(geometric_mean("first_step_over_scaled", moved, d_k=d_k))
    large = run["trained_dim"]
    drawn, scaled = _arms(run)
    losses = zip(drawn.best, scaled.best, strict=True)
    figures += [
        geometric_mean("loss_over_scaled", [one / other for one, other in losses], d_k=large),
        geometric_mean("held_out_loss_nats", drawn.best, arm="drawn", d_k=large),
        geometric_mean("held_out_loss_nats", scaled.best, arm="scaled", d_k=large),
    ]
    pair = {"no scale, small start": drawn, r"$1/\sqrt{d_k}$": scaled}
    return ExperimentResult(figures, (_plot(Figures(figures)), *curve_plots(pair, "strings", large)[:2]))


def _arms(run: ExperimentRun) -> tuple[Arm, Arm]:
    design = {"task": "strings", "head_dim": run["trained_dim"]}
    arms = {
        "drawn": {**design, "scale": "none", "init": run["start"]},
        "scaled": {**design, "scale": "sqrt_dk", "init": "unit"},
    }
    trained = train_arms(run, arms, {"drawn": run["drawn_rates"], "scaled": run["rates"]})
    return trained["drawn"], trained["scaled"]


def _moved_over_scaled(run: ExperimentRun, d_k: int, number: int) -> float:
    """How far the first step of Adam moves the logits, in rms, over how far it does with the scale."""
    rng = run.generator("layer", d_k, number)
    x, target = (torch.randn(TOKENS, WIDTH, generator=rng) for _ in range(2))
    weights = torch.randn(2, WIDTH, d_k, generator=rng) / WIDTH**0.5
    small = d_k ** (-run["powers"]["variance"] / 2)  # standard deviation of a component of q and of k
    drawn, scaled = _moved(x, target, small * weights, 1.0), _moved(x, target, weights, d_k**-0.5)
    return drawn / scaled


def _moved(x: Tensor, target: Tensor, weights: Tensor, scale: float) -> float:
    trained = weights.clone().requires_grad_()

    def logits() -> Tensor:
        return scale * (x @ trained[0]) @ (x @ trained[1]).mT

    before = logits().detach()
    adam = torch.optim.Adam([trained], lr=ADAM_RATE)
    output = attention(x @ trained[0], x @ trained[1], x, scale=scale)
    assert isinstance(output, Tensor)
    (output * target).sum().backward()  # type: ignore[no-untyped-call]
    adam.step()
    return float((logits().detach() - before).square().mean().sqrt())


def _plot(figures: Figures) -> Plot:
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "$d_k$",
        r"variance of $q \cdot k$ at the start",
        tuple(
            series_over(f"no scale, {label}", figures.all("variance_at_the_start", reading=reading), "d_k")
            for reading, label in (
                ("variance", r"variance $1/\sqrt{d_k}$"),
                ("deviation", r"standard deviation $1/\sqrt{d_k}$"),
            )
        ),
        x_axis="log",
        y_axis="log",
        lines=(("with the scale", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    ratio = figures("loss_over_scaled")
    found = figures.all("variance_at_the_start", reading="variance")
    d_k = max(float(figure.at["d_k"]) for figure in found)
    return WORDS(
        "why",
        d_k=f"{d_k:g}",
        variance=figures("variance_at_the_start", reading="variance", d_k=d_k),
        deviation=figures("variance_at_the_start", reading="deviation", d_k=d_k),
        moved=figures("first_step_over_scaled", d_k=d_k),
        trained=ratio.at["d_k"],
        drawn=figures("held_out_loss_nats", arm="drawn"),
        scaled=figures("held_out_loss_nats", arm="scaled"),
        ratio=ratio,
    )


def _start(reading: str) -> ClaimPart:
    bar = Expect("variance_at_the_start", low=0.95, high=1.05, at={"reading": reading})
    return ClaimPart(WORDS(f"part.{reading}"), (bar,))


CLAIM = Claim(
    id="init-equivalent",
    group="statistics",
    sources=("S0",),
    statement=WORDS("statement"),
    formula=r"\frac{q}{d^{1/4}} \cdot \frac{k}{d^{1/4}} = \frac{q \cdot k}{\sqrt{d}}, \qquad "
    r"|\Delta w| \approx \eta \text{ in either (Adam)}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        **FULL_TRAINING,
        "drawn_rates": FULL_TRAINING["rates"],
        "trained_dim": 512,
        "start": "folded",
        "dims": (16, 64, 256, 1024),
        "pairs": 100_000,
        "layers": 40,
        "powers": {"variance": 0.5, "deviation": 1.0},
    },
    # In the quick run each arm has the better of the two rates of `QUICK`, and more seeds.
    quick={
        **QUICK,
        "seeds": 8,
        "rates": QUICK["rates"][1:],
        "drawn_rates": QUICK["rates"][:1],
        "trained_dim": 64,
        "dims": (16, 64, 256),
        "pairs": 40_000,
        "layers": 10,
    },
    flipped={"powers": {"variance": 0.0, "deviation": 0.0}, "start": "unit"},
    measure=measure,
    parts=(
        _start("variance"),
        _start("deviation"),
        # 5%, as for the variance; equal arms differ by exactly 0
        ClaimPart(WORDS("part.training"), (Expect("loss_over_scaled", low=0.95, high=1.05),)),
    ),
    why=why,
    condition=WORDS("condition"),
)
