"""Sequences of unlike lengths, end to end: torch.nn.attention.varlen, flash-attn, xformers, paged keys."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("torch.nn.attention.varlen")

from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.attention.varlen import varlen_attn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from sqrtdk.tracing.readback import addends
from tests.attentions import stand_in_kernels as kernels
from tests.attentions.each import each

H, E = 4, 8
EXACT = E**-0.5
LENGTHS, LONGER = (3, 5, 1), (4, 7, 5)  # of queries, and of more keys
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
newer = pytest.mark.skipif(
    not hasattr(varlen, "varlen_attn_out"), reason=f"varlen_attn of torch {torch.__version__} has fewer arguments"
)


@contextlib.contextmanager
def operators() -> Iterator[None]:
    """Stand-ins; torch's own varlen code then runs on a CPU, down to its CUDA kernel."""
    library = torch.library.Library("aten", "IMPL")
    with kernels.registered():
        library.impl("_flash_attention_forward", _flash, "CPU")
        library.impl("_flash_attention_forward_no_dropout_inplace", _flash_into, "CPU")
        yield
    library._destroy()


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    with operators():
        yield


def _flash(q: Tensor, k: Tensor, v: Tensor, query_ends: Tensor, key_ends: Tensor, longest: int, further: int,
           dropout: float, causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int = -1,
           window_size_right: int = -1, seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None,
           block_table: Tensor | None = None, num_splits: int | None = None) -> Any:  # fmt: skip
    out = kernels.attend_all(
        q,
        k,
        v,
        q.shape[-1] ** -0.5 if scale is None else scale,
        left=window_size_left,
        right=0 if causal else window_size_right,
        query_ends=query_ends,
        key_ends=key_ends,
        used=seqused_k,
        pages=block_table,
        slopes=alibi_slopes,
    )
    return out, *(torch.zeros(1) for _ in range(4))


def _flash_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out.copy_(_flash(*args, **kwargs)[0])
    return torch.zeros(1)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class Packed(nn.Module):
    """Projections of tokens (T, 16) to (T, H, E), and an operator; the queries are of the first tokens."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], queries: int, kv_heads: int = H) -> None:
        super().__init__()
        self.q = nn.Linear(16, H * E)
        self.k, self.v = (nn.Linear(16, kv_heads * E) for _ in range(2))
        self.attend, self.queries = attend, queries

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(f(y).unflatten(-1, (-1, E)) for f, y in ((self.q, x[: self.queries]), (self.k, x), (self.v, x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


def trace_of(model: nn.Module, tokens: int) -> tuple[AttentionCall, Tensor]:
    return kernels.traced(model, torch.randn(tokens, 16, dtype=torch.float64))


def compare(call: AttentionCall, model: Packed, x: Tensor, rows: tuple[int, ...], columns: tuple[int, ...],
            scale: float = EXACT, slopes: Tensor | None = None, **sides: Any) -> None:  # fmt: skip
    """Statistics against each sequence's own logits."""
    q, k, _ = model.split(x)
    kernels.check_statistics(call, q.split(rows), k.split(columns), scale, sides, slopes=slopes)
    assert (call.batch, call.heads, call.kv_heads) == (len(rows), H, k.shape[1])
    assert (call.query_len, call.key_len) == (max(rows), max(columns))
    assert call.stats is not None
    assert call.stats.rows == sum(rows)


def torch_varlen(scale: float | None = None, window: tuple[int, int] = (-1, -1), rows: tuple[int, ...] = LENGTHS,
                 columns: tuple[int, ...] = LENGTHS, **more: Any) -> Callable[..., Tensor]:  # fmt: skip
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(
            q, k, v, ends(rows), ends(columns), max(rows), max(columns), scale=scale, window_size=window, **more
        )

    return run


def flash_varlen(
    scale: float = EXACT,
    causal: bool = False,
    slopes: Tensor | None = None,
    rows: tuple[int, ...] = LENGTHS,
    columns: tuple[int, ...] = LENGTHS,
) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, ends(rows), ends(columns), max(rows), max(columns), 0.0, scale, causal, alibi_slopes=slopes
        )[0]

    return run


def xformers_packed(kind: int) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[None] for x in (q, k, v))
        at = ends(LENGTHS)
        operator = torch.ops.xformers.efficient_attention_forward_cutlass
        return operator(q, k, v, None, at, at, max(LENGTHS), 0.0, False, kind, None, None, None)[0][0]

    return run


CASES: dict[str, tuple[Callable[..., Tensor], str, dict[str, Any]]] = {
    "torch": (torch_varlen(), "softmax(0.3536 * q.k)", {}),
    "torch causal": (torch_varlen(window=(-1, 0)), "softmax(0.3536 * q.k + causal)", {"right": 0}),
    "torch window": (torch_varlen(window=(2, 0)), "softmax(0.3536 * q.k + window)", {"left": 2, "right": 0}),
    "flash": (flash_varlen(), "softmax(0.3536 * q.k)", {}),
    "flash causal": (flash_varlen(causal=True), "softmax(0.3536 * q.k + causal)", {"right": 0}),
    "flash alibi": (flash_varlen(slopes=SLOPES), "softmax(0.3536 * q.k + alibi)", {"slopes": SLOPES}),
    "xformers": (xformers_packed(0), "softmax(0.3536 * q.k)", {}),
    "xformers causal": (xformers_packed(2), "softmax(0.3536 * q.k + causal)", {"right": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_packed_sequences_are_one_call(name: str) -> None:
    attend, formula, options = CASES[name]
    model = Packed(attend, sum(LENGTHS))
    call, x = trace_of(model, sum(LENGTHS))
    assert (call.kind, call.formula) == ("kernel", formula)
    assert call.scale.agree is True
    assert call.scale.ratio == pytest.approx(1.0)
    compare(call, model, x, LENGTHS, LENGTHS, **options)


@each("factor", [E**-0.5, 0.5, E**0.5])
@each("attend", [torch_varlen, flash_varlen])
def test_a_wrong_scale_is_read(attend: Callable[[float], Callable[..., Tensor]], factor: float) -> None:
    call, _ = trace_of(Packed(attend(EXACT * factor), sum(LENGTHS)), sum(LENGTHS))
    assert call.scale.effective == pytest.approx(EXACT * factor)
    assert call.scale.agree is True
    twice, _ = trace_of(Packed(lambda q, k, v: attend(EXACT)(q * factor, k, v), sum(LENGTHS)), sum(LENGTHS))
    assert twice.scale.effective == pytest.approx(EXACT * factor)
    assert twice.scale.agree is True


@each("attend", [torch_varlen(window=(-1, 0), columns=LONGER), flash_varlen(EXACT, True, columns=LONGER)])
def test_more_keys_than_queries(attend: Callable[..., Tensor]) -> None:
    """Each sequence's last query stands beside its own last key."""
    model = Packed(attend, sum(LENGTHS))
    call, x = trace_of(model, sum(LONGER))
    assert call.formula == "softmax(0.3536 * q.k + causal_lower_right)"
    assert call.mask is not None
    assert (call.mask.kind, call.mask.blind_rows, call.mask.masked_weight) == ("causal_lower_right", 0, 0.0)
    compare(call, model, x, LENGTHS, LONGER, right=0)


@newer
def test_slots_of_a_cache_that_are_filled_in_part() -> None:
    """Each sequence has 8 places for its keys, and uses fewer."""
    used = torch.tensor(LONGER, dtype=torch.int32)
    slots = (8, 8, 8)
    model = Packed(torch_varlen(window=(-1, 0), columns=slots, seqused_k=used), sum(LENGTHS))
    call, x = trace_of(model, sum(slots))
    assert call.formula == "softmax(0.3536 * q.k + causal_lower_right)"
    assert (call.batch, call.query_len, call.key_len) == (3, max(LENGTHS), max(LONGER))
    with torch.no_grad():
        q, k, _ = model.split(x)
        largest = []
        for a, b, length in zip(q.split(LENGTHS), k.split(slots), LONGER, strict=True):
            z = kernels.logits_of(a, b[:length], EXACT)
            largest.append(z.masked_fill(~kernels.visible(len(a), length, right=0), -math.inf).amax((1, 2)))
    assert call.stats is not None
    assert call.stats.max_logit == pytest.approx(torch.stack(largest).amax(0).tolist(), rel=1e-6)


def test_one_new_query_a_sequence_sees_all_its_keys() -> None:
    model = Packed(torch_varlen(window=(-1, 0), rows=(1, 1, 1), columns=LONGER), 3)
    call, x = trace_of(model, sum(LONGER))
    assert (call.formula, call.mask) == ("softmax(0.3536 * q.k)", None)
    compare(call, model, x, (1, 1, 1), LONGER, right=0)


def test_a_window_one_key_ahead_is_seen() -> None:
    model = Packed(torch_varlen(window=(5, 1)), sum(LENGTHS))
    call, _ = trace_of(model, sum(LENGTHS))
    assert call.mask is not None
    assert (call.mask.kind, call.mask.least) == ("window", -1)
    assert (call.future_weight or 0.0) > 0.01


@newer
def test_groups_of_heads() -> None:
    model = Packed(torch_varlen(enable_gqa=True), sum(LENGTHS), kv_heads=2)
    call, x = trace_of(model, sum(LENGTHS))
    assert call.scale.agree is True
    compare(call, model, x, LENGTHS, LENGTHS)


@newer
def test_a_result_written_where_the_caller_says() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q)
        at = ends(LENGTHS)
        varlen.varlen_attn_out(out, q, k, v, at, at, max(LENGTHS), max(LENGTHS), scale=0.5)
        return out

    call, _ = trace_of(Packed(attend, sum(LENGTHS)), sum(LENGTHS))
    assert call.formula == "softmax(0.5 * q.k)"
    assert (call.output_rms or 0.0) > 0


@newer
def test_paged_keys() -> None:
    """Pages of 2 tokens in another order than the sequences'; the last of each is filled in part."""
    lengths = (3, 4)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)

    class Pages(Packed):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            k, v = (y.unflatten(0, (4, 2)) for y in (k, v))
            used = torch.tensor(lengths, dtype=torch.int32)
            return varlen_attn(
                q, k, v, ends((1, 1)), None, 1, 4, window_size=(-1, 0), seqused_k=used, block_table=table
            )

    model = Pages(lambda q, k, v: q, 2)
    call, x = trace_of(model, 8)
    assert (call.formula, call.batch, call.key_len) == ("softmax(0.3536 * q.k)", 2, 4)
    with torch.no_grad():
        q, k, _ = model.split(x)
        pages = k.unflatten(0, (4, 2))
        largest = [
            kernels.logits_of(q[n : n + 1], pages[table[n].long()].flatten(0, 1)[: lengths[n]], EXACT).amax((1, 2))
            for n in range(2)
        ]
    assert call.stats is not None
    assert call.stats.max_logit == pytest.approx(torch.stack(largest).amax(0).tolist(), rel=1e-6)
    assert call.stats.keys == (3.5,) * H


@each("causal", [False, True])
def test_without_data(causal: bool) -> None:
    """Lengths are not known; that q and k have the same is."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = torch.empty(4, dtype=torch.int32)
        return varlen_attn(q, k, v, at, at, 5, 5, window_size=(-1, 0) if causal else (-1, -1))

    with torch.device("meta"), torch.no_grad():
        model = Packed(attend, 9)
        with sqrtdk.trace(model) as run:
            model(torch.randn(9, 16))
    (call,) = run.calls
    assert call.formula == "softmax(0.3536 * q.k + causal)" if causal else "softmax(0.3536 * q.k)"
    assert (call.batch, call.heads, call.query_len, call.key_len) == (3, H, 5, 5)
    assert call.scale.effective == pytest.approx(EXACT)


def test_sequences_of_one_length() -> None:
    model = Packed(torch_varlen(window=(1, 0), rows=(3, 3, 3), columns=(3, 3, 3)), 9)
    call, x = trace_of(model, 9)
    assert call.formula == "softmax(0.3536 * q.k + window)"
    compare(call, model, x, (3, 3, 3), (3, 3, 3), left=1, right=0)


@pytest.mark.parametrize("name", ["torch window", "flash alibi", "torch causal"])
def test_masks_too_large_to_hold(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is seen by name is told, the statistics are not measured, and the reason is."""
    monkeypatch.setattr(addends, "MOST_MASK_ELEMENTS", 8)
    attend, formula, _ = CASES[name]
    call, _ = trace_of(Packed(attend, sum(LENGTHS)), sum(LENGTHS))
    assert (call.formula, call.scale.agree) == (formula, True)
    assert call.stats is None
    assert call.stats_reason == "a mask of 3 x 5 rows and 5 keys would have to be held"


def test_a_sequence_without_tokens() -> None:
    lengths = (3, 0, 2)
    model = Packed(flash_varlen(causal=True, rows=lengths, columns=lengths), 5)
    call, _ = trace_of(model, 5)
    assert call.stats is not None
    assert (call.batch, call.stats.rows, call.stats.blind_rows) == (3, 5, (0,) * H)
    assert call.scale.agree is True
