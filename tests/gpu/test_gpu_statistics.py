"""Statistics of the Triton kernel where rounding would show: ties, rows that are almost one-hot, far offsets."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk import AuxRequest
from sqrtdk.stats.request import AuxOutput
from tests.attention.oracle import STATISTICS, attend
from tests.gpu.judged import attention, qkv, randn
from tests.support.triton_here import DEVICE, needs_triton, overflows
from tests.tolerances import complaint

launch = pytest.importorskip("sqrtdk.impl.gpu.launch", reason="Triton is not installed")
pytestmark = [needs_triton, overflows, pytest.mark.usefixtures("small_tiles")]
ALL = AuxRequest.all()
KEYS = 150  # ten blocks, the last of six keys
UNDERFLOW = 1e-30  # weights below it, next to a peak of 1, may count as 0


def whole_numbers(high: int, low: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high, (KEYS,), generator=generator).double()


def at(*places: int) -> Tensor:
    return torch.isin(torch.arange(KEYS), torch.tensor(places))


# One row of logits each, whole numbers, so that the products are exact and only the statistics' own rounding shows.
ROWS: dict[str, Tensor] = {
    "uniform": torch.full((KEYS,), 3.0),
    "uniform, far": torch.full((KEYS,), 1e4),
    "offset": 1e3 + whole_numbers(4, -3),
    "spread": (torch.randn(KEYS, generator=torch.Generator().manual_seed(4)) * 100).round(),
    "almost one-hot at the start": torch.where(at(0), 24.0, whole_numbers(3)),
    "almost one-hot in a block": torch.where(at(37), 24.0, whole_numbers(3)),
    "almost one-hot at the end": torch.where(at(149), 24.0, whole_numbers(3)),
    "one-hot": torch.where(at(70), 60.0, whole_numbers(3)),
    "one-hot beyond float32": torch.where(at(70), 200.0, whole_numbers(3)),
    "one-hot, then a larger one": torch.where(at(20), 30.0, whole_numbers(3)) + 60.0 * at(100),
    "two equal in a block": torch.where(at(33, 40), 30.0, whole_numbers(3)),
    "two equal in two blocks": torch.where(at(5, 120), 30.0, whole_numbers(3)),
    "three equal, two of a block": torch.where(at(5, 121, 122), 30.0, whole_numbers(3)),
    "equal but for one": torch.where(at(80), 1.0, torch.zeros(KEYS)).double(),
    "rising": torch.arange(KEYS).double() / 2,
    "falling": -torch.arange(KEYS).double() / 2,
    "blocks in turns": torch.where(torch.arange(KEYS) // 16 % 2 == 0, 5.0, -5.0).double(),
    "small weights": torch.where(at(9), 0.0, -20.0 - whole_numbers(4)),
}


def of_row(logits: Tensor) -> dict[str, Tensor]:
    """Leaves whose products are the logits."""
    keys = logits.numel()
    return {
        "query": torch.ones(1, 1, 1, 1, dtype=torch.float64),
        "key": logits.view(1, 1, keys, 1),
        "value": randn(1, 1, keys, 3),
    }


@pytest.mark.sampled(9)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ROWS)
def test_statistics_within_1e_5_of_float64(name: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "split_keys", lambda *rest: (parts, KEYS if parts == 1 else 48))
    leaves = of_row(ROWS[name])
    _, aux = attention({n: leaf.float() for n, leaf in leaves.items()}, {"scale": 1.0}, ALL)
    check(aux, attend(**leaves, scale=1.0).statistics)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ROWS)
def test_so_are_they_beside_a_bias(name: str) -> None:
    """The longer way, on which logits are made in full before the statistics see them."""
    leaves = of_row(torch.zeros(KEYS, dtype=torch.float64))
    _, aux = attention({n: leaf.float() for n, leaf in leaves.items()}, {"bias": ROWS[name].float()}, ALL)
    check(aux, attend(**leaves, scale=1.0, bias=ROWS[name]).statistics)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sink", [-40.0, 0.0, 24.0, 30.0, 80.0])
@pytest.mark.parametrize("name", ["almost one-hot in a block", "two equal in two blocks", "uniform", "one-hot"])
def test_so_are_they_beside_a_sink(name: str, sink: float) -> None:
    leaves = of_row(ROWS[name])
    _, aux = attention({n: leaf.float() for n, leaf in leaves.items()}, {"scale": 1.0, "sinks": sink}, ALL)
    check(aux, attend(**leaves, scale=1.0, sinks=sink).statistics)


def check(aux: AuxOutput, expected: dict[str, Tensor]) -> None:
    for name in STATISTICS:
        found, wanted = getattr(aux, name).cpu().double(), expected[name]
        assert ((found - wanted).abs() <= 1e-5 * wanted.abs() + UNDERFLOW).all(), (name, found, wanted)


def test_one_key_is_certain() -> None:
    leaves = {name: leaf.float() for name, leaf in qkv(7, 1).items()}
    _, aux = attention(leaves, {}, ALL)
    assert (aux.entropy_nats == 0).all()
    assert (aux.peak == 1).all()
    assert (aux.collision == 1).all()
    assert (aux.jacobian_norm == 0).all()
    assert (aux.variance == 0).all()
    assert torch.equal(aux.lse, aux.max_logit)


@pytest.mark.parametrize("size", [3e30, 3e35])
def test_equal_logits_have_no_variance_whatever_their_size(size: float) -> None:
    leaves = {name: leaf.float() for name, leaf in qkv(6, 41).items()} | {"query": torch.zeros(1, 2, 6, 16)}
    _, aux = attention(leaves, {"bias": torch.full((6, 41), size)}, ALL)
    assert bool((aux.variance == 0.0).all())
    assert bool((aux.mean == torch.tensor(size)).all())


OPTIONS: list[dict[str, Any]] = [{}, {"softcap": 3.0}, {"is_causal": True, "sinks": 0.4}]
AT_ONCE = {(37, 1), (38, 2)}


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        pytest.param(keys, options, marks=() if (keys, i) in AT_ONCE else pytest.mark.full, id=f"{options}-{way}")
        for keys, way in ((37, "whole"), (38, "parts"))
        for i, options in enumerate(OPTIONS)
    ],
)
def test_each_statistic_alone_is_that_of_all_together(
    keys: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also some two, of which one lies behind the other in memory; and the output stays what it is without any."""
    monkeypatch.setattr(launch, "split_keys", lambda programs, keys, *rest: (1, keys) if keys == 37 else (3, 16))
    leaves = {name: leaf.float() for name, leaf in qkv(5, keys, heads=(1, 1)).items()}
    plain = attention(leaves, options)
    output, together = attention(leaves, options, ALL)
    close(output, plain)
    requests = [(name,) for name in AuxOutput._fields]
    if options:
        requests += [("peak", "keys"), ("lse", "mean"), ("min_logit", "jacobian_norm", "keys")]
    else:
        requests += list(combinations(AuxOutput._fields, 2))[::3]
    for names in requests:
        output, aux = attention(leaves, options, AuxRequest(**dict.fromkeys(names, True)))
        close(output, plain)
        assert [name for name, value in aux._asdict().items() if value is not None] == list(names)
        for name in names:
            close(getattr(aux, name), getattr(together, name))


def close(actual: Tensor, expected: Tensor) -> None:
    """But for the order of sums, which is the compiler's on a GPU."""
    if DEVICE.type == "cpu" and actual.ndim == 3:
        assert torch.equal(actual, expected)
    text = complaint(actual.cpu(), expected.cpu(), torch.float32, length=38, logit=10.0)
    assert text is None, text
