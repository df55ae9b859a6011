"""Small calls for tests of edges, and how close is close."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk.errors import UnsupportedError
from tests.support.kernel_here import unable
from tests.tolerances import complaint, gradient_complaints

IMPLEMENTATIONS = ("auto", *(() if unable() else ("cpu",)), "dense", "fused", "tiled")
every = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
F64 = torch.float64


def qkv(length: int = 7, keys: int = 9, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = ((2, 2, length, dim), (2, 2, keys, dim), (2, 2, keys, dim))
    return [torch.randn(size, dtype=F64).to(dtype).requires_grad_() for size in sizes]


def with_aux(*args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    with torch.no_grad():
        return sqrtdk.attention(*args, return_aux=sqrtdk.AuxRequest.all(), **kwargs)


def lse_and_entropy(*args: Any, **kwargs: Any) -> Any:
    request = sqrtdk.AuxRequest(lse=True, entropy_nats=True)
    return sqrtdk.attention(*args, return_aux=request, **kwargs)[1]


def close_gradients(actual: Sequence[Tensor], expected: Sequence[Tensor], rows: int = 2 * 2 * 7) -> None:
    """In the dtype of the first; `rows` of all batches and heads."""
    found, wanted = ({str(i): g for i, g in enumerate(gradients)} for gradients in (actual, expected))
    wrong = gradient_complaints(found, wanted, actual[0].dtype, length=16, logit=10.0, rows=rows)
    assert not wrong, wrong


def close(actual: Tensor, expected: Tensor, logit: float = 10.0) -> None:
    found = complaint(actual.detach(), expected.detach().double(), actual.dtype, length=16, logit=logit, magnitude=1.0)
    assert found is None, found


def refuses(impl: str, call: Callable[[], Any], refusing: Mapping[str, str]) -> bool:
    """Whether the implementation is one of those that refuse the call; it is shown to, with the reason given here."""
    if impl not in refusing:
        return False
    with pytest.raises(UnsupportedError, match=refusing[impl]):
        call()
    return True
