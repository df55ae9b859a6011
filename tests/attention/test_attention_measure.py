"""`measure` gives the statistics of `attention` without a value, for all rows or some; `explain` says what runs."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import sqrtdk
from sqrtdk import AuxRequest, positions, scales, scores
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats import RowStats, head_stats
from tests.stats.largest import Largest
from tests.tolerances import complaint

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower_right": {"causal_lower_right": True},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0, "is_causal": True},
    "bool_mask": {"attn_mask": torch.rand(11, 13, generator=torch.Generator().manual_seed(1)) > 0.3},
    "float_mask": {"attn_mask": torch.zeros(11, 13).masked_fill(torch.ones(11, 13).triu(3) > 0, -torch.inf)},
    "alibi": {"bias": positions.alibi(4), "is_causal": True},
    "shaw": {"bias": positions.shaw(8, max_distance=4)},
    "cosine": {"score": scores.cosine(gain=8.0)},
    "distance": {"score": scores.distance()},
    "rbf": {"score": "rbf"},
    "laplace": {"score": "laplace"},
    "log_n": {"scale": scales.log_n(), "is_causal": True},
    "tensor": {"scale": torch.linspace(0.1, 1.0, 11).view(11, 1)},
}
LOGIT = 20.0  # of normal numbers in 8 dimensions, or a cosine times 8, or ALiBi's
over_calls = pytest.mark.parametrize("name", CALLS)


@pytest.fixture
def qk() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, 11, 8), torch.randn(2, 2, 13, 8)


def same(field: str, actual: Tensor, expected: Tensor) -> None:
    found = complaint(actual, expected, torch.float32, length=13, logit=LOGIT, magnitude=1.0)
    assert found is None, f"{field}: {found}"


def close(found: RowStats, wanted: sqrtdk.stats.AuxOutput) -> None:
    seen = wanted.keys > 0
    assert torch.equal(found.keys, wanted.keys)
    pairs = {
        "lse": found.lse,
        "max_logit": found.max_logit,
        "min_logit": found.min_logit,
        "mean": found.mean,
        "variance": found.variance,
        "entropy_nats": found.entropy_nats,
        "collision": found.collision,
        "peak": found.peak,
        "jacobian_norm": found.jacobian_norm,
    }
    for field, value in pairs.items():
        expected = getattr(wanted, field)
        same(field, value[seen], expected[seen])


@over_calls
def test_the_statistics_are_those_of_dense_attention_in_float64(name: str, qk: tuple[Tensor, Tensor]) -> None:
    q, k = qk
    options = dict(CALLS[name])
    found = sqrtdk.measure(q, k, enable_gqa=True, **options)
    _, wanted = sqrtdk.attention(
        q.double(), k.double(), k.double(), enable_gqa=True, return_aux=AuxRequest.all(), impl="dense", **options
    )
    close(found, sqrtdk.stats.AuxOutput(*(value.detach() for value in wanted)))
    assert found.keys.shape == (2, 4, 11)
    assert not found.lse.requires_grad


@over_calls
def test_some_rows_are_rows_of_the_whole(name: str, qk: tuple[Tensor, Tensor]) -> None:
    """A sample keeps its places: masks, positions and rules by row see where a row stood."""
    q, k = qk
    whole = sqrtdk.measure(q, k, enable_gqa=True, **CALLS[name])
    at = torch.tensor([0, 7, 2, 10])
    found = sqrtdk.measure(q, k, enable_gqa=True, rows=at, **CALLS[name])
    for field in ("keys", "max_logit", "min_logit", "mean", "lse", "entropy_nats"):
        expected = getattr(whole, field)[..., at]
        same(field, getattr(found, field), expected)
    spread = sqrtdk.measure(q, k, enable_gqa=True, rows=3, **CALLS[name])
    same("max_logit", spread.max_logit, whole.max_logit[..., [0, 5, 10]])


def test_blocks_of_keys_merge(qk: tuple[Tensor, Tensor]) -> None:
    q, k = qk
    parts = [sqrtdk.measure(q, part, enable_gqa=True) for part in k.split([5, 1, 7], -2)]
    merged = parts[0].merge(parts[1]).merge(parts[2])
    whole = sqrtdk.measure(q, k, enable_gqa=True)
    for field in ("keys", "max_logit", "min_logit", "mean", "variance", "lse", "entropy_nats", "jacobian_norm"):
        same(field, getattr(merged, field), getattr(whole, field))


def test_a_summary_a_head_needs_no_histograms(qk: tuple[Tensor, Tensor]) -> None:
    rows = sqrtdk.measure(*qk, enable_gqa=True)
    summary = head_stats(rows)
    assert summary.logit_histogram == ()
    assert summary.max_logit == tuple(rows.max_logit.amax((0, 2)).tolist())
    assert summary.keys == (13.0,) * 4


@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}])
def test_no_rows_and_no_keys(options: dict[str, Any]) -> None:
    q, k = torch.randn(2, 3, 0, 4), torch.randn(2, 3, 5, 4)
    assert sqrtdk.measure(q, k, **options).keys.shape == (2, 3, 0)
    found = sqrtdk.measure(k, k[:, :, :0], **options)
    assert torch.equal(found.keys, torch.zeros(2, 3, 5))
    assert bool((found.lse == -torch.inf).all())


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        (0, InvalidValueError, "rows is at least 1; got 0"),
        (True, InvalidTypeError, "got True"),
        (2.0, InvalidTypeError, "got 2.0"),
        (torch.tensor([0.0]), InvalidTypeError, "int64; got torch.float32"),
        (torch.tensor([[0]]), InvalidTypeError, r"got torch.int64 \(1, 1\)"),
        (torch.tensor([0, 11]), InvalidValueError, "rows are from 0 to 10; got 0 to 11"),
        (torch.tensor([-1]), InvalidValueError, "rows are from 0 to 10; got -1 to -1"),
    ],
)
def test_wrong_rows_are_refused(rows: Any, error: type[Exception], words: str, qk: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(error, match=words):
        sqrtdk.measure(*qk, enable_gqa=True, rows=rows)


@pytest.mark.parametrize(
    ("options", "impl", "words"),
    [
        ({}, "fused", "torch's kernels run it"),
        ({"bias": positions.alibi(4)}, "fused", "torch's kernels run it"),
        (
            {"sinks": 0.0},
            "dense",
            "no sinks; the call fits one block; not the compiled kernel: there is no C++ compiler",
        ),
        ({"score": scores.keras_additive()}, "dense", "no dot product"),
        ({"impl": "dense"}, "dense", "asked for"),
    ],
)
@pytest.mark.usefixtures("without_kernel")
def test_the_choice_is_explained(options: dict[str, Any], impl: str, words: str, qk: tuple[Tensor, Tensor]) -> None:
    q, k = qk
    choice = sqrtdk.explain(q, k, k, enable_gqa=True, **options)
    assert choice.impl == impl
    assert words in choice.reason


@pytest.mark.parametrize(
    "counts", [(4, 1, 4), (4, 2, 4), (4, 1, 2), (6, 3, 2), (4, 4, 2), (1, 4, 4), (1, 4, 1), (1, 1, 4)]
)
def test_key_and_value_need_not_have_as_many_heads(counts: tuple[int, int, int]) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in counts)
    given: dict[str, Any] = {"enable_gqa": counts[0] > 1}
    every = AuxRequest.all()
    wanted, statistics = sqrtdk.attention(q, k, v, return_aux=every, impl="dense", **given)
    for impl in ("fused", "tiled", "auto"):
        output, aux = sqrtdk.attention(q, k, v, return_aux=every, impl=impl, **given)
        same("output", output, wanted)
        same("output", sqrtdk.attention(q, k, v, impl=impl, **given), wanted)
        for name, known in statistics._asdict().items():
            same(name, getattr(aux, name), known)
    rows = sqrtdk.measure(q, k, **given).lse
    same("lse", rows.expand_as(statistics.lse), statistics.lse)


@pytest.mark.parametrize("name", ["plain", "softcap", "shaw", "alibi"])
def test_autocast_does_not_narrow_the_statistics(name: str, qk: tuple[Tensor, Tensor]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sqrtdk.measure(*qk, enable_gqa=True, **CALLS[name])
    wanted = sqrtdk.measure(*(t.bfloat16().float() for t in qk), enable_gqa=True, **CALLS[name])
    same("lse", found.lse, wanted.lse)


@pytest.mark.parametrize("name", ["plain", "softcap", "causal"])
def test_measure_without_numbers_and_under_transforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk._measure.block_rows", lambda call: 5)
    q = torch.randn(3, 2, 21, 8)
    wanted = sqrtdk.measure(q, q, **CALLS[name]).lse
    assert sqrtdk.measure(q.to("meta"), q.to("meta"), **CALLS[name]).lse.shape == (3, 2, 21)
    same("lse", torch.vmap(lambda t: sqrtdk.measure(t, t, **CALLS[name]).lse)(q), wanted)


@pytest.mark.full
def test_a_long_bias_is_not_made_whole() -> None:
    q = torch.zeros(1, 8, 2**12, 4)
    with Largest() as seen:
        rows = sqrtdk.measure(q, q, bias=positions.alibi(8), is_causal=True)
    assert rows.keys[0, 0, -1] == 2**12
    assert seen.elements <= 2**22


@pytest.mark.usefixtures("without_kernel")
def test_nothing_large_is_held_without_a_word() -> None:
    q = torch.zeros(1, 17, 2**12, 4)
    wide, few = torch.zeros(1, 17, 2**12, 3), q[:, :, :100]
    mask = torch.zeros(1, 2**12)
    held = {
        "widths": sqrtdk.explain(q, q, wide),
        "dropout": sqrtdk.explain(q, q, q, dropout_p=0.1),
        "mask that learns": sqrtdk.explain(q, q, q, mask.clone().requires_grad_()),
    }
    three = sqrtdk.explain(q[0], q[0], q[0])
    if three.impl == "fused":  # torch 2.14 has a kernel for three dimensions, 2.13 has none
        assert torch._fused_sdp_choice(q[0], q[0], q[0]) == SDPBackend.FLASH_ATTENTION.value
    else:
        held["dimensions"] = three
    for name, choice in held.items():
        assert choice.impl == "tiled", name
        assert "torch would hold 285212672 pairs at once" in choice.reason, name
    every = sqrtdk.AuxRequest.all()
    for choice in (
        sqrtdk.explain(q, q, q, mask),
        sqrtdk.explain(few, q, wide),
        sqrtdk.explain(q, q, wide, return_aux=every),
    ):
        assert choice.impl == "fused"


@pytest.mark.full
@pytest.mark.usefixtures("without_kernel")
def test_a_large_plain_call_goes_the_same_way(request: pytest.FixtureRequest) -> None:
    q, lines, logger = torch.randn(1, 1, 2**14 + 1, 1), io.StringIO(), logging.getLogger("sqrtdk")
    logger.addHandler(handler := logging.StreamHandler(lines))
    request.addfinalizer(lambda: logger.removeHandler(handler))
    request.addfinalizer(lambda level=logger.level: logger.setLevel(level))  # type: ignore[misc]
    logger.setLevel(logging.DEBUG)
    with torch.no_grad():
        output = sqrtdk.attention(q, q, torch.ones(1, 1, 2**14 + 1, 2))
    assert "attention runs on tiled: torch would hold" in lines.getvalue()
    assert isinstance(output, Tensor)
    keys, largest = q.shape[-2], q.square().max().item()
    assert complaint(output, torch.ones_like(output), torch.float32, length=keys, logit=largest) is None


def test_a_long_call_is_tiled() -> None:
    """2^20 pairs a block: 64 rows of 4 heads and 4096 keys."""
    q = torch.empty(1, 4, 4096, 8, device="meta")
    choice = sqrtdk.explain(q, q, q, softcap=2.0)
    assert (choice.impl, choice.reason) == ("tiled", "torch's kernels have no softcap; blocks of 64 rows")


def test_a_key_that_is_no_tensor_is_refused_as_attention_does() -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(InvalidTypeError, match="key is a tensor; got str"):
        sqrtdk.measure(q, "keys")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="key"):
        sqrtdk.measure(q, torch.tensor(1.0))
