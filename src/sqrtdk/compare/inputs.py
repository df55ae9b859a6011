"""Gives a side the inputs of the other one: by name, or else by what they are.

    A takes  input_ids, attention_mask       transformers
    B takes  tokens, positions               a function of JAX

B's `tokens` are A's `input_ids`; its `positions` are 0, 1, 2, ... as A counts them; and it takes no mask, which is
said. What an input is tells its name, or the input that the side was traced with: whole numbers are ids. An image
has its channels where the side had them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.frontends.module import ForeignModule
from sqrtdk.messages import Message, joined
from sqrtdk.models.modules import forward_arguments
from sqrtdk.models.records import Inputs

# what an input is, by its name
_NAMES_OF_KIND: dict[str, tuple[str, ...]] = {
    "ids": ("input_ids", "tokens", "token_ids", "ids", "idx", "input_tokens", "toks", "decoder_input_tokens"),
    "mask": ("attention_mask", "mask", "padding_mask", "input_mask", "token_mask", "attn_mask", "pad_mask"),
    "segments": ("segment_ids", "segments", "segmentation", "decoder_segment_ids"),
    "positions": ("position_ids", "positions", "pos", "position", "input_positions", "segment_pos",
                  "decoder_positions"),
    "types": ("token_type_ids", "type_ids"),
    "pixels": ("pixel_values", "images", "image", "pixels", "img", "imgs"),
    "embeddings": ("inputs_embeds", "hidden_states", "embeddings"),
}  # fmt: skip
KINDS = {name: kind for kind, names in _NAMES_OF_KIND.items() for name in names}
ID_NAMES = _NAMES_OF_KIND["ids"]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Inputs that a module accepts, and sentences on what was decided."""

    inputs: Inputs
    notes: tuple[str, ...] = ()


def named_inputs(module: nn.Module, inputs: Inputs) -> Inputs:
    """Return inputs by position as inputs by name, if the module's names say what each of several is.

    Args:
        module: the module that they were made for.
        inputs: its inputs.
    """
    if isinstance(inputs, dict) or len(inputs) < 2:
        return inputs
    names = list(forward_arguments(module))[: len(inputs)]
    known = len(names) == len(inputs) and all(name in KINDS for name in names)
    return dict(zip(names, inputs, strict=True)) if known else inputs


def fit_inputs(module: nn.Module, inputs: Inputs) -> Fitted:
    """Return the inputs that a module's forward accepts: by name, by kind, or else all tensors in order.

    What the module needs beside is what it was traced with, if it is a program of another framework; positions are 0,
    1, 2, ... and a mask hides nothing.

    Args:
        module: the module.
        inputs: inputs of the other side, or of the user.

    Example:
        >>> class Port(nn.Module):
        ...     def forward(self, positions, tokens):
        ...         pass
        >>> ids = torch.zeros(1, 3, dtype=torch.long)
        >>> fitted = fit_inputs(Port(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        >>> fitted.inputs["positions"], str(fitted.notes[1])
        (tensor([[0, 1, 2]]), 'it takes no attention_mask, which hides nothing here')
    """
    takes = forward_arguments(module)
    own: Mapping[str, Any] = module.example if isinstance(module, ForeignModule) else {}
    if not takes:
        return Fitted(inputs)
    if not isinstance(inputs, dict):
        return _by_position(takes, own, inputs)
    if set(inputs) <= set(takes) and all(name in inputs for name, needed in takes.items() if needed):
        return Fitted({name: _like(value, own.get(name)) for name, value in inputs.items()})
    given: dict[str, Any] = {name: value for name, value in inputs.items() if name in takes}
    left = {name: value for name, value in inputs.items() if name not in takes}
    for name in takes:
        kind = _kind(name, own.get(name))
        source = next((other for other, value in left.items() if name not in given and kind == _kind(other, value)), "")
        if source:
            given[name] = left.pop(source)
    fitted = _completed(takes, own, given, inputs)
    if fitted is None:
        return _in_order(takes, inputs)
    return Fitted(fitted.inputs, (*fitted.notes, *_unused(left)))


def inputs_sentence(a: Inputs | None, b: Inputs | None) -> Message | None:
    """Return on which inputs two sides were compared, and what only one of them took; None for files without inputs.

    Args:
        a: what A ran on.
        b: what B ran on.

    Example:
        >>> ids = torch.zeros(1, 3, dtype=torch.long)
        >>> print(inputs_sentence({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"input_ids": ids}))
        Inputs of the comparison: input_ids (1, 3); A alone takes attention_mask (1, 3).
    """
    one, other = _shapes(a), _shapes(b)
    if not one or not other:
        return None
    both = [text for name, text in one.items() if other.get(name) == text]
    if not both:  # `tokens` of a port are the `input_ids`
        given = {side: joined([*own.values()], "comma") for side, own in (("a", one), ("b", other))}
        return Message("compare.inputs.compared_as", **given)
    compared = Message("compare.inputs.compared", inputs=joined(both, "comma"))
    alone = [
        Message("compare.inputs.alone", side=side, inputs=joined(left, "comma"))
        for side, own in (("A", one), ("B", other))
        if (left := [text for text in own.values() if text not in both])
    ]
    return Message("paragraphs.stop", text=joined([compared, *alone]))


def _shapes(inputs: Inputs | None) -> dict[str, str]:
    """Return the tensors of inputs with their shapes, by name or number: "input_ids (1, 14)"."""
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs or ())
    shapes = ((str(name), x) for name, x in items if isinstance(x, Tensor))
    return {name: f"{'' if name.isdecimal() else f'{name} '}{_size(x)}" for name, x in shapes}


def _size(tensor: Tensor) -> str:
    return "nested" if tensor.is_nested else str(tuple(tensor.shape))  # a nested tensor has no shape


def _in_order(takes: Mapping[str, bool], inputs: Mapping[str, Any]) -> Fitted:
    """Return what both sides have by name, if that is all that is needed; else the tensors in order.

    Forward may name its inputs differently, `x` for `input_ids`.
    """
    known = {name: value for name, value in inputs.items() if name in takes}
    if known and all(name in known for name, needed in takes.items() if needed):
        return Fitted(known)
    tensors = [(name, value) for name, value in inputs.items() if isinstance(value, Tensor)]
    count = max(1, sum(takes.values()))
    return Fitted(tuple(value for _, value in tensors[:count]), tuple(_unused(dict(tensors[count:]))))


def _by_position(takes: Mapping[str, bool], own: Mapping[str, Any], inputs: tuple[Any, ...]) -> Fitted:
    """Return inputs by position; if a program needs more of them, by kind, with those that it was traced with."""
    names = list(takes)
    if not own or len(inputs) >= len(names):
        kept = inputs[: len(names)] if own else inputs
        left = {str(at): value for at, value in enumerate(inputs[len(kept) :], len(kept))}
        values = (_like(value, own.get(name)) for name, value in zip(names, kept, strict=False))
        return Fitted(tuple(values) if own else inputs, tuple(_unused(left)))
    given: dict[str, Any] = {}
    for at, value in enumerate(inputs):
        free = [name for name in names if name not in given]
        kind = _kind("", value)
        given[next((name for name in free if kind and _kind(name, own.get(name)) == kind), free[0])] = inputs[at]
    return _completed(takes, own, given, dict(given)) or Fitted(inputs)


def _completed(
    takes: Mapping[str, bool], own: Mapping[str, Any], given: dict[str, Any], inputs: Mapping[str, Any]
) -> Fitted | None:
    """Return the inputs with those that the other side does not have; None if nothing says what one should be."""
    notes: list[str] = []
    for name, needed in takes.items():
        if needed and name not in given:
            value = _made(_kind(name, own.get(name)), own.get(name), inputs)
            if value is None and own.get(name, 0) is not None:
                return None
            given[name] = value
            if isinstance(value, Tensor):  # a number or a flag is a setting of the program
                id = "own" if value is own.get(name) else "made"
                notes.append(Message(f"compare.inputs.{id}", name=name))
    return Fitted({name: _like(given[name], own.get(name)) for name in takes if name in given}, tuple(notes))


def _unused(left: Mapping[str, Any]) -> list[str]:
    """Return what a side takes no input for: said, since the other side may compute something else by it."""
    plain = [name for name, value in left.items() if isinstance(value, Tensor) and _says_nothing(name, value)]
    other = [name for name, value in left.items() if isinstance(value, Tensor) and name not in plain]
    notes: list[str] = []
    if plain:
        notes.append(Message("compare.inputs.not_taken", names=joined(plain, "comma")))
    if other:
        notes.append(Message("compare.inputs.lost", names=joined(other, "comma")))
    return notes


def _says_nothing(name: str, value: Tensor) -> bool:
    """Return whether an input is what a model takes anyway: a mask of ones, positions from 0 on."""
    kind = KINDS.get(name)
    if kind in ("mask", "segments"):
        return bool((value == 1).all())
    if kind == "types":
        return bool((value == 0).all())
    return kind == "positions" and torch.equal(value, torch.arange(value.shape[-1]).expand_as(value).to(value))


def _kind(name: str, value: Any) -> str:
    """Return what an input is, by its name or by what it holds; "" if neither tells."""
    if name in KINDS:
        return KINDS[name]
    if not isinstance(value, Tensor):
        return ""
    if value.is_floating_point():
        return {4: "pixels", 3: "embeddings"}.get(value.dim(), "")
    return "ids" if value.dtype is not torch.bool and value.dim() in (1, 2) else ""


def _made(kind: str, own: Any, inputs: Mapping[str, Any]) -> Any:
    """Return an input that the other side does not have; None if nothing says it."""
    ids = next((value for name, value in inputs.items() if _kind(name, value) == "ids"), None)
    if ids is not None and ids.dim() == 2 and (own is None or not isinstance(own, Tensor) or own.dim() <= 2):
        if kind == "positions":
            rows = torch.arange(ids.shape[1], device=ids.device)
            return rows if isinstance(own, Tensor) and own.dim() == 1 else rows.expand_as(ids)
        if kind in ("mask", "segments"):
            mask = next((value for name, value in inputs.items() if _kind(name, value) in ("mask", "segments")), None)
            return torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
    return own


def _like(value: Any, own: Any) -> Any:
    """Return an input as the side had it: a mask as bools, an image with its channels last."""
    if not isinstance(value, Tensor) or not isinstance(own, Tensor):
        return value
    if own.dtype is torch.bool and value.dtype is not torch.bool:
        value = value != 0
    if value.dim() != own.dim():
        one = value.dim() == own.dim() + 1 and value.shape[0] == 1  # a function of one sequence
        return value[0] if one else value[None] if value.dim() + 1 == own.dim() and own.shape[0] == 1 else value
    if value.dim() == 4 and value.is_floating_point() and value.shape != own.shape:
        for axes in itertools.permutations((1, 2, 3)):
            if value.permute(0, *axes).shape[1:] == own.shape[1:]:
                return value.permute(0, *axes).contiguous()
    return value
