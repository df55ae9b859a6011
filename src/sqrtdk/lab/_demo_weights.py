"""The attention weights of the embedded model on real text, as its own forward pass computes them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sqrtdk.lab._random_rows import weights
from sqrtdk.lab.training.text import batch, stdlib_text
from sqrtdk.models.demo import HEADS, DemoModel
from sqrtdk.positions import rope


@cache
def _held_out() -> Tensor:
    return stdlib_text()[1]


def windows(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the held-out text of the standard library.

    Args:
        count: of windows, each from a random place.
        length: bytes of a window.
        generator: of the places.

    Returns:
        (count, length), integers below 256.
    """
    return batch(_held_out(), count, length, generator)[0]


def demo_weights(model: DemoModel, text: Tensor, scale: float) -> Tensor:
    """Weights of every layer and head.

    Args:
        model: the embedded model, or one of its variants.
        text: (B, L) bytes.
        scale: the variant's own factor on the products.

    Returns:
        (B, layers, H, L, L), float32; row i sees keys j <= i.

    Example:
        >>> model = DemoModel("demo:unscaled")
        >>> demo_weights(model, torch.zeros(1, 4, dtype=torch.long), 1.0).sum(-1).allclose(torch.ones(1, 3, 2, 4))
        True
    """
    projected: list[Tensor] = []
    hooks = [
        getattr(block.attention, name).register_forward_hook(lambda _m, _a, out: projected.append(out))
        for block in model.blocks
        for name in ("q_proj", "k_proj")
    ]
    try:
        with torch.no_grad():
            model(text)
            heads = [x.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in projected]
            layers = [
                weights(*rope(query, key), scale, is_causal=True)
                for query, key in zip(heads[::2], heads[1::2], strict=True)
            ]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers, 1)
