"""Projections whose weight is computed from others in the forward: weight and spectral norm, old hooks and new."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk

WIDTH, HEADS = 32, 4
NORMS: dict[str, Callable[..., nn.Module]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "parametrizations.weight_norm": nn.utils.parametrizations.weight_norm,
    "parametrizations.spectral_norm": nn.utils.parametrizations.spectral_norm,
}


class Projected(nn.Module):
    """Each projection is a layer of its own."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        out: Tensor = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        return out


class Pointwise(Projected):
    """The projections are convolutions of width 1 over (B, C, L)."""

    def __init__(self, norm: Callable[..., nn.Module]) -> None:
        nn.Module.__init__(self)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (norm(nn.Conv1d(WIDTH, WIDTH, 1)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x.mT).unflatten(1, (HEADS, -1)).mT for f in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        out: Tensor = self.out_proj((weights @ v).mT.flatten(1, 2))
        return out


class Packed(nn.Module):
    """torch's own module, on its output projection or on the packed one."""

    def __init__(self, norm: Callable[..., nn.Module], packed: bool = False) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        norm(self.attn, "in_proj_weight") if packed else norm(self.attn.out_proj)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(x, x, x)[0]
        return out


MODELS: dict[str, Callable[[Callable[..., nn.Module]], nn.Module]] = {
    "four layers": Projected,
    "four convolutions": Pointwise,
    "out_proj of nn.MultiheadAttention": Packed,
    "in_proj_weight of nn.MultiheadAttention": lambda norm: Packed(norm, packed=True),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_computed_weight_is_a_weight(norm: str, model: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates the old hooks
        made = MODELS[model](NORMS[norm]).eval()
    report = sqrtdk.check(made, torch.randn(2, 6, WIDTH))
    (judged,) = report.calls
    assert (judged.call.formula, judged.verdict) == ("softmax(0.3536 * q.k)", "exact")
    assert not report.not_measured
    assert not [finding for finding in report.findings if finding.rule == "unmeasured"]


class Pool(nn.Module):
    """One learned query, of a vector or of a row, pools the tokens."""

    def __init__(self, width: int, *rows: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(*rows, WIDTH))
        self.q, self.k, self.v = nn.Linear(WIDTH, width), nn.Linear(WIDTH, width), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.q(self.query), self.k(x)
        weights = (query @ key.mT * key.shape[-1] ** -0.5).softmax(-1)
        return (weights if self.query.dim() > 1 else weights[:, None]) @ self.v(x)


@pytest.mark.parametrize("pool", [Pool(WIDTH), Pool(WIDTH, 1), Pool(1, 1)])
def test_a_learned_query_is_no_number_of_the_model(pool: Pool) -> None:
    """The projection of the query has an axis, also if it is one number, of a head of one channel."""
    (judged,) = sqrtdk.check(pool.eval(), torch.randn(2, 6, WIDTH), laws="none").calls
    assert judged.verdict == "exact"
