"""torch's scaled_dot_product_attention for the output, and a pass over tiles for the statistics.

A scale tensor becomes a factor on q. A bias, a mask and a window become one mask argument; causal alone stays an
argument.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sqrtdk._modes import as_one
from sqrtdk._subclasses import torch_attention
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.call import UNBOUNDED, Call, broadcast, has_values, repeat_key_heads
from sqrtdk.impl.extremes import FARTHEST_ROW, gives_infinity, largest, looked_at, may_lose_mass
from sqrtdk.impl.operands import learns_term, only_by_blocks, with_bias
from sqrtdk.stats import AttentionRows, attention_row_stats
from sqrtdk.stats.request import AuxOutput, aux_output

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from sqrtdk._shapes import Bias, Key, Output, Value, Visible

LARGEST_MASK = 2**26  # elements of an L x S mask that "auto" makes at most


def obstacle(call: Call) -> str | None:
    """Return the reason, in English, why torch's kernels can't run a call; None if they can."""
    reason = only_by_blocks(call)
    if reason is not None:
        return reason
    if call.softcap is not None:
        return "torch's kernels have no softcap"
    if call.sinks is not None:
        return "torch's kernels have no sinks"
    if call.unclean:
        return "NaN or infinity stands at a hidden key or value or before few keys, or q and k may overflow"
    if call.aux is not None and not has_values(call.query, call.key):
        return "the pass for the statistics looks at numbers, and there are none to look at"
    if call.aux is not None and (call.aux.lse or call.aux.entropy_nats) and _learns(call):
        return "torch's kernels give no gradient of lse and entropy"
    if not (call.aux is not None and in_one_pass(call)) and gives_infinity(
        call.query, call.key, call.value, call.scale, call.hides
    ):
        return "a logit may be infinite, and torch's kernels give 0 for rows of such logits, in place of NaN"
    return None


def mask_elements(call: Call) -> int:
    """Return the number of elements of the mask (..., L, S) that must be built before torch's kernels can run a call.

    It is 0 if the call needs no mask. Bias and position term count as part of the mask.
    """
    if not _needs_mask(call):
        return 0
    lead = [tuple(t.shape[:-2]) for t in (call.bias, call.visible) if t is not None]
    if call.term is not None:
        lead.append((call.heads,))
    return math.prod(broadcast(*lead)) * call.length * call.keys


def loses_mass(call: Call) -> bool:
    """Return whether a call wants gradients that torch's kernels may compute wrong; `may_lose_mass` says when.

    Args:
        call: A call without an obstacle.
    """
    learns = torch.is_grad_enabled() and (call.value.requires_grad or _learns(call))
    if not learns or call.bias is None:
        return False
    if looked_at(call.bias) and largest(call.bias) <= FARTHEST_ROW:
        return False  # nor is a row of it as far, and the mask over all pairs need not be made
    return may_lose_mass(_mask(call))


def fused(call: Call) -> tuple[Output, AuxOutput]:
    """Return output (..., Hq, L, Ev) and statistics (..., Hq, L).

    Where torch's kernels may give wrong gradients, torch's plain formula runs, which holds all pairs.

    Raises:
        UnsupportedError: See `obstacle`.
    """
    reason = obstacle(call)
    if reason is not None:
        raise UnsupportedError(f"impl='fused' can't run this call: {reason}", hint="Use impl='tiled' or 'auto'.")
    # The lse comes from a pass over tiles of logits, which a trace would take for attentions of their own.
    result: tuple[Output, AuxOutput] = as_one(call, _fused) if call.aux is not None and call.aux.lse else _fused(call)
    return result


def _fused(call: Call) -> tuple[Output, AuxOutput]:
    call = with_bias(call)
    if call.aux is not None and in_one_pass(call):
        found = swept(call, call.value)
        assert found.output is not None
        return found.output, aux_output(call.aux, found.rows)
    query, scale = call.query, call.scale
    key, value, shared = _shared(call)
    mask = torch.atleast_2d(_mask(call)) if _needs_mask(call) else None  # type: ignore[no-untyped-call]
    is_causal = call.diagonal is not None and mask is None
    # a negative scale would turn the -inf of hidden keys into +inf
    if isinstance(scale, Tensor) or (is_causal and scale <= 0.0):
        query, scale = query.to(call.dtype) * scale, 1.0
    if loses_mass(call):
        query, key, wide = (t.to(call.dtype) for t in (query, key, value))
        bias = None if mask is None else mask.to(call.dtype)
        output, _ = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, wide, bias, call.dropout_p, scale=scale, enable_gqa=shared
        )
        output = output.to(value.dtype)
    else:
        output = torch_attention(
            query.to(value.dtype),
            key.to(value.dtype),
            value,
            mask,
            call.dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=shared,
        )
    output = output.expand(*call.lead, *output.shape[-2:])  # torch's output does not broadcast if it is empty
    if call.aux is None:
        return output, AuxOutput()
    return output, aux_output(call.aux, swept(call).rows)


def _needs_mask(call: Call) -> bool:
    added = call.bias is not None or call.term is not None
    # torch's is_causal is the triangle from the upper left, diagonal 0; one from the lower right, S - L, is a mask.
    return (
        added
        or call.visible is not None
        or call.places is not None
        or call.window != UNBOUNDED
        or call.diagonal not in (None, 0)
    )


def _mask(call: Call) -> Visible | Bias | None:
    visible = call.visible_mask(0, call.length)
    mask = visible
    if call.bias is not None:
        bias = call.bias if call.bias.dtype == call.value.dtype else call.bias.to(call.dtype)
        mask = bias if visible is None else torch.where(visible, bias, -math.inf)
    return mask if mask is None or mask.ndim > 1 else mask.unsqueeze(0)


def held_by_torch(call: Call) -> bool:
    """Return whether torch would hold the weights of all pairs in memory.

    Its kernels do not take every width, dropout or mask, and then it falls back to plain operations.
    """
    if (call.aux is not None and in_one_pass(call)) or not has_values(call.query, call.key, call.value):
        return False
    mask = None
    if _needs_mask(call):
        learns = learns_term(call) or (call.bias is not None and call.bias.requires_grad)
        # torch decides by shape and gradient: with strides of 0 the mask takes no memory.
        mask = call.value.new_empty(1, 1, requires_grad=learns).expand(call.length, call.keys)
    key, value, shared = _shared(call)
    backend = torch._fused_sdp_choice(
        call.query.to(value.dtype), key.to(value.dtype), value, mask, call.dropout_p, enable_gqa=shared
    )
    return int(backend) == SDPBackend.MATH.value


def in_one_pass(call: Call) -> bool:
    """Return whether the pass for the statistics also makes the output; it has no gradient and no dropout.

    On a GPU it does not: torch's kernel costs almost nothing beside the pass.
    """
    learns = torch.is_grad_enabled() and (call.value.requires_grad or _learns(call))
    return call.query.device.type == "cpu" and not call.dropout_p and not learns


def swept(call: Call, value: Value | None = None) -> AttentionRows:
    """Return the statistics of the rows, (..., Hq, L), by one pass over tiles; with `value`, the output as well.

    Args:
        call: A call without an obstacle.
        value: Values of the call, or None if the output is not wanted.
    """
    call = with_bias(call)
    shape = (*call.lead, call.length)
    all_heads = call.lead[-1] if call.lead else 1
    heads = {_heads(tensor) for tensor in (call.key, value) if tensor is not None} - {1}
    lead = (*call.lead[:-1], heads.pop() if len(heads) == 1 and call.heads == all_heads else all_heads)

    def expanded(tensor: Shaped[Tensor, "... S E"], lead: tuple[int, ...]) -> Shaped[Tensor, "... S E"]:
        tensor = tensor.detach() if _heads(tensor) in (1, lead[-1]) else repeat_key_heads(tensor.detach(), all_heads)
        return tensor.expand(*lead, *tensor.shape[-2:])

    query, key = expanded(call.query, (*call.lead[:-1], all_heads)), expanded(call.key, lead)
    value = None if value is None else expanded(value, lead)
    visible = call.visible_mask(0, call.length) if _needs_mask(call) else None
    found = attention_row_stats(
        query,
        key,
        value,
        scale=call.scale.detach() if isinstance(call.scale, Tensor) else call.scale,
        softcap=call.softcap,
        bias=None if call.bias is None else call.bias.detach(),
        visible=visible,
        is_causal=call.diagonal is not None and visible is None,
        product=False,
    )
    output = None if found.output is None else found.output.reshape(*shape, found.output.shape[-1])
    return AttentionRows(found.rows.map(lambda field: field.reshape(shape)), output=output)


def _heads(tensor: Key | Value) -> int:
    return tensor.shape[-3] if tensor.ndim > 2 else 1


def _shared(call: Call) -> tuple[Key, Value, bool]:
    """Return key, value, and whether torch must repeat their heads, which it can only if both have the same number."""
    key, value = call.key, call.value
    if _heads(key) != _heads(value):
        key, value = repeat_key_heads(key, call.heads), repeat_key_heads(value, call.heads)
    return key, value, call.heads not in (_heads(key), 1) and _heads(key) != 1


def _learns(call: Call) -> bool:
    tensors = (call.query, call.key, call.scale, call.bias)
    return torch.is_grad_enabled() and (
        learns_term(call) or any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
    )
