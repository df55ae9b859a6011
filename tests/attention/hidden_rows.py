"""Calls whose masks hide whole rows by a finite number, and their gradients in float64.

The logits are multiples of 1/256 and at most 4, which no sum with a number of `HIDING` rounds but to that number: so
float32 is held to the float64 formula of logits that are rounded as it rounds them, without a tolerance for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sqrtdk
from tests.tolerances import allowed, gradient_complaints

F64 = torch.float64
FLOATS = (-math.inf, torch.finfo(torch.float32).min, -1e30, -1e9, -1e4)
HIDING = ("bool", *FLOATS)
DIM, LOGIT = 16, 4.0


@dataclass(frozen=True)
class HiddenRows:
    """One call: leaves in float64 that every dtype holds, a mask, and the other arguments."""

    leaves: dict[str, Tensor]
    mask: Tensor  # bool, or float64
    options: dict[str, Any]

    def arguments(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Fresh leaves of a dtype, and the arguments beside them; a mask that learns is a leaf."""
        learns = "attn_mask" in self.leaves
        leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in self.leaves.items()}
        masked = {} if learns else {"attn_mask": self.mask if self.mask.dtype == torch.bool else self.mask.to(dtype)}
        return leaves, masked | self.options


@st.composite
def hidden_rows(draw: st.DrawFn, longest: int = 40) -> HiddenRows:
    """Masks of a whole row by one number, of single keys by another, over rows alone or all heads of all samples."""
    batch, heads = draw(st.integers(1, 2)), draw(st.sampled_from([(2, 2), (4, 2), (2, 1)]))
    length, keys = draw(st.integers(1, 9)), draw(st.integers(2, longest))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def eighths(*sizes: int) -> Tensor:
        return torch.randint(-8, 9, sizes, generator=generator).to(F64) / 8

    leaves = {
        "query": eighths(batch, heads[0], length, DIM),
        "key": eighths(batch, heads[1], keys, DIM),
        "value": eighths(batch, heads[1], keys, DIM),
    }
    of_row, of_key = draw(st.sampled_from(HIDING)), draw(st.sampled_from(FLOATS))
    sizes = draw(st.sampled_from([(length, keys), (batch, 1, length, keys), (batch, heads[0], length, keys)]))
    mask = torch.zeros(sizes, dtype=F64)
    mask[torch.rand(sizes, generator=generator) < draw(st.sampled_from([0.0, 0.4]))] = of_key
    whole = torch.rand(sizes[:-1], generator=generator) < 0.5
    whole.view(-1)[draw(st.integers(0, whole.numel() - 1))] = True
    mask[whole] = -math.inf if of_row == "bool" else of_row
    options: dict[str, Any] = {"is_causal": draw(st.booleans()), "enable_gqa": heads[0] != heads[1]}
    if of_row == "bool":
        return HiddenRows(leaves, mask == 0, options)
    if draw(st.booleans()) and not mask.isinf().any():
        leaves["attn_mask"] = mask
    return HiddenRows(leaves, mask, options)


def derivatives(outputs: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """Gradients of a weighted sum of what is finite in the outputs; the weights are eighths."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=F64)
    for output in outputs:
        weights = torch.randint(-8, 9, output.shape, generator=generator) / 8
        total = total + (output.masked_fill(output.isneginf(), 0.0).cpu().double() * weights).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {name: None if g is None else g.cpu() for name, g in zip(leaves, found, strict=True)}


def formula(call: HiddenRows, dtype: torch.dtype, statistics: bool) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Output and gradients in float64, of logits rounded as an implementation rounds them that widens half types."""
    leaves, given = call.arguments(dtype)
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    mask = leaves.get("attn_mask", given.get("attn_mask"))
    assert mask is not None
    group = leaves["query"].shape[1] // leaves["key"].shape[1]
    key, value = (leaves[name].repeat_interleave(group, 1) for name in ("key", "value"))
    z = leaves["query"] @ key.mT / math.sqrt(DIM)
    seen = mask if mask.dtype == torch.bool else mask != -math.inf
    if mask.dtype != torch.bool:
        z = z + mask.double().masked_fill(~seen, 0.0)
    if given["is_causal"]:
        seen = seen & torch.ones(z.shape[-2:], dtype=torch.bool).tril()
    if dtype != F64:
        z = z + (z.detach().float().double() - z.detach())
    seen = seen.expand(z.shape)
    blind = ~seen.any(-1, keepdim=True)
    z = z.masked_fill(~seen & ~blind, -math.inf)
    weights = z.softmax(-1).masked_fill(blind, 0.0)
    output = weights @ value
    results = [output]
    if statistics:
        # log p from z - m and log l, and no logsumexp: beside a maximum of -3.4e38 float64 loses log l as well
        shifted = z - z.detach().amax(-1, keepdim=True)
        log_mass = shifted.exp().sum(-1)
        log_mass = log_mass.log().masked_fill(blind[..., 0], 0.0)
        lse = (weights.detach() * z.masked_fill(weights == 0, 0.0)).sum(-1)  # of which only the gradient is right
        results += [lse, log_mass - (weights * shifted.masked_fill(weights == 0, 0.0)).sum(-1)]
    return output.detach(), derivatives(results, leaves)


def fixed_rows(longest: int = 600) -> HiddenRows:
    """One call without a draw: rows hidden by each number, over more keys than a block of the kernel holds."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (1, 2, 9, DIM), "key": (1, 1, longest, DIM), "value": (1, 1, longest, DIM)}
    leaves = {name: torch.randint(-8, 9, size, generator=generator).to(F64) / 8 for name, size in sizes.items()}
    mask = torch.zeros(9, longest, dtype=F64)
    for row, number in enumerate(FLOATS):
        mask[row + 2] = number
    return HiddenRows(leaves, mask, {"is_causal": False, "enable_gqa": True})


def wrong(call: HiddenRows, impl: str, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """What is wrong with output and gradients of a call, with those through lse and entropy where there are any."""
    statistics = impl != "fused"
    leaves, given = call.arguments(dtype)
    leaves = {name: leaf.detach().to(device).requires_grad_() for name, leaf in leaves.items()}
    given = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}
    request = sqrtdk.AuxRequest(lse=True, entropy_nats=True) if statistics else None
    found: Any = sqrtdk.attention(**leaves, **given, impl=impl, return_aux=request)
    results = [found[0], found[1].lse, found[1].entropy_nats] if statistics else [found]
    mine = derivatives(results, leaves)
    output, exact = formula(call, dtype, statistics)
    batch, heads, length, _ = call.leaves["query"].shape
    keys = call.leaves["key"].shape[-2]
    if dtype in (torch.float32, F64):
        complaints = gradient_complaints(mine, exact, dtype, length=keys, logit=LOGIT, rows=batch * heads * length)
    else:
        # inputs, weights and results are rounded once each; logits are wider
        largest = max(g.abs().max().item() for g in exact.values() if g is not None)
        limit = allowed(dtype, length=keys, logit=0.0, magnitude=largest)
        errors = {name: (mine[name].double() - g).abs().max().item() for name, g in exact.items() if g is not None}  # type: ignore[union-attr]
        complaints = [f"gradient of {name}: off by {e:.2g}" for name, e in errors.items() if not e <= limit]
    error = (results[0].detach().cpu().double() - output).abs().max().item()
    if not error <= allowed(dtype, length=keys, logit=LOGIT if dtype in (torch.float32, F64) else 0.0, magnitude=1.0):
        complaints.append(f"output: off by {error:.2g}")
    return complaints
