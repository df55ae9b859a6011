"""Random programs of q, k and v, and one change for each cause that may be planted in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.compute import compute_output, follow_path, project_input, repeat_heads
from sqrtdk.compare.inside.program import Affine, Formula, NormStep, Program, Rotation, VectorPath
from sqrtdk.compare.inside.suspect import Sides

BATCH, ROWS, HEADS, GROUPS, CHANNELS, MODEL = 2, 12, 4, 2, 16, 40
BASE = 10000.0
EXACT = 1e-9  # of float64, with the rounding of angles that were taken apart and put together
Change = Callable[[Program], Program]


def affine(name: str, heads: int, *, bias: bool = True, model: int = MODEL) -> Affine:
    """A random projection of which nothing is special."""
    weight = torch.randn(heads, CHANNELS, model, dtype=torch.float64) / model**0.5
    features = torch.arange(heads * CHANNELS).view(heads, CHANNELS)
    return Affine(name, weight, torch.randn(heads, CHANNELS, dtype=torch.float64) if bias else None, features)


def table(
    positions: Tensor, *, base: float = BASE, width: int = CHANNELS, amplitude: float = 1.0, stretch: float = 1.0
) -> Tensor:
    """Amplitude * e^(i position stretch base^(-2c / width)), (B or 1, L, width / 2)."""
    frequencies = stretch * base ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = positions.double().reshape(-1, positions.shape[-1])[..., None] * frequencies
    return torch.polar(torch.full_like(angles, amplitude), angles)


def norm(kind: str = "rms", *, heads: int = 1, gain: bool = True, eps: float = 1e-6, over: str = "head") -> NormStep:
    """A norm with a random gain, and shift where the kind has one."""
    size = torch.rand(heads, CHANNELS, dtype=torch.float64) + 0.5 if gain else torch.ones(1, CHANNELS).double()
    shift = torch.randn(heads, CHANNELS, dtype=torch.float64) / 4 if kind == "layer" else None
    return NormStep(kind, size, shift, eps, over)


@dataclass(frozen=True)
class Style:
    """What a model does with q and k."""

    name: str
    norm: str | None = None  # "before" or "after" the rotation, or "alone"
    kind: str = "rms"
    rotates: bool = True
    layout: str = "half"
    width: int = CHANNELS
    groups: int = GROUPS
    bias: bool = True


STYLES = {
    style.name: style
    for style in (
        Style("llama", bias=False),
        Style("gpt-j", layout="interleaved", groups=HEADS, width=8),
        Style("qwen3", norm="before", bias=False),
        Style("hunyuan", norm="after"),
        Style("bert", rotates=False, groups=HEADS),
        Style("vit", norm="alone", kind="layer", rotates=False, groups=HEADS),
        Style("cohere", norm="before", kind="layer", layout="interleaved"),
    )
}


def program(style: Style) -> Program:
    """A program of that style with random weights, two batches of one length."""

    def steps() -> tuple[NormStep | Rotation, ...]:
        own = [norm(style.kind)] if style.norm else []
        turn = [Rotation(table(torch.arange(ROWS), width=style.width), style.layout)] if style.rotates else []
        return (*turn, *own) if style.norm == "after" else (*own, *turn)

    heads = torch.arange(HEADS) // (HEADS // style.groups)
    return Program(
        query=VectorPath(affine("q_proj.weight", HEADS, bias=style.bias), steps()),
        key=VectorPath(affine("k_proj.weight", style.groups, bias=style.bias), steps(), heads),
        value=VectorPath(affine("v_proj.weight", style.groups, bias=style.bias), (), heads),
        formula=Formula(scale=1 / math.sqrt(CHANNELS)),
        dtype=torch.float64,
    )


def entering() -> Tensor:
    """(B, L, D)."""
    return torch.randn(BATCH, ROWS, MODEL, dtype=torch.float64)


def computed(of: Program, entered: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as each query head has them, and the output."""
    vectors = []
    for way in (of.query, of.key, of.value):
        assert way.affine is not None
        values = follow_path(way, project_input(way.affine, entered))[-1]
        vectors.append(values if way.heads is None else repeat_heads(values, HEADS, way.heads))
    assert of.formula is not None
    q, k, v = vectors
    return q, k, v, compute_output(q, k, v, of.formula)[0]


def differ(a: Program, b: Program, entered: Tensor) -> float:
    """The largest difference of q, k, v and output, relative to the largest value of each."""
    return max(
        float((x - y).abs().max() / y.abs().max())
        for x, y in zip(computed(a, entered), computed(b, entered), strict=True)
    )


def outputs_differ(a: Program, b: Program, entered: Tensor) -> bool:
    """Whether the outputs alone do."""
    x, y = computed(a, entered)[-1], computed(b, entered)[-1]
    return float((x - y).abs().max() / y.abs().max()) > EXACT


def sides(a: Program, b: Program) -> Sides:
    """Both, as a cause is given them."""
    return Sides(a, b, CHANNELS, MODEL, HEADS, self_attention=True)


def on(parts: str, edit: Callable[[VectorPath], VectorPath]) -> Change:
    """An edit of the parts named by their letters, "qk"."""
    names = {"q": "query", "k": "key", "v": "value"}

    def change(old: Program) -> Program:
        return replace(old, **{names[letter]: edit(getattr(old, names[letter])) for letter in parts})

    return change


def turned(parts: str, edit: Callable[[Rotation], Rotation]) -> Change:
    """An edit of their rotation."""
    return on(parts, lambda way: _steps(way, [edit(s) if isinstance(s, Rotation) else s for s in way.steps]))


def normed(parts: str, edit: Callable[[NormStep], NormStep]) -> Change:
    """An edit of their norm."""
    return on(parts, lambda way: _steps(way, [edit(s) if isinstance(s, NormStep) else s for s in way.steps]))


def without(parts: str, kind: type) -> Change:
    """Leave a step out."""
    return on(parts, lambda way: _steps(way, [s for s in way.steps if not isinstance(s, kind)]))


def projected(parts: str, edit: Callable[[Affine], Affine]) -> Change:
    """An edit of their projection."""
    return on(parts, lambda way: replace(way, affine=edit(way.affine)) if way.affine else way)


def _steps(way: VectorPath, steps: list) -> VectorPath:
    return replace(way, steps=tuple(steps))
