"""Attributes of a module that look like its scale: how each name is read, and whether the run follows the number.

They declare nothing, because an attribute is what the code does, and can hold the mistake itself:
`self.scale = num_heads ** -0.5`. A finding names the attribute that holds the number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sqrtdk.audit.configs import as_number, field, own_fields
from sqrtdk.audit.tolerance import are_close, inverse_root, is_close
from sqrtdk.tracing.records import AttentionCall

Form = tuple[str, Callable[[float, int], float]]


def _inverse(value: float) -> float:
    return 1.0 / value if value else math.inf


AS_IT_IS: Form = ("{}", lambda value, head_dim: value)
INVERSE: Form = ("1/{}", lambda value, head_dim: _inverse(value))
EXP: Form = ("exp({})", lambda value, head_dim: math.exp(min(value, 700.0)))  # exp(710) overflows
OVER_SQRT: Form = ("{}/sqrt(head_dim)", lambda value, head_dim: value * inverse_root(head_dim))
INVERSE_OVER_SQRT: Form = ("1/({} sqrt(head_dim))", lambda value, head_dim: _inverse(value) * inverse_root(head_dim))

# Attribute name -> ways to read it, as seen in transformers, timm, x-transformers, MPT and GPT-J.
# `self.norm_factor = sqrt(head_dim)`: GPT-J divides by it, so INVERSE is tried before PLAIN.
SCALE_ATTRIBUTES: dict[str, tuple[Form, ...]] = {
    **dict.fromkeys(
        ("scale", "scaling", "softmax_scale", "attn_scale", "attention_scale", "sm_scale", "qk_scale", "q_scale",
         "scale_factor", "scale_qk", "softmax_scaling", "scaling_factor", "attention_multiplier", "qk_norm_scale",
         "inv_norm_factor", "normalize_fact"),
        (AS_IT_IS,),
    ),
    **dict.fromkeys(("sqrt_d", "sqrt_dk", "sqrt_head_dim"), (INVERSE,)),
    **dict.fromkeys(("norm_factor", "scale_attn", "normalizer"), (INVERSE, AS_IT_IS)),
    **dict.fromkeys(("temperature", "tau"), (INVERSE, AS_IT_IS, OVER_SQRT, INVERSE_OVER_SQRT)),
    **dict.fromkeys(("gain", "alpha", "qk_scale_factor"), (AS_IT_IS, OVER_SQRT)),
    "logit_scale": (AS_IT_IS, EXP),
}  # fmt: skip


# A child module may hold the softmax's scale if its name or class is about attention or scaling:
# `self.inner_attn = ScaledDotProduct(...)`. The words of STRANGERS exclude children with a number of another meaning
# (a LoRA layer's `scaling`, a FakeQuantize's `scale`): it is 1 by default, and would declare any missing scale.
HOLDERS = ("attn", "attend", "attention", "softmax", "sdpa", "dot", "scale", "scaling", "temperature", "cosine")
STRANGERS = (
    "norm", "lora", "adapter", "quant", "observer", "linear", "proj", "conv", "drop", "embed", "rotary", "rope",
    "layerscale", "layer_scale", "residual",
)  # fmt: skip

# Switches whose False means "do not scale" (Keras, GPT-2, TFT's `scale=False`): read as the value 1.
FLAGS = ("use_scale", "use_scaling", "use_attn_scale", "scale_attn_weights", "scale_attn", "scaling", "scaled", "scale")
FLAG_TEXT = "{} = False"


@dataclass(frozen=True, slots=True, eq=False)
class ScaleAttribute:
    """One scale-like number, `owner.name`, at `path` from the site; `values` is None on the meta device.

    `store` is the owner's dictionary that holds the number, or None if it can't be changed there (TorchScript).
    `flag` is True for a switch set to False, which stands for a scale of 1.
    """

    owner: nn.Module
    name: str
    path: str
    values: tuple[float, ...] | None
    learned: bool
    store: MutableMapping[str, Any] | None
    flag: bool = False


def _read(raw: Any, heads: int) -> tuple[tuple[float, ...] | None, bool] | None:
    """Return the values of a Python number or of a 0-d or per-head tensor, and whether it is learned; else None."""
    if isinstance(raw, torch.Tensor):
        # `self.scale = nn.Parameter(torch.ones(heads, 1, 1))` has one number for each head.
        if raw.numel() not in (1, heads) or not raw.is_floating_point():
            return None
        learned = isinstance(raw, nn.Parameter)
        if raw.is_meta:
            return None, learned
        try:
            return tuple(raw.detach().double().flatten().tolist()), learned
        except RuntimeError:  # sparse or quantised: nobody stores a scale in such a tensor
            return None
    value = as_number(raw)
    return None if value is None else ((value,), False)


def _holds_scale(name: str, child: nn.Module) -> bool:
    """Return whether a child of an attention module may hold the scale of its softmax."""
    kind = type(child)
    if kind is not nn.Module and kind.__module__.startswith(("torch.nn.", "torch.ao.")):
        return False
    words = f"{name} {field(child, 'original_name') or kind.__name__}".lower()  # TorchScript keeps the class's name
    if any(word in words for word in STRANGERS) or not any(word in words for word in HOLDERS):
        return False
    # A child with a Linear projects as well: its numbers need not be about the softmax.
    return not any(isinstance(part, nn.Linear) for part in child.modules())


def _stored(owner: nn.Module, name: str) -> tuple[Any, MutableMapping[str, Any] | None]:
    """Return the module's own (not its class's) value of a name and the dictionary that holds it, else (None, None)."""
    # `self.scale = 0.125` is in the module's __dict__, a Parameter or a buffer in a dictionary of its own.
    for store in (own_fields(owner), *(own_fields(owner).get(kind) for kind in ("_parameters", "_buffers"))):
        if isinstance(store, MutableMapping) and store.get(name) is not None:
            return store[name], store
    return (field(owner, name), None) if isinstance(owner, torch.jit.ScriptModule) else (None, None)


def scale_attributes(module: nn.Module | None, heads: int) -> tuple[ScaleAttribute, ...]:
    """Return the attributes of a module, and of its direct children, that may hold the scale of its softmax.

    Args:
        module: The module of the attention, or None.
        heads: Number of query heads, which decides whether a tensor can hold one scale for each head.

    Returns:
        Numbers with a name of `SCALE_ATTRIBUTES`, and switches with a name of `FLAGS` that are False. Empty without a
        module.
    """
    if module is None:
        return ()
    owners = [("", module), *((name, child) for name, child in module.named_children() if _holds_scale(name, child))]
    attributes = []
    for prefix, owner in owners:
        for name in dict.fromkeys((*SCALE_ATTRIBUTES, *FLAGS)):
            raw, store = _stored(owner, name)
            path = f"{prefix}.{name}" if prefix else name
            if raw is False and name in FLAGS:
                attributes.append(ScaleAttribute(owner, name, path, (1.0,), False, store, flag=True))
                continue
            read = None if raw is None or name not in SCALE_ATTRIBUTES else _read(raw, heads)
            if read is not None:
                attributes.append(ScaleAttribute(owner, name, path, read[0], read[1], store))
    return tuple(attributes)


def readings(attribute: ScaleAttribute, head_dim: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield every interpretation of an attribute as a scale of the logits: its formula as text, and the values.

    A number `temperature` may be the scale itself or its inverse, "1/temperature"; `head_dim` enters some formulas. The
    values are one for all heads, or one for each. Yields nothing if the values are unknown (on the meta device).
    """
    if attribute.values is None:
        return
    if attribute.flag:
        yield FLAG_TEXT.format(attribute.path), attribute.values
        return
    for text, function in SCALE_ATTRIBUTES[attribute.name]:
        yield text.format(attribute.path), tuple(function(value, head_dim) for value in attribute.values)


def holders(
    attributes: tuple[ScaleAttribute, ...], effective: tuple[float, ...], head_dim: int
) -> Iterator[tuple[ScaleAttribute, str]]:
    """Yield each attribute that explains the effective scale, with the first reading that does.

    Args:
        attributes: Result of `scale_attributes`.
        effective: The scale that ran: one value for all heads, or one for each head.
        head_dim: Size of a head of q and k.

    Yields:
        The attribute, and the text of a reading (see `readings`) whose values are within 1% of `effective`.
    """
    for attribute in attributes:
        for text, values in readings(attribute, head_dim):
            if are_close(effective, values):
                yield attribute, text
                break


def is_flag(text: str) -> bool:
    """Return whether the text of a reading is that of a switch set to False."""
    return text.endswith(FLAG_TEXT.format(""))


PROBE_FACTOR = 1.25  # exact in every binary format, far outside the tolerance, too small to overflow
Key = tuple[str, int]  # site and index of a call


@contextmanager
def enlarged(attributes: Iterable[ScaleAttribute], factor: float = PROBE_FACTOR) -> Iterator[None]:
    """Multiply scale attributes by `factor` within the block, to see which attentions follow; restore them afterwards.

    Args:
        attributes: Result of `scale_attributes`. Numbers and buffers are multiplied, and switches set to True.
            Parameters and attributes that can't be set (`store` is None) are left as they are.
        factor: The multiplier.
    """
    restore: list[tuple[MutableMapping[str, Any], str, Any]] = []
    changed: set[tuple[int, str]] = set()
    try:
        for attribute in attributes:
            store, key = attribute.store, (id(attribute.owner), attribute.name)
            # Layers may share a module: its number is enlarged once.
            if attribute.learned or store is None or key in changed:
                continue
            changed.add(key)
            value = store[attribute.name]
            restore.append((store, attribute.name, value))
            number = value.detach() if isinstance(value, torch.Tensor) else value
            store[attribute.name] = not value if attribute.flag else number * factor
        yield
    finally:
        for store, name, value in restore:
            store[name] = value


def moves(before: Iterable[AttentionCall], after: Iterable[AttentionCall]) -> dict[Key, bool]:
    """Return for each attention call whether its effective scale changed between two runs.

    Args:
        before: The calls of the first run.
        after: The calls of the second run.

    Returns:
        A dict from (site, index) to whether the two scales differ by more than 1%. A call whose scale could not be read
        in one of the runs has no entry.
    """
    scales = {(call.site, call.index): call.scale.effective for call in after}
    pairs = (((call.site, call.index), call.scale.effective) for call in before)
    return {
        key: not is_close(new, old) for key, old in pairs if old is not None and (new := scales.get(key)) is not None
    }
