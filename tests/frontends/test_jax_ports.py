"""The causes that are planted between torch models, planted in JAX ports: named and proven as there.

A is a torch model, or its JAX port; B is the JAX port with what is planted. The answers are judged by the same rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk.compare.diff import sides_diff
from sqrtdk.compare.records import DiffReport
from sqrtdk.frontends import from_jax
from tests.compare.ports.answers import alarms
from tests.compare.ports.built import build, inputs, port_of
from tests.compare.ports.config import BASES
from tests.compare.ports.pairs import Case, complaints, run, side_a
from tests.compare.ports.planted import HARMLESS, cross_section
from tests.frontends.ports import parameters_of, port
from tests.frontends.programs import jnp
from tests.support.paths import ROOT

PART = [Case(base, ((cause, planting),), single=True) for cause, planting, base in cross_section()]
WRITTEN = [(planting, base) for planting in HARMLESS for base in planting.bases[:1]]
FILE = "tests/frontends/ports.py"
WITHOUT_LINE = {"weights", "projection_bias", "input", "unknown"}  # what differs is a parameter, or is not known
# What is not named here, and is between two torch models.
UNNAMED = {
    "kv_scale-k_twice-rope_gqa": "a factor a head of (B, S, H, E) is read as one a row, and jnp.clip as two steps",
    "rounding-q_in_bfloat16-sdpa": "q is rounded and goes into jax.nn.dot_product_attention at once",
}
UNNAMED_IN_JAX = {"rounding-q_and_k_in_bfloat16-eager": "the rounding is taken for a step of both sides"}


def ported(base: str, common: dict[str, Any], only: Any = None, **planted: Any) -> nn.Module:
    """Return the JAX port of `build(base, ...)`."""
    model = build(base, common=common, only=only, **planted)
    plain = port_of(base, **common)
    ports = [replace(plain, **planted) if only is None or at in only else plain for at in range(plain.layers)]
    named = {name: jnp.asarray(tensor.numpy()) for name, tensor in inputs(base, **common).items()}
    return from_jax(port(ports), parameters_of(model), **named)


def compared(case: Case, a: Any) -> DiffReport:
    b = ported(case.base, case.common, case.planted[0][1].only, **case.changes)
    return sides_diff(a, run(b, "B", inputs(case.base, **case.common)))


def torch_side(case: Case) -> Any:
    return side_a(case.base, torch.float32, 2, tuple(sorted(case.common.items())))


def judged(report: DiffReport, case: Case) -> None:
    assert not complaints(report, case)
    for pair in report.pairs:
        for cause in pair.causes:
            if cause.at_b is None:
                assert cause.name in WITHOUT_LINE
                continue
            file, _, line = str(cause.at_b).rpartition(":")
            assert file == FILE
            assert (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line.partition("-")[0]) - 1].strip()


def marked(cases: list[Case], unnamed: dict[str, str]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.xfail(reason=unnamed[case.name], strict=True)]
                     if case.name in unnamed else [])
        for case in cases
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", marked(PART, UNNAMED))
def test_a_cause_between_torch_and_jax_is_named(case: Case) -> None:
    judged(compared(case, torch_side(case)), case)


@pytest.mark.full
@pytest.mark.parametrize("case", marked(PART[::4], UNNAMED_IN_JAX))
def test_a_cause_between_two_jax_functions_is_named(case: Case) -> None:
    a = run(ported(case.base, case.common), "A", inputs(case.base, **case.common))
    judged(compared(case, a), case)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", BASES)
def test_a_right_port_is_the_same(base: str) -> None:
    report = sides_diff(side_a(base, torch.float32, 2, ()), run(ported(base, {}), "B", inputs(base)))
    assert not alarms(report, BASES[base].layers)


@pytest.mark.full
@pytest.mark.parametrize(("planting", "base"), WRITTEN, ids=[planting.name for planting, _ in WRITTEN])
def test_a_right_port_that_is_written_otherwise_is_the_same(planting: Any, base: str) -> None:
    common = planting.shared(base)
    a = side_a(base, torch.float32, 2, tuple(sorted(common.items())))
    report = sides_diff(a, run(ported(base, common, **planting.changes(base)), "B", inputs(base, **common)))
    assert not alarms(report, BASES[base].layers)
