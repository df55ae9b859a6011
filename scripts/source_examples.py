"""Small programs of our own that compute what the code examples of the five explanations compute.

The code of the explanations is not part of this project. Each program draws the same shapes, and returns the numbers
that the example prints, in its order. `python scripts/source_examples.py` prints them for seed 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sqrtdk.messages import Text

SEEDS = 1000  # runs of a random example
SHARES = (0.01, 0.99)  # of those runs, below the two ends of a range
Numbers = Sequence[float]


@dataclass(frozen=True, slots=True)
class SourceExample:
    """A code example of an explanation.

    Attributes:
        claim: id of the claim about it.
        source: the explanation.
        computes: the computation in words.
        said: what the explanation says that it prints.
        run: our program, from a generator to the numbers.
        random: whether the numbers depend on the seed.
    """

    claim: str
    source: str
    computes: Text
    said: Text
    run: Callable[[torch.Generator], Numbers]
    random: bool = True


def _scales(d_k: int) -> tuple[float, float]:
    """The factor without the scale and with it."""
    return 1.0, d_k**-0.5


def _logits(rng: torch.Generator, queries: int, keys: int, d_k: int) -> Tensor:
    return torch.randn(queries, d_k, generator=rng) @ torch.randn(keys, d_k, generator=rng).mT


def _weights(rng: torch.Generator, queries: int, keys: int, dims: Sequence[int]) -> list[Tensor]:
    """The weights at each dimension: all without the scale, then all with it, of the same queries and keys."""
    drawn = [(d_k, _logits(rng, queries, keys, d_k)) for d_k in dims]
    return [(logits * _scales(d_k)[side]).softmax(-1) for side in (0, 1) for d_k, logits in drawn]


def largest_weights(rng: torch.Generator) -> Numbers:
    """The largest weight of a 10 x 10 matrix at d_k 16, 64, 256: three without the scale, then three with it."""
    return [weights.max().item() for weights in _weights(rng, 10, 10, (16, 64, 256))]


def deviations(rng: torch.Generator) -> Numbers:
    """The standard deviation of 2 x 3 x 3 logits at 512 dimensions without and with the scale, and a row's sum."""
    query, key = (torch.randn(2, 3, 512, generator=rng) for _ in range(2))
    logits = query @ key.mT
    spreads = [(logits * scale).std().item() for scale in _scales(512)]
    return [*spreads, (logits * _scales(512)[1]).softmax(-1).sum(-1)[0, 0].item()]


def extreme_weights(rng: torch.Generator) -> Numbers:
    """The largest of 8 weights at d 32, 128, 512 without the scale and with it, then the smallest."""
    rows = _weights(rng, 1, 8, (32, 128, 512))
    return [*(row.max().item() for row in rows), *(row.min().item() for row in rows)]


def entropies(rng: torch.Generator) -> Numbers:
    """The mean entropy in nats of 10 rows of 10 keys at d_k 16, 64, 256: without the scale, then with it."""
    return [torch.special.entr(weights).sum(-1).mean().item() for weights in _weights(rng, 10, 10, (16, 64, 256))]


def softmax_of_five(_: torch.Generator) -> Numbers:
    """The softmax of five logits."""
    return torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0], dtype=torch.float64).softmax(-1).tolist()


def mean_weights(rng: torch.Generator) -> Numbers:
    """The mean of 10 x 10 weights at d_k = 64 without the scale and with it."""
    logits = _logits(rng, 10, 10, 64)
    return [(logits * scale).softmax(-1).mean().item() for scale in _scales(64)]


def one_head(rng: torch.Generator) -> Numbers:
    """The variance of a fresh head's scaled logits, 10 tokens of 512 channels at d_k = 64, and a row's sum."""
    tokens = torch.randn(2, 10, 512, generator=rng)
    matrices = []
    for _ in range(2):
        layer = nn.utils.skip_init(nn.Linear, 512, 64)
        bound = 512**-0.5  # as `nn.Linear` draws weights and biases
        for tensor in (layer.weight, layer.bias):
            nn.init.uniform_(tensor, -bound, bound, generator=rng)
        matrices.append(layer)
    query, key = (layer(tokens) for layer in matrices)
    logits = query @ key.mT * _scales(64)[1]
    return [logits.var().item(), logits.softmax(-1).sum(-1)[0, 0].item()]


def exponentials(_: torch.Generator) -> Numbers:
    """E to four powers."""
    return [math.exp(power) for power in (3, -3, 24, -24)]


EXAMPLES = (
    SourceExample(
        "seed-code-shapes",
        "S0",
        Text(
            "standard deviation of the logits of batch 2, length 3, 512 dimensions, without and with the scale; sum of "
            "a row of weights",
            "批量 2、长度 3、512 维时 logit 的标准差，不缩放与缩放；一行权重之和",
        ),
        Text("22.6; 1.0; 1", "22.6；1.0；1"),
        deviations,
    ),
    SourceExample(
        "printed-maxima",
        "S1",
        Text(
            "largest weight at length 10 and d_k 16 / 64 / 256, without and with the scale",
            "长度 10，d_k 为 16 / 64 / 256 时的最大权重，不缩放与缩放",
        ),
        Text("0.342, 0.891, 0.998; 0.289, 0.276, 0.301", "0.342、0.891、0.998；0.289、0.276、0.301"),
        largest_weights,
    ),
    SourceExample(
        "entropy-table",
        "S1",
        Text(
            "mean entropy at length 10 and d_k 16 / 64 / 256, without and with the scale, in nats",
            "长度 10，d_k 为 16 / 64 / 256 时的平均熵，不缩放与缩放，单位 nat",
        ),
        Text("2.1, 0.8, 0.2; 2.3, 2.3, 2.3", "2.1、0.8、0.2；2.3、2.3、2.3"),
        entropies,
    ),
    SourceExample(
        "softmax-example",
        "S1",
        Text("softmax of [-3, -1, 0, 1, 3]", "[-3, -1, 0, 1, 3] 的 softmax"),
        Text("0.012, 0.089, 0.243, 0.661, 0.995", "0.012、0.089、0.243、0.661、0.995"),
        softmax_of_five,
        random=False,
    ),
    SourceExample(
        "exp-examples",
        "S1",
        Text("e^3, e^-3; e^24, e^-24", "e^3、e^-3；e^24、e^-24"),
        Text("20.1, 0.05; 2.6e10, 3.8e-11", "20.1、0.05；2.6e10、3.8e-11"),
        exponentials,
        random=False,
    ),
    SourceExample(
        "minmax-by-dim",
        "S2",
        Text(
            "largest weight of 8 keys at d 32 / 128 / 512, without and with the scale; then the smallest",
            "8 个键，d 为 32 / 128 / 512 时的最大权重，不缩放与缩放；然后是最小权重",
        ),
        Text(
            "without the scale the largest goes to 1 and the smallest to 0; with it both stay",
            "不缩放时最大的趋于 1，最小的趋于 0；缩放后两者不变",
        ),
        extreme_weights,
    ),
    SourceExample(
        "seed-prints",
        "S2",
        Text(
            "mean of the weights of 10 keys, without and with the scale (other prints: a dtype, a shape)",
            "10 个键的权重均值，不缩放与缩放（另外还打印 dtype 和形状）",
        ),
        Text("what the scale does to the softmax", "缩放对 softmax 的作用"),
        mean_weights,
    ),
    SourceExample(
        "seed-module",
        "S4",
        Text(
            "a module of one head: variance of its scaled logits (10 tokens, 512 channels, d_k = 64); sum of a row",
            "单头模块：缩放后 logit 的方差（10 个词元、512 个通道、d_k = 64）；一行权重之和",
        ),
        Text("variance 1; 1", "方差 1；1"),
        one_head,
    ),
)


@torch.no_grad()
def run_once(example: SourceExample, seed: int = 0) -> Numbers:
    """The numbers of one run."""
    return example.run(torch.Generator().manual_seed(seed))


def ranges(example: SourceExample) -> list[tuple[float, float, float]]:
    """Of each number the low end, the median and the high end over the seeds."""
    runs = torch.tensor([run_once(example, seed) for seed in range(SEEDS)], dtype=torch.float64)
    low, high = SHARES
    ends = runs.quantile(torch.tensor([low, 0.5, high], dtype=torch.float64), dim=0)
    return [tuple(column) for column in ends.T.tolist()]


if __name__ == "__main__":
    for one in EXAMPLES:
        print(one.claim, *(f"{number:.3g}" for number in run_once(one)))
        if one.random:
            print("  ", *(f"{low:.3g} to {high:.3g}" for low, _, high in ranges(one)))
