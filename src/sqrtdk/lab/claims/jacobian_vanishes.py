"""jacobian-vanishes: the derivative of softmax where one logit dominates."""

from __future__ import annotations

import math

import torch

from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures
from sqrtdk.lab.intervals import largest, mean
from sqrtdk.lab.plots import Plot, curve, over
from sqrtdk.lab.text import Text
from sqrtdk.stats import row_stats


def measure(run: Run) -> Measured:
    """Norm of the Jacobian of rows whose first logit leads the others by a given distance."""
    rng = run.generator("others")
    others = torch.randn(run["rows"], run["keys"] - 1, generator=rng, dtype=torch.float64)
    logs, figures = {}, []
    for lead in run["leads"]:
        top = others.amax(-1, keepdim=True) + run["dominance"] * lead
        logits = torch.cat([top, others], -1)
        norm = row_stats(logits).jacobian_norm
        logs[lead] = norm.log()
        figures += [
            mean("jacobian_norm", norm, lead_nats=lead),
            largest("largest_error_against_autograd", _errors(logits[: run["checked"]], norm), lead_nats=lead),
        ]
    *_, before, last = run["leads"]
    figures.append(mean("slope_of_log_norm", (logs[last] - logs[before]) / (last - before)))
    return Measured(figures, (_plot(Figures(figures), run["leads"]),))


def _errors(logits: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Relative differences between the formula of the norm and the Jacobian that autograd gives, one a row."""
    jacobian = torch.func.vmap(torch.func.jacrev(lambda z: z.softmax(-1)))(logits)
    found: torch.Tensor = jacobian.flatten(1).norm(dim=1)
    return (found / norm[: len(logits)] - 1.0).abs()


def _plot(figures: Figures, leads: tuple[float, ...]) -> Plot:
    return Plot(
        "norm",
        Text(
            "Norm of the softmax Jacobian over the lead of the largest logit.",
            "softmax 雅可比矩阵的范数随最大 logit 领先量的变化。",
        ),
        "lead of the largest logit, nats",
        r"$\Vert J \Vert_F$",
        (
            over("measured", figures.all("jacobian_norm"), "lead_nats", style="points"),
            curve(r"$e^{-\mathrm{lead}}$", leads, (math.exp(-lead) for lead in leads), style="dashed"),
        ),
        y_axis="log",
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    near, *_, far = figures.all("jacobian_norm")
    slope = figures("slope_of_log_norm")
    return Text(
        "The Jacobian of p = softmax(z) is diag(p) - p p^T. All its entries are products of a weight and either "
        "another weight or one minus itself, so all vanish as p becomes one-hot: with a weight of 1 - e on one key, no "
        f"entry exceeds e, and e falls as exp(-lead). Measured: a norm of {near} without a lead, {far} with a lead of "
        f"{far.at['lead_nats']} nats, and a slope of log norm of {slope} for each nat of lead. This is the derivative "
        "of softmax alone: the gradient of q has the keys as a further factor, see grad-norm.",
        "p = softmax(z) 的雅可比矩阵是 diag(p) - p p^T。它的每个元素都是一个权重与另一个权重（或与 1 减去自身）"
        "的乘积，因此当 p 趋于 one-hot 时，所有元素都趋于零：若某个键的权重为 1 - e，则没有元素超过 e，而 e 按 "
        f"exp(-领先量) 衰减。实测：没有领先时范数为 {near}，领先 {far.at['lead_nats']} nat 时为 {far}；领先量每增加 1 "
        f"nat，范数的对数变化 {slope}。这里说的只是 softmax 本身的导数；查询的梯度还要乘上键，见 grad-norm。",
    )


CLAIM = Claim(
    id="jacobian-vanishes",
    group="gradients",
    sources=("S0", "S1", "S3"),
    statement=Text(
        "Where one logit dominates the others, the derivative of softmax tends to 0.",
        "当一个 logit 远大于其余 logit 时，softmax 的导数趋于 0。",
    ),
    formula=r"J = \mathrm{diag}(p) - p\,p^\top, \qquad "
    r"\Vert J \Vert_F^2 = \sum_i p_i^2 - 2 \sum_i p_i^3 + \left( \sum_i p_i^2 \right)^2",
    method=Text(
        "Rows of logits from N(0, 1), and one more logit that leads the largest of them by a given distance. Frobenius "
        "norm of the Jacobian of each row, checked against the matrix that automatic differentiation gives.",
        "每行的 logit 取自 N(0, 1)，另加一个比其中最大者高出给定距离的 logit。计算每行雅可比矩阵的 Frobenius 范数，"
        "并与自动微分得到的矩阵核对。",
    ),
    control=Text(
        "The first logit is only level with the largest of the others, whatever the lead: the norm stays.",
        "无论给定的领先量是多少，第一个 logit 都只与其余的最大者持平：范数不再变小。",
    ),
    parameters={
        "rows": 4000,
        "keys": 16,
        "leads": (0, 1, 2, 4, 6, 8, 10, 15, 20),
        "dominance": 1.0,
        "checked": 50,
    },
    quick={"rows": 1000, "leads": (0, 5, 10, 20), "checked": 10},
    flipped={"dominance": 0.0},
    measure=measure,
    parts=(
        Part(
            Text(
                "the norm falls to almost nothing, as exp(-lead)",
                "范数按 exp(-领先量) 下降，直到几乎为零",
            ),
            (
                Expect("jacobian_norm", high=1e-6, at={"lead_nats": 20}),
                Expect("slope_of_log_norm", low=-1.02, high=-0.98),
                Expect("largest_error_against_autograd", high=1e-6),
            ),
        ),
    ),
    why=why,
)
