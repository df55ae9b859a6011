"""Inputs of a language model that separate faults which the ranks' own inputs may hide.

    packed          two documents in a row: positions begin again at 0 within it, `document_ids` tell them apart, or
                    `cu_seqlens` where they begin
    left_padded     the first quarter of each row is padding
    long            more tokens than the window that the config declares

They have the length, or are a multiple of it, that the ranks took before, and are cut by the same places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from sqrtdk.audit.configs import field
from sqrtdk.laws.processes.inputs_of_ranks import NamedInputs, WholeInputs, token_axis
from sqrtdk.laws.processes.shards import TokenPlaces, on_ranks, token_orders
from sqrtdk.models.modules import forward_arguments

_DOCUMENTS = ("document_ids", "documents", "doc_ids", "segment_ids", "sequence_ids", "seq_idx")  # a number a token
_OFFSETS = ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seq_lens_k")  # of the whole sequence
_LONGEST = 2048  # tokens of inputs that are made to reach beyond a window


def made_inputs(module: nn.Module, whole: WholeInputs, seed: int) -> Iterator[tuple[str, WholeInputs]]:
    """Yield a language model's inputs that separate faults: two documents, padding on the left, beyond a window.

    Args:
        module: The model.
        whole: Inputs that the ranks take; none are made unless they hold `input_ids`.
        seed: Seed of the tokens.
    """
    ids = whole.inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or whole.batch or ids.is_floating_point():
        return
    takes, length = forward_arguments(module), ids.shape[1]
    made = torch.Generator().manual_seed(seed)
    tokens = ids.flatten()[torch.randint(0, ids.numel(), ids.shape, generator=made)]
    rest = {name: value for name, value in whole.inputs.items() if name != "input_ids"}
    plain = {**rest, "input_ids": tokens}
    at = torch.arange(length)
    if packed := _packed(whole, takes, ids, length * 5 // 8):
        yield "packed", _with(whole, plain | packed)
    if "attention_mask" in takes:
        mask = (at >= length // 4).long().expand(ids.shape).clone()
        positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if "position_ids" in whole.inputs else {}
        yield "left_padded", _with(whole, {**plain, "attention_mask": mask, **positions})
    if (longer := _longer(module, whole)) is not None and set(whole.inputs) <= {"input_ids", "position_ids"}:
        size, places = longer
        ids = ids.flatten()[torch.randint(0, ids.numel(), (len(ids), size), generator=made)]
        positions = (
            {"position_ids": torch.arange(size).expand(ids.shape).clone()} if "position_ids" in whole.inputs else {}
        )
        yield "long", _with(WholeInputs({}, places, size), {"input_ids": ids, **positions})


def _packed(whole: WholeInputs, takes: Collection[str], ids: Tensor, first: int) -> NamedInputs:
    """Return the inputs by which a model knows two documents, of which the first has `first` tokens; {} if none."""
    at, found = torch.arange(ids.shape[1]), {}
    if "position_ids" in whole.inputs:
        found["position_ids"] = torch.where(at < first, at, at - first).expand(ids.shape).clone()
    for name in set(takes) & set(_DOCUMENTS):
        found[name] = (at >= first).long().expand(ids.shape).clone()
    for name in _OFFSETS:
        value = whole.inputs.get(name)
        if isinstance(value, Tensor) and value.dim() == 1 and len(ids) == 1 and name not in whole.strange:
            found[name] = torch.tensor([0, first, ids.shape[1]], dtype=value.dtype)
    return found


def _longer(module: nn.Module, whole: WholeInputs) -> tuple[int, TokenPlaces | None] | None:
    """Return a number of tokens beyond the window that the config declares, and their places; None without need."""
    declared = (field(part, "config.sliding_window") for part in module.modules())
    window = next((value for value in declared if value is not None), None)
    if not isinstance(window, int) or not 0 < window < _LONGEST or window < whole.tokens or not whole.tokens:
        return None
    length = whole.tokens * -(-(window + window // 2) // whole.tokens)
    if whole.places is None:
        return length, None
    pieces = [len(piece) * length // whole.tokens for piece in whole.places.pieces()]
    found = [order for order in token_orders(length, pieces) if order.order == whole.places.order]
    numbers = [
        next(n for n, piece in enumerate(whole.places.pieces()) if torch.equal(piece, mine))
        for mine in whole.places.of_ranks
    ]
    return (length, on_ranks(found[0], numbers)) if found else None


def _with(whole: WholeInputs, inputs: NamedInputs) -> WholeInputs:
    axes = {} if whole.places is None else {
        name: axis for name, value in inputs.items()
        if isinstance(value, Tensor) and (axis := token_axis(value, whole.tokens)) is not None
    }  # fmt: skip
    return WholeInputs(inputs, whole.places, whole.tokens, axes)
