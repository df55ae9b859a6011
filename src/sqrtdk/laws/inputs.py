"""Recognises the inputs of a model as content, masks or positions, and makes other content to replace them.

An argument's name says what it may be, and its values say what it is: `attention_mask` with 0 and 1, ids as whole
numbers (batch, length), features (batch, length, channels).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.audit.configs import field
from sqrtdk.laws.subject import Subject

LEAST_TOKENS = 4  # with fewer tokens there is no earlier and later half to compare
MASK_WORDS = re.compile(r"mask|keep|pad(?!ded)|valid")
_LENGTH_WORDS = re.compile(r"(^|_)(lengths?|lens?|seqlens?)$")
# Arguments that go along with content and are none: position_ids, labels, bbox.
_BESIDE_CONTENT = re.compile(
    r"position|type_id|segment|label|target|cache|past|step|time|thw|bbox|boxes|shape|grid|index|indices|sigma|"
    r"embeddings|cos|sin|cu_seqlens|scale|bias|edge|adj"
)
_HIDES_TRUE = re.compile(r"key_padding_mask$|padding_mask$|pad_mask$")  # torch's masks that are True at padding
DECODER = re.compile(r"decoder|tgt|trg")
ENCODER = re.compile(r"encoder|memory|context|src|source")
_SPECIAL_ID_FIELDS = re.compile(r"_token_id$|_token_index$|_token_ids$")  # pad_token_id, image_token_index


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """An input with the data of a sample: ids (B, n), features (B, n, E), or pixels (B, C, H, W).

    `length` is n, or None for pixels.
    """

    name: str
    tensor: Tensor

    @property
    def length(self) -> int | None:
        """Number of positions of a sample, or None for pixels."""
        return int(self.tensor.shape[1]) if self.tensor.dim() in (2, 3) else None

    @property
    def ids(self) -> bool:
        """Whether the content is ids of a vocabulary."""
        return not self.tensor.is_floating_point()


@dataclass(frozen=True, slots=True, eq=False)
class MaskInput:
    """A mask input; `hidden` (B, n) is True at hidden positions, or None if the mask has another shape."""

    name: str
    tensor: Tensor
    hidden: Tensor | None
    inverted: bool = False  # 1 marks padding

    def hiding(self, hidden: Tensor) -> Tensor:
        """Return a mask of the same dtype and convention that hides the positions where `hidden` (B, n) is True."""
        return (hidden if self.inverted else ~hidden).to(self.tensor.dtype)


def contents(subject: Subject) -> list[Content]:
    """Return the inputs that hold the data of the samples, not masks, positions or lengths.

    Floating-point tensors of 2 to 5 axes and integer tensors of 2 axes count. Those with an axis of positions come
    first.
    """
    kept = []
    for name, value in subject.tensors.items():
        if MASK_WORDS.search(name) or _BESIDE_CONTENT.search(name) or value.is_nested or value.dtype is torch.bool:
            continue
        # Axis 1 of pixels is channels, and may be 1.
        dims = (2, 3, 4, 5) if value.is_floating_point() else (2,)
        if value.dim() in dims and value.shape[0] and value.shape[1] >= (1 if value.dim() > 3 else LEAST_TOKENS):
            kept.append(Content(name, value))
    return sorted(kept, key=lambda content: content.length is None)


def goes_with(name: str, content: Content) -> bool:
    """Return whether an input belongs to the tokens of a content, and not to an encoder beside it.

    Example:
        >>> tokens = Content("decoder_input_ids", torch.ones(2, 5, dtype=torch.long))
        >>> goes_with("decoder_attention_mask", tokens), goes_with("attention_mask", tokens)
        (True, False)
    """
    if name == content.name:
        return True
    return bool(DECODER.search(name)) if DECODER.search(content.name) else not ENCODER.search(name)


def mask_inputs(subject: Subject) -> Iterator[MaskInput]:
    """Yield the inputs that are masks: bool, of 0 and 1, or of 0 and negative numbers.

    For a (B, n) mask of bool or of 0 and 1, `hidden` says which positions it hides; for a square or additive mask, and
    one of more axes, it is None.
    """
    for name, value in subject.tensors.items():
        if value.is_nested or not value.numel() or not (MASK_WORDS.search(name) or value.dtype is torch.bool):
            continue
        if _BESIDE_CONTENT.search(name) or value.dim() < 2:
            continue
        zero_one = value.dtype is torch.bool or bool(((value == 0) | (value == 1)).all())
        # A square mask is one of rows and keys.
        if value.dim() == 2 and zero_one and value.shape[0] != value.shape[1]:
            inverted = _hides_true(name, value.bool())
            yield MaskInput(name, value, value.bool() if inverted else ~value.bool(), inverted)
        elif zero_one or (value.is_floating_point() and bool((value <= 0).all())):
            yield MaskInput(name, value, None)


def lengths(subject: Subject) -> Iterator[str]:
    """Yield the names of (B,) inputs that are lengths of samples: whole numbers, or shares such as `wav_lens`."""
    for name, value in subject.tensors.items():
        if _LENGTH_WORDS.search(name) and value.dim() == 1 and bool((value > 0).all()) and "cu_" not in name:
            yield name


def restarts(positions: Tensor) -> Tensor:
    """Return the number of the document of each position, (B, n); a new one begins where position ids restart.

    Example:
        >>> restarts(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[0, 0, 0, 1, 1]]
    """
    begins = torch.zeros_like(positions, dtype=torch.long)
    begins[:, 1:] = (positions[:, 1:] < positions[:, :-1]).long()
    return begins.cumsum(1)


def content_of(subject: Subject, mask: MaskInput) -> list[Content]:
    """Return the content inputs that a (B, n) mask belongs to; empty if none has its shape.

    Among several of its shape the name decides: `encoder_attention_mask` goes with `encoder_hidden_states`, and
    `attention_mask` with `input_ids`.
    """
    fits = [content for content in contents(subject) if content.tensor.shape[:2] == mask.tensor.shape]
    stem = re.sub(r"(_?(attention|key|padding|pad|features?))*_?mask$", "", mask.name).strip("_")
    named = [content for content in fits if stem and stem.split("_")[0] in content.name]
    plain = [content for content in fits if not re.search(r"encoder|decoder|memory|cross", content.name)]
    return named or (plain if not stem and plain else fits)


def other_content(
    subject: Subject, content: Content, where: Tensor, salt: int = 1, *, specials: bool = False
) -> Tensor:
    """Return a copy of a content input with other values at some positions.

    Ids are drawn from those in the inputs, except the largest, because some models look for it. Special ids (the
    config's `pad_token_id` and the like) are never drawn. Features and pixels become noise with the mean and the
    standard deviation of the whole input.

    Args:
        subject: The model; its seed is that of the draw.
        content: The input.
        where: True at the positions (B, n) or samples (B,) to change.
        salt: Added to the seed, for different draws.
        specials: Whether positions that hold special ids are changed as well.

    Returns:
        A tensor of the same shape and dtype; the input itself if it has too few different ids to choose from.
    """
    value = content.tensor
    marked = where.to(value.device).reshape(where.shape + (1,) * (value.dim() - where.dim())).expand_as(value)
    generator = torch.Generator().manual_seed(subject.seed + salt)
    if not content.ids:
        # Noise with the mean and the spread of the content itself.
        plain = value.detach().double()
        spread = plain.std().nan_to_num().clamp_min(1e-3) if value.numel() > 1 else 1.0
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        return torch.where(marked, (noise * spread + plain.mean()).to(value.dtype), value)
    special = torch.tensor(sorted(special_ids(subject.config)), dtype=value.dtype, device=value.device)
    if not specials:
        marked = marked & ~torch.isin(value, special)
    pool = torch.unique(value[~torch.isin(value, special)])
    if pool.numel() > 2:  # the largest id stays: CLIP takes its output at ids.argmax()
        marked, pool = marked & (value != pool[-1]), pool[:-1]
    if pool.numel() < 2:
        pool = torch.unique(torch.cat((pool, (pool - 1).clamp_min(0))))
    if pool.numel() < 2:
        return value
    place = torch.searchsorted(pool, value.clamp(int(pool[0]), int(pool[-1]))).clamp_max(pool.numel() - 1)
    # A step of 1 or more, within the pool, never gives the same id.
    step = torch.randint(1, pool.numel(), value.shape, generator=generator).to(value.device)
    return torch.where(marked, pool[(place + step) % pool.numel()], value)


def special_ids(config: Any) -> set[int]:
    """Return the ids that a config names, alone or in lists: `pad_token_id`, `eos_token_id`, `image_token_index`."""
    ids: set[int] = set()
    for part in (config, *(field(config, name) for name in ("text_config", "decoder", "encoder", "thinker_config"))):
        values = part if isinstance(part, Mapping) else field(part, "__dict__") or {}
        for name, value in values.items():
            if isinstance(name, str) and _SPECIAL_ID_FIELDS.search(name):
                ids |= {
                    entry for entry in (value if isinstance(value, list | tuple) else [value]) if type(entry) is int
                }
    return ids


def _hides_true(name: str, mask: Tensor) -> bool:
    """Return whether 1 marks padding, as in torch's `key_padding_mask`. Keras's `padding_mask` is 1 at tokens."""
    return _HIDES_TRUE.search(name) is not None and float(mask.double().mean()) <= 0.5
