"""Edits of positions: the base, scaling for long contexts, the layout of pairs, where counting starts.

Frequencies are buffers whose name ends with `inv_freq`, as in transformers. Where a model computes them anew at each
length (dynamic, longrope), a changed buffer may not be read; such an edit answers as the unedited model does, and the
report lists it among those that could not have been shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.answers.edit import Change, Edit, edits_of_number, put_parameter
from sqrtdk.answers.edited import Edited
from sqrtdk.positions import yarn_frequencies

BASES = (1e4, 1e5, 5e5, 1e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 0.5)
LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1, 3.2
ROTATED_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj")
TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding")  # of learned positions


def frequency_tables(copy: Edited) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each table of frequencies with the module and the name that hold it."""
    for module in copy.module.modules():
        for name, buffer in list(module._buffers.items()):
            if name.endswith("inv_freq") and buffer is not None:
                yield module, name, buffer


def with_frequencies(change: Callable[[Tensor], Tensor]) -> Change:
    """Return a change of every table of frequencies."""

    def apply(copy: Edited) -> None:
        for module, name, buffer in frequency_tables(copy):
            module._buffers[name] = change(buffer)

    return apply


def powers(base: float, like: Tensor) -> Tensor:
    """Return base^(-2i/d) for i = 0 .. d/2 - 1."""
    return (base ** (-torch.arange(len(like), dtype=torch.float64) / len(like))).to(like)


def bases(copy: Edited, _length: int) -> Iterator[Edit]:
    """Other bases of the rotation's frequencies; what scales A's own frequencies is left out with them.

    A model that has tables of two bases, as Gemma 3, gets edits of each.
    """
    tables: list[Tensor] = []
    for *_, buffer in frequency_tables(copy):
        if not any(torch.equal(buffer, table) for table in tables):
            tables.append(buffer)
    for table, what in zip(tables, ("base", "second_base"), strict=False):
        if len(table) < 2:
            continue
        read = float((table[0].double() / table[1].double()) ** len(table))
        own = float(f"{read:.6g}") if torch.allclose(powers(read, table), table, rtol=1e-3) else None

        def change(base: float, table: Tensor = table) -> Change:
            return with_frequencies(lambda old: powers(base, old) if torch.equal(old, table) else old)

        yield from edits_of_number("rope_base", what, own, BASES, (10.0, 1e9), change)


def linear_scalings(copy: Edited, _length: int) -> Iterator[Edit]:
    """Positions divided by a factor."""
    if any(True for _ in frequency_tables(copy)):
        change = lambda factor: with_frequencies(lambda old: old / factor)  # noqa: E731
        yield from edits_of_number("rope_base", "linear", 1.0, FACTORS, (1 / 64, 64.0), change)


def scaling_laws(copy: Edited, _length: int) -> Iterator[Edit]:
    """Frequencies of llama3's and YaRN's law for plain ones, and plain ones for those of another law."""
    settings = getattr(copy.config, "rope_parameters", None) or {}
    nested = [one for one in settings.values() if isinstance(one, dict)] or [settings]
    kinds = {str(one.get("rope_type", "default")) for one in nested}
    if kinds == {"default"} and any(True for _ in frequency_tables(copy)):
        most = int(getattr(copy.config, "max_position_embeddings", None) or 8192)
        for factor in LLAMA3_FACTORS:
            change = with_frequencies(lambda old, factor=factor: llama3_frequencies(old, factor, most))  # type: ignore[misc]
            yield Edit("rope_base", "scaling", "default", f"llama3 {factor:g}", change)
        yield Edit("rope_base", "scaling", "default", "yarn 4", with_frequencies(lambda old: yarn_4(old, most)))
    for one in nested:
        kind, base = one.get("rope_type", "default"), one.get("rope_theta")
        if kind != "default" and base is not None:
            plain = with_frequencies(lambda old, base=base: powers(base, old))  # type: ignore[misc]
            yield Edit("rope_base", "scaling", str(kind), "default", plain)
    factors = [module for module in copy.module.modules() if getattr(module, "attention_scaling", 1.0) != 1.0]

    def without_factor(copy: Edited) -> None:
        for module in copy.module.modules():
            if getattr(module, "attention_scaling", 1.0) != 1.0:
                module.attention_scaling = 1.0  # type: ignore[assignment]

    if factors:
        own: Any = factors[0].attention_scaling
        yield Edit("length_factor", "length_factor", float(own), 1.0, without_factor)


def llama3_frequencies(plain: Tensor, factor: float, original: int, low: float = 1.0, high: float = 4.0) -> Tensor:
    """Return Llama 3.1's frequencies of plain ones.

    A frequency f with wavelength w = 2 pi / f is f where w < original / high, f / factor where w > original / low, and
    between them (1 - t) f / factor + t f with t = (original / w - low) / (high - low).
    """
    turns = original * plain / (2 * math.pi)
    between = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - between) * plain / factor + between * plain


def yarn_4(plain: Tensor, original: int) -> Tensor:
    """Return YaRN's frequencies for a context four times as long, without its factor on cos and sin."""
    if not float(plain[-1]) > 0:  # another edit has taken the rotation away, or turned it round
        return plain
    base = float((plain[0].double() / plain[1].double()) ** len(plain))
    found = yarn_frequencies(2 * len(plain), factor=4.0, original_length=original, base=base)
    return found.to(plain)


def no_rotation(copy: Edited, _length: int) -> Iterator[Edit]:
    """No rotation."""
    if any(True for _ in frequency_tables(copy)):
        yield Edit("rope_missing", "rotation", "rotated", None, with_frequencies(torch.zeros_like))


def layouts(copy: Edited, _length: int) -> Iterator[Edit]:
    """Pairs of neighbours for pairs of halves, by another order of the rows of q and k; turns backwards.

    A rotation of neighbours on A's rows pairs channels 2i and 2i + 1: as halves of rows in the order 0 2 4 .. 1 3 5 ..
    A conversion for such a rotation writes rows in the order 0 d/2 1 d/2+1 .., which is wrong where B rotates halves.
    """
    if not copy.facts or not any(True for _ in frequency_tables(copy)):
        return
    yield Edit("rope_layout", "direction", "forwards", "backwards", with_frequencies(torch.neg))
    named = [name for name, _ in copy.module.named_modules() if name.rpartition(".")[2] in ROTATED_PROJECTIONS]
    if not named:
        return
    fact = copy.facts[0]

    def apply(copy: Edited, order: Tensor) -> None:
        for name, module in copy.module.named_modules():
            last = name.rpartition(".")[2]
            weight = getattr(module, "weight", None)
            if last in ROTATED_PROJECTIONS and isinstance(weight, Tensor):
                rows = fact.head_dim * (fact.heads + fact.groups) if last == "qkv_proj" else len(weight)
                for part in ("weight", "bias"):
                    put_parameter(module, part, lambda old, rows=rows: _reordered(old, rows, order))  # type: ignore[misc]
            elif last in ("q_norm", "k_norm") and isinstance(weight, Tensor) and weight.shape[-1] == fact.head_dim:
                put_parameter(module, "weight", lambda old: old[order])

    places = torch.arange(fact.head_dim)
    for b, order in (("neighbours", places.view(-1, 2).T.flatten()), ("permuted", places.view(2, -1).T.flatten())):
        yield Edit("rope_layout", "layout", "halves", b, partial(apply, order=order))


def _reordered(old: Tensor, rows: int, order: Tensor) -> Tensor:
    """Return a weight whose first rows are in another order within each head."""
    heads = old[:rows].reshape(-1, len(order), *old.shape[1:])
    return torch.cat([heads[:, order].flatten(0, 1), old[rows:]])


def position_tables(copy: Edited, _length: int) -> Iterator[Edit]:
    """Learned positions that are counted from 1."""
    names = [
        name
        for name, module in copy.module.named_modules()
        if name.rpartition(".")[2] in TABLES and isinstance(getattr(module, "weight", None), Tensor)
    ]

    def apply(copy: Edited) -> None:
        for name in names:
            put_parameter(copy.module.get_submodule(name), "weight", lambda old: torch.cat([old[1:], old[-1:]]))

    if names:
        yield Edit("positions", "first_position", 0.0, 1.0, apply)
