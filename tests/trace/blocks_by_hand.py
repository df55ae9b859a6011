"""A small attention whose middle is computed in blocks, and what its record must say."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.stats import head_stats_from_logits
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.blocks import WAYS, Masks

B, H, L, E = 2, 2, 12, 16
ROOT = E**-0.5
Attending = Callable[["Attend", Tensor, Tensor, Tensor], Tensor]
Scales = tuple[float, ...]


class Attend(nn.Module):
    """Projections, and in the middle a function."""

    def __init__(self, attend: Attending) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, H * E) for _ in range(3))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.attend(self, q, k, v).transpose(1, 2).flatten(2)


def causal(rows: int, columns: int, first_row: int = 0, first_key: int = 0) -> Tensor:
    """True where the row may not see the key."""
    return torch.arange(first_key, first_key + columns) > torch.arange(first_row, first_row + rows)[:, None]


def traced(attend: Attending, device: str = "cpu") -> tuple[Trace, Tensor, Attend, Tensor]:
    """One run, its output bit-equal to the run without a trace."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model, x = Attend(attend), torch.randn(B, L, 32)
        plain = model(x)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert plain.is_meta or torch.equal(plain, observed)
    return run, observed, model, x


def only(attend: Attending, device: str = "cpu") -> AttentionCall:
    run, *_ = traced(attend, device)
    assert (run.not_attention, run.not_measured) == ((), ())
    (call,) = run.calls
    return call


def products(model: Attend, x: Tensor) -> Tensor:
    """Products of q and k in float64."""
    with torch.no_grad():
        q, k = (part(x).double().unflatten(-1, (H, E)).transpose(1, 2) for part in (model.q, model.k))
    return q @ k.mT


def is_dense(call: AttentionCall, logits: Tensor) -> None:
    """The statistics of the record are those of float64 logits, -inf where hidden."""
    expected = head_stats_from_logits(logits, logits > -math.inf).heads
    assert call.stats is not None
    for name in ("max_logit", "min_logit", "std_logit", "entropy_nats", "effective_keys", "peak", "keys"):
        assert getattr(call.stats, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-5), name


ONE = (ROOT, ROOT, ROOT)


MERGED = ("merged", "by_a_softmax_of_sums", "by_shares", "ring")


KEYS = [(0, 3), (4, 7), (8, 11)]


def padding() -> Tensor:
    """Keys that are none, on the left of the second sequence."""
    return (torch.arange(L) < torch.tensor([0, 3])[:, None])[:, None, None]


def online(name: str, scales: Scales, *, hide: bool = False, pad: bool = False) -> Attending:
    """A way of attention with its masks."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks: Masks = (causal(L, L) if hide else None, padding() if pad else None)
        return WAYS[name].way(q, k, v, scales, masks)

    return attend
