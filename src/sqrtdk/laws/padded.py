"""Arranges the same tokens with padding on the right and on the left, with positions that count tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import field
from sqrtdk.laws.answers import calls_inside
from sqrtdk.laws.first_place import in_encoder
from sqrtdk.laws.inputs import Content, MaskInput, content_of, goes_with, mask_inputs, restarts
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.messages import Message
from sqrtdk.models.modules import forward_arguments
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.trace import trace

_ONE_PADDED_IN = 4  # one in so many positions becomes padding if the inputs have none
_POSITION_INPUT = "position_ids"


@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """Both arrangements of the same tokens; `hidden_right` and `hidden_left` (B, n) are True at padding."""

    right: Subject
    left: Subject
    hidden_right: Tensor
    hidden_left: Tensor


def mask_name(subject: Subject, content: Content) -> str | None:
    """Return the argument of forward that hides padding among the tokens, or None.

    It is a mask among the inputs that belongs to the content, or else `attention_mask` of a Hugging Face forward. None
    for the decoder of an encoder-decoder model unless the inputs have a mask for it, because nobody pads before its
    first token.

    Args:
        subject: The model with its inputs.
        content: The tokens.
    """
    for mask in mask_inputs(subject):
        if mask.hidden is not None and any(one.name == content.name for one in content_of(subject, mask)):
            return mask.name
    if field(subject.config, "model_type") is None or "attention_mask" in subject.inputs:
        return None
    takes = "attention_mask" in forward_arguments(subject.module) and goes_with("attention_mask", content)
    return "attention_mask" if takes else None


def takes_positions(subject: Subject, content: Content) -> bool:
    """Return whether forward takes `position_ids` for this content; False for `decoder_...` content."""
    return _POSITION_INPUT in forward_arguments(subject.module) and not content.name.startswith("decoder")


def with_positions(subject: Subject, content: Content) -> Subject:
    """Return the model with its inputs and `position_ids` (B, n) that count from 0 in every sample."""
    batch, length = content.tensor.shape[:2]
    positions = torch.arange(length, device=content.tensor.device).expand(batch, length)
    return subject.over({**subject.inputs, _POSITION_INPUT: positions.clone()})


def pad_both_sides(subject: Subject, content: Content, *, last_sample: bool = False) -> Padded:
    """Return the tokens with padding on the right, and the same tokens with padding on the left.

    Padding is that of the inputs, or else replaces the last quarter of the tokens. Inputs with a number for each token
    move with the tokens. If forward takes positions, they count the tokens, as in `generate`.

    Args:
        subject: The model with its inputs by name.
        content: The tokens.
        last_sample: Pad only the last sample.

    Raises:
        NotAsked: No argument hides padding, or the inputs fix positions or masks in another way.
    """
    name = mask_name(subject, content)
    if name is None:
        raise NotAsked(Message("laws.asking.no_attention_mask"))
    batch, length = content.tensor.shape[:2]
    device = content.tensor.device
    given = next((mask for mask in mask_inputs(subject) if mask.name == name), None)
    mask = given or MaskInput(name, torch.ones(batch, length, dtype=torch.long, device=device), None)
    hidden = mask.hidden
    positions = subject.tensors.get(_POSITION_INPUT)
    if positions is not None and positions.dim() == 2 and bool(restarts(positions).any()):
        raise NotAsked(Message("laws.left_padding.restarts"))
    for other, value in subject.tensors.items():
        if other != name and value.shape[-2:] == (length, length) and goes_with(other, content):
            raise NotAsked(Message("laws.left_padding.mask_of_pairs", name=other))
    if hidden is None or not bool(hidden.any()):
        hidden = torch.zeros(batch, length, dtype=torch.bool, device=device)
        hidden[batch - 1 if last_sample else 0 :, length - max(length // _ONE_PADDED_IN, 1) :] = True
    if bool(hidden.all(1).any()):
        raise NotAsked(Message("laws.left_padding.only_padding"))
    filled = dict(subject.inputs)
    pad = _pad_id(subject)
    if content.ids and pad is not None:
        filled[content.name] = content.tensor.masked_fill(hidden, pad)
    # False sorts before True: sorted by `hidden`, tokens come first and padding is on the right.
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
        # Qwen2-VL's position_ids are (3, B, n): time, height and width.
        own = subject.tensors.get(_POSITION_INPUT)
        inputs[_POSITION_INPUT] = positions.expand_as(own).clone() if own is not None and own.dim() == 3 else positions
    return subject.over(inputs), hidden


def _taken(value: Tensor, order: Tensor) -> Tensor:
    index = order.to(value.device).reshape(order.shape + (1,) * (value.dim() - 2)).expand_as(value)
    return value.gather(1, index)


def _pad_id(subject: Subject) -> int | None:
    """Return the config's pad_token_id if the vocabulary has it, else None."""
    for part in (subject.config, field(subject.config, "text_config")):
        pad, size = field(part, "pad_token_id"), field(part, "vocab_size")
        if isinstance(pad, int) and pad >= 0 and (not isinstance(size, int) or pad < size):
            return pad
    return None


def self_attentions(subject: Subject, content: Content) -> list[AttentionCall]:
    """Return the self-attention calls with as many queries as the content has positions.

    If a mask hides positions of the content, the model runs once more, with a mask that hides none, and the calls of
    that run are returned. Attentions of the encoder are left out for the content of a decoder.
    """
    calls = list(calls_inside(subject, None))
    name = mask_name(subject, content)
    given = next((mask for mask in mask_inputs(subject) if mask.name == name), None)
    if given is not None and given.hidden is not None and bool(given.hidden.any()):
        with trace(subject.module, stats=False, numeric=False) as traced:
            subject.run({given.name: given.hiding(torch.zeros_like(given.hidden))})
        calls = list(traced.calls)
    length, decoder = content.tensor.shape[1], content.name.startswith("decoder")
    calls = [call for call in calls if call.query_len == length and call.self_attention is not False]
    return [call for call in calls if not (decoder and in_encoder(call.site))]
