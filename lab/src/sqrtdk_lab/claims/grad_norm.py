"""grad-norm: the gradient of a query over the dimension, for few and many keys, with and without the scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import AuxRequest, attention
from sqrtdk.messages import Text
from sqrtdk_lab._rows import SIDES, factor, root_mean_square
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figure, Figures, Place, Plot, map_over, series_over
from sqrtdk_lab.intervals import bootstrap
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

VALUE_DIM = 64
# The Jacobian's norm falls if it loses a sixth or more from d_k = 16 to 512. Slopes of the quick run scatter by less.
FALLING = -0.05
AS_ONE_OVER_DK = (-1.2, -0.8)  # proportional to 1/d_k, but for a factor of 32^0.2 = 2 from d_k = 16 to 512
FLAT = 0.1  # exponents closer to 0 count as constant: a factor of 1.4 from d_k = 16 to 512
LESS = 0.5  # less than half counts as less: medians of some hundred rows scatter by a tenth
# Ratios are taken over the norms with the scale, for other queries to the same keys. So the control, in which the
# unscaled case has the scale too, compares two draws and not one with itself.
REFERENCE = "reference"
NUMBERS_AT_ONCE = 2**21
NORM_STATISTICS: dict[str, Callable[..., np.ndarray]] = {
    "rms": lambda norms, axis: np.sqrt(np.square(norms).mean(axis)),
    "median": lambda norms, axis: np.median(norms, axis),
}


@dataclass(frozen=True, slots=True)
class Upstream:
    """A convention for the loss behind the attention.

    Attributes:
        value_dim: width of the values; None: d_k.
        loss: of g and the output, both (rows, 1, d_v); g has N(0, 1) components.
        legend: its words in the plot.
    """

    value_dim: int | None
    loss: Callable[[Tensor, Tensor], Tensor]
    legend: str


UPSTREAM = {
    "unit": Upstream(VALUE_DIM, lambda g, out: (out * torch.nn.functional.normalize(g, dim=-1)).sum(), "length 1"),
    "sum": Upstream(None, lambda g, out: (out * g).sum(), "$d_v = d_k$, sum"),
    "average": Upstream(None, lambda g, out: (out - g).square().mean(-1).sum(), "$d_v = d_k$, average"),
}


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of independent rows: of dL/dq and of the softmax Jacobian, (rows,) each."""

    gradient: Tensor
    jacobian: Tensor


def measure(run: ExperimentRun) -> ExperimentResult:
    """Gradients through real attention over d_k and the number of keys, and the norm of the softmax Jacobian."""
    figures: list[Figure] = []
    lengths = [keys for keys, _ in run["keys_and_rows"]]
    for keys, rows in run["keys_and_rows"]:
        norms = {d_k: _norms(run, keys, rows, d_k, "unit") for d_k in run["dims"]}
        length = {lengths[0]: "few", lengths[-1]: "many"}.get(keys, "between")
        for d_k, sides in norms.items():
            size = "large" if d_k == max(run["dims"]) else "smaller"
            figures += _cell(run, sides, keys=keys, d_k=d_k, length=length, size=size)
        for case in SIDES:
            at: dict[str, Place] = {"case": case, "keys": keys, "length": length, "upstream": "unit"}
            gradients = {d_k: sides[case].gradient for d_k, sides in norms.items()}
            jacobians = {d_k: sides[case].jacobian for d_k, sides in norms.items()}
            figures += [
                _slope("slope_of_rms_gradient_norm", gradients, "rms", run.seed, **at),
                _slope("slope_of_median_gradient_norm", gradients, "median", run.seed, **at),
                _slope("slope_of_rms_jacobian_norm", jacobians, "rms", run.seed, **at),
            ]
    keys, rows = run["keys_and_rows"][0]
    for upstream in ("sum", "average"):
        other = {d_k: _norms(run, keys, rows, d_k, upstream) for d_k in run["dims"]}
        for case in SIDES:
            gradients = {d_k: sides[case].gradient for d_k, sides in other.items()}
            places: dict[str, Place] = {"case": case, "keys": keys, "length": "few", "upstream": upstream}
            figures.append(_slope("slope_of_rms_gradient_norm", gradients, "rms", run.seed, **places))
            figures += [
                root_mean_square("rms_gradient_norm", norm, case=case, keys=keys, d_k=d_k, upstream=upstream)
                for d_k, norm in gradients.items()
            ]
    return ExperimentResult(figures, _plots(Figures(figures), lengths))


def _norms(run: ExperimentRun, keys: int, rows: int, d_k: int, upstream: str) -> dict[str, Norms]:
    """Return the norms of the same rows without and with the scale, and of other queries for the reference."""
    rng, found = run.generator("rows", keys, d_k, upstream), []
    convention = UPSTREAM[upstream]
    width = convention.value_dim or d_k
    height = max(1, NUMBERS_AT_ONCE // (keys * (d_k + width)))
    for start in range(0, rows, height):
        count = min(height, rows - start)
        # In float32, for speed: rows below 1e-5 are rounding errors, while the smallest median is about 0.01.
        shapes = ((1, d_k), (keys, d_k), (keys, width), (1, width))
        query, key, value, g = (torch.randn(count, *shape, generator=rng) for shape in shapes)
        queries = dict.fromkeys(SIDES, query) | {REFERENCE: query.roll(1, 0)}
        found.append(
            [
                _row_norms(q, key, value, partial(convention.loss, g), factor(run[case], d_k))
                for case, q in queries.items()
            ]
        )
    return {
        case: Norms(torch.cat([one.gradient for one in blocks]), torch.cat([one.jacobian for one in blocks]))
        for case, blocks in zip((*SIDES, REFERENCE), zip(*found, strict=True), strict=True)
    }


def _row_norms(query: Tensor, key: Tensor, value: Tensor, loss: Callable[[Tensor], Tensor], scale: float) -> Norms:
    query = query.detach().requires_grad_()
    output, aux = attention(query, key, value, scale=scale, return_aux=AuxRequest(jacobian_norm=True))
    (gradient,) = torch.autograd.grad(loss(output), query)
    assert aux.jacobian_norm is not None
    return Norms(gradient.flatten(1).norm(dim=1).double(), aux.jacobian_norm.detach().flatten().double())


def _cell(run: ExperimentRun, sides: dict[str, Norms], **at: Place) -> list[Figure]:
    """Median and root mean square of one cell of the map, each of both cases and as a ratio."""
    found = []
    for case in SIDES:
        gradient, here = sides[case].gradient, {"case": case, "upstream": "unit", **at}
        found.append(root_mean_square("rms_gradient_norm", gradient, **here))
        found.append(bootstrap("median_gradient_norm", gradient, np.median, seed=run.seed, **here))
        found.append(root_mean_square("rms_jacobian_norm", sides[case].jacobian, case=case, **at))
    pair = (sides["unscaled"].gradient, sides[REFERENCE].gradient)
    for name, statistic in NORM_STATISTICS.items():
        ratio = partial(_ratio, statistic)
        found.append(bootstrap(f"{name}_gradient_ratio", pair, ratio, seed=run.seed, **at))
    return found


def _ratio(statistic: Callable[..., Any], unscaled: np.ndarray, scaled: np.ndarray, axis: int) -> Any:
    return statistic(unscaled, axis=axis) / statistic(scaled, axis=axis)


def _slope(name: str, norms: dict[int, Tensor], statistic: str, seed: int, **at: Place) -> Figure:
    """Least-squares slope of the logarithm of a statistic of the rows against log d_k."""
    x = np.log(list(norms))
    x = (x - x.mean()) / np.square(x - x.mean()).sum()

    def slope(*rows: np.ndarray, axis: int) -> Any:
        return sum(
            weight * np.log(NORM_STATISTICS[statistic](one, axis=axis)) for weight, one in zip(x, rows, strict=True)
        )

    return bootstrap(name, tuple(norms.values()), slope, seed=seed, **at)


def _plots(figures: Figures, lengths: Sequence[int]) -> tuple[Plot, ...]:
    maps = [
        Plot(
            f"{name}-ratio",
            WORDS(f"plot.{name}_ratio"),
            "$d_k$",
            "keys",
            (),
            x_axis="log",
            y_axis="log",
            map=map_over(
                "unscaled over scaled", figures.all(f"{name}_gradient_ratio"), "d_k", "keys", colours="log", centre=1.0
            ),
        )
        for name in NORM_STATISTICS
    ]
    curves = [
        Plot(
            name,
            WORDS(f"plot.{name}"),
            "$d_k$",
            r"$\Vert \partial L / \partial q \Vert$",
            tuple(
                series_over(
                    f"{case}, {keys} keys",
                    figures.all(f"{name}_gradient_norm", case=case, keys=keys, upstream="unit"),
                    "d_k",
                    style="line" if case == "unscaled" else "dashed",
                )
                for case in SIDES
                for keys in dict.fromkeys((lengths[0], lengths[-1]))
            ),
            x_axis="log",
            y_axis="log",
        )
        for name in NORM_STATISTICS
    ]
    upstream = Plot(
        "upstream",
        WORDS("plot.upstream", keys=lengths[0]),
        "$d_k$",
        r"rms of $\Vert \partial L / \partial q \Vert$",
        tuple(
            series_over(
                f"{case}, {UPSTREAM[name].legend}",
                figures.all("rms_gradient_norm", case=case, keys=lengths[0], upstream=name),
                "d_k",
                style="line" if case == "unscaled" else "dashed",
            )
            for case in SIDES
            for name in UPSTREAM
        ),
        x_axis="log",
        y_axis="log",
    )
    return (*maps, *curves, upstream)


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    few, many = (figures("slope_of_median_gradient_norm", case="unscaled", length=length) for length in ("few", "many"))
    dims = [figure.at["d_k"] for figure in figures.all("median_gradient_ratio", keys=few.at["keys"])]
    ratios = {
        f"{name}_{length}": figures(f"{name}_gradient_ratio", d_k=dims[-1], keys=keys)
        for name in NORM_STATISTICS
        for length, keys in (("few", few.at["keys"]), ("many", many.at["keys"]))
    }
    slopes = {
        name: figures("slope_of_rms_gradient_norm", case="scaled", length="few", upstream=name) for name in UPSTREAM
    }
    return WORDS(
        "why",
        jacobian=figures("slope_of_rms_jacobian_norm", case="unscaled", length="few"),
        rms=figures("slope_of_rms_gradient_norm", case="unscaled", length="few", upstream="unit"),
        few=few,
        many=many,
        few_keys=few.at["keys"],
        many_keys=many.at["keys"],
        d_k=dims[-1],
        value_dim=VALUE_DIM,
        **ratios,
        **slopes,
    )


def _constant(upstream: str) -> ClaimPart:
    at = {"case": "scaled", "length": "few", "upstream": upstream}
    return ClaimPart(
        WORDS(f"part.scaled_{upstream}"),
        (Expect("slope_of_rms_gradient_norm", low=-FLAT, high=FLAT, at=at),),
    )


def _less(length: str) -> ClaimPart:
    at = {"length": length, "size": "large"}
    return ClaimPart(WORDS(f"part.less_{length}"), (Expect("median_gradient_ratio", high=LESS, at=at),))


CLAIM = Claim(
    id="grad-norm",
    group="gradients",
    sources=("S1",),
    statement=WORDS("statement"),
    formula=r"\frac{\partial L}{\partial q} = s \, K^\top J \, V \frac{\partial L}{\partial o}, \qquad "
    r"J = \mathrm{diag}(p) - p\,p^\top, \quad s = 1, \; \frac{1}{\sqrt{d_k}}",
    method=WORDS("method", value_dim=VALUE_DIM),
    control=WORDS("control"),
    parameters={
        "dims": (16, 32, 64, 128, 256, 512),
        "keys_and_rows": ((32, 6000), (256, 3000), (1024, 2000), (4096, 300)),
        "unscaled": "none",
        "scaled": "sqrt_dk",
        REFERENCE: "sqrt_dk",
    },
    quick={"dims": (16, 512), "keys_and_rows": ((32, 500), (1024, 200))},
    flipped={"unscaled": "sqrt_dk", "scaled": "none"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.jacobian"),
            (Expect("slope_of_rms_jacobian_norm", high=FALLING, at={"case": "unscaled", "length": "few"}),),
        ),
        ClaimPart(
            WORDS("part.unscaled"),
            (Expect("slope_of_rms_gradient_norm", *AS_ONE_OVER_DK, {"case": "unscaled", "upstream": "unit"}),),
        ),
        _less("few"),
        _less("many"),
        *map(_constant, UPSTREAM),
    ),
    why=why,
    condition=WORDS("condition"),
)
