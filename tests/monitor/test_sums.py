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
from sqrtdk.monitor.sums import HeadSums, head_statistics, head_sums, join_heads, join_rows
from sqrtdk.stats import AttentionRows, LogitSource, ProductSource, RowStats
from sqrtdk.tracing.calls import statistics
from sqrtdk.tracing.calls.finish import RowLimit
from sqrtdk.tracing.tensors import CallRows
from sqrtdk.tracing.trace import Trace
from tests.tolerances import complaint

HEADS, WIDTH, SCALE = 4, 8, 0.6
CAP = 3.0


class Attend(nn.Module):
    """Self-attention with a scale that is not the textbook's; every way of hiding keys."""

    def __init__(self, way: str, kv_heads: int, case: str) -> None:
        super().__init__()
        self.way, self.kv_heads, self.case = way, kv_heads, case
        self.q_proj = nn.Linear(16, HEADS * WIDTH)
        self.k_proj = nn.Linear(16, kv_heads * WIDTH)
        self.v_proj = nn.Linear(16, kv_heads * WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        repeat = HEADS // self.kv_heads
        return q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    def mask(self, x: Tensor) -> Tensor | None:
        length = x.shape[1]
        shown = torch.ones(length, length, dtype=torch.bool)
        if self.case == "bool":
            return (torch.arange(length)[:, None] + torch.arange(length)) % 3 != 0
        if self.case == "blind":
            shown[2] = False
            return shown
        if self.case == "bias":
            return torch.linspace(-1, 1, length, dtype=x.dtype) * torch.ones(length, 1, dtype=x.dtype)
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mask, causal = self.mask(x), self.case in ("causal", "softcap")
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=SCALE)
        logits = q @ k.mT * SCALE
        if self.case == "softcap":
            logits = CAP * torch.tanh(logits / CAP)
        if causal:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            logits = logits.masked_fill(~mask, -math.inf)
            logits = logits - logits.amax(-1, keepdim=True) if self.way == "offset" else logits
        elif mask is not None:
            logits = logits + mask
        return logits.softmax(-1) @ v

    def dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and visible keys in float64."""
        exact = copy.deepcopy(self).double()
        with torch.no_grad():
            q, k, _ = exact.split(x.double())
            logits, mask = q @ k.mT * SCALE, exact.mask(x.double())
        if self.case == "softcap":
            logits = CAP * torch.tanh(logits / CAP)
        shown = torch.ones_like(logits, dtype=torch.bool)
        if self.case in ("causal", "softcap"):
            shown = shown.tril()
        elif mask is not None and mask.dtype == torch.bool:
            shown = shown & mask
        elif mask is not None:
            logits = logits + mask
        return logits, shown


def by_hand(logits: Tensor, shown: Tensor) -> dict[str, Tensor]:
    """The columns, from their definitions: (B, H, L, S) to one number a head."""
    logits, shown = (x.transpose(0, 1).flatten(1, 2) for x in (logits, shown))
    bad = (logits.isnan() & shown).any(-1)
    blind = ~shown.any(-1)
    columns: dict[str, list[float]] = {}
    for head in range(logits.shape[0]):
        rows = [z[v] for z, v, no in zip(logits[head], shown[head], bad[head] | blind[head], strict=True) if not no]
        p = [z.softmax(-1) for z in rows]
        entropy = torch.stack([torch.special.entr(x).sum() for x in p])
        most = torch.stack([z.max() for z in rows])
        choices = [i for i, z in enumerate(rows) if len(z) > 1]
        jacobians = [torch.linalg.matrix_norm(torch.diag(x) - torch.outer(x, x)).item() for x in p]
        values = {
            "rows": float(shown.shape[1]),
            "blind_rows": float(blind[head].sum()),
            "nan_rows": float(bad[head].sum()),
            "inf_rows": 0.0,
            "keys": mean([float(len(z)) for z in rows]),
            "max_logit": most.max().item(),
            "min_logit": min(z.min().item() for z in rows),
            "max_abs_logit": max(z.abs().max().item() for z in rows),
            "mean_logit": mean([z.mean().item() for z in rows]),
            "std_logit": math.sqrt(mean([z.var(correction=0).item() for z in rows])),
            "row_offset": max(abs(z.mean().item()) for z in rows),
            "entropy_nats": entropy.mean().item(),
            "entropy_fraction": mean([entropy[i].item() / math.log(len(rows[i])) for i in choices]),
            "saturated": mean([float(p[i].max() > 0.99) for i in choices]),
            "effective_keys": mean([1 / x.square().sum().item() for x in p]),
            "peak": mean([x.max().item() for x in p]),
            "peak_max": max(x.max().item() for x in p),
            "jacobian_norm": mean(jacobians),
        }
        for name, each in (("entropy", entropy), ("max_logit", most)):
            for q in (5, 50, 95):
                values[f"{name}_p{q:02d}"] = each.quantile(q / 100).item()
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def traced(model: nn.Module, x: Tensor, most: int | None = None) -> CallRows:
    with torch.no_grad(), Trace(model, stats=False, rows=RowLimit(most)) as run:
        model(x)
    (rows,) = run.rows
    assert rows is not None
    return rows


def columns(sums: HeadSums) -> dict[str, Tensor]:
    (found,) = head_statistics([sums])
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def wrong(found: dict[str, Tensor], wanted: dict[str, Tensor], logits: Tensor, shown: Tensor) -> dict[str, str]:
    largest = float(logits[shown].nan_to_num().abs().max())
    length = shown.shape[-1] * WIDTH
    complaints = {
        name: complaint(found[name], value, torch.float32, length=length, logit=largest, magnitude=1.0)
        for name, value in wanted.items()
    }
    return {name: text for name, text in complaints.items() if text is not None}


def sharp(model: Attend, x: Tensor) -> None:
    """Some rows are one-hot, and no column is the same for all heads."""
    with torch.no_grad():
        model.q_proj.weight *= torch.linspace(1, 6, HEADS).repeat_interleave(WIDTH)[:, None]


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
