"""Positions, frequencies and axes in words: modules that turn q and k otherwise, and the one sentence on each pair."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import Cause
from sqrtdk.messages import said as said_in
from sqrtdk.positions import yarn_frequencies

HEADS, SIZE = 4, 16
Turn = Callable[[Tensor], Tensor]
Core = Callable[..., Tensor]
Case = tuple[Core, Core, tuple[Tensor, ...], str, str]
HALF, NEIGHBOURS = "half", "neighbours"


class Attend(nn.Module):
    """Projections, and any core between them."""

    def __init__(self, core: Core, width: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.core = core

    def forward(self, x: Tensor, *cache: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.core(2 * q, 2 * k, v, *cache).transpose(1, 2).flatten(-2))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(width: int = SIZE, base: float = 1e4) -> Tensor:
    return base ** (-torch.arange(0, width, 2).float() / width)


def turned(x: Tensor, angles: Tensor, layout: str = HALF) -> Tensor:
    """The first channels of x, as many as angles (L, R / 2) or (B, L, R / 2) have."""
    angles = angles[:, None] if angles.dim() == 3 else angles
    cos, sin, width = angles.cos(), angles.sin(), 2 * angles.shape[-1]
    if layout == HALF:
        a, b = x[..., :width].chunk(2, -1)
        part = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = x[..., :width:2], x[..., 1:width:2]
        part = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([part, x[..., width:]], -1)


def by(frequencies: Tensor, layout: str = HALF, times: int = 1, start: int = 0) -> Turn:
    """Rows from a position on, turned so many times."""

    def turn(x: Tensor) -> Tensor:
        for _ in range(times):
            x = turned(x, torch.arange(start, start + x.shape[2])[:, None] * frequencies, layout)
        return x

    return turn


def attended(turn: Turn, of_keys: Turn | None = None, mask: Tensor | None = None) -> Core:
    of_keys = of_keys or turn
    return lambda q, k, v: functional.scaled_dot_product_attention(turn(q), of_keys(k), v, attn_mask=mask)


def cause_of(a: Core, b: Core, inputs: tuple[Tensor, ...]) -> Cause:
    width = inputs[0].shape[-1]
    report = diff(Attend(a, width), Attend(b, width), inputs)
    (cause,) = report.pairs[0].causes
    assert cause.explained > 0.99
    return cause


X = (drawn(2, 40, HEADS * SIZE),)
ENGLISH = re.compile(r"\b(the|of|by|and|instead|not|with|pairs|turns|position|twice|once|axis)\b(?!\^|\()")
ONCE, OTHER = attended(by(steps())), attended(by(steps(base=5e5), NEIGHBOURS))


# -- frequencies -------------------------------------------------------------------------------------------------------


def llama3(base: float, factor: float, original: float, low: float = 1.0, high: float = 4.0) -> Tensor:
    """As transformers writes it, pair by pair."""
    found = []
    for f in steps(base=base).tolist():
        wavelength = 2 * math.pi / f
        share = (original / wavelength - low) / (high - low)
        blend = (1 - share) * f / factor + share * f
        found.append(f if wavelength < original / high else f / factor if wavelength > original / low else blend)
    return torch.tensor(found)


LLAMA3 = "llama3 (factor {}, low_freq_factor 1, high_freq_factor 4, original_max_position_embeddings {})"
SCALED: dict[str, tuple[Core, Core, str]] = {
    "linear": (
        OTHER, attended(by(steps(base=5e5) / 4, NEIGHBOURS)),
        "base 500000 scaled by linear (factor 4) instead of base 500000",
    ),
    "llama3": (
        ONCE, attended(by(llama3(1e4, 8.0, 64))), f"base 10000 scaled by {LLAMA3.format(8, 64)} instead of base 10000",
    ),
    "llama3 with another factor": (
        attended(by(llama3(5e5, 32.0, 128))), attended(by(llama3(5e5, 8.0, 128))),
        f"base 500000 scaled by {LLAMA3.format(8, 128)} instead of base 500000 scaled by {LLAMA3.format(32, 128)}",
    ),
    "yarn": (
        OTHER, attended(by(yarn_frequencies(SIZE, factor=16.0, original_length=64, base=5e5), NEIGHBOURS)),
        "base 500000 scaled by yarn (factor 16, original_max_position_embeddings 64, beta_fast 32, beta_slow 1) "
        "instead of base 500000",
    ),
    "dynamic": (  # factor 2, longest 32, of 40 rows
        ONCE, attended(by(steps(base=1e4 * (2 * 40 / 32 - 1) ** (16 / 14)))),
        "base 10000 scaled by dynamic (NTK) by 1.5 to 15890 instead of base 10000",
    ),
    "longrope": (
        ONCE, attended(by(steps() / torch.tensor([1.0, 1.05, 1.2, 1.8, 2.6, 4.0, 9.0, 20.0]))),
        "base 10000 scaled by longrope (factors 1 to 20) instead of base 10000",
    ),
    "exponents of the whole head": (
        attended(by(steps(12))), attended(by(steps()[:6])),
        "10000^(-2c/16), the exponents of the whole head, instead of 10000^(-2c/12)",
    ),
    "exponents of a part": (
        attended(by(steps()[:4], NEIGHBOURS)), attended(by(steps(8), NEIGHBOURS)),
        "10000^(-2c/8) instead of 10000^(-2c/16), the exponents of the whole head,",
    ),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_by_the_name_of_their_law(name: str) -> None:
    a, b, said = SCALED[name]
    cause = cause_of(a, b, X)
    assert (cause.name, cause.text) == ("rope_base", f"turns q and k with {said}")
    assert ENGLISH.findall(said_in(cause.text, "zh")) == []


def rounded(dtype: torch.dtype, parts: str, layout: str = HALF, base: float = 1e4) -> Core:
    """Some of positions, frequencies, angles and tables in half precision."""

    def turn(x: Tensor) -> Tensor:
        def part(name: str, value: Tensor) -> Tensor:
            return value.to(dtype).float() if name in parts else value

        positions = part("positions", torch.arange(x.shape[2]).float())
        angles = part("angles", positions[:, None] * part("frequencies", steps(base=base)))
        if "tables" not in parts:
            return turned(x, angles, layout)
        cos, sin = (part("tables", torch.cat([t, t], -1)) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1) * sin

    return attended(turn)


ROUNDED = [
    ("frequencies", torch.bfloat16, HALF, 1e4, "the frequencies"),
    ("frequencies", torch.float16, HALF, 1e4, "the frequencies"),
    ("positions", torch.bfloat16, HALF, 1e4, "the positions"),
    ("positions frequencies", torch.bfloat16, NEIGHBOURS, 5e5, "the positions and the frequencies"),
    ("angles", torch.bfloat16, HALF, 1e6, "the angles"),
    ("tables", torch.bfloat16, HALF, 1e4, "cos and sin"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("parts", "dtype", "layout", "base", "what"), ROUNDED)
def test_what_is_rounded_to_half_precision(parts: str, dtype: torch.dtype, layout: str, base: float, what: str) -> None:
    exact, half = rounded(dtype, "", layout, base), rounded(dtype, parts, layout, base)
    long, name = (drawn(1, 400, HEADS * SIZE),), str(dtype).removeprefix("torch.")
    cause, back = cause_of(exact, half, long), cause_of(half, exact, long)
    assert (cause.name, back.name) == ("rounding", "rounding")
    assert cause.text == f"rounds {what} of the rotation of q and k to {name}, and A does not: keep them in float32"
    assert back.text == f"does not round {what} of the rotation of q and k to {name}, as A does"


# -- positions ---------------------------------------------------------------------------------------------------------


def cached(layout: str = HALF, *, past: int = 1, new: int | None = None, query: int | None = None) -> Core:
    """New rows behind cached keys, which are turned so many times; new rows from a position on."""

    def core(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows, before = q.shape[2], keys.shape[2]
        start = before if new is None else new
        q = by(steps(), layout, start=start if query is None else query)(q)
        k = torch.cat([by(steps(), layout, past)(keys), by(steps(), layout, start=start)(k)], 2)
        seen = torch.arange(before + rows) <= torch.arange(before, before + rows)[:, None]
        return functional.scaled_dot_product_attention(q, k, torch.cat([values, v], 2), attn_mask=seen)

    return core


def step(rows: int, before: int) -> tuple[Tensor, ...]:
    cache = (drawn(2, HEADS, before, SIZE, seed=seed) for seed in (5, 6))
    return drawn(2, rows, HEADS * SIZE), *cache


def padded(rows: int, count: bool, keys_too: bool = False, padding: tuple[int, ...] = (0, 3, 9)) -> Core:
    """Sequences with padding in front, which is counted as a position or not; of the last rows."""

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, before = k.shape[2], torch.tensor(padding)[:, None]
        right = (torch.arange(length) - before).clamp(min=0)
        positions = torch.arange(length).expand_as(right) if count else right
        q = turned(q, positions[..., None] * steps())[:, :, -rows:]
        k = turned(k, (positions if keys_too else right)[..., None] * steps())
        seen = (torch.arange(length) >= before)[:, None, None] & torch.ones(length, length).tril().bool()[-rows:]
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return functional.pad(attended, (0, 0, length - rows, 0))

    return core


PLACES: dict[str, Case] = {
    "cached keys twice": (
        cached(NEIGHBOURS), cached(NEIGHBOURS, past=2), step(3, 20), "positions",
        "turns the 20 cached keys twice: position 38 instead of 19 for the last of them",
    ),
    "cached keys twice, most rows are new": (
        cached(), cached(past=2), step(20, 6), "positions",
        "turns the 6 cached keys twice: position 10 instead of 5 for the last of them",
    ),
    "cached keys once": (
        cached(past=2), cached(), step(1, 9), "positions",
        "turns the 9 cached keys once, not twice: position 8 instead of 16 for the last of them",
    ),
    "cached keys again": (
        cached(past=0), cached(), step(1, 9), "positions",
        "turns the 9 cached keys, a second time where the cache holds turned ones: A takes them as they are",
    ),
    "cached keys as they are": (
        cached(), cached(past=0), step(5, 7), "positions",
        "takes the 7 cached keys as they are in the cache, where A turns them",
    ),
    "no offset": (
        cached(past=0), cached(past=0, new=0), step(4, 9), "positions",
        "turns the new rows of q and k from position 0 on instead of 9: it does not count the 9 cached keys",
    ),
    "no offset, one row": (
        cached(), cached(new=0), step(1, 9), "positions",
        "turns the new rows of q and k from position 0 on instead of 9: it does not count the 9 cached keys",
    ),
    "off by one": (
        cached(), cached(query=10), step(4, 9), "positions",
        "counts the positions of q from 10 instead of from 9: off by +1",
    ),
    "padding": (
        padded(24, count=False), padded(24, count=True), (drawn(3, 24, HEADS * SIZE),), "positions",
        "gives q position 23 in place of 14 at row 23 of sequence 2: it counts the 9 tokens of padding in front",
    ),
    "padding, one row": (
        padded(1, count=True), padded(1, count=False), (drawn(3, 24, HEADS * SIZE),), "positions",
        "gives q position 14 in place of 23 in sequence 2: it does not count the 9 tokens of padding in front",
    ),
    "q twice": (
        ONCE, attended(by(steps(), times=2), by(steps())), X, "positions", "turns q twice, and k once",
    ),
    "k twice": (
        OTHER, attended(by(steps(base=5e5), NEIGHBOURS), by(steps(base=5e5), NEIGHBOURS, 2)), X, "positions",
        "turns k twice, and q once",
    ),
    "both twice": (ONCE, attended(by(steps(), times=2)), X, "positions", "turns q and k twice, not once"),
    "q once": (
        attended(by(steps(), times=2), by(steps())), ONCE, X, "positions", "turns q once, where A does twice",
    ),
}  # fmt: skip


# -- axes --------------------------------------------------------------------------------------------------------------


def grid(height: int, width: int, layout: str = HALF, swap: bool = False, columns: bool = False) -> Core:
    """An image's rows and columns, each for half of the pairs."""
    token = torch.arange(height * width)
    places = [token // width, token % width] if not columns else [token % height, token // height]
    angles = torch.cat([place[:, None] * steps(8, 100.0) for place in (places[::-1] if swap else places)], -1)
    return attended(lambda x: turned(x, angles, layout))


def sections(sizes: tuple[int, ...], order: tuple[int, ...] = (0, 1, 2)) -> Core:
    """Text, an image of 3 by 4 patches, text: positions of time, height and width, each for a section of the pairs."""
    before, after = torch.arange(6), torch.arange(10, 22)
    patches = torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4
    axes = [torch.cat([before, 6 + patch, after]) for patch in patches]
    of_pairs = [axes[order[i]] for i, size in enumerate(sizes) for _ in range(size)]
    return attended(lambda x: turned(x, torch.stack(of_pairs, -1) * steps()))


FLAT = "pairs 0 to 3 by token // {0} and pairs 4 to 7 by token % {0}"
AXES = "pairs {} by axis {} and pairs {} by axis {} and pairs {} by axis {}"
TIME_FIRST = AXES.format("0 to 1", 1, "2 to 4", 2, "5 to 7", 3)
OF_AXES: dict[str, Case] = {
    "swapped": (
        grid(4, 6), grid(4, 6, swap=True), (drawn(2, 24, 64),), "positions",
        "has the axes of the positions of q and k swapped, height for width: it turns pairs 0 to 3 by token % 6 and "
        f"pairs 4 to 7 by token // 6, not {FLAT.format(6)}",
    ),
    "swapped with another meshgrid": (
        grid(3, 8, NEIGHBOURS), grid(3, 8, NEIGHBOURS, columns=True), (drawn(2, 24, 64),), "positions",
        "has the axes of the positions of q and k swapped, height for width: it turns pairs 0 to 3 by token % 3 and "
        f"pairs 4 to 7 by token // 3, not {FLAT.format(8)}",
    ),
    "another width": (
        grid(4, 6), grid(6, 4), (drawn(2, 24, 64),), "positions",
        f"counts the positions of q and k on a grid of another width: it turns {FLAT.format(4)}, not {FLAT.format(6)}",
    ),
    "sections in another order": (
        sections((2, 3, 3)), sections((2, 3, 3), (0, 2, 1)), (drawn(2, 30, 64),), "positions",
        "has the sections of q and k for the axes of the positions in another order: it turns "
        f"{AXES.format('0 to 1', 1, '2 to 4', 3, '5 to 7', 2)}, not {TIME_FIRST}",
    ),
    "sections of other sizes": (
        sections((2, 3, 3)), sections((4, 2, 2)), (drawn(2, 30, 64),), "positions",
        "has sections of q and k of other sizes for the axes of the positions (4, 2, 2 instead of 2, 3, 3 pairs): "
        f"it turns {AXES.format('0 to 3', 1, '4 to 5', 2, '6 to 7', 3)}, not {TIME_FIRST}",
    ),
    "one axis": (
        sections((2, 3, 3)), ONCE, (drawn(2, 30, 64),), "positions",
        f"has positions of q and k on one axis, where A has 3: it turns pairs 0 to 7 by token, not {TIME_FIRST}",
    ),
}  # fmt: skip


# -- pairs of channels -------------------------------------------------------------------------------------------------


def mixed(layout: str, width: int = SIZE) -> Core:
    """The channels of one layout by cos and sin as the other one has them."""

    def turn(x: Tensor) -> Tensor:
        angles, part = torch.arange(x.shape[2])[:, None] * steps(width), x[..., :width]
        if layout == HALF:
            angles = angles.repeat_interleave(2, -1)
            beside = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], -1)
        else:
            angles = torch.cat([angles, angles], -1)
            beside = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
        return torch.cat([part * angles.cos() + beside * angles.sin(), x[..., width:]], -1)

    return attended(turn)


PAIRS: dict[str, Case] = {
    "halves by a table of neighbours": (
        ONCE, mixed(HALF), X, "rope_layout",
        "lays out cos and sin interleaved for q and k, whose channels it pairs half-split: no rotation, norms change; "
        "use cat((angles, angles), -1)",
    ),
    "neighbours by a table of halves, of a part": (
        attended(by(steps(12), NEIGHBOURS)), mixed(NEIGHBOURS, 12), X, "rope_layout",
        "lays out cos and sin half-split for q and k, whose channels it pairs interleaved: no rotation, norms change; "
        "use angles.repeat_interleave(2, -1)",
    ),
    "no rotation on A's side": (
        mixed(HALF), ONCE, X, "rope_layout",
        "pairs the channels of q and k half-split instead of half-split, with cos and sin laid out interleaved",
    ),
    "more channels of q": (
        attended(by(steps(8))), attended(by(steps()), by(steps(8))), X, "rope_partial",
        "turns all 16 channels of q (pairs c and c + 8 by base^(-2c/16)) instead of channels 0 to 7 of 16 "
        "(pairs c and c + 4 by base^(-2c/8))",
    ),
    "fewer neighbours": (
        attended(by(steps(), NEIGHBOURS)), attended(by(steps(12), NEIGHBOURS)), X, "rope_partial",
        "turns channels 0 to 11 of 16 of q and k (by base^(-2c/12)) instead of all 16 channels (by base^(-2c/16))",
    ),
}  # fmt: skip
SAID = PLACES | OF_AXES | PAIRS


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SAID)
def test_one_sentence_says_what_is_turned_otherwise(name: str) -> None:
    a, b, inputs, expected, said = SAID[name]
    cause = cause_of(a, b, inputs)
    assert (cause.name, cause.text) == (expected, said)
    assert ENGLISH.findall(said_in(cause.text, "zh")) == []


@pytest.mark.parametrize("core", [ONCE, OTHER, mixed(HALF), sections((2, 3, 3)), grid(5, 6)])
def test_one_and_the_same_rotation_differs_in_nothing(core: Core) -> None:
    assert diff(Attend(core, 64), Attend(core, 64), drawn(2, 30, 64)).same is True
