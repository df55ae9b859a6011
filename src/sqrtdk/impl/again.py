"""Gradients of a fused kernel by operations of torch, which can be derived again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.impl.call import Call
from sqrtdk.impl.rows import attend
from sqrtdk.stats.request import AuxRequest

if TYPE_CHECKING:
    from jaxtyping import Float


def gradients_of_formula(
    call: Call, leaves: Sequence[Tensor | None], given: Sequence[Float[Tensor, "B Hq L ..."] | None]
) -> tuple[Tensor | None, ...]:
    """Those of the leaves that are not None, in their places; all weights are held.

    Args:
        call: made of the leaves.
        leaves: whose gradient is wanted.
        given: gradients of output, lse and entropy; None: 0.
    """
    output, aux = attend(replace(call, aux=AuxRequest(lse=True, entropy=True)), 0, call.length)
    results = [(r, g) for r, g in zip((output, aux.lse, aux.entropy), given, strict=True) if g is not None]
    outputs, gradients = zip(*results, strict=True)
    inputs = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(outputs, inputs, gradients, create_graph=True, allow_unused=True))
    return tuple(None if leaf is None else next(found) for leaf in leaves)
