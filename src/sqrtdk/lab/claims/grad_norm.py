"""grad-norm: how the gradient of the queries grows with the dimension, with and without the scale."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention
from sqrtdk.lab._rows import own_keys
from sqrtdk.lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk.lab.figures import Figures, Plot, series_over
from sqrtdk.lab.intervals import bootstrap, mean
from sqrtdk.lab.words import words_of
from sqrtdk.messages import Text
from sqrtdk.scales import SCALES

WORDS = words_of(__name__)

VALUE_DIM = 64  # the same at every d_k, so that the value's path does not grow with it
QUANTITIES = ("gradient_norm", "jacobian_norm")


def measure(run: ExperimentRun) -> ExperimentResult:
    """Gradients through real attention, and the norm of the softmax Jacobian beside them."""
    figures = []
    for case in ("unscaled", "scaled"):
        norms = [_norms(run, d_k, run[case]) for d_k in run["dims"]]
        for name, samples in zip(QUANTITIES, zip(*norms, strict=True), strict=True):
            rms = torch.stack([one.unflatten(0, (run["blocks"], -1)).square().mean(1).sqrt() for one in samples])
            figures += [mean(f"rms_{name}", block, case=case, d_k=d) for d, block in zip(run["dims"], rms, strict=True)]
            figures.append(mean(f"slope_of_rms_{name}", _slopes(run["dims"], rms), case=case))
        medians = zip(run["dims"], norms, strict=True)
        figures += [
            bootstrap("median_gradient_norm", norm[0], np.median, seed=run.seed, case=case, d_k=d)
            for d, norm in medians
        ]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _norms(run: ExperimentRun, d_k: int, scale: str) -> tuple[Tensor, Tensor]:
    """Norms of dL/dq and of the softmax Jacobian, one a row, for L = output . g with a random g of length 1."""
    rng, norms = run.generator("rows", d_k), []
    for _ in range(run["blocks"]):
        query, key = own_keys(rng, run["rows"], run["keys"], d_k)
        value, direction = (torch.randn(run["rows"], n, VALUE_DIM, generator=rng).double() for n in (run["keys"], 1))
        wanted = AuxRequest(jacobian_norm=True)
        output, aux = attention(query.requires_grad_(), key, value, scale=SCALES[scale](), return_aux=wanted)
        (output * torch.nn.functional.normalize(direction, dim=-1)).sum().backward()  # type: ignore[no-untyped-call]
        assert query.grad is not None
        assert aux.jacobian_norm is not None
        norms.append((query.grad.flatten(1).norm(dim=1), aux.jacobian_norm.flatten()))
    gradients, jacobians = (torch.cat(parts) for parts in zip(*norms, strict=True))
    return gradients, jacobians


def _slopes(dims: tuple[int, ...], rms: Tensor) -> Tensor:
    """Least-squares slope of log rms (dims, blocks) against log d_k, one a block."""
    x = torch.tensor(dims, dtype=torch.float64).log()
    x = x - x.mean()
    return x @ rms.log() / (x @ x)


def _plot(figures: Figures) -> Plot:
    return Plot(
        "gradient",
        WORDS("plot.gradient"),
        "$d_k$",
        r"$\Vert \partial L / \partial q \Vert$",
        tuple(
            series_over(f"{case}, {label}", figures.all(name, case=case), "d_k")
            for case in ("unscaled", "scaled")
            for label, name in (("rms", "rms_gradient_norm"), ("median", "median_gradient_norm"))
        ),
        x_axis="log",
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    jacobian, plain = (figures(f"slope_of_rms_{name}", case="unscaled") for name in reversed(QUANTITIES))
    scaled = figures("slope_of_rms_gradient_norm", case="scaled")
    medians = figures.all("median_gradient_norm", case="unscaled")
    return WORDS(
        "why",
        jacobian=jacobian,
        unscaled=plain,
        first=medians[0],
        first_dim=medians[0].at["d_k"],
        last=medians[-1],
        last_dim=medians[-1].at["d_k"],
        scaled=scaled,
    )


CLAIM = Claim(
    id="grad-norm",
    group="gradients",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\frac{\partial L}{\partial q} = s \, K^\top J \, V \frac{\partial L}{\partial o}, \qquad "
    r"J = \mathrm{diag}(p) - p\,p^\top, \quad s = 1, \; \frac{1}{\sqrt{d_k}}",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={
        "dims": (16, 32, 64, 128, 256, 512, 1024),
        "blocks": 24,
        "rows": 64,
        "keys": 32,
        "unscaled": "none",
        "scaled": "sqrt_dk",
    },
    quick={"dims": (16, 64, 256), "blocks": 12},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.jacobian"),
            (Expect("slope_of_rms_jacobian_norm", high=-0.05, at={"case": "unscaled"}),),
        ),
        ClaimPart(
            WORDS("part.unscaled"),
            (Expect("slope_of_rms_gradient_norm", low=-1.2, high=-0.8, at={"case": "unscaled"}),),
        ),
        ClaimPart(
            WORDS("part.scaled"),
            (Expect("slope_of_rms_gradient_norm", low=-0.1, high=0.1, at={"case": "scaled"}),),
        ),
    ),
    why=why,
)
