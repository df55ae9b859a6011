"""Registers the kernel's operators with torch: shapes without data, and the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.call import Call
from sqrtdk.impl.operands import of_pairs
from sqrtdk.impl.rows import gradients_of_formula

if TYPE_CHECKING:
    from jaxtyping import Float, Int

# in the order of row.h
PLANES = ("keys", "max_logit", "min_logit", "rest", "share2", "share3", "a", "mean", "m2")
Gradients = tuple[Tensor | None, ...]


def register_operators() -> None:
    """Tell torch the result shapes and gradients of the operators `sqrtdk_cpu::*`.

    Call it after the library was loaded; a second call does nothing.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key("sqrtdk_cpu::forward", "Meta"):
        return
    torch.library.register_fake("sqrtdk_cpu::forward", _shapes)
    torch.library.register_fake("sqrtdk_cpu::backward", _gradient_shapes)
    torch.library.register_fake("sqrtdk_cpu::kept", _kept_shape)
    torch.library.register_autograd("sqrtdk_cpu::forward", _backward, setup_context=_keep)
    torch.library.register_autograd("sqrtdk_cpu::backward", _refuse)


def _shapes(
    query: Float[Tensor, "B Hq L E"],
    key: Float[Tensor, "B H S E"],
    value: Float[Tensor, "B H S Ev"],
    *rest: Any,
) -> tuple[Float[Tensor, "..."], ...]:
    batch, heads, length, _ = query.shape
    wide, statistics = rest[-2:]
    rows = query.new_empty((batch, heads, length), dtype=torch.float32)
    output = query.new_empty((batch, heads, length, value.shape[-1]), dtype=torch.float32 if wide else query.dtype)
    levels = query.new_empty((2, batch, heads, length), dtype=torch.float32)
    if not statistics:
        return output, rows, *(query.new_empty((0,), dtype=torch.float32) for _ in range(2)), levels
    planes = query.new_empty((len(PLANES), batch, heads, length), dtype=torch.float32)
    return output, rows, torch.empty_like(rows), planes, levels


def _gradient_shapes(
    gradient: Float[Tensor, "B Hq L Ev"],
    query: Float[Tensor, "B Hq L E"],
    key: Float[Tensor, "B H S E"],
    value: Float[Tensor, "B H S Ev"],
    levels: Float[Tensor, "2 B Hq L"],
    *rest: Any,
) -> tuple[Float[Tensor, "..."], ...]:
    biases, learn = rest[5:7], rest[-2:]
    of_biases = [
        torch.empty_like(bias, memory_format=torch.contiguous_format) if learns else levels.new_empty((0,))
        for bias, learns in zip(biases, learn, strict=True)
    ]
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), *of_biases


def _kept_shape(seed: Int[Tensor, ""], dropout_p: float, sizes: list[int]) -> Float[Tensor, "B Hq L S"]:
    return seed.new_empty(sizes, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, factor, scale, softcap, bias, distances, visible, sinks, *rest = inputs
    above, below, dropout, seed, _, statistics = rest
    out, _, entropy, planes, levels = output
    ctx.mark_non_differentiable(planes, levels)
    ctx.save_for_backward(query, key, value, out, levels, entropy, scale, bias, distances, visible, sinks, seed)
    ctx.numbers = factor, softcap, above, below, dropout, statistics
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any,
    d_out: Float[Tensor, "B Hq L Ev"] | None,
    d_lse: Float[Tensor, "B Hq L"] | None,
    d_entropy: Float[Tensor, "B Hq L"] | None,
    *_: None,
) -> Gradients:
    """Return the gradients of the kernel's inputs; where these must be differentiated again, by plain operations."""
    saved = ctx.saved_tensors  # once: under a checkpoint they can't be had again
    query, key, value, out, levels, entropy, scale, bias, distances, visible, sinks, seed = saved
    factor, softcap, above, below, dropout, statistics = ctx.numbers
    if torch.is_grad_enabled():  # so that this gradient can itself be differentiated
        return _by_the_formula(ctx, saved, d_out, d_lse, d_entropy)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    # dz = p (dp - p . dp), and p . dp of a row is out . d_out: one number, to which lse and entropy add theirs.
    constant = -(out.float() * d_out.float()).sum(-1)
    if d_lse is not None:
        constant = constant + d_lse
    d_entropy = d_entropy if statistics else None
    if d_entropy is not None:
        constant = constant - d_entropy * entropy
        d_entropy = d_entropy.contiguous()
    given = (d_out.to(query.dtype), query, key, value, levels, constant.contiguous(), d_entropy)
    numbers = (factor, scale, softcap, bias, distances, visible, above, below, dropout, seed)
    learn = ctx.needs_input_grad[6:8]
    dq, dk, dv, *of_biases = torch.ops.sqrtdk_cpu.backward(*given, *numbers, *learn)
    d_biases = [found if learns else None for found, learns in zip(of_biases, learn, strict=True)]
    d_sinks = None
    if sinks is not None and ctx.needs_input_grad[9]:  # a sink is a key of value 0
        log_weight = sinks.unsqueeze(-1) - levels[0] - levels[1]
        inner = constant if d_entropy is None else constant - d_entropy * log_weight
        weight = log_weight.exp()
        d_sinks = torch.where(weight > 0, weight * inner, 0.0).sum((0, 2))
    return dq, dk, dv, None, None, None, *d_biases, None, d_sinks, *(None,) * 6


def _by_the_formula(ctx: Any, saved: tuple[Any, ...], *given: Float[Tensor, "B Hq L ..."] | None) -> Gradients:
    """Return the gradients by plain operations, which autograd can differentiate."""
    query, key, value, out, _, _, scale, bias, distances, visible, sinks, seed = saved
    factor, softcap, above, below, dropout, _ = ctx.numbers
    sizes = (*out.shape[:-1], key.shape[-2])
    call = Call(
        query,
        key,
        value,
        factor if scale is None else scale,
        softcap=softcap or None,
        bias=_sum(bias, None if distances is None else of_pairs(distances.squeeze(-2), sizes[-2])),
        visible=visible,
        diagonal=above,
        window=(below, None),
        sinks=sinks,
        dropout_p=dropout,
        kept=None if seed is None else torch.ops.sqrtdk_cpu.kept(seed, dropout, sizes),
    )
    leaves = (query, key, value, None, None, None, bias, distances, None, sinks, *(None,) * 6)
    wanted = [leaf if needed else None for leaf, needed in zip(leaves, ctx.needs_input_grad, strict=True)]
    return gradients_of_formula(call, wanted, given)


def _sum(*biases: Tensor | None) -> Tensor | None:
    given = [bias for bias in biases if bias is not None]
    return sum(given[1:], given[0]) if given else None


def _refuse(ctx: Any, *gradients: Tensor | None) -> Gradients:
    raise UnsupportedError("the backward operator of the compiled kernel has no gradient", hint="Pass impl='tiled'.")
