"""Who is measured: ways to compute a case, ours and our peers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from sqrtdk._attention import attention, explain
from sqrtdk.bench.onnx import onnxruntime
from sqrtdk.bench.peers import Call, eager, eager_statistics, flex, sdpa
from sqrtdk.bench.workloads import Case
from sqrtdk.impl.choice import Choice
from sqrtdk.stats.request import AuxRequest

BASE = "sdpa"  # what all ratios are to


@dataclass(frozen=True, slots=True)
class Way:
    """One way.

    Attributes:
        text: what it is.
        make: prepares a case, and returns what computes its output (B, Hq, L, E); not timed. Raises where it can't.
        statistics: whether all row statistics are computed with the output.
        impl: of `sqrtdk.attention`; None for others' code.
        peer: others' code, any error of which means that it can't run a case; our own has a class for that.
    """

    text: str
    make: Callable[[Case], Call]
    statistics: bool = False
    impl: str | None = None
    peer: bool = False

    def choice(self, case: Case) -> Choice | None:
        """What `sqrtdk.attention` runs the case on, and why; None for others' code."""
        return None if self.impl is None else explain(*case.inputs, **_options(case, self.impl, self.statistics))


def _options(case: Case, impl: str, statistics: bool) -> dict[str, Any]:
    return {
        "is_causal": case.workload.is_causal,
        "enable_gqa": case.workload.grouped,
        "return_aux": AuxRequest.all() if statistics else None,
        "impl": impl,
    }


def _attend(case: Case, impl: str, statistics: bool) -> Call:
    options = _options(case, impl, statistics)

    def call() -> Tensor:
        found: Tensor | tuple[Tensor, object] = attention(*case.inputs, **options)
        return found[0] if isinstance(found, tuple) else found

    return call


def _ours(text: str, impl: str, statistics: bool = False) -> Way:
    return Way(text, partial(_attend, impl=impl, statistics=statistics), statistics, impl)


WAYS: dict[str, Way] = {
    BASE: Way("torch's scaled_dot_product_attention", sdpa),
    "cpu": _ours("sqrtdk, the compiled kernel", "cpu"),
    "cpu-stats": _ours("sqrtdk, the compiled kernel, all statistics", "cpu", statistics=True),
    "auto": _ours("sqrtdk, whatever it chooses", "auto"),
    "auto-stats": _ours("sqrtdk, whatever it chooses, all statistics", "auto", statistics=True),
    "fused-stats": _ours("sqrtdk, torch's kernels and a pass for all statistics", "fused", statistics=True),
    "tiled-stats": _ours("sqrtdk, blocks of rows, all statistics", "tiled", statistics=True),
    "flex": Way("torch's FlexAttention, compiled", flex, peer=True),
    "eager": Way("the formula written out in torch", eager, peer=True),
    "eager-stats": Way("the formula and all statistics in torch", eager_statistics, statistics=True, peer=True),
    "onnxruntime": Way("onnxruntime's attention operators", onnxruntime, peer=True),
}
