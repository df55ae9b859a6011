"""The backward operator, the launch of its kernels, and the gradient of the forward operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from torch.library import custom_op, triton_op

from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.call import Call
from sqrtdk.impl.gpu.backward import constants
from sqrtdk.impl.gpu.backward_bias import backward_bias, summed_by_distance
from sqrtdk.impl.gpu.backward_keys import backward_keys
from sqrtdk.impl.gpu.backward_rows import backward_rows
from sqrtdk.impl.gpu.configs import backward_config
from sqrtdk.impl.gpu.launch import fits_descriptor, launch, padded, placed, precision, strides, target_of
from sqrtdk.impl.gpu.load import interpreted
from sqrtdk.impl.operands import of_pairs
from sqrtdk.impl.rows import gradients_of_formula

if TYPE_CHECKING:
    from jaxtyping import Float

operator = custom_op if interpreted() else triton_op  # an interpreted kernel can't be traced
ROWS_OF_CONSTANTS = 32
BIAS_BLOCK = 64
Gradients = tuple[Tensor | None, ...]


@operator("sqrtdk_gpu::constant", mutates_args=())
def constant(
    gradient: Tensor, output: Tensor, d_lse: Tensor | None, d_entropy: Tensor | None, entropy: Tensor | None
) -> Tensor:
    """Return c = -sum dO O + dlse - dH H of every row, float32 (B, Hq, L).

    Args:
        gradient: dO, the gradient of the output, (B, Hq, L, Ev).
        output: O, (B, Hq, L, Ev).
        d_lse: Gradient of lse, (B, Hq, L), contiguous; None means 0.
        d_entropy: dH, the gradient of the entropy, (B, Hq, L), contiguous; None means 0.
        entropy: H in nats, (B, Hq, L), contiguous; read only if `d_entropy` is given.
    """
    batch, heads, length, width = output.shape
    c = output.new_empty((batch, heads, length), dtype=torch.float32)
    if c.numel() == 0:
        return c
    launch(
        constants,
        (triton.cdiv(c.numel(), ROWS_OF_CONSTANTS),),
        gradient,
        *gradient.stride(),
        output,
        *output.stride(),
        d_lse,
        d_entropy,
        entropy,
        c,
        c.numel(),
        heads,
        length,
        EV=width,
        BLOCK_EV=padded(width),
        BLOCK_M=ROWS_OF_CONSTANTS,
        LSE=d_lse is not None,
        ENTROPY=d_entropy is not None,
        num_warps=4,
        num_stages=1,
    )
    return c


@constant.register_fake
def _constant_shape(gradient: Tensor, output: Tensor, *rest: Tensor | None) -> Tensor:
    return output.new_empty(output.shape[:-1], dtype=torch.float32)


@operator("sqrtdk_gpu::backward", mutates_args=())
def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: Tensor,
    constant: Tensor,
    entropy: Tensor | None,
    factor: float,
    scale: Tensor | None,
    softcap: float,
    bias: Tensor | None,
    distances: bool,
    visible: Tensor | None,
    above: int | None,
    below: int | None,
    needs_scale: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, scale and bias.

    Args:
        gradient: of the output, (B, Hq, L, Ev).
        query: see `operators.forward`.
        key: likewise.
        value: likewise.
        levels: of the forward pass, maxima and log masses, float32 (2, B, Hq, L), contiguous; a maximum is -inf if its
            row saw no key.
        constant: -sum gradient output + dlse - dH H, float32 (B, Hq, L), contiguous.
        entropy: dH, the gradient of the entropy, likewise; None: 0.
        factor: see `operators.forward`.
        scale: likewise.
        softcap: likewise.
        bias: likewise.
        distances: likewise.
        visible: likewise.
        above: likewise.
        below: likewise.
        needs_scale: whether to compute the gradient of the scale.
        needs_bias: whether to compute the gradient of the bias.

    Returns:
        dq, dk, dv like query, key, value; the scale's gradient (B, Hq, L, 1) in float32, and the bias's in its own
        shape and dtype, or (0,) if not computed.
    """
    batch, heads, length, width = query.shape
    key_heads, keys, value_width = value.shape[1:]
    found = _empty(query, key, value, bias, needs_scale, needs_bias)
    if 0 in (batch, heads, length, keys):
        return tuple(t.zero_() for t in found)  # type: ignore[return-value]
    dq, dk, dv, d_scale, d_bias = found
    widen = interpreted() and query.dtype == torch.bfloat16  # the interpreter multiplies bit patterns of bfloat16
    if widen:
        dq, dk, dv = dq.float(), dk.float(), dv.float()
    group = heads // key_heads
    widest = max(padded(width), padded(value_width))
    extras = bias is not None or visible is not None or softcap > 0.0
    for_keys, for_rows = backward_config(target_of(query), query.dtype, widest, extras)
    if for_keys.descriptors and value_width and not fits_descriptor(gradient):
        gradient = gradient.contiguous()
    tensors = (
        *(gradient, *gradient.stride(), query, *query.stride(), key, *key.stride(), value, *value.stride()),
        *(
            *levels.unbind(),
            constant,
            entropy,
            scale,
            *strides(scale, 3),
            *placed(bias, distances, length),
            visible,
            *strides(visible, 4),
        ),
    )
    numbers = (heads, length, keys, factor, softcap, above or 0, below or 0)
    common = {
        "GROUP": group,
        "E": width,
        "EV": value_width,
        "BLOCK_E": padded(width),
        "BLOCK_EV": padded(value_width),
        "SCALES": scale is not None,
        "SOFTCAP": bool(softcap),
        "VISIBLE": visible is not None,
        "ABOVE": above is not None,
        "BELOW": below is not None,
        "ENTROPY": entropy is not None,
        "WIDEN": widen,
        "PRECISION": precision(query),
    }
    swept = {"LINEAR": bias is None and not softcap, "BIAS": bias is not None}
    launch(
        backward_keys,
        (triton.cdiv(keys, for_keys.block_m) * batch * key_heads,),
        *tensors,
        dk,
        dv,
        *numbers,
        BLOCK_M=for_keys.block_n,
        BLOCK_N=for_keys.block_m,
        DESCRIPTORS=for_keys.descriptors and all(fits_descriptor(t) for t in (query, gradient) if t.shape[-1]),
        num_warps=for_keys.warps,
        num_stages=for_keys.stages,
        **swept,
        **common,
    )
    launch(
        backward_rows,
        (triton.cdiv(length, for_rows.block_m) * batch * heads,),
        *tensors,
        dq,
        d_scale,
        *numbers,
        BLOCK_M=for_rows.block_m,
        BLOCK_N=for_rows.block_n,
        NEEDS_SCALE=needs_scale,
        DESCRIPTORS=for_rows.descriptors and all(fits_descriptor(t) for t in (key, value) if t.shape[-1]),
        num_warps=for_rows.warps,
        num_stages=for_rows.stages,
        **swept,
        **common,
    )
    if needs_bias and bias is not None:
        block = min(for_rows.block_m, BIAS_BLOCK)
        whole = [size > 1 for size in bias.shape]  # a dimension of the call that is 1 is summed over as well
        cut = [triton.cdiv(size, block) for size in (length, keys)]
        shape = [n if own else 1 for n, own in zip((batch, heads), whole, strict=False)]
        if distances:
            shape += [cut[0] + cut[1] - 1, block, block]
        else:
            shape += [n if own else parts for n, own, parts in zip((length, keys), whole[2:], cut, strict=True)]
        direct = whole[2] and whole[3] and not (interpreted() and bias.dtype == torch.bfloat16)
        sums = d_bias if direct else bias.new_empty(shape, dtype=torch.float32)
        launch(
            backward_bias,
            (shape[0] * shape[1] * (shape[2] if distances else cut[0] * cut[1]),),
            *tensors,
            sums,
            batch,
            *numbers,
            BLOCK_M=block,
            BLOCK_N=block,
            BATCHES=whole[0],
            HEADS=whole[1],
            ROWS=whole[2],
            KEYS=whole[3],
            DISTANCES=distances,
            num_warps=8 if distances else 4,
            num_stages=1,
            **common,
        )
        if distances:
            d_bias = summed_by_distance(sums.squeeze(0), length, keys).view(bias.shape).to(bias.dtype)
        elif not direct:
            d_bias = sums.sum_to_size(bias.shape).to(bias.dtype)
    return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype), d_scale, d_bias


@backward.register_fake
def _shapes(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: Tensor,
    constant: Tensor,
    entropy: Tensor | None,
    factor: float,
    scale: Tensor | None,
    softcap: float,
    bias: Tensor | None,
    distances: bool,
    visible: Tensor | None,
    above: int | None,
    below: int | None,
    needs_scale: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _empty(query, key, value, bias, needs_scale, needs_bias)


def _empty(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, needs_scale: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `backward`, uninitialised."""
    d_scale = query.new_empty((*query.shape[:-1], 1) if needs_scale else (0,), dtype=torch.float32)
    d_bias = bias.new_empty(bias.shape) if needs_bias and bias is not None else query.new_empty((0,))
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), d_scale, d_bias


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what `gradients` needs of the inputs and results of the forward operator.

    This is its `setup_context`, as `torch.library.register_autograd` calls it.

    Args:
        ctx: The autograd context.
        inputs: Arguments of `operators.forward`, in order.
        output: Its results, in order.
    """
    query, key, value, factor, scale, softcap, bias, distances, visible, sinks, above, below, places, _ = inputs
    out, _, entropy, planes, levels = output
    ctx.mark_non_differentiable(planes, levels)
    added = bias if distances is None else distances
    ctx.save_for_backward(query, key, value, out, levels, entropy, scale, added, visible, sinks)
    ctx.numbers = factor, softcap, distances is not None, above, below
    ctx.sampled = places is not None
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any,
    d_out: Float[Tensor, "B Hq L Ev"] | None,
    d_lse: Float[Tensor, "B Hq L"] | None,
    d_entropy: Float[Tensor, "B Hq L"] | None,
    *_: None,
) -> Gradients:
    """Return the gradients of the forward operator's inputs, from those of its results.

    Under `create_graph=True` they are computed by the plain formula, so that they can themselves be differentiated.

    Args:
        ctx: The autograd context that `keep` filled.
        d_out: Gradient of the output; None means 0.
        d_lse: Gradient of lse, likewise.
        d_entropy: Gradient of the entropy, likewise.

    Returns:
        One gradient for each argument of `operators.forward`, in order; None for those that have none or need none.

    Raises:
        UnsupportedError: The rows were a sample (`places` was given).
    """
    query, key, value, out, levels, entropy, scale, bias, visible, sinks = ctx.saved_tensors
    factor, softcap, distances, above, below = ctx.numbers
    if ctx.sampled:
        raise UnsupportedError("the Triton kernel has no gradient of sampled rows", hint="Pass impl='tiled'.")
    d_entropy = d_entropy if 2 * entropy.numel() == levels.numel() else None
    if torch.is_grad_enabled():  # so that this gradient can itself be differentiated
        call = Call(
            query,
            key,
            value,
            factor if scale is None else scale,
            softcap=softcap or None,
            bias=of_pairs(bias.squeeze(-2), query.shape[-2]) if distances else bias,
            visible=visible,
            diagonal=above,
            window=(below, None),
            sinks=sinks,
        )
        biases = (None, bias) if distances else (bias, None)
        leaves = (query, key, value, None, scale, None, *biases, None, sinks, None, None, None, None)
        wanted = [leaf if needed else None for leaf, needed in zip(leaves, ctx.needs_input_grad, strict=True)]
        return gradients_of_formula(call, wanted, (d_out, d_lse, d_entropy))
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_lse = None if d_lse is None else d_lse.contiguous()
    d_entropy = None if d_entropy is None else d_entropy.contiguous()
    c = torch.ops.sqrtdk_gpu.constant(d_out, out, d_lse, d_entropy, None if d_entropy is None else entropy)
    needs_scale, needs_bias, needs_sinks = (ctx.needs_input_grad[at] for at in (4, 7 if distances else 6, 9))
    dq, dk, dv, d_scale, d_bias = torch.ops.sqrtdk_gpu.backward(
        *(
            d_out,
            query,
            key,
            value,
            levels,
            c,
            d_entropy,
            factor,
            scale,
            softcap,
            bias,
            distances,
            visible,
            above,
            below,
        ),
        *(needs_scale, needs_bias),
    )
    return (
        *(dq, dk, dv, None, d_scale.sum_to_size(scale.shape) if needs_scale else None, None),
        *(d_bias if needs_bias and not distances else None, d_bias if needs_bias and distances else None, None),
        *(_of_sinks(sinks, levels, c, d_entropy) if needs_sinks else None, None, None, None, None),
    )


def _of_sinks(sinks: Tensor, levels: Tensor, constant: Tensor, d_entropy: Tensor | None) -> Tensor:
    """Return the gradient of the sinks, each a key of value 0, in their shape."""
    log_weight = sinks.squeeze(-1) - levels[0] - levels[1]
    weight = log_weight.clamp(max=0.0).exp()
    nothing = (weight == 0.0) | levels[0].isneginf()
    inner = constant if d_entropy is None else constant - d_entropy * log_weight.masked_fill(nothing, 0.0)
    return (weight * inner).masked_fill(nothing, 0.0).unsqueeze(-1).sum_to_size(sinks.shape)


def _refuse(ctx: Any, *gradients: Tensor | None) -> Gradients:
    raise UnsupportedError("the backward operators of the Triton kernel have no gradient", hint="Pass impl='tiled'.")


constant.register_autograd(_refuse)
backward.register_autograd(_refuse)
