"""Changes of a program by the cause that each of them is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.inside.program import Affine, NormStep, Program, Rotation
from tests.compare.causes.vector_programs import (
    BASE,
    BATCH,
    CHANNELS,
    HEADS,
    ROWS,
    STYLES,
    Change,
    Style,
    affine,
    norm,
    normed,
    on,
    projected,
    table,
    turned,
    without,
)


@dataclass(frozen=True)
class Plant:
    """One change, what it is called, and what a and b are; None: not looked at."""

    cause: str
    detail: str
    change: Change
    fits: tuple[str, ...]  # styles
    a: str | float | None = None
    b: str | float | None = None

    @property
    def name(self) -> str:
        return f"{self.cause}: {self.detail}"


def _where(**wanted: object) -> tuple[str, ...]:
    return tuple(name for name, style in STYLES.items() if all(getattr(style, k) == v for k, v in wanted.items()))


EVERY = tuple(STYLES)
ROTARY = _where(rotates=True)
NORMED = tuple(name for name, style in STYLES.items() if style.norm)
BOTH = tuple(name for name in ROTARY if name in NORMED)
GROUPED = _where(groups=2)


def _rerotated(parts: str, positions: Tensor | None = None, base: float = BASE, **other: float) -> Change:
    """Another table of the same width."""
    rows = torch.arange(ROWS) if positions is None else positions
    return turned(parts, lambda r: replace(r, table=table(rows, base=base, width=r.width, **other)))


def _relaid(old: Rotation) -> Rotation:
    return replace(old, layout="interleaved" if old.layout == "half" else "half")


def _part(first: int, width: int) -> Change:
    return turned("qk", lambda r: replace(r, table=table(torch.arange(ROWS), width=width), first=first))


def _rows(index: Tensor) -> Change:
    """Rows of q in another order."""

    def edit(old: Affine) -> Affine:
        weight = old.weight.flatten(0, 1)[index].view_as(old.weight)
        return replace(old, weight=weight, bias=None if old.bias is None else old.bias.flatten()[index].view(4, -1))

    return projected("q", edit)


def _fused(old: Program) -> Program:
    """q, k and v of one projection [q, k, v][head][channel], read as [head][q, k, v][channel]."""
    ways = [old.query, old.key, old.value]
    weights, biases = [], []
    for way in ways:
        assert way.affine is not None
        weights.append(way.affine.weight)
        biases.append(way.affine.bias if way.affine.bias is not None else torch.zeros(HEADS, CHANNELS).double())
    rows, bias = torch.cat(weights).view(HEADS, 3, CHANNELS, -1), torch.cat(biases).view(HEADS, 3, CHANNELS)
    new = [replace(w, affine=replace(w.affine, weight=rows[:, i], bias=bias[:, i])) for i, w in enumerate(ways)]
    return replace(old, query=new[0], key=new[1], value=new[2])


def _reordered(old: Program) -> Program:
    return on("qk", lambda way: replace(way, steps=way.steps[::-1]))(old)


def _log_n(old: Program) -> Program:
    assert old.formula is not None
    factor = torch.arange(2, ROWS + 2).double().log()[:, None]
    return replace(old, formula=replace(old.formula, scale=old.formula.scale * factor))


def _added(kind: type, step: object) -> Change:
    def edit(way):
        steps = (step, *way.steps) if kind is NormStep else (*way.steps, step)
        return replace(way, steps=steps)

    return on("qk", edit)


def plants() -> list[Plant]:
    """All of them; the numbers are drawn anew."""
    interleave = torch.arange(CHANNELS).view(2, -1).T.flatten()
    rows = torch.arange(HEADS * CHANNELS).view(HEADS, CHANNELS)
    reset = torch.cat([torch.arange(7), torch.arange(ROWS - 7)])
    padded = torch.stack([torch.arange(ROWS), (torch.arange(ROWS) - 4).clamp(min=0)])
    half = torch.tensor(0.5, dtype=torch.float64)
    unrotated = tuple(name for name in EVERY if name not in ROTARY)
    unnormed = tuple(name for name in ROTARY if name not in NORMED)
    return [
        Plant("rope_missing", "q and k", without("qk", Rotation), ROTARY, "rotated", "not rotated"),
        Plant("rope_missing", "q", without("q", Rotation), ROTARY, "rotated", "not rotated"),
        Plant("rope_missing", "k", without("k", Rotation), ROTARY, "rotated", "not rotated"),
        Plant("rope_missing", "in A", _added(Rotation, Rotation(table(torch.arange(ROWS)), "half")), unrotated),
        Plant("rope_base", "500000", _rerotated("qk", base=5e5), ROTARY, 1e4, 5e5),
        Plant("rope_base", "of k", _rerotated("k", base=1e6), ROTARY, 1e4, 1e6),
        Plant("rope_base", "interpolated", _rerotated("qk", stretch=0.25), ROTARY, 1e4, "10000, positions times 0.25"),
        Plant("rope_layout", "q and k", turned("qk", _relaid), ROTARY),
        Plant("rope_layout", "k", turned("k", _relaid), ROTARY),
        Plant("rope_layout", "backwards", turned("q", lambda r: replace(r, table=r.table.conj().clone())), ROTARY),
        Plant("rope_partial", "less", _part(0, 4), ROTARY),
        Plant("rope_partial", "shifted", _part(4, 12), ROTARY),
        Plant("positions", "q by one", _rerotated("q", torch.arange(ROWS) + 1), ROTARY, "from 0", "from 1"),
        Plant("positions", "k by minus one", _rerotated("k", torch.arange(ROWS) - 1), ROTARY, "from 0", "from -1"),
        Plant("positions", "reset", _rerotated("qk", reset), ROTARY, "from 0", "from 0, then from 0 at row 7"),
        Plant("positions", "of padding", _rerotated("qk", padded), ROTARY),
        Plant("length_factor", "amplitude", _rerotated("qk", amplitude=1.1386), ROTARY, 1.0, 1.139),
        Plant("length_factor", "log n", _log_n, EVERY, "one for all rows", "one of each row"),
        Plant("qk_norm", "missing", without("qk", NormStep), NORMED),
        Plant("qk_norm", "missing on k", without("k", NormStep), NORMED),
        Plant("qk_norm", "added", _added(NormStep, norm("rms")), unnormed, "none", "RMS"),
        Plant("qk_norm", "kind", normed("qk", lambda n: replace(n, kind="l2", shift=None)), BOTH[:2], "RMS", "L2"),
        Plant("qk_norm_order", "q and k", _reordered, BOTH),
        Plant("qk_norm_eps", "larger", normed("qk", lambda n: replace(n, eps=1e-3)), NORMED, 1e-6, 1e-3),
        Plant("qk_norm_axis", "all heads", normed("qk", lambda n: replace(n, over="heads")), NORMED),
        Plant(
            "group_order",
            "tiled",
            on("kv", lambda way: replace(way, heads=torch.arange(HEADS) % 2)),
            GROUPED,
            "0 0 1 1",
            "0 1 0 1",
        ),
        Plant("head_order", "heads", _rows(rows[[2, 0, 1, 3]].flatten()), EVERY),
        Plant("head_order", "channels", _rows(rows[:, interleave].flatten()), EVERY),
        Plant("head_order", "fused", _fused, _where(groups=HEADS)),
        Plant("kv_scale", "k", on("k", lambda way: replace(way, scaled=0.05)), EVERY, 1.0, 0.05),
        Plant("kv_scale", "v", on("v", lambda way: replace(way, scaled=torch.tensor([[[20.0]]]))), EVERY, 1.0, 20.0),
        Plant("projection_bias", "added", projected("qkv", _other_bias), EVERY),
        Plant("projection_bias", "missing", projected("v", lambda x: replace(x, bias=None)), _where(bias=True)),
        Plant("weights", "k_proj.weight", projected("k", _other_weight), EVERY, "k_proj.weight", "k_proj.weight"),
        Plant("weights", "a row", projected("v", _other_row), EVERY, "v_proj.weight", "v_proj.weight"),
        Plant("weights", "a gain", normed("q", lambda n: replace(n, gain=n.gain + half)), NORMED),
    ]


def _other_bias(old: Affine) -> Affine:
    return replace(old, bias=torch.randn(old.weight.shape[:2], dtype=torch.float64))


def _other_weight(old: Affine) -> Affine:
    return replace(old, weight=affine("", len(old.weight)).weight)


def _other_row(old: Affine) -> Affine:
    weight = old.weight.clone()
    weight[1, 3] *= 1.1
    return replace(old, weight=weight)


def cases() -> list[tuple[str, str]]:
    """Every plant in every style that it fits, by name."""
    return [(plant.name, style) for plant in plants() for style in plant.fits]


def planted(name: str) -> Plant:
    """The plant of that name."""
    return next(plant for plant in plants() if plant.name == name)


def style_of(name: str) -> Style:
    """The style of that name."""
    return STYLES[name]


assert BATCH == 2, "`padded` has positions for two batches"
