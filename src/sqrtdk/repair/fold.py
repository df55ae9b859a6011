"""Moves a wrong scale of a trained model into its weights, so that the scale in the code can be corrected."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sqrtdk._arguments import finite_number
from sqrtdk.audit.guard import eval_mode, random_state
from sqrtdk.audit.own_module import as_inputs, from_module
from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call as forward
from sqrtdk.repair.lookup import Parameters
from sqrtdk.repair.masters import Copies, Optimizers, scale_
from sqrtdk.repair.plan import check_trace, overlaps, readers, rows_of_v, side_rows
from sqrtdk.repair.ranks import reshard
from sqrtdk.repair.rows import HeadRows, Refusal
from sqrtdk.tracing import CallTensors, Trace
from sqrtdk.tracing.trace import trace

_LEAVE_HINT = "Leave the scale where it is: the weights were trained with it."


@dataclass(frozen=True, slots=True)
class FoldRecord:
    """The parameters that absorbed the scale.

    Attributes:
        site: module path.
        ratio: factor by which q grew; divide the code's scale by it.
        parameters: names of the multiplied parameters.
        scale: the effective scale before; the code should now use it divided by `ratio`. None if it could not be read.
    """

    site: str
    ratio: float
    parameters: tuple[str, ...]
    scale: float | None


@torch.no_grad()
def fold_scale_(
    model: nn.Module,
    site: str,
    ratio: float,
    *,
    stats: Trace | None = None,
    inputs: Any = None,
    optimizer: Optimizers = None,
) -> FoldRecord:
    """Multiply the weights that set the size of q by a ratio, so that the code's scale may be divided by it.

    Logits are scale * q . k, with q = W x + b, possibly rotated. With `ratio` * W and `ratio` * b, and the scale
    divided by `ratio` in the code, all outputs stay the same (to the bit, if the ratio is a power of two). A q/k norm
    removes the size of the projection. Then its gain takes the ratio, and a norm without a gain is refused. If the
    model also uses q outside the attention, those outputs change: this is not checked.

    Args:
        model: its weights are changed; its code is not.
        site: module path of the attention, as `sqrtdk.trace` and `sqrtdk.check` name it; "" is the root.
        ratio: effective scale divided by the scale that the code should have, above 0: 8 for a model of head dimension
            64 that was trained without 1/sqrt(64).
        stats: a finished `sqrtdk.trace(model, keep=True)`; None: run the model once, in eval mode.
        inputs: for that run, as `sqrtdk.check` takes them; None: made up from the model's config.
        optimizer: its copies of the weights are multiplied as well.

    Returns:
        The changed parameters.

    Raises:
        InvalidTypeError: An argument has another type.
        InvalidValueError: The ratio is not above 0; no attention is at `site`; the trace is of another model, or kept
            nothing; there are no inputs, and no config to make them from.
        UnsupportedError: The architecture does not allow it; the message says why.

    Example:
        >>> layer = nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.randn(1, 6, 32)
        >>> fold_scale_(layer, "", 2.0, inputs=(x, x, x)).parameters
        ('in_proj_weight', 'in_proj_bias')
    """
    ratio = finite_number("ratio", ratio, above=0.0)
    if not isinstance(site, str):
        raise InvalidTypeError(f"site is a module path; got {site!r}", hint="'' is the root.")
    # The trace shows which parameters give q; names such as "q_proj" are not relied on.
    run = _traced(model, inputs) if stats is None else stats
    check_trace(model, run)
    reshard(model)
    parameters = Parameters(model)
    at_site = [tensors for tensors in run.tensors if tensors.site == site]
    if not at_site:
        sites = ", ".join(dict.fromkeys(repr(tensors.site) for tensors in run.tensors))
        raise InvalidValueError(f"an attention ran at the site; got {site!r}, and there are {sites}", hint="Pick one.")
    try:
        rows = [entry for tensors in at_site for entry in _query_rows(tensors, parameters)]
        _refuse_shared(rows, site, run, parameters)
    except Refusal as refusal:
        raise UnsupportedError(
            f"the scale of {site or 'the root'} can't be moved into its weights: {refusal}", hint=_LEAVE_HINT
        ) from None
    scaled = {entry.name: parameters.get(entry.name) for entry in rows}
    copies = Copies(scaled, parameters.ids, optimizer)
    # Only q is scaled, as one key head may serve several query heads.
    by = torch.tensor(ratio, dtype=torch.float64)
    for name, parameter in scaled.items():  # once, even if several calls of the site share its rows
        of_it = [entry for entry in rows if entry.name == name]
        scale_(parameter, copies.of(name), [(entry, by.expand(len(entry.index))) for entry in of_it])
    call = at_site[0].call
    return FoldRecord(site, ratio, tuple(scaled), None if call is None else call.scale.effective)


def _traced(model: nn.Module, inputs: Any) -> Trace:
    """Trace one run in the same way as an audit."""
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model is an nn.Module; got {type(model).__name__}", hint="Pass the model itself.")
    loaded = from_module(model, None if inputs is None else as_inputs(inputs), LoadOptions())
    with ExitStack() as stack:
        stack.enter_context(random_state(model))
        stack.enter_context(eval_mode(model))
        fast = torch.backends.mha.get_fastpath_enabled()
        # On its fast path, torch's module is one native operation, in which q and k can't be seen.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        run = stack.enter_context(trace(model, stats=False, keep=True))
        forward(loaded.module, loaded.inputs)
    return run


def _query_rows(tensors: CallTensors, parameters: Parameters) -> list[HeadRows]:
    call = tensors.call
    assert call is not None
    if tensors.missing is not None:
        raise Refusal(f"it can't be computed again: {tensors.missing}")
    # DeBERTa: c2c + c2p + p2c, where p2c is a product of k with positions
    if call.terms > 1:
        raise Refusal(f"its logits are {call.terms} products, and q is in some of them only")
    if call.bias_scaled_by is not None:
        raise Refusal(f"its bias is multiplied by {call.bias_scaled_by:g} as well")
    return side_rows("q", tensors, parameters)


def _refuse_shared(rows: list[HeadRows], site: str, run: Trace, parameters: Parameters) -> None:
    """Refuse rows that also belong, or may belong, to k, v or another site."""
    read = readers(run.tensors, parameters)
    for tensors, names in zip(run.tensors, read.names, strict=True):
        # q at the site is what is scaled; its k, and q and k elsewhere, must stay as they are
        for side in ("k",) if tensors.site == site else ("q", "k"):
            try:
                beside = side_rows(side, tensors, parameters)
            except Refusal as refusal:
                if tensors.site != site and (shared := next((one.name for one in rows if one.name in names), None)):
                    raise Refusal(f"{shared} is also used by {tensors.site or 'the root'}: {refusal}") from None
                continue
            _refuse_overlaps(rows, beside, side, tensors)
        _refuse_overlaps(rows, rows_of_v(tensors, parameters), "v", tensors)
    for one in rows:
        if any(other.name == one.name and (other.axis, other.offset) != (one.axis, one.offset) for other in rows):
            raise Refusal(f"{one.name} is used both as it is and transposed, or as a gain in two ways")


def _refuse_overlaps(rows: list[HeadRows], others: list[HeadRows], side: str, tensors: CallTensors) -> None:
    for other in others:
        if any(overlaps(entry, other) for entry in rows):
            raise Refusal(f"{other.name} is also that of {side} in {tensors.site or 'the root'}")
