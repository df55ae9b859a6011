"""RowStats against dense float64, and the laws of its merge."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats import RowStats, row_stats
from tests.stats.stats_oracle import STATISTICS, oracle
from tests.tolerances import allowed, complaint

# Nothing is rounded before the weights here, which have no gap to the largest logit beyond that of the least number.
GAP = 87.0
NOTHING = 1e-16  # next to a peak of 1: what float64, the oracle's dtype, rounds away


def assert_matches(rows: RowStats, logits: Tensor, visible: Tensor | None = None) -> None:
    """Every row by its own size: what is left beside a peak of almost 1 is small, and exact."""
    expected = oracle(logits, visible)
    dtype, length = rows.keys.dtype, logits.shape[-1]
    finite = logits[logits.isfinite()].double()
    size = finite.abs().max().item() if finite.numel() else 0.0
    gap = min(GAP, (finite.amax() - finite.amin()).item()) if finite.numel() else 0.0
    for name in STATISTICS:
        levels = name in ("max_logit", "min_logit", "mean", "lse")
        text = complaint(
            getattr(rows, name),
            expected[name],
            dtype,
            length=length,
            logit=0.0 if levels or name == "variance" else gap,
            magnitude=size if levels else NOTHING / torch.finfo(dtype).eps,
            each=True,
        )
        assert text is None, f"{name}: {text}"


def one_hot_rows(keys: int) -> Tensor:
    height = torch.tensor([5.0, 10.0, 15.0, 20.0, 40.0]).view(-1, 1, 1)
    return torch.randn(5, 8, keys) + height * torch.nn.functional.one_hot(torch.arange(8), keys)


CASES = {
    "plain": lambda: torch.randn(2, 3, 17, 40),
    "huge": lambda: torch.randn(20, 33) * 3e3,
    "wide": lambda: torch.randn(20, 33) * 30,
    "one_hot": lambda: one_hot_rows(64),
    "uniform": lambda: torch.zeros(4, 77),
    "one_key": lambda: torch.randn(5, 1) * 100,
    "offset": lambda: torch.randn(20, 33) + 1e4,
    "ties": lambda: torch.randint(0, 3, (40, 9)).float() * 20,
    "outlier": lambda: torch.zeros(3, 500).index_fill(1, torch.tensor([7]), 300.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_dense_float64(case: str, masked: bool, dtype: torch.dtype) -> None:
    logits = CASES[case]().to(dtype)
    visible = torch.rand(logits.shape[-2:]) > 0.4 if masked else None
    before = logits.clone()
    rows = row_stats(logits, visible)
    assert rows.keys.dtype == dtype
    assert torch.equal(logits, before)
    assert_matches(rows, logits, visible)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_are_widened(dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 5, 20) * 4).to(dtype)
    rows = row_stats(logits)
    assert rows.max_logit.dtype == torch.float32
    assert_matches(rows, logits.float())


def test_several_tiles_and_strides() -> None:
    logits = torch.randn(700, 2, 900).transpose(0, 1)
    visible = torch.ones(700, 900, dtype=torch.bool).tril(50)
    rows = row_stats(logits, visible)
    sample = torch.tensor([0, 1, 350, 436, 437, 699])
    assert_matches(
        RowStats(**{f: getattr(rows, f)[:, sample] for f in RowStats.__dataclass_fields__}),
        logits[:, sample],
        visible[sample],
    )


def test_near_one_hot_is_not_rounded_away() -> None:
    rows = row_stats(torch.tensor([[40.0, 0.0]]))
    tail = math.exp(-40.0)
    single = allowed(torch.float32, length=2, logit=40.0, magnitude=1.0)
    assert rows.off_peak.item() == pytest.approx(tail, rel=single, abs=0.0)
    assert rows.jacobian_norm.item() == pytest.approx(2 * tail, rel=single, abs=0.0)
    assert rows.entropy_nats.item() == pytest.approx(tail * 41.0, rel=single, abs=0.0)


def test_a_spread_beyond_the_dtype_costs_the_weights_nothing() -> None:
    z = torch.tensor([[3e38, 3e38, -3e38]])
    for rows in (row_stats(z), row_stats(z[:, :2]).merge(row_stats(z[:, 2:]))):
        single = allowed(torch.float32, length=3, logit=0.0, magnitude=1.0)
        assert rows.entropy_nats.item() == pytest.approx(math.log(2.0), rel=single)
        assert rows.peak.item() == 0.5


def test_a_mean_beyond_the_dtype_leaves_an_infinite_variance() -> None:
    z = torch.zeros(1, 9)
    z[:, :2] = torch.finfo(torch.float32).min
    for rows in (row_stats(z), row_stats(z.view(3, 1, 3)).merged(0)):
        assert rows.variance.item() == math.inf
        single = allowed(torch.float32, length=9, logit=0.0, magnitude=1.0)
        assert rows.entropy_nats.item() == pytest.approx(math.log(7.0), rel=single)


@pytest.mark.parametrize("gap", [20.0, 45.0, 60.0, 68.0])
@pytest.mark.parametrize("halves", [False, True])
def test_the_jacobian_of_a_row_that_is_one_hot_but_for_a_trace(gap: float, halves: bool) -> None:
    """Three other keys of equal weight w: |J|^2 is 18 w^2 to first order, and w^2 may be no number of the dtype."""
    z = torch.tensor([[gap, 0.0, 0.0, 0.0]])
    rows = row_stats(z.view(2, 1, 2)).merged(0) if halves else row_stats(z)
    single = allowed(torch.float32, length=4, logit=gap, magnitude=1.0)
    assert rows.jacobian_norm.item() == pytest.approx(18**0.5 * math.exp(-gap), rel=single, abs=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_rows_are_nan_and_stay_alone(bad: float) -> None:
    logits = torch.randn(3, 6)
    clean = row_stats(logits)
    logits[1, 2] = bad
    rows = row_stats(logits)
    assert rows.keys.tolist() == [6.0, 6.0, 6.0]
    for name in (*RowStats.__dataclass_fields__, "lse", "entropy_nats", "peak", "jacobian_norm"):
        if name != "keys":
            assert getattr(rows, name).isnan().tolist() == [False, True, False], name
            assert torch.equal(getattr(rows, name)[[0, 2]], getattr(clean, name)[[0, 2]])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hidden_keys_do_not_count(bad: float) -> None:
    logits = torch.randn(4, 6)
    visible = torch.ones(4, 6, dtype=torch.bool)
    visible[:, 4] = False
    logits[:, 4] = bad
    expected = row_stats(logits[:, [0, 1, 2, 3, 5]])
    rows = row_stats(logits, visible)
    for name in RowStats.__dataclass_fields__:
        torch.testing.assert_close(getattr(rows, name), getattr(expected, name))


def test_visible_minus_infinity_is_a_key_of_weight_zero() -> None:
    rows = row_stats(torch.tensor([[0.0, -math.inf, 1.0], [-math.inf] * 3]))
    other = row_stats(torch.tensor([[0.0, 1.0]]))
    assert rows.keys.tolist() == [3.0, 3.0]
    assert rows.min_logit.tolist() == [-math.inf, -math.inf]
    assert rows.mean.tolist() == [-math.inf, -math.inf]
    for name in ("lse", "entropy_nats", "peak", "collision", "jacobian_norm", "max_logit"):
        torch.testing.assert_close(getattr(rows, name)[:1], getattr(other, name))
    assert rows.entropy_nats[1].isnan()
    assert rows.lse[1] == -math.inf


def test_blind_rows_are_neutral() -> None:
    rows = row_stats(torch.randn(2, 5), torch.zeros(2, 5, dtype=torch.bool))
    empty = RowStats.empty((2,))
    for name in RowStats.__dataclass_fields__:
        assert torch.equal(getattr(rows, name), getattr(empty, name)), name
    assert rows.lse.tolist() == [-math.inf, -math.inf]
    assert rows.entropy_nats.isnan().all()
    assert rows.l.tolist() == [0.0, 0.0]


def test_neutral_also_where_squares_overflow() -> None:
    lowest = row_stats(torch.full((1, 3), torch.finfo(torch.float32).min))
    nothing = RowStats.empty((1,))
    for merged in (lowest.merge(nothing), nothing.merge(lowest)):
        for name in RowStats.__dataclass_fields__:
            assert torch.equal(getattr(merged, name), getattr(lowest, name)), name
    assert lowest.effective_keys.item() == pytest.approx(3.0)


def test_a_single_key_leaves_exactly_nothing_to_the_others() -> None:
    visible = torch.eye(9, dtype=torch.bool)
    rows = row_stats(torch.randn(9, 9), visible)
    for name in ("rest", "share2", "share3", "a", "entropy_nats", "off_peak", "jacobian_norm"):
        assert not getattr(rows, name).any(), name
    assert (rows.peak == 1.0).all()


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0)])
def test_empty_dimensions(shape: tuple[int, ...]) -> None:
    rows = row_stats(torch.zeros(shape))
    assert rows.keys.shape == shape[:-1]
    assert not rows.keys.any()
    assert (rows.max_logit == -math.inf).all()


def test_textbook_sums() -> None:
    z = torch.randn(3, 7, dtype=torch.float64)
    rows, gap = row_stats(z), z - z.amax(-1, keepdim=True)
    torch.testing.assert_close(rows.l, gap.exp().sum(-1))
    torch.testing.assert_close(rows.c2, (2 * gap).exp().sum(-1))
    torch.testing.assert_close(rows.c3, (3 * gap).exp().sum(-1))
    torch.testing.assert_close(rows.a, (gap.exp() * gap).sum(-1))


def test_refusals() -> None:
    with pytest.raises(InvalidTypeError, match="int64"):
        row_stats(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(InvalidTypeError, match="bool"):
        row_stats(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(InvalidValueError, match=r"\(2, 4\)"):
        row_stats(torch.zeros(2, 3), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(InvalidValueError, match="shape"):
        row_stats(torch.zeros(3))


LOGIT = st.one_of(st.floats(-50, 50), st.sampled_from([0.0, -math.inf, 1e4, -1e4]))
BLOCK = st.lists(LOGIT, max_size=5)


def stats_of(values: list[float]) -> RowStats:
    return row_stats(torch.tensor([values], dtype=torch.float64).reshape(1, len(values)))


def assert_same(left: RowStats, right: RowStats) -> None:
    for name in (*RowStats.__dataclass_fields__, "lse", "entropy_nats", "jacobian_norm", "off_peak"):
        x, y = getattr(left, name), getattr(right, name)
        text = complaint(x, y, torch.float64, length=15, logit=1e4, magnitude=1.0)
        assert text is None, f"{name}: {text}"


@settings(max_examples=60, deadline=None)
@given(BLOCK, BLOCK, BLOCK)
def test_merge_is_associative_commutative_and_equals_the_whole(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = stats_of(a), stats_of(b), stats_of(c)
    whole = stats_of(a + b + c)
    assert_same(x.merge(y).merge(z), whole)
    assert_same(x.merge(y.merge(z)), whole)
    assert_same(x.merge(y), y.merge(x))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(LOGIT, st.sampled_from([math.nan, math.inf])), max_size=4))
def test_merge_with_nothing_changes_nothing(a: list[float]) -> None:
    x, nothing = stats_of(a), RowStats.empty((1,), dtype=torch.float64)
    for merged in (x.merge(nothing), nothing.merge(x)):
        for name in RowStats.__dataclass_fields__:
            assert torch.equal(getattr(merged, name).nan_to_num(0.5), getattr(x, name).nan_to_num(0.5)), name
            assert torch.equal(getattr(merged, name).isnan(), getattr(x, name).isnan()), name


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.integers(0, 8))
def test_a_bad_block_spoils_the_whole(a: list[float], where: int) -> None:
    bad = [*a[:where], math.nan, *a[where:]]
    for merged in (stats_of(a).merge(stats_of(bad)), stats_of(bad).merge(stats_of(a))):
        assert merged.max_logit.isnan()
        assert merged.entropy_nats.isnan()
        assert merged.mean.isnan()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.sampled_from([-512.0, 3.0, 4096.0]))
def test_a_shift_moves_levels_and_nothing_else(a: list[float], shift: float) -> None:
    x, y = stats_of(a), stats_of([value + shift for value in a])
    size = abs(shift) + 50  # to which a shifted logit is rounded
    for name in ("keys", "entropy_nats", "peak", "collision", "jacobian_norm", "variance"):
        found = complaint(getattr(y, name), getattr(x, name), torch.float64, length=8, logit=size, magnitude=size)
        assert found is None, name
    for name in ("max_logit", "min_logit", "mean", "lse"):
        assert complaint(getattr(y, name), getattr(x, name) + shift, torch.float64, length=8, logit=size) is None


def test_float32_split_in_many_blocks() -> None:
    logits = one_hot_rows(64)
    rows = RowStats.empty(logits.shape[:-1])
    for part in logits.split(7, dim=-1):
        rows = rows.merge(row_stats(part))
    assert_matches(rows, logits)
