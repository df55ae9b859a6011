"""What is allowed beside what rounding does, and the smallest change that is found, by dtype: printed, and asked.

Hugging Face's small models, eager, against themselves: by another implementation, or with one number changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from sqrtdk.compare.align import align
from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.inside.pair import JudgedPair, judge_pair
from sqrtdk.compare.inside.segments import Segment, run_segment
from sqrtdk.compare.sides import ModelSide, load_side, run_side
from sqrtdk.models.options import LoadOptions
from tests.compare.real.test_same import DTYPES, OTHERS, SIX, inputs, model, scaled

diff = importlib.import_module("sqrtdk.compare.diff").diff

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HALF = DTYPES[1:]
Change = Callable[[nn.Module], None]


def based(power: float) -> Change:
    """Another base of the rotation: 10000 to a power."""

    def change(of: nn.Module) -> None:
        for part in of.modules():
            if hasattr(part, "inv_freq"):
                part.inv_freq = part.inv_freq**power

    return change


def with_eps(eps: float) -> Change:
    """Another eps in the norms of q and k."""

    def change(of: nn.Module) -> None:
        for name, part in of.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                part.variance_epsilon = eps

    return change


def capped(at: float) -> Change:
    """Another softcap."""

    def change(of: nn.Module) -> None:
        for part in of.modules():
            if hasattr(part, "attn_logit_softcapping"):
                part.attn_logit_softcapping = at

    return change


def windowed(by: int) -> Change:
    """Another window."""

    def change(of: nn.Module) -> None:
        for part in (of.config, *of.modules()):
            if getattr(part, "sliding_window", None):
                part.sliding_window += by

    return change


# From the largest change to the smallest; beside each family the smallest that must be found in bfloat16 and float16.
SCALES = {f"scale times {by}": scaled(by) for by in (1.5, 1.1, 1.05, 1.02, 1.01)}
BASES = {f"base ** {power}": based(power) for power in (0.9, 0.97, 0.99)}
EPS = {f"eps {eps}": with_eps(eps) for eps in (0.5, 0.1, 0.01)}
CAPS = {f"softcap {at}": capped(at) for at in (10.0, 25.0, 45.0)}
WINDOWS = {"window + 1": windowed(1), "window - 1": windowed(-1)}
ASKED: list[tuple[str, dict[str, Change], int, int]] = [
    *((family, SCALES, 4, 5) for family in ("llama", "bert", "qwen3", "gemma2")),
    ("gpt2", SCALES, 4, 5),
    ("t5", SCALES, 1, 4),  # its logits are large: they are not scaled
    *((family, BASES, 2, 3) for family in ("llama", "qwen3", "gemma2")),
    ("qwen3", EPS, 2, 2),
    ("gemma2", CAPS, 2, 2),
    ("gemma2", WINDOWS, 2, 2),
]


def side(of: nn.Module, family: str) -> ModelSide:
    tokens = inputs(family, 3)
    return run_side(load_side(of, "A", tokens, LoadOptions()), "A", tokens, LoadOptions())


def judged(family: str, dtype: torch.dtype) -> Iterator[JudgedPair]:
    """Every pair of a family by every other implementation."""
    eager = side(model(family, dtype=dtype), family)
    for other in OTHERS[family]:
        if (family, other) != ("t5", "flex_attention"):
            b = side(model(family, other, dtype), family)
            yield from (
                judge_pair(eager.calls[i], b.calls[j], CAUSES) for i, j in align(eager.calls, b.calls, {}).pairs
            )


def ratio(segment: Segment, own: JudgedPair) -> float:
    """The largest difference over a segment, of what is allowed there."""
    assert own.sides is not None
    values, allowed = run_segment(segment, own.sides.a)
    difference = (values - segment.target.double()).abs()
    return float(torch.where(difference == 0, 0.0, difference / allowed(None).clamp(min=1e-300)).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_rounding_does_of_what_is_allowed(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    parts: dict[str, list[float]] = {}
    for family in SIX:
        for own in judged(family, dtype):
            assert own.same is True
            for segment, _ in own.parts:
                kind = "steps" if segment.name.endswith("used") else segment.name
                parts.setdefault(kind, []).append(ratio(segment, own))
    with capsys.disabled():
        for kind, ratios in sorted(parts.items()):
            least, middle, most = torch.tensor(ratios).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
            print(f"\n{dtype}, {kind}: {least:.3f} {middle:.3f} {most:.3f}, largest {max(ratios):.3f}", end="")
    for kind in ("query", "output"):
        assert 0.05 < max(parts[kind]) <= 1.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_smallest_change_that_is_found(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    missed = []
    for family, changes, *counts in ASKED:
        found = []
        for name, change in changes.items():
            a, b = model(family, dtype=dtype), model(family, dtype=dtype)
            change(b)
            if any(pair.same is False and pair.causes for pair in diff(a, b, inputs(family, 2)).pairs):
                found.append(name)
        wanted = list(changes)[: counts[HALF.index(dtype)]]
        missed += [f"{family}: {name}" for name in wanted if name not in found]
        with capsys.disabled():
            print(f"\n{dtype}, {family}: {', '.join(found)}", end="")
    assert not missed
