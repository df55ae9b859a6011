"""One case on one implementation against the oracle: what is wrong, if anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sqrtdk
from sqrtdk.errors import UnsupportedError
from sqrtdk.stats.request import AuxOutput
from tests.attention.cases import Case, as_leaves
from tests.attention.oracle import STATISTICS, WITH_GRADIENT, Answer, attend
from tests.attention.parts import Leaves
from tests.attention.plain import plain
from tests.support import triton_here
from tests.support.kernel_here import unable
from tests.tolerances import HALF, complaint, half_complaint

# The compiled kernel is judged wherever it can be built: `make test` builds it.
HERE = () if unable() else ("cpu",)
# So is the Triton kernel: in its interpreter where there is no GPU.
TRITON = () if triton_here.unable() else ("triton",)
IMPLEMENTATIONS = ("auto", *HERE, "dense", "fused", "tiled", *TRITON)
Attention = Callable[..., Any]


@dataclass(frozen=True)
class Expected:
    """The oracle's results, and those of the plain formula for a half dtype."""

    answer: Answer
    gradients: Leaves
    aux_gradients: Leaves  # of output, lse and entropy together
    plain: dict[str, list[Tensor]]  # output, statistics, and `d` + a leaf's name: its gradient
    cotangents: dict[str, Tensor]


def cotangents(answer: Answer, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = {"output": answer.output} | {name: answer.statistics[name] for name in WITH_GRADIENT}
    return {
        name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).double()
        for name, t in found.items()
    }


def gradients(results: dict[str, Tensor], weights: dict[str, Tensor], leaves: Leaves) -> Leaves:
    """Of the weighted sum of the results; infinite rows of lse (they see nothing) are left out."""
    total = torch.zeros((), dtype=torch.float64)
    for name, result in results.items():
        counted = torch.where(result.isneginf(), 0.0, result) if name in WITH_GRADIENT else result
        total = total + (counted.double() * weights[name]).sum()
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    moving = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(total, list(moving.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(moving.items(), found, strict=True)
    }


def expect(case: Case) -> Expected:
    leaves = as_leaves(case.leaves(), torch.float64)
    answer = attend(**case.resolved(leaves))
    weights = cotangents(answer, case.torch_dtype)
    with_aux = {"output": answer.output} | {name: answer.statistics[name] for name in WITH_GRADIENT}
    grads = _retained({"output": answer.output}, weights, leaves)
    aux_grads = gradients(with_aux, weights, leaves)
    beside: dict[str, list[Tensor]] = {}
    for scale_first in (False, True) if case.torch_dtype in HALF else ():
        for name, result in plain_results(case, weights, scale_first).items():
            beside.setdefault(name, []).append(result)
    return Expected(answer, grads, aux_grads, beside, weights)


def plain_results(case: Case, weights: dict[str, Tensor], scale_first: bool) -> dict[str, Tensor]:
    half = as_leaves(case.leaves(), case.torch_dtype)
    output, statistics = plain(**case.resolved(half), scale_first=scale_first)
    finite = {name: statistics[name] for name in WITH_GRADIENT}
    found = {"output": output.detach()} | {name: t.detach() for name, t in statistics.items()}
    found |= {f"d{name}": t for name, t in _retained({"output": output}, weights, half).items()}
    return found | {f"aux d{name}": t for name, t in gradients({"output": output} | finite, weights, half).items()}


def _retained(results: dict[str, Tensor], weights: dict[str, Tensor], leaves: Leaves) -> Leaves:
    total = sum(
        ((t.double() * weights[name]).sum() for name, t in results.items()), torch.zeros((), dtype=torch.float64)
    )
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def judge(case: Case, impl: str, expected: Expected, attention: Attention | None = None) -> list[str]:
    """Everything that is wrong with output, statistics and gradients; empty where nothing is.

    Raises:
        UnsupportedError: the implementation does not take the call.
    """
    attention = attention or sqrtdk.attention
    wrong: list[str] = []
    judged = Judge(case, expected, wrong)

    leaves = as_leaves(case.leaves(), case.torch_dtype)
    output, _ = called(case, leaves, impl, None, attention)
    if output.dtype != case.torch_dtype:
        wrong.append(f"output is {output.dtype}")
    judged.result("output", output.detach(), expected.answer.output.detach())
    judged.gradients("d", gradients({"output": output}, expected.cotangents, leaves), expected.gradients)
    if impl == "auto":
        return wrong  # it hands over to one of the others, whose statistics are judged by name

    with torch.no_grad():
        output, aux = called(case, leaves, impl, sqrtdk.AuxRequest.all(), attention)
    judged.statistics(output, aux)

    leaves = as_leaves(case.leaves(), case.torch_dtype)
    try:
        output, aux = called(case, leaves, impl, sqrtdk.AuxRequest(lse=True, entropy_nats=True), attention)
    except UnsupportedError:
        if impl != "fused":
            raise
        return wrong  # torch's kernels give no gradient of lse
    judged.aux_gradients(output, aux, leaves)
    return wrong


def judge_at_once(case: Case, impl: str, expected: Expected) -> list[str]:
    """The same of one call that returns all statistics: for an implementation whose calls take long."""
    judged = Judge(case, expected, [])
    leaves = as_leaves(case.leaves(), case.torch_dtype)
    output, aux = called(case, leaves, impl, sqrtdk.AuxRequest.all(), sqrtdk.attention)
    judged.statistics(output.detach(), aux)
    judged.aux_gradients(output, aux, leaves)
    return judged.wrong


def called(
    case: Case, leaves: Leaves, impl: str, request: sqrtdk.AuxRequest | None, attention: Attention
) -> tuple[Tensor, Any]:
    """Output and statistics; for the Triton kernel everything goes to its device, and comes back."""
    device = triton_here.DEVICE if impl == "triton" else torch.device("cpu")
    given = case.given({name: leaf.to(device) for name, leaf in leaves.items()})
    given = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    found = attention(**given, impl=impl, return_aux=request)
    output, aux = (found, ()) if request is None else found
    return output.cpu(), AuxOutput(*(field if field is None else field.cpu() for field in aux))


@dataclass(frozen=True)
class Judge:
    """Holds what every comparison of a case needs."""

    case: Case
    expected: Expected
    wrong: list[str]

    def add(self, label: str, text: str | None) -> None:
        if text is not None:
            self.wrong.append(f"{label}: {text}")

    def result(self, label: str, actual: Tensor, expected: Tensor, magnitude: float = 0.0, uses: int = 1) -> None:
        dtype = self.case.torch_dtype
        if dtype in HALF:
            self.add(label, half_complaint(actual, expected, self.expected.plain[label], dtype, floor=magnitude))
            return
        length = max(self.case.sizes.keys, self.case.sizes.length, self.case.sizes.dim)
        size = self.expected.answer.size
        found = complaint(actual, expected, dtype, length=length, logit=size, magnitude=magnitude, uses=uses)
        self.add(label, found)

    def gradients(self, prefix: str, actual: Leaves, expected: Leaves) -> None:
        """A gradient is a sum of terms as large as the largest gradient of the call, and may cancel."""
        largest = max((g.abs().max().item() for g in expected.values() if g.numel()), default=0.0)
        rows = math.prod(self.case.sizes.logits[:-1])
        for name, grad in actual.items():
            own = grad.numel() // max(1, grad.shape[-1]) if name in ("query", "key", "value") else 1
            self.result(f"{prefix}{name}", grad, expected[name], largest, uses=rows // max(1, own))

    def statistics(self, output: Tensor, aux: AuxOutput) -> None:
        """Output and every statistic."""
        self.result("output", output, self.expected.answer.output.detach())
        for name in STATISTICS:
            self.statistic(name, getattr(aux, name).detach(), self.expected.answer.statistics[name].detach())

    def aux_gradients(self, output: Tensor, aux: AuxOutput, leaves: Leaves) -> None:
        """Those of output, lse and entropy together."""
        results = {"output": output, "lse": aux.lse, "entropy_nats": aux.entropy_nats}
        found = gradients(results, self.expected.cotangents, leaves)
        self.gradients("aux d", found, self.expected.aux_gradients)

    def statistic(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Statistics are float32 (float64 for float64 inputs), of half inputs too."""
        dtype = torch.float64 if self.case.torch_dtype == torch.float64 else torch.float32
        if actual.dtype != dtype:
            self.wrong.append(f"{name} is {actual.dtype}")
        if self.case.torch_dtype in HALF and not self.case.wide_logits:
            self.result(name, actual, expected, self.expected.answer.size)
            return
        size = self.expected.answer.size
        magnitude = 1.0 + size if name == "variance" else 1.0
        length = max(self.case.sizes.keys, self.case.sizes.dim)
        self.add(name, complaint(actual, expected, dtype, length=length, logit=size, magnitude=magnitude))
