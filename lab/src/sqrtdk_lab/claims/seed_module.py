"""seed-module: what a module of one head returns that is built as S4 describes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sqrtdk.messages import Text
from sqrtdk_lab._rows import factor
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, series_over
from sqrtdk_lab.intervals import exact, largest_draw, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

BATCH, LENGTH, D_MODEL = 2, 10, 512
NEAR_ONE = (0.8, 1.25)  # variance; the two starts are a factor of 9 apart
WEIGHT_STARTS = ("torch", "kept")


class OneHead(nn.Module):
    """Attention of one head after S4's description: three linear layers, products over sqrt(d_k), softmax.

    The source's own code is not part of this project.

    Args:
        d_model: channels of the input.
        d_k: channels of query, key and value.
        scale: factor on the products.
    """

    def __init__(self, d_model: int, d_k: int, scale: float) -> None:
        super().__init__()
        self.w_q = nn.Linear(d_model, d_k)
        self.w_k = nn.Linear(d_model, d_k)
        self.w_v = nn.Linear(d_model, d_k)
        self.scale = scale

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return output (B, L, d_k), weights (B, L, L) and logits (B, L, L) of the input (B, L, d_model)."""
        query, key, value = self.w_q(x), self.w_k(x), self.w_v(x)
        logits = query @ key.mT * self.scale
        weights = torch.softmax(logits, dim=-1)
        return weights @ value, weights, logits


@torch.no_grad()
def measure(run: ExperimentRun) -> ExperimentResult:
    """Shapes, sums of rows, and variance of the logits of fresh modules, for both starts of the weights."""
    figures = []
    for d_k in run["dims"]:
        for start in WEIGHT_STARTS:
            rng = run.generator("module", d_k, start)
            variances, sums, shapes = [], [], []
            scale = factor(run["scale"], d_k)
            for _ in range(run["modules"]):
                module = _fresh(d_k, start, scale, rng)
                output, weights, logits = module(torch.randn(BATCH, LENGTH, D_MODEL, generator=rng))
                shapes.append(output.shape == (BATCH, LENGTH, d_k) and weights.shape == (BATCH, LENGTH, LENGTH))
                sums.append((weights.double().sum(-1) - 1).abs().max().item())
                # The mean of a logit is 0, as the three matrices are drawn independently.
                variances.append(logits.double().square().mean().item())
            at = {"d_k": d_k, "start": start}
            figures += [
                exact("calls_of_other_shape", shapes.count(False), **at),
                largest_draw("row_sum_off_by", sums, **at),
                mean("logit_variance", variances, **at),
                mean("product_variance", [variance / scale**2 for variance in variances], **at),
            ]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _fresh(d_k: int, start: str, scale: float, rng: torch.Generator) -> OneHead:
    """A module with torch's start, uniform with variance 1/(3 d_model), or one that keeps variances, 1/d_model."""
    with torch.random.fork_rng(devices=[]):  # the layers draw weights when built, which ours replace
        module = OneHead(D_MODEL, d_k, scale)
    bound = D_MODEL**-0.5 * (1.0 if start == "torch" else 3.0**0.5)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=rng)
    if start == "kept":
        for layer in (module.w_q, module.w_k, module.w_v):
            nn.init.zeros_(layer.bias)
    return module


def _plot(figures: Figures) -> Plot:
    series = (
        series_over(f"{words}, {label}", figures.all(name, start=start), "d_k")
        for start, label in (("torch", "torch's start"), ("kept", "variance kept"))
        for name, words in (("logit_variance", "with the scale"), ("product_variance", "without"))
    )
    return Plot(
        "variance",
        WORDS("plot.variance"),
        "$d_k$",
        "variance of the logits",
        tuple(series),
        x_axis="log",
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    last = figures.all("logit_variance", start="torch")[-1]
    d_k = last.at["d_k"]
    off = max(figures.all("row_sum_off_by"), key=lambda figure: figure.value)
    return WORDS(
        "why",
        d_k=d_k,
        off=off,
        torch_start=last,
        product=figures("product_variance", start="torch", d_k=d_k),
        kept=figures("logit_variance", start="kept", d_k=d_k),
    )


def _variance(start: str) -> ClaimPart:
    low, high = NEAR_ONE
    return ClaimPart(WORDS(f"part.{start}"), (Expect("logit_variance", low=low, high=high, at={"start": start}),))


CLAIM = Claim(
    id="seed-module",
    group="structure",
    sources=("S4",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Attention}(X) = \mathrm{softmax}\left(\frac{X W_Q (X W_K)^\top}{\sqrt{d_k}}\right) X W_V, \qquad "
    r"\mathrm{Var} = d_{model}^2 \, \mathrm{Var}[W_Q] \, \mathrm{Var}[W_K]",
    method=WORDS("method", batch=BATCH, length=LENGTH, d_model=D_MODEL),
    control=WORDS("control"),
    parameters={"dims": (16, 64, 256), "modules": 80, "scale": "sqrt_dk"},
    quick={"dims": (16, 64), "modules": 30},
    flipped={"scale": "none"},
    measure=measure,
    parts=(
        ClaimPart(WORDS("part.shapes"), (Expect("calls_of_other_shape", high=0.0),)),
        # Sums of ten weights in float32 are off by a few units of 2^-24.
        ClaimPart(WORDS("part.rows"), (Expect("row_sum_off_by", high=1e-6),)),
        _variance("torch"),
        _variance("kept"),
    ),
    why=why,
    condition=WORDS("condition"),
)
