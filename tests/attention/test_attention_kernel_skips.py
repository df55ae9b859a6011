"""The compiled kernel leaves out what a mask hides: blocks of keys, their ends, and the ends of each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from tests.support.kernel_here import unable
from tests.tolerances import complaint

pytestmark = pytest.mark.skipif(bool(unable()), reason="there is no compiled kernel")

L, S, E = 300, 1300, 16
ROWS, KEYS = torch.arange(L).unsqueeze(-1), torch.arange(S)
MASKS: dict[str, Tensor] = {
    "documents": ROWS * S // L // 170 == KEYS // 170,
    "one key of a block": KEYS % 512 == 511,
    "the middle of a block": (KEYS > 600) & (KEYS < 700),
    "last key alone": KEYS == S - 1,
    "first rows of a tile alone": (ROWS % 128 < 3) & (KEYS // 64 % 3 == 1),
    "every third row": (ROWS % 3 == 0) & (KEYS >= 1024),
    "nothing": KEYS < 0,
    "of a head": (torch.arange(2).view(2, 1, 1) == KEYS // 130 % 2).expand(2, L, S),
    "laid out by keys": (ROWS * S // L // 300 == KEYS // 300).t().contiguous().t(),
    "one row for all": (KEYS > 70) & (KEYS < 900),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", ["", "causal", "bias", "stay"])
@pytest.mark.parametrize("name", MASKS)
def test_output_statistics_and_gradients_are_those_in_float64(name: str, options: str, dtype: torch.dtype) -> None:
    judge_mask(name, options, dtype)


def judge_mask(name: str, options: str, dtype: torch.dtype) -> None:
    """Raise an AssertionError if the kernel is wrong under one of `MASKS`."""
    mask = MASKS[name]
    more: dict[str, Any] = {"causal_lower_right": options == "causal"}
    made = {n: torch.randn(1, 2, m, E).to(dtype) for n, m in (("q", L), ("k", S), ("v", S))}
    if options == "bias":
        made["bias"] = torch.randn(2, L, S).to(dtype)
    if options == "stay":  # the places of keys in a block decide which weights dropout keeps
        more["dropout_p"] = 0.3
    results = []
    for kind, impl in ((torch.float64, "dense"), (dtype, "cpu")):
        leaves = {n: tensor.to(kind, copy=True).requires_grad_() for n, tensor in made.items()}
        if options == "stay" and impl == "dense":
            continue
        torch.manual_seed(0)
        given = {**leaves, "attn_mask": mask, **more}
        output, aux = sqrtdk.attention(
            given.pop("q"), given.pop("k"), given.pop("v"), return_aux=True, impl=impl, **given
        )
        total = output.double().sum() + torch.where(aux.keys > 0, aux.lse, 0.0).double().sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
        results.append((output, aux, dict(zip(leaves, found, strict=True))))
    if options == "stay":  # beside the same mask with one more row of visible keys, after which nothing is left out
        _same_weights_stay(made, mask, results[0][0])
        return
    (wanted, stats, exact), (found, aux, mine) = results
    assert complaint(found, wanted, dtype, length=S, logit=8.0, magnitude=1.0) is None
    assert torch.equal(aux.keys.double(), stats.keys.double())
    assert complaint(aux.lse, stats.lse, torch.float32, length=S, logit=8.0, magnitude=8.0) is None
    for leaf, gradient in exact.items():
        assert complaint(mine[leaf], gradient, dtype, length=S, logit=8.0) is None, leaf


def _same_weights_stay(made: dict[str, Tensor], mask: Tensor, output: Tensor) -> None:
    mask = mask.expand(2, L, S).clone()
    mask[:, ::128] = True  # a row of each tile
    torch.manual_seed(0)
    whole = sqrtdk.attention(made["q"], made["k"], made["v"], mask, dropout_p=0.3, impl="cpu")
    kept = torch.arange(L) % 128 > 0
    torch.testing.assert_close(output[:, :, kept], whole[:, :, kept], rtol=2e-2, atol=2e-2)
