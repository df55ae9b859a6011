"""Every position term in its forms, with random tables, next to its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sqrtdk import positions
from sqrtdk.positions import PositionTerm
from tests.positions import positions_oracle as oracle
from tests.positions.positions_oracle import DEBERTA_BUCKETS, DEBERTA_DISTANCE, MODEL, SHAW_SPAN, SPAN, B, E, H


class Case(NamedTuple):
    make: Callable[..., PositionTerm]
    law: Callable[..., Tensor]
    content: bool


def _deberta(**options: Any) -> Callable[..., PositionTerm]:
    return lambda **where: positions.deberta(H, E, model_dim=MODEL, **options, **where)


BUCKETS = {"buckets": DEBERTA_BUCKETS, "max_distance": DEBERTA_DISTANCE}
CASES = {
    "alibi": Case(lambda **_: positions.alibi(H), oracle.alibi, False),
    "alibi symmetric": Case(lambda **_: positions.alibi(H, symmetric=True), oracle.alibi, False),
    "t5": Case(lambda **where: positions.t5_bias(H, num_buckets=8, max_distance=9, **where), oracle.t5_bias, False),
    "t5 causal": Case(
        lambda **where: positions.t5_bias(H, bidirectional=False, num_buckets=6, max_distance=11, **where),
        oracle.t5_bias,
        False,
    ),
    "shaw": Case(lambda **where: positions.shaw(E, max_distance=SHAW_SPAN, **where), oracle.shaw, True),
    "shaw per head": Case(
        lambda **where: positions.shaw(E, max_distance=SHAW_SPAN, heads=H, **where), oracle.shaw, True
    ),
    "transformer-xl": Case(
        lambda **where: positions.transformer_xl(H, E, model_dim=MODEL, **where), oracle.transformer_xl, True
    ),
    "deberta": Case(_deberta(max_distance=SPAN), oracle.deberta, True),
    "deberta buckets": Case(_deberta(**BUCKETS), oracle.deberta, True),
    "deberta c2p": Case(_deberta(**BUCKETS, terms=["c2p"]), oracle.deberta, True),
    "deberta p2c": Case(_deberta(**BUCKETS, terms=["p2c"]), oracle.deberta, True),
}


def made(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """The term with tables of random numbers of size 1."""
    term = CASES[name].make(dtype=dtype, device=device)
    if isinstance(term, nn.Module):
        for parameter in term.parameters():
            nn.init.normal_(parameter)
    return term


def block(
    dtype: torch.dtype = torch.float64, rows: int = 5, columns: int = 7, device: str = "cpu"
) -> tuple[Tensor, ...]:
    """Query, key, row and column positions; the rows are the last ones of a cache that lacks its first keys."""
    first = 9
    return (
        torch.randn(B, H, rows, E, dtype=dtype, device=device),
        torch.randn(B, H, columns, E, dtype=dtype, device=device),
        torch.arange(first, first + rows, device=device),
        torch.arange(first + rows - columns - 3, first + rows - 3, device=device),
    )
