"""Declared factors on a scale: gains, layer numbers, and factors that follow a length (YaRN, longrope, log n).

A factor on cos and sin multiplies both q and k, so the logits get its square. DeepSeek's factor multiplies the softmax
scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sqrtdk.audit.configs import field, is_transformers, mapping, model_type, number_at
from sqrtdk.audit.families import MLA_YARN
from sqrtdk.audit.proportional import Arguments, by_base_length
from sqrtdk.messages import Message
from sqrtdk.scales import yarn_mscale
from sqrtdk.tracing.records import AttentionCall


@dataclass(frozen=True, slots=True)
class Multiplier:
    """One declared factor on the base scale. Any of `values` is right, or with `interval` anything between them."""

    values: tuple[float, ...]
    by: str
    kind: str = "factor"  # "factor", "length", "layer"
    interval: bool = False


LAYER_SWITCH = "scale_attn_by_inverse_layer_idx"  # of GPT-2
FIXED_FACTORS = {  # field -> id of its source
    "key_multiplier": "sources.field.falcon_h1",
    "qk_scale_factor": "sources.field.query_gain",
}


def _steps(strength: float, original: float, keys: int) -> float:
    return 1.0 + strength * math.log1p(keys // original)


# Factors that grow with the position, from 1 at the first rows. The field that switches a factor on -> the field of its
# strength, the field of the length from which it grows, its value at the last of n keys, and the id of its source.
GROWING_FACTORS: dict[str, tuple[str, str, Callable[[float, float, int], float], str | None]] = {
    "attn_temperature_tuning": ("attn_scale", "floor_scale", _steps, "sources.field.llama4"),
    "rope_parameters.llama_4_scaling_beta": (
        "rope_parameters.llama_4_scaling_beta",
        "rope_parameters.original_max_position_embeddings",
        _steps,
        None,
    ),
    "log_scaling_alpha": (
        "log_scaling_alpha",
        "log_scaling_n_floor",
        lambda alpha, floor, keys: 1.0 + alpha * math.log(max(keys / floor, 1.0)),
        None,
    ),
    "use_logn_attn": (
        "seq_length",
        "seq_length",
        lambda _, trained, keys: math.log(keys) / math.log(trained) if 1 < trained < keys else 1.0,
        "sources.field.qwen",
    ),
}


def multipliers(
    call: AttentionCall, module: nn.Module | None, config: Any, layer: int | None, arguments: Arguments
) -> Iterator[Multiplier]:
    """Yield every factor on the base scale that the config, the module or the arguments of its call declare.

    Args:
        call: The attention.
        module: Its module, or None.
        config: The config that governs it.
        layer: 0-based number of its layer, or None if unknown.
        arguments: The base lengths of proportional attention that the module was called with, by argument name.

    Yields:
        Factors of length extension (YaRN, longrope), of the layer (1/(layer + 1)), of proportional attention, constants
        of the config, and factors that grow with the number of keys. Their product is the declared factor.
    """
    block = rope_block(config, module, layer)
    if block is not None:
        stated = block.mscale is not None or block.all_dim is not None
        others = _by_mscale(block) if stated else _by_rotation(block, call)
        by_rope = _by_transformers(block, call, config) if is_transformers(config) else others
        yield from filter(None, (by_rope,))
    if layer is not None and field(config, LAYER_SWITCH) is True:
        by = Message("sources.declared.layer", field=LAYER_SWITCH, number=layer + 1)
        yield Multiplier((1.0 / (layer + 1),), by, "layer")
    if (proportional := by_base_length(call, module, config, arguments)) is not None:
        yield Multiplier(*proportional)
    for path, source in FIXED_FACTORS.items():
        value = number_at(config, path)
        if value is not None and value not in (0.0, 1.0):
            yield Multiplier((value,), by_config(path, f"{value:g}", source))
    for switch, (strength_field, original_field, grown, origin) in GROWING_FACTORS.items():
        strength, original = number_at(config, strength_field), number_at(config, original_field)
        if field(config, switch) and strength is not None and original:
            high = grown(strength, original, call.key_len)
            if high != 1.0:
                by = Message("sources.declared.growing", field=switch)
                by = Message("sources.declared.growing_by", field=switch, source=Message(origin)) if origin else by
                yield Multiplier((1.0, high), by, interval=True)


def by_config(path: str, value: str, source: str) -> str:
    """Return the words of a report that a field of the config declares a scale.

    Args:
        path: Dotted path of the field in the config.
        value: Its value as text.
        source: Id of the message that names where this rule comes from.
    """
    return Message("sources.declared.config", field=path, value=value, source=Message(source))


# Fields of a config that hold the rotary embedding's parameters; the last is litgpt's.
ROPE_BLOCKS = ("rope_parameters", "rope_scaling", "rope_adjustments")
BARE = "mscale"  # DeepSeek's own inference code has flat arguments, with this one among them
_BARE_FIELDS = {"factor": "rope_factor", "mscale": BARE, "mscale_all_dim": "mscale_all_dim"}
ROPE_FIELDS = (*ROPE_BLOCKS, BARE)


@dataclass(frozen=True, slots=True)
class RopeBlock:
    """A config's statements about its rotary embedding; None stands for a field that is not set."""

    name: str  # of the config's field
    rope_type: Any  # "yarn", "longrope", ..., or any value of a user's config
    factor: float | None  # by which the context was lengthened
    mscale: float | None  # YaRN's temperature, of q and k
    all_dim: float | None  # YaRN's `mscale_all_dim`
    attention_factor: float | None  # on cos and sin, if stated
    original: float | None  # context length before the extension, in tokens
    longest: float | None  # context length, in tokens
    short: float | None  # Phi-3.5-MoE's factor on cos and sin up to the original length
    long: float | None  # the same, beyond it
    partial: bool  # whether part of the head is not rotated

    @property
    def extension(self) -> float:
        """How many times longer the context became, at least 1: the stated factor, else the ratio of both lengths."""
        return max(self.factor or (self.longest / self.original if self.longest and self.original else 1.0), 1.0)


def _yarn(block: RopeBlock) -> float:
    factor = block.extension
    # transformers divides DeepSeek's two temperatures if both are stated.
    if block.mscale and block.all_dim:
        return yarn_mscale(factor, block.mscale) / yarn_mscale(factor, block.all_dim)
    return yarn_mscale(factor)


def _longrope(block: RopeBlock) -> float:
    factor = block.extension
    return math.sqrt(1 + math.log(factor) / math.log(block.original)) if factor > 1 and block.original else 1.0


# Rope type -> function for its factor on cos and sin if the block does not state it, as transformers'
# `modeling_rope_utils` computes it. Other types have no factor.
LENGTH_FACTORS: dict[str, Callable[[RopeBlock], float]] = {
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _on_logits(block: RopeBlock, *, states: bool) -> float:
    """Return the factor of a RoPE block on the logits: the square of its factor on cos and sin.

    Args:
        block: of the config.
        states: whether a factor that the config gives applies even to a rope type that has none by definition.
    """
    reader = LENGTH_FACTORS.get(block.rope_type) if isinstance(block.rope_type, str) else None
    if block.attention_factor is not None and (states or reader is not None):
        return block.attention_factor**2
    return 1.0 if reader is None else reader(block) ** 2


def rope_parameters(config: Any, module: nn.Module | None, layer: int | None) -> Mapping[str, Any] | None:
    """Return the config's mapping of rotary embedding parameters (`rope_parameters`, `rope_scaling`), or None.

    Args:
        config: The config.
        module: The attention's module; its `layer_type` selects if the config has a mapping for each layer type.
        layer: 0-based number of the layer, which selects from `config.layer_types` if the module has no `layer_type`.

    Returns:
        A copy of the first mapping among `ROPE_BLOCKS`, or for a config that states YaRN's values in fields of its own
        a mapping made of these. None if there is neither, or no mapping for the layer's type.
    """
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
    if number_at(config, BARE) is not None:
        return {key: number_at(config, path) for key, path in _BARE_FIELDS.items()} | {"rope_type": "yarn"}
    return None


def rope_block(config: Any, module: nn.Module | None, layer: int | None) -> RopeBlock | None:
    """Return what a config states about the rotary embedding of a layer, or None if it states nothing.

    The arguments are those of `rope_parameters`. Lengths and factors that the mapping lacks are taken from the config
    itself.
    """
    parameters = rope_parameters(config, module, layer)
    if not parameters:
        return None
    rotated = number_at(parameters, "partial_rotary_factor") or number_at(config, "partial_rotary_factor") or 1.0
    original = "original_max_position_embeddings"
    return RopeBlock(
        name=next(name for name in ROPE_FIELDS if field(config, name) is not None),
        rope_type=parameters.get("rope_type", parameters.get("type")),
        factor=number_at(parameters, "factor"),
        mscale=number_at(parameters, "mscale"),
        all_dim=number_at(parameters, "mscale_all_dim"),
        attention_factor=number_at(parameters, "attention_factor"),
        original=number_at(parameters, original) or number_at(config, original),
        longest=number_at(config, "max_position_embeddings"),
        short=number_at(parameters, "short_mscale"),
        long=number_at(parameters, "long_mscale"),
        partial=rotated < 1.0 or number_at(config, "qk_nope_head_dim") is not None,
    )


def _by_transformers(block: RopeBlock, call: AttentionCall, config: Any) -> Multiplier | None:
    """Return the factor of transformers' own code: on cos and sin, and in DeepSeek's family on the softmax scale."""
    softmax = yarn_mscale(block.extension, block.all_dim) ** 2 if block.factor and block.all_dim else 1.0
    if model_type(config) not in MLA_YARN or block.rope_type in (None, "default"):
        softmax = 1.0
    sides = _lengthened(call) if call.rope else 0
    gain = _on_logits(block, states=False) ** (sides / 2)
    if block.short and block.long and sides:
        mscales = {"short": f"{block.short:g}", "long": f"{block.long:g}"}
        stated = Message("sources.declared.mscales", field=block.name, **mscales)
        return Multiplier((block.short**sides, block.long**sides), stated, "length")
    whole = softmax * gain
    if softmax == whole == 1.0:
        if block.attention_factor is None or block.rope_type not in LENGTH_FACTORS or not sides:
            return None
        return Multiplier((1.0,), by_config(f"{block.name}.attention_factor", "1", "sources.field.length"), "length")
    if block.all_dim and softmax != 1.0:
        mscale, square = f"{block.all_dim:g}", f"{softmax:.4g}"
        by = _by_rope(block, Message("sources.declared.mscale_all_dim", mscale=mscale, square=square))
    else:
        by = _by_rope(block, _attention_factor(gain, sides))
    # Channels that are not rotated lack the factor, so the scale lies between the two values.
    between = block.partial and gain != 1.0
    return Multiplier((softmax, whole) if between else (whole,), by, "length", between)


def _by_rope(block: RopeBlock, gain: str) -> str:
    block_type = {"field": block.name, "type": str(block.rope_type)}
    if block.factor is None:
        return Message("sources.declared.rope", gain=gain, **block_type)
    return Message("sources.declared.rope_factor", factor=f"{block.factor:g}", gain=gain, **block_type)


def _lengthened(call: AttentionCall) -> int:
    """Return how many of q and k keep the length that a rotation gives them: a norm after the rotation undoes it."""
    steps = [stage for stage in call.stages if stage.name in ("norm", "rope", "xpos")]
    return sum([stage.name for stage in steps if stage.where == side][-1:] != ["norm"] for side in ("q", "k"))


def _attention_factor(gain: float, sides: int) -> str:
    """Return the text for the factor on cos and sin that multiplies the logits by this gain."""
    factor = f"{gain ** (1 / sides):.4g}"
    if sides == 2:
        return Message("sources.declared.attention_factor_squared", factor=factor)
    return Message("sources.declared.attention_factor", factor=factor)


def _by_mscale(block: RopeBlock) -> Multiplier | None:
    """Return the factor of DeepSeek's own code and its followers: on the softmax scale, by either name."""
    temperatures = [mscale for mscale in (block.all_dim, block.mscale) if mscale]
    squares = [yarn_mscale(block.extension, m) ** 2 if block.factor else m * m for m in temperatures]
    squares = [square for square in squares if square != 1.0]
    if not squares:
        return None
    stated = block.mscale if block.mscale is not None else block.all_dim
    by = Message("sources.declared.mscale", field=block.name, mscale=f"{stated:g}", square=f"{squares[0]:.4g}")
    return Multiplier(tuple(squares), by, "length")


def _by_rotation(block: RopeBlock, call: AttentionCall) -> Multiplier | None:
    """Return the factor of any other code: on cos and sin."""
    sides = _lengthened(call)
    gain = _on_logits(block, states=True) ** (sides / 2)
    if gain == 1.0 and block.attention_factor is not None and sides:
        # `attention_factor: 1.0` in the config: that of YaRN's formula is not to be applied.
        return Multiplier((1.0,), by_config(f"{block.name}.attention_factor", "1", "sources.field.length"), "length")
    if gain == 1.0:
        return None
    by = Message(
        "sources.declared.rope", field=block.name, type=str(block.rope_type), gain=_attention_factor(gain, sides)
    )
    return Multiplier((1.0, gain) if block.partial else (gain,), by, "length", interval=block.partial)
