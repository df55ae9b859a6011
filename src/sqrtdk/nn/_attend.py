"""One call of `sqrtdk.attention` that also gives the weights where they are wanted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from sqrtdk._arguments import autocast_dtype
from sqrtdk._attention import attention
from sqrtdk._resolve import resolve
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.call import Call, grow
from sqrtdk.impl.rows import block_rows, guarded_logits, guarded_sum, logits, sink_column
from sqrtdk.stats.request import AuxOutput, AuxRequest

if TYPE_CHECKING:
    from sqrtdk._shapes import AnyKey, Factor, Logits, Output, Query, Value, Visible


class Attended(NamedTuple):
    """What a call gave."""

    output: Output
    weights: Logits | None
    aux: AuxOutput | None

    def asked(self) -> Any:
        """The output alone, or a tuple of it and what was asked for."""
        extras = tuple(extra for extra in (self.weights, self.aux) if extra is not None)
        return (self.output, *extras) if extras else self.output


def attend(
    query: Query,
    key: AnyKey,
    value: Value,
    *,
    need_weights: bool = False,
    return_aux: AuxRequest | None = None,
    impl: str = "auto",
    **options: Any,
) -> Attended:
    """Output, weights after dropout, statistics.

    Raises:
        UnsupportedError: weights of an implementation that never has them.
    """
    if not need_weights:
        found = attention(query, key, value, return_aux=return_aux, impl=impl, **options)
        output, aux = found if isinstance(found, tuple) else (found, None)
        return Attended(output, None, aux)
    if impl not in ("auto", "dense"):
        raise UnsupportedError(
            f"impl={impl!r} never holds the weights, which were asked for", hint="Pass need_weights=False."
        )
    aux = None
    if return_aux is not None:
        undropped = options | {"dropout_p": 0.0}  # statistics are those before dropout, and draw nothing
        _, aux = attention(query, key, value[..., :0], return_aux=return_aux, **undropped)
    lowered = autocast_dtype(query) is not None
    call = resolve(query, key, value, **options)
    with torch.autocast(query.device.type, enabled=False) if lowered else contextlib.nullcontext():
        return Attended(*_weighed(call), aux)


def _weighed(call: Call) -> tuple[Output, Logits]:
    """Output and weights from the same logits and the same dropout, computed as in the dense implementation."""
    weights = _weights(call)
    if call.dropout_p:
        weights = functional.dropout(weights, call.dropout_p)
    value = grow(call.value, call.heads).to(call.dtype)
    output = guarded_sum(weights, value, call.seen(0, call.length)) if call.unclean else weights @ value
    return output.to(call.value.dtype), weights.to(call.value.dtype)


def _weights(call: Call) -> Logits:
    """Softmax of the logits over visible keys and sink, 0 in a row that sees no key; logits come in blocks of rows."""
    height, length = max(1, block_rows(call)), call.length
    blocks = []
    for start in range(0, max(1, length), height):
        stop = min(length, start + height)
        seen = call.seen(start, stop)
        z = (guarded_logits if call.unclean else logits)(call, start, stop, seen)
        z = z.expand(*call.lead, stop - start, call.keys)
        sink = None if call.sinks is None else sink_column(call, start, stop, z.dtype)
        blocks.append(_softmax(z, seen, sink))
    return torch.cat(blocks, -2) if len(blocks) != 1 else blocks[0]


def _softmax(z: Logits, seen: Visible | None, sink: Factor | None) -> Logits:
    keys = z.shape[-1]
    blind = None if seen is None else ~seen.any(-1, keepdim=True)
    if blind is not None:
        z = z.masked_fill(blind, 0.0)
    if sink is not None:
        z = torch.cat([z, sink.expand(*z.shape[:-1], 1)], -1)
    weights = z.softmax(-1)[..., :keys]
    return weights if blind is None else weights.masked_fill(blind, 0.0)
