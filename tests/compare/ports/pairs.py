"""Pairs of small models with something planted on side B: how they are drawn and compared."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.compare.diff import sides_diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.compare.sides import ModelSide, load_side, run_side
from sqrtdk.models.options import LoadOptions
from tests.compare.ports.answers import complaints as _complaints
from tests.compare.ports.built import BATCH, build, inputs, port_of
from tests.compare.ports.config import BASES, Port
from tests.compare.ports.planted import PLANTED
from tests.compare.ports.planting import Planting, case_name

# Causes that are near to one another. What of these may not be planted at once is below.
GROUPS = (
    ("mask_offset", "mask_alignment", "window", "padding", "mask_magnitude"),
    ("scale", "length_factor", "softcap", "softcap_order", "bias_scaled"),
    ("bias", "bias_scaled", "softcap_order"),
    ("rope_missing", "rope_base", "rope_layout", "rope_partial", "positions", "length_factor", "qk_norm_order"),
    ("qk_norm", "qk_norm_order", "qk_norm_eps", "qk_norm_axis", "kv_scale"),
    ("group_order", "head_order", "weights", "projection_bias"),
)
CLASHES = {
    ("mask_offset", "mask_alignment"): "both move the diagonal",
    ("mask_offset", "window"): "a window of one key less that begins one key later is the window, moved",
    ("mask_alignment", "window"): "the same",
    ("scale", "length_factor"): "the logarithm of another number is a factor on the scale",
    ("softcap", "softcap_order"): "a softcap that is missing has no order",
    ("softcap_order", "bias_scaled"): "both move the scale, the softcap and the bias past one another",
    ("bias", "bias_scaled"): "half the slopes times the scale are another slope",
    ("bias", "softcap_order"): "a softcap after a bias that is missing is one before it",
    ("rope_missing", "*"): "what is not turned has no base, no layout and no positions",
    ("qk_norm", "*"): "a norm that is missing has no epsilon, axis or order",
    ("group_order", "head_order"): "both say which head reads which",
    ("weights", "head_order"): "heads are known again by their weights",
    ("projection_bias", "head_order"): "the same",
}
ALONE = {"input", "unknown"}


@dataclass(frozen=True, slots=True)
class Case:
    """One pair: a base, and one planting or more, each with the name of its cause.

    `single`: of one layer, unless the planting is about layers. What follows from a difference has other inputs.
    """

    base: str
    planted: tuple[tuple[str, Planting], ...]
    single: bool = False

    @property
    def name(self) -> str:
        return " + ".join(case_name(cause, planting, self.base) for cause, planting in self.planted)

    @property
    def common(self) -> dict[str, Any]:
        """Fields that both sides have."""
        fields = {name: value for _, one in self.planted for name, value in one.shared(self.base).items()}
        return self._cut(fields) | ({"layers": 1} if self._of_one_layer else {})

    @property
    def changes(self) -> dict[str, Any]:
        """Fields that B has otherwise."""
        return self._cut({name: value for _, one in self.planted for name, value in one.changes(self.base).items()})

    @property
    def _of_one_layer(self) -> bool:
        return self.single and not any(one.only or one.first for _, one in self.planted)

    def _cut(self, fields: dict[str, Any]) -> dict[str, Any]:
        cut = self._of_one_layer and "windows" in fields
        return fields | {"windows": fields["windows"][:1]} if cut else fields

    def sides(self, batch: int = BATCH) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
        """A, B and inputs."""
        return build(self.base, common=self.common), self.other(), inputs(self.base, batch=batch, **self.common)

    def other(self) -> nn.Module:
        """B."""
        return build(self.base, common=self.common, only=self.planted[0][1].only, **self.changes)

    def ports(self) -> tuple[Port, Port]:
        """The descriptions of A and of a layer of B in which something is planted."""
        a = port_of(self.base, **self.common)
        return a, replace(a, **self.changes)

    def layers(self, planting: Planting) -> tuple[int, ...]:
        """Those in which a planting makes attention another."""
        a, b = self.ports()
        every = range(a.layers) if planting.only is None else planting.only
        if set(planting.changes(self.base)) == {"windows"}:
            every = [layer for layer in every if a.windows[layer] != b.windows[layer]]
        return tuple(layer for layer in every if layer >= planting.first)


def complaints(report: DiffReport, case: Case) -> list[str]:
    """What is wrong with the answer about a case; nothing where all is right."""
    a, b = case.ports()
    planted = [
        [(cause, planting) for cause, planting in case.planted if layer in case.layers(planting)]
        for layer in range(a.layers)
    ]
    return _complaints(report, a, b, planted)


@lru_cache(maxsize=256)
def side_a(base: str, dtype: torch.dtype, batch: int, fields: tuple[tuple[str, Any], ...]) -> ModelSide:
    """A base with some fields, run; it serves every B that is compared with it."""
    common = dict(fields)
    return run(build(base, dtype=dtype, common=common), "A", inputs(base, batch=batch, **common))


def run(model: nn.Module, label: str, tokens: dict[str, Tensor]) -> ModelSide:
    return run_side(load_side(model, label, tokens, LoadOptions()), label, tokens, LoadOptions())


def compare(
    base: str, b: nn.Module, *, dtype: torch.dtype = torch.float32, batch: int = 2, **common: Any
) -> DiffReport:
    """What is said of a base, which is A, and of B."""
    a = side_a(base, dtype, batch, tuple(sorted(common.items())))
    return sides_diff(a, run(b, "B", inputs(base, batch=batch, **common)))


def judge(case: Case) -> list[str]:
    """What is wrong with what is said of a case."""
    report = compare(case.base, case.other(), **case.common)
    return [f"{case.name}: {said}" for said in complaints(report, case)]


def case_of(cause: str, number: int, base: str) -> Case:
    """A variant of a cause, by its number, in one layer."""
    return Case(base, ((cause, PLANTED[cause][number]),), single=True)


def pairs_of_causes(count: int, seed: int = 0) -> Iterator[Case]:
    """Cases of two causes drawn at random."""
    draw = random.Random(seed)
    everything = [
        (cause, one) for cause, those in PLANTED.items() for one in those if cause not in ALONE and not one.only
    ]
    made: set[str] = set()
    while len(made) < count:
        one, two = draw.sample(everything, 2)
        case = Case(draw.choice(tuple(BASES)), (one, two))
        if case.name not in made and _fit(case):
            made.add(case.name)
            yield case


def near_pairs(seed: int = 0) -> Iterator[Case]:
    """One case of every two causes of a group that may be planted at once, drawn at random."""
    draw = random.Random(seed)
    couples = dict.fromkeys(couple for group in GROUPS for couple in combinations(group, 2))
    for one, other in couples:
        every = [Case(base, ((one, x), (other, y))) for x in PLANTED[one] for y in PLANTED[other] for base in BASES]
        fitting = [case for case in every if _fit(case)]
        if fitting:
            yield draw.choice(fitting)


def _clash(cause: str, other: str) -> bool:
    near = any({cause, other} <= set(group) for group in GROUPS)
    pairs = {(cause, other), (other, cause)}
    if near:
        pairs |= {(cause, "*"), (other, "*")}
    return any(pair in CLASHES for pair in pairs)


def _fit(case: Case) -> bool:
    (cause, one), (other, two) = case.planted
    if cause == other or one.only or two.only or one.first or two.first or _clash(cause, other):
        return False
    if case.base not in one.bases or case.base not in two.bases:
        return False
    sides = [(planting.shared(case.base), planting.changes(case.base)) for planting in (one, two)]
    (common, changes), (common_2, changes_2) = sides
    if set(changes) & (set(common_2) | set(changes_2)) or set(changes_2) & set(common):
        return False
    if not all(common[name] == common_2[name] for name in set(common) & set(common_2)):
        return False
    return not _hides(*case.ports(), {cause, other})


def _hides(a: Port, b: Port, causes: set[str]) -> bool:
    """Whether what A and B do can't show one of two causes, beside the other."""
    if causes == {"rope_base", "rope_partial"}:
        # pair c turns by base^(-2c / width): where that is the same on both sides the width alone differs
        return math.isclose(*(port.rope_base ** (1 / (port.rope_width or port.head_dim)) for port in (a, b)))
    if causes == {"length_factor", "qk_norm_order"}:
        # N(c R q) = N(R q) of a norm N, rotation R and amplitude c of the whole head: B's c is nowhere
        return a.amplitude != b.amplitude and b.qk_norm_at == "after" and b.rope_width in (None, b.head_dim)
    if causes == {"scale", "bias_scaled"}:
        return b.factor == 1.0  # which multiplies the bias by nothing
    if causes == {"softcap", "bias_scaled"}:
        # c tanh(s (q.k + b) / c): what is added before the scale is before the softcap too, which is a third change
        return b.softcap is not None
    if causes == {"rounding", "bias_scaled"}:
        # a hidden key gets e^(-25 s) = e^-7.2 of what a logit of 0 gets: as much as the weights in half are off by
        return b.before_scale == "mask" and not b.rounded
    if "mask_magnitude" in causes and causes & {"bias", "bias_scaled"}:
        # t[i - j] + fill at hidden keys, t being drawn and known to neither side there: any fill goes with some t
        return b.bias == "t5" and all(_one_addend(port) for port in (a, b))
    return False


def _one_addend(port: Port) -> bool:
    """Whether bias and fill are one tensor when they are added."""
    return port.style == "sdpa" or (port.style == "baddbmm" and port.softcap is None and not port.before_scale)
