"""Finds the attentions of any model, and the parameters that each holds, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from sqrtdk.errors import InvalidValueError
from sqrtdk.nn._single import Counted

LEAST_PROJECTIONS = 2  # a fused one for q, k and v, and one for the output
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_NETWORK = re.compile(r"mlp|feedforward|ffn|moe|experts", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)
_OF_QKV = re.compile(r"(^|_)(q|k|v|qk|kv|query|key|value)(_|$)|^(q|k|v|qk|kv)_?(layer)?(norm|ln)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """The parameters of one attention.

    Attributes:
        site: path of the module in the model, "" for the model itself.
        cls: name of its class.
        weights: names and shapes of its parameters, without norms of the residual stream, which some models keep inside
            their attention.
        parameters: their number, without parameters shared with an earlier attention.
        formula: in symbols, for modules of `sqrtdk.nn`; otherwise None.
    """

    site: str
    cls: str
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    parameters: int
    formula: str | None = None


def attention_parts(model: nn.Module) -> tuple[AttentionPart, ...]:
    """Find the attentions of a model by class name, with the parameters of each; the model may be on the meta device.

    An attention is a module with such a class name that holds at least two matrices and no other attention; or a
    wrapper with such a name around just one (BERT's, which adds the output projection), unless it also holds a
    feed-forward network.

    Args:
        model: any module.

    Raises:
        InvalidValueError: A parameter has no shape before the first call.

    Example:
        >>> model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
        >>> [(part.site, part.parameters) for part in attention_parts(model)]
        [('0', 288)]
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InvalidValueError(
                f"the parameter {name!r} has no shape before the first call", hint="Call the model once in the factory."
            )
    counted: set[int] = set()
    return tuple(_part(site, module, counted) for site, module in _attentions(model))


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the innermost attentions, each widened to the wrapper around it."""
    modules = dict(model.named_modules())
    named = [site for site, module in modules.items() if _is_attention(module)]
    # BertAttention holds BertSelfAttention: both are named attention, and one of them is to be counted.
    innermost = [site for site in named if not any(other != site and _within(other, site) for other in named)]
    for site in innermost:
        while site:
            parent = site.rpartition(".")[0]
            alone = sum(_within(other, parent) for other in innermost) == 1
            # The outer module counts if it adds the output projection alone (BertAttention), not if it is a whole block
            # with an MLP.
            if not (alone and parent in named and not any(map(_is_network, modules[parent].modules()))):
                break
            site = parent
        yield site, modules[site]


def _within(site: str, parent: str) -> bool:
    return not parent or site == parent or site.startswith(parent + ".")


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    if not _ATTENTION.search(type(module).__name__):
        return False
    return isinstance(module, Counted) or sum(p.dim() > 1 for p in module.parameters()) >= LEAST_PROJECTIONS


def _is_network(module: nn.Module) -> bool:
    return _NETWORK.search(type(module).__name__) is not None


def _part(site: str, module: nn.Module, counted: set[int]) -> AttentionPart:
    weights, number = [], 0
    for path, owner in module.named_modules():
        name = path.rpartition(".")[2]
        # A block's LayerNorm is not part of the attention; the norms of q and k inside it are.
        if path and _NORM.search(type(owner).__name__) and not _OF_QKV.search(name):
            continue
        for own, parameter in owner.named_parameters(recurse=False):
            weights.append((f"{path}.{own}".lstrip("."), tuple(parameter.shape)))
            # ALBERT uses one attention in all layers: its parameters count once.
            number += 0 if id(parameter) in counted else parameter.numel()
            counted.add(id(parameter))
    formula = module.parameter_formula if isinstance(module, Counted) else None
    return AttentionPart(site, type(module).__name__, tuple(weights), number, formula)
