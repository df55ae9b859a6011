"""Finds tests that could not have failed, because their result would be the same with the mistake.

Masks that hide nothing are observed at the operations, because the trace drops everything that changes no logit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from sqrtdk._modes import EagerMode
from sqrtdk.audit.tolerance import are_close, inverse_root
from sqrtdk.tracing.records import AttentionCall
from sqrtdk.tracing.tensors import CallTensors, Vector

_MASK_ARGUMENTS = ("attn_mask", "attn_bias")
# ways to write a mask: scores + mask, scores.masked_fill(hidden, -inf), torch.where(visible, scores, -inf)
_MASKING_OPS = ("aten::add", "aten::add_", "aten::masked_fill", "aten::masked_fill_", "aten::where")
_SOFTMAX_OPS = ("aten::_softmax", "aten::_safe_softmax")


class OpenMasks(EagerMode):
    """Counts attentions that received a mask which hides nothing; operations run unchanged.

    Such a mask is a fused kernel's `attn_mask` without effect, zeros added to the logits, a `masked_fill` that fills
    nothing, or a `where` that always takes the logits. Zeros that require a gradient are a learned bias, not a mask.
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
        # The operation first: its result is remembered, and it was a mask if a softmax reads that later.
        output = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and (schema.name in _MASKING_OPS + _SOFTMAX_OPS or "attention" in schema.name):
            with torch.no_grad(), _disable_current_modes():  # our own reads of masks must not be traced
                self._see(schema, args, kwargs or {}, output)
        return output

    def _see(self, schema: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        name = schema.name
        if name in _MASKING_OPS:
            if isinstance(output, Tensor) and output.dim() > 1 and _hides_nothing(name, args):
                self._masked[output] = True  # counted later, if a softmax reads it: then it holds logits
        elif name in _SOFTMAX_OPS:
            self.count += isinstance(args[0], Tensor) and args[0] in self._masked
        elif "attention" in name:
            named = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
            # By name, as the fused kernels have their mask at different positions.
            masks = [named[name] for name in _MASK_ARGUMENTS if isinstance(named.get(name), Tensor)]
            self.count += any(_open(mask) for mask in masks)


def _readable(value: Any) -> bool:
    """Return whether `value` is a plain tensor whose values can be read, with rows and keys."""
    # A subclass may refuse or answer reads in its own way, and a meta tensor has no values.
    if type(value) is not Tensor or value.is_meta or value.is_nested or value.layout is not torch.strided:
        return False
    return value.dim() > 1 and value.numel() > 0


def _open(mask: Tensor) -> bool:
    if not _readable(mask) or mask.requires_grad:
        return False
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _hides_nothing(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operation that may mask logits leaves all of them as they are."""
    if name.startswith("aten::add"):
        addend = args[1] if len(args) > 1 else None  # scores + torch.zeros(L, S)
        return isinstance(addend, Tensor) and addend.dim() > 1 and addend.shape[-1] > 1 and _open(addend)
    # torch.where(visible, scores, -inf) with visible all True; scores.masked_fill(hidden, -inf) with hidden all False
    condition = args[0] if name == "aten::where" else args[1]
    if not _readable(condition):
        return False
    return bool(condition.all()) if name == "aten::where" else not bool(condition.any())


NOTHING_RAN = "no attention was seen in it"


def cannot_fail(calls: Sequence[AttentionCall], tensors: Sequence[CallTensors], open_masks: int) -> tuple[str, ...]:
    """Return the reasons why a test on these calls could not have failed, as sentences; empty if it could.

    A reason must hold for all calls of the test. One call with a scale other than the default is enough to detect a
    dropped scale.

    Args:
        calls: every attention that ran.
        tensors: the tensors of the calls; sketches of them are enough.
        open_masks: number of masks that hide nothing.
    """
    if not calls:
        return (NOTHING_RAN,)
    return (*_scale(calls), *_keys(calls), *_mask(calls, open_masks), *_positions(calls, tensors))


def _scale(calls: Sequence[AttentionCall]) -> Iterator[str]:
    effective = [call.scale.per_head or (call.scale.effective,) for call in calls if call.scale.effective is not None]
    # one call whose scale is unknown or not the default could fail the test
    if len(effective) == len(calls) and all(
        are_close([value for value in values if value is not None], (inverse_root(call.head_dim),))
        for call, values in zip(calls, effective, strict=True)
    ):
        dims = sorted({call.head_dim for call in calls})
        values_text = ", ".join(f"{inverse_root(dim):.4g} = 1/sqrt({dim})" for dim in dims)
        yield f"scale {values_text}, the default: a scale that is dropped passes"


def _one_key(call: AttentionCall) -> bool:
    return call.key_len == 1


def _first_key(call: AttentionCall) -> bool:
    """Return whether every row sees one key of several, as row 0 alone under a causal mask does."""
    visible = call.stats.keys if call.stats is not None else ()
    return call.key_len > 1 and bool(visible) and all(keys <= 1 for keys in visible)


def _keys(calls: Sequence[AttentionCall]) -> Iterator[str]:
    if all(_one_key(call) for call in calls):
        yield "one key only: its weight is 1, whatever the scale"
    elif all(_one_key(call) or _first_key(call) for call in calls):
        first = "position 0 only: it" if all(call.query_len == 1 for call in calls) else "one key only: each row"
        yield f"{first} sees one key, whose weight is 1, whatever the scale"


def _hides(call: AttentionCall) -> bool | None:
    """Return whether a call's mask hides a key; None without a mask, or if that is not known."""
    if call.mask is None or call.stats is None:
        return None
    return any(keys < call.key_len for keys in call.stats.keys) or any(call.stats.blind_rows)


def _mask(calls: Sequence[AttentionCall], open_masks: int) -> Iterator[str]:
    known = [_hides(call) for call in calls]
    unread = any(call.mask is not None and call.stats is None for call in calls)
    # A call whose rows were not read may hide keys, so one such call leaves the question open.
    if not unread and True not in known and (open_masks or False in known):
        yield "a mask that hides nothing: a mask that is dropped, or turned round, passes"


def _positions(calls: Sequence[AttentionCall], tensors: Sequence[CallTensors]) -> Iterator[str]:
    rotated = [one for call, one in zip(calls, tensors, strict=False) if call.rope]
    if rotated and all(_still(one.query) and _still(one.key) for one in rotated):
        yield "position 0 only: the rotation turns nothing"


def _still(vector: Vector) -> bool:
    """Return whether every rotation is known to leave the values as they are, as at position 0."""
    before, turned = vector.projected, False
    for step in vector.steps:
        if step.name == "rope":
            if before is None or step.values is None or before.shape != step.values.shape:
                return False
            if not torch.equal(before.float(), step.values.float()):
                return False
            turned = True
        before = step.values
    return turned
