"""The factor on the scale that a config's RoPE block declares for long contexts (YaRN, longrope): one row a rope type.

A factor on cos and sin turns with q and k, and so enters the logits squared. DeepSeek's is on the softmax's scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, is_transformers, mapping, model_type, number
from sqrtdk.audit.families import MLA_YARN
from sqrtdk.audit.multipliers import Multiplier
from sqrtdk.tracing.records import AttentionCall

# Names of the block of a config that holds the rotary embedding's parameters; the last is litgpt's.
ROPE_BLOCKS = ("rope_parameters", "rope_scaling", "rope_adjustments")
BARE = "mscale"  # DeepSeek's own inference code keeps them on the arguments themselves, this one among them
_BARE_FIELDS = {"factor": "rope_factor", "mscale": BARE, "mscale_all_dim": "mscale_all_dim"}
ROPE_FIELDS = (*ROPE_BLOCKS, BARE)


@dataclass(frozen=True, slots=True)
class RopeBlock:
    """What a config says of its rotary embedding; None stands for a field that is not set.

    Attributes:
        name: of the config's field.
        rope_type: "yarn", "longrope", ..., or whatever stands there.
        factor: by which the context was lengthened.
        mscale: YaRN's temperature, of q and k.
        all_dim: YaRN's `mscale_all_dim`.
        attention_factor: the factor on cos and sin, where it is stated.
        original: length of the context before, in tokens.
        longest: length of the context, in tokens.
        short: Phi-3.5-MoE's factor on cos and sin up to the original length.
        long: the same beyond it.
        partial: whether a part of the head is not rotated.
    """

    name: str
    rope_type: Any
    factor: float | None
    mscale: float | None
    all_dim: float | None
    attention_factor: float | None
    original: float | None
    longest: float | None
    short: float | None
    long: float | None
    partial: bool

    @property
    def extension(self) -> float:
        """By how much the context was lengthened; 1 where nothing says so."""
        return self.factor or (self.longest / self.original if self.longest and self.original else 1.0)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature `0.1 mscale ln(factor) + 1` (Peng et al. 2023, section 3.4 of version 2).

    >>> round(yarn_mscale(40.0, 1.0), 4)
    1.3689
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(block: RopeBlock) -> float:
    factor = block.extension
    if block.mscale and block.all_dim:
        return yarn_mscale(factor, block.mscale) / yarn_mscale(factor, block.all_dim)
    return yarn_mscale(factor)


def _longrope(block: RopeBlock) -> float:
    factor = block.extension
    return math.sqrt(1 + math.log(factor) / math.log(block.original)) if factor > 1 and block.original else 1.0


# Rope type -> reader of its factor on cos and sin, where the block does not state it: as transformers'
# `modeling_rope_utils` computes it. The types that are not here have none.
LENGTH_FACTORS: dict[str, Callable[[RopeBlock], float]] = {
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _on_logits(block: RopeBlock, *, states: bool) -> float:
    """The square of the factor on cos and sin; with `states` one that the block states counts for every rope type."""
    reader = LENGTH_FACTORS.get(block.rope_type) if isinstance(block.rope_type, str) else None
    if block.attention_factor is not None and (states or reader is not None):
        return block.attention_factor**2
    return 1.0 if reader is None else reader(block) ** 2


def rope_parameters(config: Any, module: nn.Module | None, layer: int | None) -> Mapping[str, Any] | None:
    """The RoPE block of a config; where there is one for each layer type, that of this layer."""
    for name in ROPE_BLOCKS:
        parameters = mapping(config, name)
        if parameters is None:
            continue
        if parameters and all(isinstance(value, Mapping) for value in parameters.values()):
            layer_types = field(config, "layer_types")
            layer_type = field(module, "layer_type")
            if layer_type is None and isinstance(layer_types, list | tuple) and layer is not None:
                layer_type = layer_types[layer] if layer < len(layer_types) else None
            return mapping(parameters, layer_type) if isinstance(layer_type, str) else None
        return parameters
    if number(config, BARE) is not None:
        return {key: number(config, path) for key, path in _BARE_FIELDS.items()} | {"rope_type": "yarn"}
    return None


def rope_block(config: Any, module: nn.Module | None, layer: int | None) -> RopeBlock | None:
    """What the config says of the rotary embedding of a layer, or None."""
    parameters = rope_parameters(config, module, layer)
    if not parameters:
        return None
    rotated = number(parameters, "partial_rotary_factor") or number(config, "partial_rotary_factor") or 1.0
    original = "original_max_position_embeddings"
    return RopeBlock(
        name=next(name for name in ROPE_FIELDS if field(config, name) is not None),
        rope_type=parameters.get("rope_type", parameters.get("type")),
        factor=number(parameters, "factor"),
        mscale=number(parameters, "mscale"),
        all_dim=number(parameters, "mscale_all_dim"),
        attention_factor=number(parameters, "attention_factor"),
        original=number(parameters, original) or number(config, original),
        longest=number(config, "max_position_embeddings"),
        short=number(parameters, "short_mscale"),
        long=number(parameters, "long_mscale"),
        partial=rotated < 1.0 or number(config, "qk_nope_head_dim") is not None,
    )


def rope_length(call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None) -> Multiplier | None:
    """The factor that the RoPE block of a config declares for a call, or None."""
    block = rope_block(config, module, layer)
    if block is None:
        return None
    if is_transformers(config):
        return _by_transformers(block, call, config)
    if block.mscale is not None or block.all_dim is not None:
        return _by_mscale(block)
    return _by_rotation(block, call)


def _by_transformers(block: RopeBlock, call: AttentionCall, config: Any) -> Multiplier | None:
    """As transformers' own code applies it: on cos and sin, and in DeepSeek's family on the softmax's scale."""
    softmax = yarn_mscale(block.factor, block.all_dim) ** 2 if block.factor and block.all_dim else 1.0
    if model_type(config) not in MLA_YARN or block.rope_type in (None, "default"):
        softmax = 1.0
    sides = _lengthened(call) if call.rope else 0
    gain = _on_logits(block, states=False) ** (sides / 2)
    if block.short and block.long and sides:
        text = f"config.{block.name}: short_mscale {block.short:g}, long_mscale {block.long:g}"
        return Multiplier((block.short**sides, block.long**sides), text, "length")
    whole = softmax * gain
    if softmax == whole == 1.0:
        return None
    text = f"config.{block.name}: {block.rope_type}"
    text += f", factor {block.factor:g}" if block.factor is not None else ""
    if block.all_dim and softmax != 1.0:
        text += f", mscale_all_dim {block.all_dim:g}: x{softmax:.4g}"
    elif gain != 1.0:
        text += f", {_attention_factor(gain, sides)}"
    between = block.partial and gain != 1.0
    return Multiplier((softmax, whole) if between else (whole,), text, "length", between)


def _lengthened(call: AttentionCall) -> int:
    """How many of q and k keep the length that a rotation gives: those that no normalisation follows."""
    steps = [stage for stage in call.stages if stage.name in ("norm", "rope", "xpos")]
    return sum([stage.name for stage in steps if stage.where == side][-1:] != ["norm"] for side in ("q", "k"))


def _attention_factor(gain: float, sides: int) -> str:
    """The factor on cos and sin that makes this gain of the logits."""
    return f"attention factor {gain ** (1 / sides):.4g}{' squared' if sides == 2 else ''}"


def _by_mscale(block: RopeBlock) -> Multiplier | None:
    """As DeepSeek's own code applies it, and what follows that: on the softmax's scale, by either name."""
    temperatures = [mscale for mscale in (block.all_dim, block.mscale) if mscale]
    squares = [yarn_mscale(block.factor, m) ** 2 if block.factor else m * m for m in temperatures]
    squares = [square for square in squares if square != 1.0]
    if not squares:
        return None
    stated = block.mscale if block.mscale is not None else block.all_dim
    return Multiplier(tuple(squares), f"config.{block.name}: mscale {stated:g}: x{squares[0]:.4g}", "length")


def _by_rotation(block: RopeBlock, call: AttentionCall) -> Multiplier | None:
    """As any other code applies it: on cos and sin."""
    sides = _lengthened(call)
    gain = _on_logits(block, states=True) ** (sides / 2)
    if gain == 1.0:
        return None
    text = f"config.{block.name}: {block.rope_type}, {_attention_factor(gain, sides)}"
    return Multiplier((1.0, gain) if block.partial else (gain,), text, "length", interval=block.partial)
