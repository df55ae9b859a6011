"""cross-modal: text attends to an image, each with the features that it comes with."""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.messages import Text
from sqrtdk_lab.claim import Claim, ClaimPart, Expect, ExperimentResult, ExperimentRun
from sqrtdk_lab.figures import Figures, Plot, format_figure, series_over
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.words import words_of

WORDS = words_of(__name__)

WIDTH, HEAD_DIM = 768, 64
LENGTH, PATCHES = 10, 49  # 7 x 7 places of a 2 x 2 patch in an image of 8 x 8
NGRAMS = (1, 2, 3)  # bytes

PREPARE: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda x: x,
    "standardised": lambda x: (x - x.mean((0, 1))) / x.std((0, 1)).clamp(min=1e-6),  # each feature over all samples
    "layer norm": lambda x: nn.functional.layer_norm(x, (WIDTH,)),
}


def measure(run: ExperimentRun) -> ExperimentResult:
    """Logits of fresh projections of text and image features, over pairs of a text and an image."""
    text, image = _text(run), _image(run)
    cases = {
        "layer norm": ("layer norm", 1.0),
        "standardised": ("standardised", 1.0),
        "raw, pixels 0 to 16": (run["raw"], 1.0),
        "raw, pixels 0 to 1": (run["raw"], 1.0 / 16.0),
        "raw, pixels 0 to 255": (run["raw"], 255.0 / 16.0),
    }
    rng = run.generator("projections")
    shape = (run["pairs"], WIDTH, HEAD_DIM)
    to_query, to_key = (torch.randn(shape, generator=rng, dtype=torch.float64) / WIDTH**0.5 for _ in range(2))
    figures = []
    figures.append(mean("feature_rms", text.square().mean((1, 2)).sqrt(), modality="text"))
    figures.append(mean("feature_std_over_patches", image.std(1).square().mean(-1).sqrt(), modality="image"))
    for case, (prepare, unit) in cases.items():
        query, key = PREPARE[prepare](text) @ to_query, PREPARE[prepare](unit * image) @ to_key
        rows = sqrtdk.measure(query, key)
        std = (rows.variance.mean(-1) * PATCHES / (PATCHES - 1)).sqrt()
        figures += [
            mean("logit_std", std, features=case),
            mean("entropy_share", rows.entropy_nats.mean(-1) / math.log(PATCHES), features=case),
        ]
    return ExperimentResult(figures, (_plot(Figures(figures)),))


def _text(run: ExperimentRun) -> Tensor:
    """Counts of the hashed byte n-grams of words from a module of the standard library, (pairs, 10, 768)."""
    words = Path(argparse.__file__).read_bytes().split()
    starts = torch.randint(len(words) - LENGTH, (run["pairs"],), generator=run.generator("text")).tolist()
    found = torch.zeros(len(starts), LENGTH, WIDTH, dtype=torch.float64)
    for pair, start in enumerate(starts):
        for place, word in enumerate(words[start : start + LENGTH]):
            for n in NGRAMS:
                for i in range(len(word) - n + 1):
                    found[pair, place, zlib.crc32(word[i : i + n]) % WIDTH] += 1.0
    return found


def _image(run: ExperimentRun) -> Tensor:
    """Patches of handwritten digits through a random projection that keeps their mean square, (pairs, 49, 768)."""
    from sklearn.datasets import load_digits

    rng = run.generator("images")
    images = torch.from_numpy(load_digits().images)
    chosen = images[torch.randperm(len(images), generator=rng)[: run["pairs"]]]
    patches = chosen.unfold(1, 2, 1).unfold(2, 2, 1).reshape(run["pairs"], PATCHES, 4)
    return patches @ torch.randn(4, WIDTH, generator=rng, dtype=torch.float64) / 2.0


def _plot(figures: Figures) -> Plot:
    return Plot(
        "std",
        WORDS("plot.std"),
        "features",
        "standard deviation of the logits",
        (series_over("measured", figures.all("logit_std"), "features", style="bars"),),
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def std(case: str) -> str:
        return str(figures("logit_std", features=case))

    text, image = figures("feature_rms", modality="text"), figures("feature_std_over_patches", modality="image")
    product = format_figure(text.value * image.value)
    share = [figures("entropy_share", features=f"raw, pixels 0 to {top}") for top in (1, 255)]
    return WORDS(
        "why",
        text=text,
        image=image,
        product=product,
        pixels_16=std("raw, pixels 0 to 16"),
        pixels_1=std("raw, pixels 0 to 1"),
        share_1=share[0],
        pixels_255=std("raw, pixels 0 to 255"),
        share_255=share[1],
        standardised=std("standardised"),
        layer_norm=std("layer norm"),
    )


def _part(name: str, case: str) -> ClaimPart:
    return ClaimPart(WORDS(f"part.{name}"), (Expect("logit_std", low=0.5, high=2.0, at={"features": case}),))


CLAIM = Claim(
    id="cross-modal",
    group="factors",
    sources=("S2",),
    statement=WORDS("statement"),
    formula=r"\mathrm{std}_j\left[ \frac{q \cdot k_j}{\sqrt{d_k}} \right] \approx "
    r"\mathrm{rms}[x_{\mathrm{text}}] \; \mathrm{std}_j[x_{\mathrm{image}, j}]",
    method=WORDS("method"),
    control=WORDS("control"),
    parameters={"pairs": 200, "raw": "raw"},
    quick={"pairs": 48},
    flipped={"raw": "standardised"},
    measure=measure,
    parts=(
        _part("layer_norm", "layer norm"),
        _part("standardised", "standardised"),
        _part("pixels_16", "raw, pixels 0 to 16"),
        _part("pixels_1", "raw, pixels 0 to 1"),
        _part("pixels_255", "raw, pixels 0 to 255"),
    ),
    why=why,
    condition=WORDS("condition"),
)
