"""Ways to compute a case, ours and our peers'; each runs only after its results agreed with those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peers import Call, eager, eager_statistics, flex, onnxruntime, sdpa
from sqrtdk import AuxRequest, attention, explain
from sqrtdk.errors import MissingExtraError, UnsupportedError, kind_and_text, short_text
from sqrtdk.impl.choice import Choice
from workloads import Case

Work = Callable[[], tuple[Tensor, ...]]
BASE = "sdpa"  # what all ratios are to
SLACK = 4.0  # roundings of the largest number that two right results may be apart
RESULTS = ("the output", "the gradient of the query", "the gradient of the key", "the gradient of the value")


class DisagreementError(RuntimeError):
    """A way computes something else than torch: one of the two is wrong."""


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


def prepared(case: Case, ways: Mapping[str, Way]) -> tuple[dict[str, Work], dict[str, str]]:
    """Works by way, each of which gave the base's results once; and for the others why they can't run the case.

    Raises:
        DisagreementError: a way gives another result than the base, which is the first of `ways`.
    """
    ready: dict[str, Work] = {}
    refused: dict[str, str] = {}
    expected: tuple[Tensor, ...] = ()
    for name, way in ways.items():
        try:
            work = _work(case, way.make(case))
            found = work()
        except (UnsupportedError, MissingExtraError) as error:
            if name == BASE:
                raise
            hint = f"; {error.hint}" if isinstance(error, MissingExtraError) else ""
            refused[name] = short_text(error, 200) + hint
            continue
        except Exception as error:
            if not way.peer:
                raise
            refused[name] = kind_and_text(error, 200)
            continue
        expected = expected or found
        compare(name, found, expected, case)
        ready[name] = work
    return ready, refused


def compare(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
    """Refuse results that are no rounding of the base's.

    Two right results in one dtype differ by roundings of that dtype, and of float32 in sums over the keys: by
    `SLACK (eps + sqrt(S) eps_32)` of the largest number at most.

    Raises:
        DisagreementError: they differ by more, or in shape or dtype.
    """
    for what, own, base in zip(RESULTS, found, expected, strict=False):
        if own.shape != base.shape or own.dtype != base.dtype:
            shapes = f"{tuple(own.shape)} {own.dtype}, {BASE} {tuple(base.shape)} {base.dtype}"
            raise DisagreementError(f"{name} gives {shapes} as {what} of {case.workload.text}")
        roundings = torch.finfo(base.dtype).eps + math.sqrt(case.workload.keys) * torch.finfo(torch.float32).eps
        limit = SLACK * roundings * base.abs().max().item()
        error = (own.float() - base.float()).abs().max().item()
        if not error <= limit:  # NaN is no agreement
            raise DisagreementError(
                f"{name} and {BASE} differ by {error:.3g} in {what} of {case.workload.text} in {base.dtype}; "
                f"{limit:.3g} is rounding"
            )


def _work(case: Case, call: Call) -> Work:
    """One forward pass without a graph; or one with its backward pass, for output and gradients."""
    if case.training:

        def training() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                output = call()
            return output.detach(), *torch.autograd.grad(output, case.inputs, case.cotangent)

        return training

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (call(),)

    return forward
