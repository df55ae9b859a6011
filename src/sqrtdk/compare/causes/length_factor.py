"""`length_factor`: a factor that stands for the length: YaRN's amplitude of the table, or log n of the row.

The amplitude is the size of what the table multiplies by; its angles stay A's. On the formula it is a factor that
differs from row to row, or goes by the keys that the rows of a sequence see; any other is the cause `scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._lengths import by_length
from sqrtdk.compare.causes._parts import (
    QK,
    Finding,
    joined,
    like_amplitude,
    rotation,
    slack,
    way,
    with_rotation,
)
from sqrtdk.compare.causes._widths import like_widths
from sqrtdk.compare.numbers import held, one_number, same, told_apart
from sqrtdk.compare.program import Program, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "length_factor"
ONE, OWN = "one for all rows", "one of each row"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another amplitude of the table, or a factor of the rows."""
    yield from joined(NAME, "rotation", _amplitudes(like_widths(sides)))
    yield from joined(NAME, "rotation", _factors(sides))
    yield from _of_rows(sides)


def _factors(sides: Sides) -> Iterator[Finding]:
    """One and the same factor on q and on k, both rotated: an amplitude that could not be told from a factor."""
    if not like_amplitude(sides):
        return
    for part in QK:
        a, b = (float(torch.as_tensor(way(side, part).scaled).flatten()[0]) for side in (sides.a, sides.b))
        wanted = way(sides.b, part).scaled

        def other(old: Way, scaled: Tensor | float = wanted) -> Way:
            return replace(old, scaled=scaled)

        old, new = told_apart(a, b)
        text = f"has {new} instead of {old} as amplitude of the rotation of {{}}"
        yield Finding(part, float(old), float(new), text, other)


def _amplitudes(sides: Sides) -> Iterator[Finding]:
    for part in QK:
        a, b = rotation(way(sides.a, part)), rotation(way(sides.b, part))
        if a is None or b is None:
            continue
        mine, wanted = a.table.abs(), b.table.abs()
        if a.width != b.width:  # of the channels that both turn
            mine, wanted = (x.median(-1, keepdim=True).values for x in (mine, wanted))
        if mine.shape[1] != wanted.shape[1]:
            continue
        ratio = wanted / mine.clamp_min(torch.finfo(torch.float64).tiny)
        middle = float(ratio.flatten()[: 2**23].median())
        if abs(middle - 1) <= slack(sides) and float((ratio - 1).abs().flatten()[: 2**23].quantile(0.5)) <= slack(
            sides
        ):
            continue

        def other(old: Way, wanted: Tensor = wanted) -> Way:
            own = rotation(old)
            if own is None:
                return old
            size = own.table.abs().clamp_min(torch.finfo(torch.float64).tiny)
            amplitude = wanted if wanted.shape[-1] in (1, own.table.shape[-1]) else wanted[..., :1]
            return with_rotation(old, replace(own, table=own.table / size * amplitude))

        middles = [float(x.flatten()[: 2**23].median()) for x in (mine, wanted)]
        old, new = told_apart(middles[0], middles[1])
        text = f"has {new} instead of {old} as amplitude of the rotation of {{}}"
        yield Finding(part, float(old), float(new), text, other)


def _of_rows(sides: Sides) -> Iterator[Suspicion]:
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return
    if same(a.scale, b.scale, held(sides.a.dtype, sides.b.dtype)) or not by_length(sides):
        return

    def change(program: Program) -> Program:
        return program if program.formula is None else replace(program, formula=replace(program.formula, scale=b.scale))

    words = _scale_words(a.scale), _scale_words(b.scale)
    text = {
        (OWN, ONE): "leaves out the factor of the rows, as log n of the keys that each sees",
        (ONE, OWN): "multiplies each row by a factor of its own, as log n of its keys",
    }.get(words, "multiplies the rows by other factors, as log n of their keys")
    yield Suspicion(NAME, "scale", words[0], words[1], change, text)


def _scale_words(scale: Tensor | float) -> str:
    return ONE if one_number(scale) is not None else OWN
