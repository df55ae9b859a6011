"""What the rows of a head sum up to: the columns of the records against dense float64 logits, and sums of sums."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk import stats
from sqrtdk.monitor.sums import head_statistics, head_sums, join_heads, join_rows
from sqrtdk.stats import AttentionRows, LogitSource, ProductSource, RowStats
from sqrtdk.tracing.calls import statistics
from sqrtdk.tracing.tensors import CallRows
from sqrtdk.tracing.trace import Trace
from tests.monitor.sums_by_hand import HEADS, SCALE, WIDTH, Attend, by_hand, columns, sharp, traced, wrong
from tests.tolerances import complaint


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("way", "case"),
    [
        *(("sdpa", case) for case in ("all", "causal", "bool", "blind", "bias")),
        *(("eager", case) for case in ("all", "causal", "bool", "bias", "softcap")),
    ],
)
def test_columns_are_those_of_dense_float64_logits(way: str, case: str, kv_heads: int) -> None:
    model, x = Attend(way, kv_heads, case), torch.randn(3, 7, 16)
    sharp(model, x)
    logits, shown = model.dense(x)
    found = columns(head_sums(traced(model, x)))
    wanted = by_hand(logits, shown)
    assert wrong(found, wanted, logits, shown) == {}
    others = {f"{name}_nonfinite" for name in ("query", "key", "query_grad", "key_grad")}
    assert wanted.keys() | {"max_product", "stored_product", *others} == found.keys()
    with torch.no_grad():
        q, k, _ = copy.deepcopy(model).double().split(x.double())
    product = (q @ k.mT).abs()
    known = way == "sdpa" or case not in ("bias", "softcap")  # what is added or capped is not taken back
    assert near(found["max_product"], float(product[shown].max()) if known else math.nan)
    assert near(found["stored_product"], float(product.max()) if way == "eager" else math.nan)


def near(found: Tensor, wanted: float) -> bool:
    """A product of `WIDTH` terms, and of a projection of 16 before, in float32: 1e-4 is far above their rounding."""
    return bool(torch.isclose(found, torch.full_like(found, wanted), rtol=1e-4, atol=0.0, equal_nan=True).all())


class Folded(nn.Module):
    """The whole scale lies before the product, or a part of it; a mask hides the key with the largest product."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.q_proj, self.k_proj = way, nn.Linear(16, HEADS * WIDTH), nn.Linear(16, HEADS * WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, HEADS)[:, None, None])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q_proj, self.k_proj))
        return q, k

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split(x)
        shown = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q * SCALE, k, k, is_causal=True, scale=1.0)
        if self.way == "math":
            return F.scaled_dot_product_attention(q, k, k, attn_mask=shown, dropout_p=1e-6)
        if self.way == "a head":
            return F.scaled_dot_product_attention(q * self.gain, k, k, is_causal=True)
        if self.way == "both":
            logits = (q * SCALE**0.5) @ (k * SCALE**0.5).mT
        elif self.way == "gain":
            logits = (q * self.gain) @ k.mT * -SCALE
        elif self.way == "lost":
            logits = (torch.tanh(q) * SCALE) @ k.mT
        elif self.way == "unknown":
            logits = (q * torch.sigmoid(x.mean()) * SCALE) @ k.mT
        else:
            logits = (q / 2) @ k.mT * SCALE
        return logits.masked_fill(~shown, -math.inf).softmax(-1) @ k


@pytest.mark.parametrize(
    ("way", "stored"),
    [
        *(
            ("sdpa", None),
            ("a head", None),
            ("both", SCALE),
            ("part", 0.5),
            ("gain", 1.0),
            ("unknown", 0.0),
            ("lost", SCALE),
        ),
        ("math", WIDTH**-0.5),  # torch's own decomposition puts a root of the scale on q and on k
    ],
)
def test_a_product_is_told_before_any_scale_and_as_it_was_stored(way: str, stored: float | None) -> None:
    model, x = Folded(way), torch.randn(2, 7, 16)
    found = columns(head_sums(traced(model, x)))
    with torch.no_grad():
        q, k = copy.deepcopy(model).double().split(x.double())
        product = q @ k.mT
        if way == "lost":
            stored_product = q.tanh() @ k.mT * SCALE
        elif way == "gain":
            stored_product = product * model.gain
        else:
            stored_product = product * (float(torch.sigmoid(x.mean())) * SCALE if way == "unknown" else stored or 0.0)
    visible = torch.ones(7, 7, dtype=torch.bool).tril()
    largest = float(product[..., visible].abs().max())
    assert near(found["max_product"], math.nan if way in ("unknown", "lost") else largest)
    assert near(found["stored_product"], math.nan if stored is None else float(stored_product.abs().max()))
    assert not near(torch.tensor([largest]), float(product.abs().max()))  # a hidden key has a larger one


def test_where_a_product_is_not_known_of_a_part_it_is_not_known_of_all() -> None:
    parts = [head_sums(traced(Folded(way), torch.randn(1, 4, 16))) for way in ("both", "unknown")]
    assert columns(join_rows(parts))["max_product"].isnan().all()
    assert not columns(join_rows(parts))["stored_product"].isnan().any()


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_a_row_of_nan_is_counted_and_left_out(way: str) -> None:
    model, x = Attend(way, 4, "causal"), torch.randn(2, 6, 16)
    x[1, 5] = math.nan  # the last row: as a key it is seen by none but itself
    logits, shown = model.dense(x)
    found = columns(head_sums(traced(model, x)))
    assert found["nan_rows"].tolist() == [1.0] * HEADS
    assert wrong(found, by_hand(logits, shown), logits, shown) == {}


@pytest.mark.parametrize("case", ["all", "causal", "bool", "blind", "bias"])
def test_columns_equal_the_head_stats_of_the_same_call(case: str) -> None:
    model, x = Attend("sdpa", 2, case), torch.randn(3, 9, 16)
    found = columns(head_sums(traced(model, x)))
    with torch.no_grad(), Trace(model) as run:
        model(x)
    measured = run.calls[0].stats
    assert measured is not None
    for name, value in found.items():
        whole = getattr(measured, name, None)
        if whole is not None:
            wanted = torch.tensor(whole, dtype=torch.float64).expand(HEADS)
            assert (
                complaint(value, wanted, torch.float32, length=9, logit=float(max(measured.max_abs_logit))) is None
            ), name
    assert found["max_product"][0] == pytest.approx(run.calls[0].max_product, rel=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_of_a_nested_batch_is_no_row() -> None:
    parts = [torch.randn(5, 16), torch.randn(3, 16)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.projections)
            return F.scaled_dot_product_attention(q, k, v)

    model = Nested()
    together = columns(head_sums(traced(model, nested)))
    apart = columns(join_rows([head_sums(traced(model, part[None])) for part in parts]))
    assert together["rows"].tolist() == [8.0, 8.0]
    assert together["blind_rows"].tolist() == [0.0, 0.0]
    assert together["stored_product"].isnan().all()  # what nested tensors store is not looked at
    for name, value in together.items():
        if not value.isnan().all():
            assert complaint(value, apart[name], torch.float32, length=5, logit=4.0, magnitude=1.0) is None, name


@pytest.mark.parametrize("case", ["causal", "blind"])
def test_micro_batches_joined_are_the_joined_batch(case: str) -> None:
    model, x = Attend("sdpa", 2, case), torch.randn(5, 6, 16)
    whole = columns(head_sums(traced(model, x)))
    parts = columns(join_rows([head_sums(traced(model, part)) for part in x.split([1, 3, 1])]))
    assert whole.keys() == parts.keys()
    for name, value in parts.items():
        assert complaint(value, whole[name], torch.float32, length=6, logit=4.0, magnitude=1.0) is None, name


def test_heads_beside_one_another_are_all_heads() -> None:
    model, x = Attend("sdpa", 4, "causal"), torch.randn(2, 6, 16)
    rows = traced(model, x)
    halves = [
        replace(rows, rows=rows.rows.map(lambda field, at=at: field[at : at + 2]))  # type: ignore[misc]
        for at in (0, 2)
    ]
    assert str(head_statistics([join_heads([head_sums(half) for half in halves])])) == str(
        head_statistics([head_sums(rows)])
    )  # NaN is NaN


def test_the_largest_product_of_a_batch_is_in_its_part_only() -> None:
    model = Attend("sdpa", 4, "all")
    small, large = (head_sums(traced(model, torch.randn(1, 4, 16) * size)) for size in (0.1, 3.0))
    both = columns(join_rows([small, large]))["max_product"]
    assert torch.equal(both, columns(large)["max_product"])
    assert columns(small)["max_product"][0] < both[0]


@pytest.mark.parametrize("way", ["sdpa", "eager", "offset"])
@pytest.mark.parametrize(("length", "most"), [(10, 4), (10, 2), (7, 7), (7, 20)])
def test_rows_measures_the_rows_that_it_says_and_no_others(
    length: int, most: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Attend(way, 2, "causal"), torch.randn(2, length, 16)
    shapes: list[tuple[int, ...]] = []

    def call_rows(source: LogitSource | ProductSource) -> AttentionRows:
        shapes.append(source.shape)
        return stats.call_rows(source)

    monkeypatch.setattr(statistics, "call_rows", call_rows)
    rows = traced(model, x, most)
    assert shapes == [(2, HEADS, min(most, length), length)]
    chosen = [round(i * (length - 1) / (min(most, length) - 1)) for i in range(min(most, length))]
    assert rows.total_rows == 2 * length
    assert rows.rows.keys.shape == (HEADS, 2 * len(chosen))
    assert rows.rows.keys[0].tolist() == [float(1 + i) for i in chosen] * 2
    logits, shown = model.dense(x)
    wanted = by_hand(logits[:, :, chosen], shown[:, :, chosen])
    assert wrong(columns(head_sums(rows)), wanted, logits, shown) == {}


def empty_rows(n: int) -> CallRows:
    fields: dict[str, Any] = {name: torch.zeros(2, n) for name in RowStats.__dataclass_fields__}
    fields["max_logit"] = fields["max_logit"] - math.inf
    return CallRows(RowStats(**fields), None, n)


def test_a_head_without_a_seeing_row_holds_nan() -> None:
    found = columns(head_sums(empty_rows(3)))
    assert found["blind_rows"].tolist() == found["rows"].tolist() == [3.0, 3.0]
    for name, value in found.items():
        assert name.endswith("rows") or bool(value.isnan().all()), name


def test_without_a_row_or_a_call() -> None:
    assert columns(head_sums(empty_rows(0)))["rows"].tolist() == [0.0, 0.0]
    assert head_statistics([]) == []


def test_gradients_of_keys_belong_to_the_heads_that_read_them() -> None:
    sums = head_sums(traced(Attend("sdpa", 2, "all"), torch.randn(1, 3, 16)))
    key = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, math.nan]])
    found = columns(sums.with_gradients(None, key))
    assert found["key_grad_p50"].tolist() == [2.0, 2.0, 4.5, 4.5]
    assert found["key_grad_max"].tolist() == [3.0, 3.0, 5.0, 5.0]
    assert found["key_grad_nonfinite"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found["query_grad_nonfinite"].isnan().all()
    assert "query_grad_p50" not in found
