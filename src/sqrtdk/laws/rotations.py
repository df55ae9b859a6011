"""Reads a layer's rotary embedding from a config: base, rotated channels, and the law that scales frequencies.

| law | frequencies of base^(-2i/R), f |
|---|---|
| default, dynamic up to the length it was trained for | f |
| linear | f / factor |
| llama3 | f / factor of long wavelengths, f of short ones, a blend between |
| yarn | f / factor of pairs that turn seldom within the original length, f of those that turn often |
| longrope | f / short_factor of each pair, up to the original length |
| proportional | base^(-2i/E), 0 of pairs beyond the share that turns |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.audit.configs import as_number, field, number_at, own_fields
from sqrtdk.audit.multipliers import ROPE_BLOCKS, rope_parameters
from sqrtdk.messages import Message
from sqrtdk.positions import yarn_frequencies

ROPE_BASE_FIELDS = ("rope_theta", "rotary_emb_base", "rotary_base", "rope_base", "rope_freq_base")
ROTATED_SHARE_FIELDS = ("partial_rotary_factor", "rotary_pct", "rotary_percentage")
ROTATED_WIDTH_FIELDS = ("qk_rope_head_dim", "rotary_dim")
# Ends of names: `local_rope_theta` for one kind of layer.
_BASE_ENDINGS = (*ROPE_BASE_FIELDS, "rope_local_base_freq")
_ROTARY = re.compile(r"rope|rotary")
# Fields of sizes, which do not change frequencies.
_OF_WIDTH = re.compile(r"dim|elem|width|size|head|len|layer|start|kind|section")
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class StatedField:
    """A field of a config with its value; its text is "config.rope_theta = 500000"."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"config.{self.name} = {number_text(self.value)}"


@dataclass(frozen=True, slots=True)
class DeclaredRotation:
    """What a config states about one layer.

    Attributes:
        base: The field of the base, or None.
        bases: Every base that a field names, including those of other kinds of layers.
        width: The field of the number of rotated channels, or None.
        widths: Numbers of rotated channels that the fields allow; empty if no field names one. An odd number such as 5
            rotates three pairs, with exponents in fifths.
        law: Name of the law, "default" if none is named.
        block: Parameters of the law.
        unknown: A field that may change the frequencies in an unknown way, or None.
    """

    base: StatedField | None
    bases: tuple[float, ...]
    width: StatedField | None
    widths: tuple[int, ...]
    law: str
    block: Mapping[str, Any]
    unknown: str | None = None

    @property
    def scaled(self) -> bool:
        """Whether the RoPE type changes the frequencies even on inputs no longer than those of training."""
        return self.law not in ("default", "mrope", "dynamic")

    def tables(self, width: int, head_dim: int, length: int, longest: float | None) -> list[Tensor] | None:
        """Return the frequencies (width / 2,) of every base that is named, or None if the law is unknown.

        Args:
            width: Number of rotated channels.
            head_dim: Channels of a head.
            length: Length of the inputs, in tokens.
            longest: The config's max_position_embeddings.
        """
        law = FREQUENCY_LAWS.get(self.law)
        if law is None or width < 2:
            return None
        bases = [base for base in self.bases if base > 1]
        tables = [law(_LawArguments(base, width, head_dim, length, longest, self.block)) for base in bases]
        if self.scaled and self.base is not None:  # Gemma 3's local layers have their own, unscaled base
            others = (base for base in bases if base != self.base.value)
            tables += [_LawArguments(base, width, head_dim, length, longest, {}).plain for base in others]
        return [table for table in tables if table is not None] if all(x is not None for x in tables) else None

    @property
    def named_law(self) -> str:
        """The RoPE type as text, with its `factor` if the config states one."""
        factor = as_number(self.block.get("factor"))
        if factor is None:
            return self.law
        return Message("laws.configured.with_factor", law=self.law, factor=number_text(factor))


@dataclass(frozen=True, slots=True)
class _LawArguments:
    """The arguments of a law."""

    base: float
    width: int
    head_dim: int
    length: int
    longest: float | None
    block: Mapping[str, Any]

    @property
    def plain(self) -> Tensor:
        return self.base ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)

    def get(self, name: str) -> float | None:
        return as_number(self.block.get(name))

    @property
    def original(self) -> float | None:
        return self.get(ORIGINAL) or self.get("original_max_seq_len") or self.longest


def declared_rotation(config: Any, module: nn.Module | None, layer: int | None, head_dim: int) -> DeclaredRotation:
    """Return what a config states about the rotary embedding of a layer: base, rotated width, type and its parameters.

    Args:
        config: The config.
        module: The attention's module, or None; it may select the layer's type.
        layer: 0-based number of the layer, or None.
        head_dim: Size of a head, of which a declared share is rotated.
    """
    block = rope_parameters(config, module, layer) or {}
    name = next((name for name in ROPE_BLOCKS if field(config, name) is not None), "")
    places = [(f"{name}.", block), ("", config)]
    base = _first(places, ROPE_BASE_FIELDS)
    share, width = _first(places, ROTATED_SHARE_FIELDS), _first(places, ROTATED_WIDTH_FIELDS)
    widths = {int(head_dim * share.value)} if share is not None else set()
    widths |= {int(width.value)} if width is not None else set()
    law = block.get("rope_type", block.get("type", _by_parameters(block)))
    # This law itself stops the pairs beyond the share, so their number is not asked.
    if law == "proportional":
        width, share, widths = None, None, set()
    return DeclaredRotation(
        base,
        tuple(sorted({base.value} | _bases(config))) if base is not None else (),
        width or share,
        tuple(sorted(widths)),
        law if isinstance(law, str) else "default",
        {name: value for name, value in {ORIGINAL: number_at(config, ORIGINAL), **block}.items() if value is not None},
        _unknown(config),
    )


def _by_parameters(block: Mapping[str, Any]) -> str:
    """Return the law of a block without a name, as in litgpt's `rope_adjustments`, by a parameter that only it has."""
    # In this order: a block of llama3 or YaRN has a factor as well.
    marks = {"low_freq_factor": "llama3", "beta_fast": "yarn", "factor": "linear"}
    return next((law for name, law in marks.items() if name in block), "default")


def _unknown(config: Any) -> str | None:
    """Return a field that may change the frequencies in an unknown way, or None: `rope_condense_ratio`."""
    owner = config if isinstance(config, Mapping) else own_fields(config)
    for name, value in owner.items():
        if not isinstance(name, str) or not _ROTARY.search(name) or _OF_WIDTH.search(name):
            continue
        if name in (*ROPE_BLOCKS, *ROTATED_SHARE_FIELDS, *ROTATED_WIDTH_FIELDS) or name.endswith(_BASE_ENDINGS):
            continue
        if (isinstance(value, Mapping) and value) or (as_number(value) or 1.0) != 1.0:
            return f"config.{name}"
    return None


def number_text(value: float) -> str:
    """Return a number as configs write it: 500000, 0.5.

    Example:
        >>> number_text(1e6), number_text(0.25), number_text(10000.2)
        ('1000000', '0.25', '10000')
    """
    whole = round(value)
    return str(whole) if abs(value - whole) <= 1e-4 * abs(value) and whole else f"{value:.4g}"


def _first(places: list[tuple[str, Any]], names: tuple[str, ...]) -> StatedField | None:
    for prefix, owner in places:
        for name in names:
            value = number_at(owner, name)
            if value is not None and value > 0:
                return StatedField(f"{prefix}{name}", value)
    return None


def _bases(config: Any) -> set[float]:
    """Return every base that a config names, including those of other kinds of layers."""
    owners = [config if isinstance(config, Mapping) else own_fields(config)]
    for name in ROPE_BLOCKS:
        block = field(config, name)
        if isinstance(block, Mapping):
            owners += [block, *(part for part in block.values() if isinstance(part, Mapping))]
    found = set()
    for owner in owners:
        for name in owner:
            named = isinstance(name, str) and name.endswith(_BASE_ENDINGS)
            value = number_at(owner, name) if named else None
            if value is not None and value > 1:
                found.add(value)
    return found


# -- laws --------------------------------------------------------------------------------------------------------------


def _dynamic(asked: _LawArguments) -> Tensor | None:
    """Return the plain frequencies if the inputs are no longer than the model was trained for, else None."""
    # Beyond this length "dynamic" scales by the length of the inputs, which changes from run to run.
    original = asked.longest or asked.original
    return asked.plain if original is not None and asked.length <= original else None


def _linear(asked: _LawArguments) -> Tensor | None:
    factor = asked.get("factor")
    return None if not factor else asked.plain / factor


def _llama3(asked: _LawArguments) -> Tensor | None:
    factor, original = asked.get("factor"), asked.original
    low, high = asked.get("low_freq_factor"), asked.get("high_freq_factor")
    if not factor or not original or low is None or high is None or high == low:
        return None
    f = asked.plain
    turns = original * f / (2 * math.pi)  # number of turns within the original length
    # 0 for pairs that turn seldom, 1 for those that turn often.
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * f / factor + share * f


def _yarn(asked: _LawArguments) -> Tensor | None:
    original = asked.original
    factor = asked.get("factor") or (asked.longest / original if asked.longest and original else None)
    fast, slow = asked.get("beta_fast") or 32.0, asked.get("beta_slow") or 1.0
    if not factor or not original or fast <= slow or asked.width % 2:
        return None
    return yarn_frequencies(
        asked.width,
        factor=factor,
        original_length=int(original),
        base=asked.base,
        beta_fast=fast,
        beta_slow=slow,
        truncate=asked.block.get("truncate") is not False,
        dtype=torch.float64,
    )


def _longrope(asked: _LawArguments) -> Tensor | None:
    factors, original = asked.block.get("short_factor"), asked.original
    if not isinstance(factors, list | tuple) or len(factors) != asked.width // 2 or not original:
        return None
    return asked.plain / torch.tensor(factors, dtype=torch.float64) if asked.length <= original else None


def _proportional(asked: _LawArguments) -> Tensor | None:
    share, factor = asked.get("partial_rotary_factor") or 1.0, asked.get("factor") or 1.0
    if asked.width != asked.head_dim:
        return None
    table = asked.plain / factor
    table[int(share * asked.head_dim // 2) :] = 0.0
    return table


FREQUENCY_LAWS: dict[str, Callable[[_LawArguments], Tensor | None]] = {
    "default": lambda asked: asked.plain,
    "mrope": lambda asked: asked.plain,  # only the positions differ, by section of pairs
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "deepseek_yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}


def scaled_frequencies(law: str, base: float, width: int, block: Mapping[str, Any]) -> Tensor | None:
    """Return the rotary frequencies of a RoPE type with the parameters of a config, or None if a parameter is missing.

    Args:
        law: The RoPE type, a key of `FREQUENCY_LAWS`: "default", "linear", "yarn", ...
        base: The base theta.
        width: Number of rotated channels.
        block: The config's RoPE parameters by name, such as `factor`.

    Returns:
        One frequency in radians per position for each pair of channels, (width / 2,).

    Example:
        >>> scaled_frequencies("linear", 100.0, 4, {"factor": 4.0}).tolist()
        [0.25, 0.025]
    """
    return FREQUENCY_LAWS[law](_LawArguments(base, width, width, 1, None, block))
