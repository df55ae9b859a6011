"""The same tokens with padding behind them, and before them; and positions that count tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import field
from sqrtdk.laws.answers import calls_at
from sqrtdk.laws.first_place import in_encoder
from sqrtdk.laws.inputs import Content, MaskInput, content_of, goes_with, masks, restarts
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.models.signature import forward_arguments
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.trace import trace

_SHARE = 4  # one of so many positions is padding where the inputs have none
_POSITIONS = "position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Both arrangements; `hidden` (B, n) is True at padding."""

    right: Subject
    left: Subject
    hidden_right: Tensor
    hidden_left: Tensor


def mask_name(subject: Subject, content: Content) -> str | None:
    """The argument that hides padding among the tokens: one of the inputs, or one that Hugging Face's forward names.

    A decoder beside an encoder begins with one token: nobody pads before it, unless the inputs have a mask of it.
    """
    for mask in masks(subject):
        if mask.hidden is not None and any(one.name == content.name for one in content_of(subject, mask)):
            return mask.name
    if field(subject.config, "model_type") is None or "attention_mask" in subject.inputs:
        return None
    takes = "attention_mask" in forward_arguments(subject.module) and goes_with("attention_mask", content)
    return "attention_mask" if takes else None


def takes_positions(subject: Subject, content: Content) -> bool:
    """Whether forward takes the position of each token."""
    return _POSITIONS in forward_arguments(subject.module) and not content.name.startswith("decoder")


def with_positions(subject: Subject, content: Content) -> Subject:
    """The same with position_ids that count from 0 on."""
    batch, length = content.tensor.shape[:2]
    positions = torch.arange(length, device=content.tensor.device).expand(batch, length)
    return subject.over({**subject.inputs, _POSITIONS: positions.clone()})


def padded(subject: Subject, content: Content, *, last_sample: bool = False) -> Padded:
    """The tokens with padding on the right, and the same ones with it on the left.

    Padding is where the inputs have it, else in place of the last quarter of the tokens; everything that has a number
    for each token moves with them. Positions, where forward takes them, count the tokens, as `generate` has them.

    Args:
        subject: the model, its inputs by name.
        content: the tokens.
        last_sample: leave all samples but the last whole.

    Raises:
        NotAsked: No argument hides padding, or the inputs say more of the positions than this.
    """
    name = mask_name(subject, content)
    if name is None:
        raise NotAsked("forward takes no attention_mask of the tokens")
    batch, length = content.tensor.shape[:2]
    device = content.tensor.device
    given = next((mask for mask in masks(subject) if mask.name == name), None)
    mask = given or MaskInput(name, torch.ones(batch, length, dtype=torch.long, device=device), None)
    hidden = mask.hidden
    positions = subject.tensors.get(_POSITIONS)
    if positions is not None and positions.dim() == 2 and bool(restarts(positions).any()):
        raise NotAsked("position_ids restart: they tell documents")
    for other, value in subject.tensors.items():
        if other != name and value.shape[-2:] == (length, length) and goes_with(other, content):
            raise NotAsked(f"{other} is a mask of every row and key")
    if hidden is None or not bool(hidden.any()):
        hidden = torch.zeros(batch, length, dtype=torch.bool, device=device)
        hidden[batch - 1 if last_sample else 0 :, length - max(length // _SHARE, 1) :] = True
    if bool(hidden.all(1).any()):
        raise NotAsked("a sample is nothing but padding")
    filled = dict(subject.inputs)
    pad = _pad_id(subject)
    if content.ids and pad is not None:
        filled[content.name] = content.tensor.masked_fill(hidden, pad)
    arranged = [
        _arranged(subject, filled, mask, hidden, content, order)
        for order in (hidden.long().argsort(dim=1, stable=True), (~hidden).long().argsort(dim=1, stable=True))
    ]
    (right, hidden_right), (left, hidden_left) = arranged
    return Padded(right, left, hidden_right.cpu(), hidden_left.cpu())


def _arranged(
    subject: Subject, filled: dict[str, Any], mask: MaskInput, hidden: Tensor, content: Content, order: Tensor
) -> tuple[Subject, Tensor]:
    batch, length = order.shape
    inputs = {
        name: _taken(value, order)
        if isinstance(value, Tensor) and value.shape[:2] == (batch, length) and goes_with(name, content)
        else value
        for name, value in filled.items()
    }
    hidden = hidden.gather(1, order)
    inputs[mask.name] = mask.hiding(hidden)
    if takes_positions(subject, content):
        positions = ((~hidden).long().cumsum(1) - 1).clamp_min(0)
        own = subject.tensors.get(_POSITIONS)
        inputs[_POSITIONS] = positions.expand_as(own).clone() if own is not None and own.dim() == 3 else positions
    return subject.over(inputs), hidden


def _taken(value: Tensor, order: Tensor) -> Tensor:
    index = order.to(value.device).reshape(order.shape + (1,) * (value.dim() - 2)).expand_as(value)
    return value.gather(1, index)


def _pad_id(subject: Subject) -> int | None:
    """The config's pad_token_id, where the vocabulary has it."""
    for part in (subject.config, field(subject.config, "text_config")):
        pad, size = field(part, "pad_token_id"), field(part, "vocab_size")
        if isinstance(pad, int) and pad >= 0 and (not isinstance(size, int) or pad < size):
            return pad
    return None


def self_attentions(subject: Subject, content: Content) -> list[AttentionCall]:
    """The self-attentions with a row for each token, as they run where no padding is hidden."""
    calls = list(calls_at(subject, None))
    name = mask_name(subject, content)
    given = next((mask for mask in masks(subject) if mask.name == name), None)
    if given is not None and given.hidden is not None and bool(given.hidden.any()):
        with trace(subject.module, stats=False, numeric=False) as traced:
            subject.run({given.name: given.hiding(torch.zeros_like(given.hidden))})
        calls = list(traced.calls)
    length, decoder = content.tensor.shape[1], content.name.startswith("decoder")
    calls = [call for call in calls if call.query_len == length and call.self_attention is not False]
    return [call for call in calls if not (decoder and in_encoder(call.site))]


def in_a_band(call: AttentionCall) -> bool:
    """Whether each row sees all keys, or all between two distances: no blocks, and none that the data picks."""
    return call.axis == "positions" and (call.mask is None or call.mask.band is True)
