"""Masks that hide nothing, as the operations get them: the trace leaves out of a formula what changes no logit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from sqrtdk._modes import EagerMode

_MASK_ARGUMENTS = ("attn_mask", "attn_bias")
_ADDED = ("aten::add", "aten::add_", "aten::masked_fill", "aten::masked_fill_", "aten::where")
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax")


class OpenMasks(EagerMode):
    """Counts the attentions to which a mask came that hides nothing; every operation runs as it is.

    A mask is what a fused kernel takes as one, or what is added to, or written over, the logits of a softmax: zeros, a
    `masked_fill` that fills nothing, a `where` that takes nothing else. Zeros that have a gradient are a bias.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._masked: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and (schema.name in _ADDED + _SOFTMAX or "attention" in schema.name):
            with torch.no_grad(), _disable_current_modes():
                self._see(schema, args, kwargs or {}, output)
        return output

    def _see(self, schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        name = schema.name
        if name in _ADDED:
            if isinstance(output, Tensor) and output.dim() > 1 and _hides_nothing(name, args):
                self._masked[output] = True
        elif name in _SOFTMAX:
            self.count += isinstance(args[0], Tensor) and args[0] in self._masked
        elif "attention" in name:
            named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
            masks = [named[name] for name in _MASK_ARGUMENTS if isinstance(named.get(name), Tensor)]
            self.count += any(_open(mask) for mask in masks)


def _readable(value: Any) -> bool:
    """Whether it is a plain tensor with values, of rows and keys."""
    if type(value) is not Tensor or value.is_meta or value.is_nested or value.layout is not torch.strided:
        return False
    return value.dim() > 1 and value.numel() > 0


def _open(mask: Tensor) -> bool:
    if not _readable(mask) or mask.requires_grad:
        return False
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _hides_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation on what may be logits leaves all of them as they are."""
    if name.startswith("aten::add"):
        addend = args[1] if len(args) > 1 else None
        return isinstance(addend, Tensor) and addend.dim() > 1 and addend.shape[-1] > 1 and _open(addend)
    condition = args[0] if name == "aten::where" else args[1]
    if not _readable(condition):
        return False
    return bool(condition.all()) if name == "aten::where" else not bool(condition.any())
