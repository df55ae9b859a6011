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
from sqrtdk.lab._run import Run
from sqrtdk.lab.claim import Claim, Expect, Measured, Part
from sqrtdk.lab.figures import Figures, number
from sqrtdk.lab.intervals import mean
from sqrtdk.lab.plots import Plot, over
from sqrtdk.lab.text import Text

WIDTH, HEAD_DIM = 768, 64
WORDS, PATCHES = 10, 49  # 7 x 7 places of a 2 x 2 patch in an image of 8 x 8
NGRAMS = (1, 2, 3)  # bytes

PREPARE: dict[str, Callable[[Tensor], Tensor]] = {
    "raw": lambda x: x,
    "standardised": lambda x: (x - x.mean((0, 1))) / x.std((0, 1)).clamp(min=1e-6),  # each feature over all samples
    "layer norm": lambda x: nn.functional.layer_norm(x, (WIDTH,)),
}


def measure(run: Run) -> Measured:
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
    return Measured(figures, (_plot(Figures(figures)),))


def _text(run: Run) -> Tensor:
    """Counts of the hashed byte n-grams of words from a module of the standard library, (pairs, 10, 768)."""
    words = Path(argparse.__file__).read_bytes().split()
    starts = torch.randint(len(words) - WORDS, (run["pairs"],), generator=run.generator("text")).tolist()
    found = torch.zeros(len(starts), WORDS, WIDTH, dtype=torch.float64)
    for pair, start in enumerate(starts):
        for place, word in enumerate(words[start : start + WORDS]):
            for n in NGRAMS:
                for i in range(len(word) - n + 1):
                    found[pair, place, zlib.crc32(word[i : i + n]) % WIDTH] += 1.0
    return found


def _image(run: Run) -> Tensor:
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
        Text(
            "Standard deviation of the scaled logits over the patches of an image, by what was done to the features.",
            "缩放后的 logit 在一幅图像各图块上的标准差，按特征的处理方式分列。",
        ),
        "features",
        "standard deviation of the logits",
        (over("measured", figures.all("logit_std"), "features", style="bars"),),
        y_axis="log",
        lines=(("1", 1.0),),
    )


def why(figures: Figures) -> Text:
    """The paragraph of the report."""

    def std(case: str) -> str:
        return str(figures("logit_std", features=case))

    text, image = figures("feature_rms", modality="text"), figures("feature_std_over_patches", modality="image")
    product = number(text.value * image.value)
    share = [figures("entropy_share", features=f"raw, pixels 0 to {top}") for top in (1, 255)]
    return Text(
        "Over the patches of an image, the scaled logits of a word scatter by about the size of the word's features "
        "times the standard deviation of the image's features over its patches: projections that keep variances pass "
        "both on, and a part that all patches share moves no weight. The text's counts have a root mean square of "
        f"{text}, the image's features a standard deviation over the patches of {image} with pixels from 0 to 16; the "
        f"product is {product}, and the logits have {std('raw, pixels 0 to 16')}. The same images with pixels from 0 "
        f"to 1 give {std('raw, pixels 0 to 1')}, and an entropy of {share[0]} of the maximum. With pixels from 0 to "
        f"255 it is {std('raw, pixels 0 to 255')}, and an entropy of {share[1]} of the maximum: the smaller, the "
        "fewer patches hold the weight. A fixed factor cannot undo a change of units. Standardised features give "
        f"{std('standardised')}, layer-normalised ones {std('layer norm')}, in any units; patches of an image that "
        "are alike lower both.",
        "一个词对一幅图像各图块的 logit（缩放后）的标准差，大致等于该词特征的大小乘以图像特征在各图块之间的标准差："
        f"保持方差的投影把二者原样传递，而各图块共有的部分不影响权重。文本计数的均方根为 {text}；像素取 0 到 16 时，"
        f"图像特征在各图块之间的标准差为 {image}。二者之积为 {product}，而实测 logit 的标准差为 "
        f"{std('raw, pixels 0 to 16')}。同样的图像若像素取 0 到 1，则为 {std('raw, pixels 0 to 1')}，熵为最大值的 "
        f"{share[0]} 倍。若像素取 0 到 255，则为 {std('raw, pixels 0 to 255')}，熵为最大值的 {share[1]} 倍：越小，"
        f"权重就集中在越少的图块上。固定的因子无法抵消单位的改变。特征标准化之后为 {std('standardised')}，"
        f"层归一化之后为 {std('layer norm')}，与单位无关；同一幅图像的图块彼此相似，会使二者都变小。",
    )


def _part(case: str, en: str, zh: str) -> Part:
    return Part(Text(en, zh), (Expect("logit_std", low=0.5, high=2.0, at={"features": case}),))


CLAIM = Claim(
    id="cross-modal",
    group="factors",
    sources=("S2",),
    statement=Text(
        "In cross attention from text (10 x 768) to image features (49 x 768) of another distribution the scale keeps "
        "the logits stable.",
        "在由文本特征（10 × 768）对另一种分布的图像特征（49 × 768）所作的交叉注意力中，缩放能使 logit 保持稳定。",
    ),
    formula=r"\mathrm{std}_j\left[ \frac{q \cdot k_j}{\sqrt{d_k}} \right] \approx "
    r"\mathrm{rms}[x_{\mathrm{text}}] \; \mathrm{std}_j[x_{\mathrm{image}, j}]",
    method=Text(
        "Ten words of a module of the standard library as counts of their hashed byte n-grams, and the 49 patches of a "
        "handwritten digit through a random projection. Fresh projections that keep variances, one head with d_k = 64, "
        "scale 1/sqrt(d_k): standard deviation of the logits over the patches. Stable means between 0.5 and 2.",
        "文本取标准库某模块中的十个词，以其字节 n-gram 的散列计数为特征；图像取一个手写数字的 49 个图块，"
        "经随机投影得到特征。投影矩阵新初始化并保持方差，单头 d_k = 64，缩放 1/sqrt(d_k)，测量 logit "
        "在各图块上的标准差。“稳定”指在 0.5 与 2 之间。",
    ),
    control=Text(
        "The raw features are standardised as well: stable in every case.",
        "原始特征也先作标准化：所有情形下都稳定。",
    ),
    parameters={"pairs": 200, "raw": "raw"},
    quick={"pairs": 48},
    flipped={"raw": "standardised"},
    measure=measure,
    parts=(
        _part("layer norm", "with layer-normalised features", "特征经层归一化"),
        _part("standardised", "with standardised features", "特征经标准化"),
        _part("raw, pixels 0 to 16", "with the features as they are, pixels from 0 to 16", "原始特征，像素取 0 到 16"),
        _part("raw, pixels 0 to 1", "with the features as they are, pixels from 0 to 1", "原始特征，像素取 0 到 1"),
        _part(
            "raw, pixels 0 to 255", "with the features as they are, pixels from 0 to 255", "原始特征，像素取 0 到 255"
        ),
    ),
    why=why,
)
