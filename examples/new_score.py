"""A score of your own: the dot product of q and k after a feature map, q' = elu(q) + 1.

A score that is the dot product of a changed query and a changed key needs two things, a default scale and `fold`; it
then runs on every kernel, with every mask, bias and statistic. (One that no dot product gives has `prepare` and `pairs`
instead: `sqrtdk.scores.PairScore`.)

    python examples/new_score.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import sqrtdk
from sqrtdk import AuxRequest, scales


@dataclass(frozen=True)
class PositiveFeatures:
    """score = (elu(q) + 1) . (elu(k) + 1), which is never negative."""

    @property
    def default_scale(self) -> sqrtdk.scales.ScaleRule:
        return scales.sqrt_dk()

    def fold(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return functional.elu(query) + 1, functional.elu(key) + 1


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 64, 32, generator=generator) for _ in range(3))
    score = PositiveFeatures()
    output, aux = sqrtdk.attention(
        q, k, v, is_causal=True, score=score, return_aux=AuxRequest(entropy_nats=True, max_logit=True)
    )

    # what the same formula gives when it is written out
    logits = score.fold(q, k)[0] @ score.fold(q, k)[1].mT * 32**-0.5
    hidden = torch.ones(64, 64).triu(1).bool()
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    print("equal to the formula written out:", torch.allclose(output, expected, atol=1e-5))
    print("implementation:", sqrtdk.explain(q, k, v, is_causal=True, score=score).impl)
    print("entropy of a row, mean in nats:", [round(value, 2) for value in aux.entropy_nats.mean((0, 2)).tolist()])


if __name__ == "__main__":
    main()
