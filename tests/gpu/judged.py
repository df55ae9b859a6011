"""One call of the Triton kernel against the oracle: output, every statistic, and the gradients of all leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from tests.attention.oracle import STATISTICS, WITH_GRADIENT, Answer, attend
from tests.support.triton_here import DEVICE
from tests.tolerances import complaint, gradient_complaints

Leaves = dict[str, Tensor]


def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """On the CPU, float64, of numbers that `dtype` holds."""
    return torch.randn(sizes, dtype=torch.float64).to(dtype).double()


def qkv(
    length: int, keys: int, width: int = 16, value_width: int | None = None, heads: tuple[int, int] = (2, 2)
) -> Leaves:
    """Leaves of a call of one batch element."""
    value_width = width if value_width is None else value_width
    return {
        "query": randn(1, heads[0], length, width),
        "key": randn(1, heads[1], keys, width),
        "value": randn(1, heads[1], keys, value_width),
    }


def attention(leaves: Mapping[str, Tensor], options: Mapping[str, Any], request: AuxRequest | None = None) -> Any:
    """The package's, by the Triton kernel, on its device."""
    given = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    return sqrtdk.attention(
        **{name: leaf.to(DEVICE) for name, leaf in leaves.items()},
        **given,
        enable_gqa=leaves["query"].shape[1] != leaves["key"].shape[1],
        impl="triton",
        return_aux=request,
    )


def expected(leaves: Mapping[str, Tensor], options: Mapping[str, Any]) -> Answer:
    """The oracle's."""
    scale = {"scale": leaves["query"].shape[-1] ** -0.5} if "scale" not in {*leaves, *options} else {}
    return attend(**leaves, **options, **scale)


def wrong_with(
    leaves: Leaves, gradients: bool = True, each: bool = False, logit: float | None = None, **options: Any
) -> list[str]:
    """What is wrong with a call in float32.

    Args:
        leaves: all that may carry a gradient, by the name of the argument, in float64.
        gradients: whether to judge the gradients, of output, lse and entropy together.
        each: whether every number is judged by its own size.
        logit: the size of the logits' terms where it is not that of the products.
        **options: the other arguments.
    """
    exact = {name: leaf.detach().clone().requires_grad_(gradients) for name, leaf in leaves.items()}
    own = {name: leaf.detach().float().requires_grad_(gradients) for name, leaf in leaves.items()}
    answer = expected(exact, options)
    output, aux = attention(own, options, AuxRequest.all())
    length = max(*answer.logits.shape[-2:], leaves["query"].shape[-1])
    size = answer.size if logit is None else logit
    wrong = []

    def judge(name: str, actual: Tensor, wanted: Tensor, magnitude: float = 0.0) -> None:
        text = complaint(
            actual.detach().cpu(), wanted.detach(), torch.float32, length=length, logit=size, magnitude=magnitude,
            each=each,
        )  # fmt: skip
        wrong.extend([] if text is None else [f"{name}: {text}"])

    judge("output", output, answer.output)
    for name in STATISTICS:
        magnitude = 0.0 if each else 1.0 + size if name == "variance" else 1.0
        judge(name, getattr(aux, name), answer.statistics[name], magnitude)
    if not gradients:
        return wrong
    found = derivatives({"output": output, "lse": aux.lse, "entropy_nats": aux.entropy_nats}, own)
    statistics = {name: answer.statistics[name] for name in WITH_GRADIENT}
    wanted = derivatives({"output": answer.output, **statistics}, exact)
    rows = answer.logits[..., 0].numel()
    return wrong + gradient_complaints(found, wanted, torch.float32, length=length, logit=size, rows=rows)


def derivatives(results: Mapping[str, Tensor], leaves: Leaves) -> dict[str, Tensor | None]:
    """Gradients of a weighted sum of the results; infinite rows of lse are left out."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for result in results.values():
        weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
        finite = torch.where(result.isneginf(), 0.0, result)
        total = total + (finite.cpu().double() * weights).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))
