"""Formulas of attentions, and the differences that ports plant into them: what `causes` must name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.compute import compute_output
from sqrtdk.compare.inside.program import Formula, Program, RoundingStep, VectorPath
from sqrtdk.compare.inside.suspect import Sides, Suspicion
from sqrtdk.masks.band import band_mask
from sqrtdk.positions import alibi_slopes
from tests.tolerances import allowed

HEADS, GROUPS, HEAD_DIM, MODEL_DIM, BATCH = 4, 2, 16, 48, 3
SCALE = 0.25
PADDING = (0, 2, 3)  # of each entry of the batch


@dataclass(frozen=True, slots=True)
class Case:
    """A base and what is planted in it: the names that must come out, with what is said of A and B."""

    base: str
    name: str
    plant: Callable[[Formula], Formula]
    a: str | float | None
    b: str | float | None
    text: str


def visible(rows: int, keys: int, least: int | None, greatest: int | None = None) -> Tensor:
    return band_mask(rows, keys, least, greatest)[None, None]


def tokens(keys: int, left: bool) -> Tensor:
    """(B, 1, 1, S), False at padding."""
    number = torch.arange(keys)
    hidden = torch.stack([number < many if left else number >= keys - many for many in PADDING])
    return ~hidden[:, None, None]


def alibi(rows: int, keys: int, factor: float = 1.0) -> Tensor:
    slopes = factor * torch.tensor(alibi_slopes(HEADS), dtype=torch.float64)
    return -slopes[:, None, None] * (torch.arange(rows)[:, None] - torch.arange(keys))


def table(rows: int, keys: int, seed: int = 5) -> Tensor:
    """A learned number for each i - j and head."""
    numbers = torch.randn(HEADS, rows + keys, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers[:, torch.arange(rows)[:, None] - torch.arange(keys) + keys]


def learned(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOWEST = torch.finfo(torch.float32).min
OPEN = visible(8, 8, 0) & tokens(8, True) | ~(visible(8, 8, 0) & tokens(8, True)).any(-1, keepdim=True)
BASES: dict[str, tuple[int, int, Formula]] = {  # rows, keys, formula
    "plain": (7, 9, Formula(SCALE)),
    "causal": (8, 8, Formula(SCALE, visible=visible(8, 8, 0))),
    "capped": (8, 8, Formula(SCALE, softcap=1.5, visible=visible(8, 8, 0))),
    "capped product": (8, 8, Formula(1.0, 2.0, "product", SCALE, visible=visible(8, 8, 0))),
    "alibi": (8, 8, Formula(SCALE, bias=alibi(8, 8), bias_name="alibi", visible=visible(8, 8, 0))),
    "relative": (9, 9, Formula(1.0, bias=table(9, 9), bias_name="relative")),
    "window": (9, 9, Formula(SCALE, visible=visible(9, 9, 0, 3))),
    "two-sided": (9, 9, Formula(SCALE, visible=visible(9, 9, -2, 2))),
    "cached": (4, 9, Formula(SCALE, visible=visible(4, 9, -5))),
    "cached window": (4, 9, Formula(SCALE, visible=visible(4, 9, -5, -2))),
    "decode": (1, 9, Formula(SCALE)),
    "encoder": (8, 8, Formula(SCALE, visible=tokens(8, False))),
    "right padded": (8, 8, Formula(SCALE, visible=visible(8, 8, 0) & tokens(8, False))),
    "left padded": (8, 8, Formula(SCALE, visible=visible(8, 8, 0) & tokens(8, True))),
    "left opened": (8, 8, Formula(SCALE, visible=OPEN)),
    "sinks": (8, 8, Formula(SCALE, visible=visible(8, 8, 0), sinks=learned(3, HEADS))),
    "added mask": (8, 8, Formula(SCALE, visible=visible(8, 8, 0), fill=LOWEST, fill_added=True)),
    "by head": (8, 8, Formula(0.2 + learned(4, 1, HEADS, 1, 1).abs(), visible=visible(8, 8, 0))),
}


def scaled(by: float) -> Callable[[Formula], Formula]:
    return lambda f: replace(f, scale=f.scale * by)


def masked(mask: Tensor | None) -> Callable[[Formula], Formula]:
    return lambda f: replace(f, visible=mask)


def part(**changes: object) -> Callable[[Formula], Formula]:
    return lambda f: replace(f, **changes)  # type: ignore[arg-type]


def in_product(formula: Formula) -> Formula:
    return replace(formula, softcap_at="product", scale=1.0, after=formula.scale)


_DROPPED = torch.rand(BATCH, HEADS, 8, 8, generator=torch.Generator().manual_seed(9)) > 0.3
_LOG = torch.arange(1, 10, dtype=torch.float64).log()[None, None, :, None]
_DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
DOCUMENTS = visible(8, 8, 0) & (_DOCUMENT[:, None] == _DOCUMENT)
CASES: tuple[Case, ...] = (
    Case("plain", "scale", scaled(4), 0.25, 1.0, "leaves the scale out (1 in place of 0.25)"),
    Case(
        "causal", "scale", scaled(0.25), 0.25, 0.0625,
        "applies the scale twice, or 1/head_dim in place of 1/sqrt(head_dim)",
    ),
    Case("causal", "scale", scaled(16), 0.25, 4.0, "multiplies by the root of head_dim instead of dividing"),
    Case("alibi", "scale", scaled(4 / 48**0.5), 0.25, 0.144338, "takes the root of the model's width"),
    Case("window", "scale", scaled(4 / 64**0.5), 0.25, 0.125, "takes the root of the model's width"),
    Case("sinks", "scale", scaled(2), 0.25, 0.5, "takes the root of the number of heads"),
    Case("plain", "scale", scaled(4 / 2**0.5), 0.25, 0.707107, "takes the root of the number of heads"),
    Case("plain", "scale", scaled(4 / 32**0.5), 0.25, 0.176777, "takes the root of a padded head_dim"),
    Case("plain", "scale", scaled(1.3), 0.25, 0.325, "scales by another number (0.325 in place of 0.25)"),
    Case("plain", "scale", scaled(-1), 0.25, -0.25, "scales with the other sign"),
    Case("relative", "scale", scaled(SCALE), 1.0, 0.25, "has the scale that A leaves out"),
    Case("relative", "length_factor", scaled(_LOG), "one for all rows", "one of each row", "each row by a factor of"),
    Case("by head", "scale", part(scale=SCALE), "0.", 0.25, "leaves out factors of each head"),
    Case("by head", "scale", scaled(2), "0.", "0.", "multiplies every factor of the scale by 2"),
    Case("plain", "scale", part(scale=learned(2, HEADS, 1, 1)), 0.25, "-", "multiplies by factors of each head"),
    Case("capped", "scale", scaled(2), 0.25, 0.5, "takes the root of the number of heads"),
    Case("capped product", "scale", part(after=1.0), 0.25, 1.0, "leaves the scale out"),
    Case("capped", "softcap", part(softcap=None), 1.5, None, "leaves out the softcap (1.5)"),
    Case("capped product", "softcap", lambda f: Formula(0.25, visible=f.visible), 2.0, None, "leaves out the softcap"),
    Case("causal", "softcap", part(softcap=1.0), None, 1.0, "has a softcap (1), which A has not"),
    Case("causal", "softcap", lambda f: in_product(replace(f, softcap=2.0)), None, 2.0, "has a softcap (2)"),
    Case(
        "capped", "softcap", part(softcap_by_logits=True),
        "1.5 * tanh(z / 1.5)", "z * tanh(z / 1.5)", "has a softcap of z * tanh(z / 1.5) in place of 1.5 *",
    ),
    Case("capped", "softcap", part(softcap=1.0), 1.5, 1.0, "has a softcap of 1 in place of 1.5"),
    Case("capped", "softcap_order", in_product, "after the scale", "before the scale", "before the scale, not after"),
    Case("capped", "softcap_order", part(softcap_at="masked"), "after the scale", "after the mask", "after the mask"),
    Case(
        "capped product", "softcap_order", part(softcap_at="scaled", scale=SCALE, after=1.0),
        "before the scale", "after the scale", "applies the softcap after the scale",
    ),
    Case("alibi", "bias_scaled", part(bias_by=SCALE), 1.0, 0.25, "multiplies the bias by 0.25 as well"),
    Case("alibi", "bias_scaled", part(bias=alibi(8, 8, SCALE)), 1.0, 0.25, "multiplies the bias by 0.25 as well"),
    Case("relative", "bias_scaled", part(bias_by=0.5), 1.0, 0.5, "multiplies the bias by 0.5 as well"),
    Case("alibi", "bias", part(bias=None), "ALiBi", None, "leaves out the ALiBi bias"),
    Case("causal", "bias", part(bias=alibi(8, 8), bias_name="alibi"), None, "ALiBi", "adds an ALiBi bias, which A"),
    Case("alibi", "bias", part(bias=alibi(8, 8).pow(2).neg()), "ALiBi", "ALiBi", "has another ALiBi bias"),
    Case("alibi", "bias", part(bias=alibi(8, 8, 2.0)), "ALiBi", "ALiBi", "(head 0: 0.5 in place of 0.25)"),
    Case("alibi", "bias", part(bias=-alibi(8, 8)), "ALiBi", "ALiBi", "with the other sign"),
    Case("alibi", "bias", part(bias=alibi(8, 8).flip(0)), "ALiBi", "ALiBi", "of the heads in another order"),
    Case("relative", "bias", part(bias=table(9, 9, 6)), "relative", "relative", "has another relative bias"),
    Case("relative", "bias", part(bias=table(9, 9).mT), "relative", "relative", "turned round, rows for keys"),
    Case("relative", "bias", part(bias=table(9, 9).tril()), "relative", "relative", "for keys after the row alone"),
    Case("relative", "bias", part(bias=table(9, 9).triu(-3)), "relative", "relative", "before the row alone"),
    Case("cached", "mask_alignment", masked(visible(4, 9, 0)), "lower right", "upper left", "upper left (4 rows"),
    Case("cached window", "mask_alignment", masked(visible(4, 9, 0, 3)), "lower right", "upper left", "upper left"),
    Case("decode", "mask_alignment", masked(visible(1, 9, 0)), "lower right", "upper left", "upper left (1 row"),
    Case("causal", "mask_offset", masked(visible(8, 8, -1)), 0, -1, "lets every row see one key more ahead"),
    Case("causal", "mask_offset", masked(visible(8, 8, 1)), 0, 1, "hides one key more from every row"),
    Case("cached", "mask_offset", masked(visible(4, 9, -6)), -5, -6, "lets every row see one key more ahead"),
    Case("window", "mask_offset", masked(visible(9, 9, -1, 3)), 0, -1, "lets every row see one key more ahead"),
    Case("window", "mask_offset", masked(visible(9, 9, 1, 4)), 0, 1, "hides one key more from every row"),
    Case("right padded", "mask_offset", masked(visible(8, 8, -1) & tokens(8, False)), 0, -1, "one key more ahead"),
    Case("left padded", "mask_offset", masked(visible(8, 8, -1) & tokens(8, True)), 0, -1, "one key more ahead"),
    Case("causal", "mask_offset", masked(None), 0, "none", "leaves out the causal mask"),
    Case("plain", "mask_offset", masked(visible(7, 9, 0)), "none", 0, "has a causal mask, which A has not"),
    Case("window", "window", masked(visible(9, 9, 0, 4)), 4, 5, "has a window of 5 keys in place of 4"),
    Case("window", "window", masked(visible(9, 9, 0)), 4, "none", "leaves out the window (4 keys)"),
    Case("causal", "window", masked(visible(8, 8, 0, 5)), "none", 6, "has a window of 6 keys, which A has not"),
    Case("two-sided", "window", masked(visible(9, 9, -3, 3)), 5, 7, "has a window of 7 keys in place of 5"),
    Case("two-sided", "window", masked(None), 5, "none", "leaves out the window (5 keys)"),
    Case("cached window", "window", masked(visible(4, 9, -5, -3)), 4, 3, "has a window of 3 keys in place of 4"),
    Case("encoder", "padding", masked(None), "the last 2 to 3", "none", "leaves out the padding mask"),
    Case("encoder", "padding", masked(tokens(8, True)), "the last 2 to 3", "the first 2 to 3", "takes the first 2"),
    Case("right padded", "padding", masked(visible(8, 8, 0)), "the last 2 to 3", "none", "leaves out the padding"),
    Case("left padded", "padding", masked(visible(8, 8, 0)), "the first 2 to 3", "none", "leaves out the padding"),
    Case("causal", "padding", masked(BASES["left padded"][2].visible), "none", "the first 2 to 3", "hides keys as"),
    Case("left opened", "padding", masked(visible(8, 8, 0)), "the first 2 to 3", "none", "leaves out the padding"),
    Case("left padded", "padding", masked(OPEN), "all rows see", "5 rows see every key", "lets rows of padding see"),
    Case("causal", "mask", masked(DOCUMENTS), "none", "boundaries at 3, 7", "hides keys of other documents"),
    Case("window", "mask", masked(visible(9, 9, 0, 3).mT), "row by key", "key by row", "has the mask transposed"),
    Case("right padded", "padding", masked(visible(8, 8, 0) & ~tokens(8, False)), "as it is", "inverted", "inverts"),
    Case("causal", "mask_magnitude", part(fill=-3.0), "-inf", -3.0, "marks hidden keys with -3 in place of -inf"),
    Case("added mask", "mask_magnitude", part(fill=-4.0), -3.40282e38, -4.0, "marks hidden keys with -4"),
    Case("left padded", "mask_magnitude", part(fill=LOWEST), "-inf", -3.40282e38, "marks hidden keys"),
    Case("sinks", "sinks", part(sinks=None), "-", None, "leaves out the sinks"),
    Case("sinks", "sinks", part(sinks=learned(8, HEADS)), "-", "-", "has other sinks"),
    Case("causal", "sinks", part(sinks=torch.zeros(HEADS)), None, 0.0, "has sinks (0.0), which A has not"),
    Case("causal", "rounding", part(logits_dtype="float16"), "its own dtype", "float16", "rounds the logits to fl"),
    Case("causal", "rounding", part(weights_dtype="bfloat16"), "its own", "bfloat16", "rounds the weights to bfloat16"),
    Case(
        "causal", "rounding", part(logits_dtype="float16", weights_dtype="float16"),
        "its own", "float16", "rounds the logits and the weights",
    ),
    Case("causal", "dropout", part(kept=_DROPPED, dropout=0.3), 0.0, 0.3, "drops weights (rate 0.3), which A does not"),
    Case("capped", "scale", part(after=1 / 1.5), 0.25, 0.166667, "does not multiply by the softcap (1.5) behind"),
    Case("capped", "scale", part(after=1.5), 0.25, 0.375, "multiplies by the softcap (1.5) behind the tanh, where A"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Two programs and the vectors that both get."""

    sides: Sides
    query: Tensor
    key: Tensor
    value: Tensor

    def output(self, program: Program) -> Tensor:
        """What a program makes of the vectors; roundings are all that its ways do."""
        vectors = [self.query, self.key, self.value]
        for number, way in enumerate((program.query, program.key, program.value)):
            for step in way.steps:
                assert isinstance(step, RoundingStep)
                vectors[number] = vectors[number].to(getattr(torch, step.dtype)).double()
        assert program.formula is not None
        return compute_output(*vectors, program.formula)[0]

    def left(self, a: Program) -> float:
        """Largest difference of the outputs of `a` and B."""
        return float((self.output(a) - self.output(self.sides.b)).abs().max())

    def suspicions(self, a: Program | None = None) -> Iterator[Suspicion]:
        sides = self.sides if a is None else replace(self.sides, a=a)
        for suspect in CAUSES.values():
            yield from suspect(sides)

    @property
    def tiny(self) -> float:
        """What the rounding of float64 allows."""
        logit = float(self.query.norm(dim=-1).max() * self.key.norm(dim=-1).max())
        return allowed(torch.float64, length=16 * 16, logit=4 * logit, magnitude=float(self.value.abs().max()))

    def proven(self) -> list[Suspicion]:
        return [suspicion for suspicion in self.suspicions() if self.left(suspicion.change(self.sides.a)) <= self.tiny]


def trial(a: Formula, b: Formula, rows: int, keys: int, seed: int = 0, batch: int = BATCH) -> Trial:
    """Formulas as sides, on random vectors; those of keys and values are shared by groups of query heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (HEADS, rows), (GROUPS, keys), (GROUPS, keys)
    vectors = [torch.randn(batch, *shape, HEAD_DIM, generator=generator, dtype=torch.float64) for shape in shapes]
    groups = torch.arange(HEADS) // (HEADS // GROUPS)
    sides = (Program(VectorPath(), VectorPath(heads=groups), VectorPath(heads=groups), formula) for formula in (a, b))
    return Trial(Sides(*sides, HEAD_DIM, MODEL_DIM, HEADS, rows == keys), *vectors)


def of_case(case: Case) -> Trial:
    rows, keys, formula = BASES[case.base]
    return trial(formula, case.plant(formula), rows, keys)


def names_found(start: Trial) -> list[str]:
    """Causes taken one after the other, each in A as the ones before left it; those are kept without which B is missed.

    One alone may take the outputs further apart, so that no one of two need help by itself.
    """
    a, taken = start.sides.a, []
    for suspect in CAUSES.values():
        for suspicion in suspect(replace(start.sides, a=a)):
            a = suspicion.change(a)
            taken.append(suspicion)
    assert start.left(a) <= start.tiny, "something is left"
    return [one.name for one in taken if start.left(_changed(start.sides.a, taken, one)) > start.tiny]


def _changed(a: Program, changes: list[Suspicion], but: Suspicion) -> Program:
    for suspicion in changes:
        a = a if suspicion is but else suspicion.change(a)
    return a
