"""scale-two-sqrt: the effect of a divisor twice too large on the logits, the weights and a trained layer."""

from __future__ import annotations

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk.scales import SCALES
from sqrtdk_lab._rows import factor, own_keys
from sqrtdk_lab._teacher import TEACHER_STD, Fit, Start, fit
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, curve_series
from sqrtdk_lab.intervals import geometric_mean, mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

KEYS = 64
LEARNER_DIM = 32
LABEL_NOISE = 0.5  # standard deviation of the noise on the teacher's outputs
WORSE = 1.1  # times the error with the usual scale


def measure(run: ExperimentRun) -> ExperimentResult:
    """Variance and effective keys of random rows, and the error of trained layers, against the usual scale."""
    figures = []
    for d_k in run["dims"]:
        query, key = own_keys(run.generator("rows", d_k), run["rows"], KEYS, d_k)
        rows, usual = (sqrtdk.measure(query, key, scale=SCALES[rule]()) for rule in (run["scale"], "sqrt_dk"))
        shares = [r.effective_keys.flatten() / KEYS for r in (rows, usual)]
        figures += [
            mean("logit_variance", rows.variance.flatten() * KEYS / (KEYS - 1), d_k=d_k),
            mean("effective_key_share", shares[0], d_k=d_k),
            mean("effective_key_share_more_than_usual", shares[0] - shares[1], d_k=d_k),
        ]
    fits = _fits(run)
    for case, found in fits.items():
        figures.append(geometric_mean("error_at_end", found.end, case=case))
        if case != "the usual scale":
            figures.append(geometric_mean("error_over_usual", found.end / fits["the usual scale"].end, case=case))
    plot = Plot(
        "error",
        WORDS("plot.error"),
        "step",
        "error",
        tuple(curve_series(case, range(run["steps"]), found.curve) for case, found in fits.items()),
        y_axis="log",
    )
    return ExperimentResult(figures, (plot,))


def _fits(run: ExperimentRun) -> dict[str, Fit]:
    """Train with the same W, teachers and rows for every scale."""
    rules = {"this scale": run["scale"], "the usual scale": "sqrt_dk", "no scale": "none"}
    start = LEARNER_DIM**-0.5
    return fit(
        run.generator("learners"),
        d_k=LEARNER_DIM,
        starts={case: Start(start, factor(rule, LEARNER_DIM)) for case, rule in rules.items()},
        learners=run["learners"],
        rates=run["rates"],
        steps=run["steps"],
        rows=32,
        keys=8,
        noise=LABEL_NOISE,
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""
    variance, more = (figures.all(name)[-1] for name in ("logit_variance", "effective_key_share_more_than_usual"))
    ends = [figures("error_at_end", case=case) for case in ("this scale", "the usual scale")]
    ratio, bare = (figures("error_over_usual", case=case) for case in ("this scale", "no scale"))
    return WORDS(
        "why",
        variance=variance,
        d_k=variance.at["d_k"],
        more=more,
        error=ends[0],
        usual_error=ends[1],
        ratio=ratio,
        bare=bare,
    )


CLAIM = Claim(
    id="scale-two-sqrt",
    group="factors",
    sources=("S3",),
    statement=WORDS("statement"),
    formula=r"\mathrm{Var}\left[ \frac{q \cdot k}{2 \sqrt{d_k}} \right] = \frac{1}{4}, \qquad "
    r"\frac{(2 W_q x)^\top W_k y}{2 \sqrt{d_k}} = \frac{(W_q x)^\top W_k y}{\sqrt{d_k}}",
    method=WORDS("method", teacher_std=f"{TEACHER_STD:g}", noise=f"{LABEL_NOISE:g}", worse=WORSE),
    control=WORDS("control"),
    parameters={
        "scale": "two_sqrt_dk",
        "dims": (16, 64, 256),
        "rows": 1000,
        "learners": 6,
        "rates": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
        "steps": 600,
    },
    quick={"dims": (64,), "rows": 300, "learners": 4, "rates": (1e-2, 2e-2, 4e-2, 8e-2), "steps": 150},
    flipped={"scale": "sqrt_dk"},
    measure=measure,
    parts=(
        ClaimPart(
            WORDS("part.variance"),
            (Expect("logit_variance", low=0.225, high=0.275),),
        ),
        ClaimPart(
            WORDS("part.flatter"),
            (Expect("effective_key_share_more_than_usual", low=0.2),),
        ),
        ClaimPart(
            WORDS("part.worse", worse=WORSE),
            (Expect("error_over_usual", low=WORSE, at={"case": "this scale"}),),
        ),
    ),
    why=why,
)
