"""Operators of flash-attn, xformers and torch's CUDA build, read by their schemas; stand-ins compute what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from sqrtdk.tracing.readback.kernels import KERNELS
from tests.attentions import stand_in_kernels as kernels
from tests.attentions.each import each
from tests.support.needs import needs

B, L, S, H, E = 2, 6, 6, 4, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
EXACT = E**-0.5


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    with kernels.registered():
        yield


class Attention(nn.Module):
    """Projections to (B, L, H, E), and an operator."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], kv_heads: int = H, rows: int = L) -> None:
        super().__init__()
        self.q = nn.Linear(16, H * E)
        self.k, self.v = (nn.Linear(16, kv_heads * E) for _ in range(2))
        self.attend, self.rows = attend, rows

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(f(y).unflatten(-1, (-1, E)) for f, y in ((self.q, x[:, -self.rows :]), (self.k, x), (self.v, x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


def flash(scale: float = EXACT, causal: bool = False, left: int = -1, right: int = -1, cap: float = 0.0,
          slopes: Tensor | None = None, dropout: float = 0.0) -> Callable[..., Tensor]:  # fmt: skip
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = torch.ops.flash_attn._flash_attn_forward
        return operator(q, k, v, dropout, scale, causal, left, right, cap, slopes, False)[0]

    return run


def xformers(kind: int = 0, scale: float | None = None, window: int | None = None, bias: Tensor | None = None,
             used: Tensor | None = None) -> Callable[..., Tensor]:  # fmt: skip
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operator = torch.ops.xformers.efficient_attention_forward_cutlass
        return operator(q, k, v, bias, None, None, None, 0.0, False, kind, scale, used, window)[0]

    return run


def trace_of(model: nn.Module) -> tuple[AttentionCall, Tensor]:
    return kernels.traced(model, torch.randn(B, S, 16, dtype=torch.float64))


BIAS = torch.randn(1, H, L, S, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[Callable[..., Tensor], str, dict[str, Any]]] = {
    "plain": (flash(), "softmax(0.3536 * q.k)", {}),
    "causal": (flash(causal=True), "softmax(0.3536 * q.k + causal)", {"right": 0}),
    "window": (flash(left=2, right=0), "softmax(0.3536 * q.k + window)", {"left": 2, "right": 0}),
    "two sides": (flash(left=1, right=2), "softmax(0.3536 * q.k + window)", {"left": 1, "right": 2}),
    "softcap": (flash(cap=5.0), "softmax(5 * tanh(0.3536 * q.k / 5))", {"softcap": 5.0}),
    "alibi": (flash(slopes=SLOPES), "softmax(0.3536 * q.k + alibi)", {"slopes": SLOPES}),
    "all": (
        flash(causal=True, cap=5.0, slopes=SLOPES),
        "softmax(5 * tanh(0.3536 * q.k / 5) + alibi + causal)",
        {"softcap": 5.0, "slopes": SLOPES, "right": 0},
    ),
    "xformers": (xformers(), "softmax(0.3536 * q.k)", {}),
    "xformers upper left": (xformers(1), "softmax(0.3536 * q.k + causal)", {"right": 0, "lower_right": False}),
    "xformers window": (xformers(2, window=3), "softmax(0.3536 * q.k + window)", {"left": 2, "right": 0}),
    "xformers bias": (xformers(bias=BIAS), "softmax(0.3536 * q.k + bias)", {"bias": BIAS[0]}),
}


def compare(call: AttentionCall, model: Attention, x: Tensor, **options: Any) -> None:
    """Statistics and sizes against the logits, written out."""
    q, k, _ = model.split(x)
    sides = {name: options.pop(name) for name in ("left", "right", "lower_right") if name in options}
    kernels.check_statistics(call, q, k, EXACT, sides, **options)
    assert (call.batch, call.heads, call.kv_heads) == (B, H, k.shape[2])
    assert (call.query_len, call.key_len, call.head_dim) == (q.shape[1], k.shape[1], E)
    assert call.output_rms is not None


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_read(name: str) -> None:
    attend, formula, options = CASES[name]
    model = Attention(attend)
    call, x = trace_of(model)
    assert (call.kind, call.formula, call.score) == ("kernel", formula, "dot")
    assert call.scale.agree is True
    assert call.scale.ratio == pytest.approx(1.0)
    compare(call, model, x, **options)


@each("factor", [0.5, E**-0.5, E**0.5, 2.0])
@each("attend", [lambda s: flash(s), lambda s: xformers(scale=s)])
def test_a_wrong_scale_is_read(attend: Callable[[float], Callable[..., Tensor]], factor: float) -> None:
    """Also one that stands before the operator: scaled twice."""
    call, _ = trace_of(Attention(attend(EXACT * factor)))
    assert call.scale.effective == pytest.approx(EXACT * factor)
    assert call.scale.agree is True
    twice, _ = trace_of(Attention(lambda q, k, v: attend(EXACT)(q * factor, k, v)))
    assert twice.scale.effective == pytest.approx(EXACT * factor)
    assert twice.scale.agree is True


def test_fewer_rows_than_keys_stand_at_the_end() -> None:
    """The last query beside the last key; xformers has a number for the other."""
    model = Attention(flash(causal=True), rows=3)
    call, x = trace_of(model)
    assert call.formula == "softmax(0.3536 * q.k + causal_lower_right)"
    assert call.mask is not None
    assert (call.mask.least, call.mask.greatest, call.mask.band) == (-3, 2, True)
    compare(call, model, x, right=0)
    upper = Attention(xformers(1), rows=3)
    call, x = trace_of(upper)
    assert call.formula == "softmax(0.3536 * q.k + causal)"
    compare(call, upper, x, right=0, lower_right=False)
    one = Attention(flash(causal=True), rows=1)
    call, x = trace_of(one)
    assert (call.formula, call.mask) == ("softmax(0.3536 * q.k)", None)


def test_rows_that_see_no_key_are_counted() -> None:
    """More queries than keys: the first of them stand before every key."""
    model = Attention(lambda q, k, v: flash(causal=True)(q, k[:, :4], v[:, :4]))
    call, _ = trace_of(model)
    assert call.mask is not None
    assert call.mask.blind_rows == B * H * 2
    assert call.stats is not None
    assert call.stats.blind_rows == (B * 2,) * H


def test_a_window_one_key_ahead_is_seen() -> None:
    call, _ = trace_of(Attention(flash(left=-1, right=1)))
    assert call.mask is not None
    assert (call.mask.least, call.mask.ahead_by_one) == (-1, B * H)
    assert (call.future_weight or 0.0) > 0.01


def test_groups_of_heads() -> None:
    model = Attention(flash(causal=True), kv_heads=2)
    call, x = trace_of(model)
    assert call.scale.agree is True
    compare(call, model, x, right=0)


def test_keys_beyond_the_used_ones_are_not_seen() -> None:
    used = torch.tensor([6, 4], dtype=torch.int32)
    model = Attention(lambda q, k, v: torch.ops.flash_attn_3.fwd(q, k, v, seqused_k=used, softmax_scale=EXACT)[0])
    call, x = trace_of(model)
    assert call.scale.agree is True
    assert call.formula == "softmax(0.3536 * q.k)"
    assert call.stats is not None
    assert call.stats.keys == (5.0,) * H
    with torch.no_grad():
        q, k, _ = model.split(x)
        largest = [
            max(float(kernels.logits_of(q[n], k[n, : int(used[n])], EXACT)[h].max()) for n in range(B))
            for h in range(H)
        ]
    assert call.stats.max_logit == pytest.approx(largest, rel=1e-6)


@each("written", [False, True])
def test_the_third_version(written: bool) -> None:
    """Its scale has a default, and its result may be written where the caller says."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros_like(q) if written else None
        result = torch.ops.flash_attn_3.fwd(q, k, v, out=out, is_causal=True)
        return result[0] if out is None else out

    model = Attention(attend)
    call, x = trace_of(model)
    assert call.formula == "softmax(0.3536 * q.k + causal)"
    assert [factor.source for factor in call.scale.factors] == ["kernel default 1/sqrt(E)"]
    compare(call, model, x, right=0)


def test_what_is_not_read_is_named() -> None:
    """A product of further parts of q and k, inside the kernel: neither its scale nor its logits are known."""
    model = Attention(lambda q, k, v: torch.ops.flash_attn_3.fwd(q, k, v, q_v=torch.zeros_like(q))[0])
    call, _ = trace_of(model)
    assert call.unknown == ("q_v of the kernel",)
    assert call.formula == "softmax(unknown(q_v of the kernel)(0.3536 * q.k))"
    assert call.scale.effective is None
    assert (call.stats, call.stats_reason) == (None, "q_v of the kernel is not read")


def test_a_factor_for_each_position_is_none_for_each_head() -> None:
    """(L, 1, 1) stands where (B, H, L, E) has its heads."""
    model = Attention(lambda q, k, v: flash()(q * torch.arange(2.0, L + 2).log()[:, None, None], k, v))
    call, _ = trace_of(model)
    assert call.unknown == ("a factor for each position",)
    assert (call.scale.effective, call.scale.per_head) == (None, None)


def test_other_operators_of_xformers() -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.xformers_flash.flash_fwd(
            q, k, v, None, None, None, L, S, 0.0, EXACT, True, -1, -1, False, None
        )[0]

    def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.xformers_flash3.flash_fwd(q, k, v, None, None, None, None, L, S, 0.0, EXACT, True)[0]

    for attend in (two, three):
        model = Attention(attend)
        call, x = trace_of(model)
        assert call.formula == "softmax(0.3536 * q.k + causal)"
        compare(call, model, x, right=0)


@each("way", ["stacked", "stacked and turned", "one projection"])
def test_q_k_and_v_in_one_tensor(way: str) -> None:
    """`flash_attn_qkvpacked_func` takes them apart again."""

    class Whole(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.split(x)
            if way == "stacked":
                qkv = torch.stack([q * 0.5, k, v], 2)
            elif way == "stacked and turned":
                qkv = torch.stack([y.transpose(1, 2) for y in (q * 0.5, k, v)], 2).transpose(1, 3)
            else:
                weights, biases = (
                    torch.cat([getattr(f, name) for f in (self.q, self.k, self.v)]) for name in ("weight", "bias")
                )
                qkv = nn.functional.linear(x, weights, biases).unflatten(-1, (3, H, E))
            return flash(causal=True)(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])

    call, _ = trace_of(Whole(flash()))
    assert call.formula == f"softmax({'0.3536' if way == 'one projection' else '0.1768'} * q.k + causal)"
    assert call.scale.agree is True


def test_a_rotation_and_a_norm_before_a_kernel() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angle = torch.arange(L)[:, None] * 100.0 ** (-torch.arange(0, E, 2) / E)
        cos, sin = angle.cos().repeat(1, 2)[:, None], angle.sin().repeat(1, 2)[:, None]
        q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x * cos + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin for x in (q, k))
        return flash(causal=True)(q, k, v)

    call, _ = trace_of(Attention(attend))
    assert call.formula == "softmax(0.3536 * rope(rms(q)).rope(rms(k)) + causal)"
    assert call.scale.agree is True


@each("name", ["causal", "window", "softcap", "xformers window"])
def test_without_data(name: str) -> None:
    attend, formula, _ = CASES[name]
    with torch.device("meta"), torch.no_grad():
        model = Attention(attend)
        with sqrtdk.trace(model) as run:
            model(torch.randn(B, S, 16))
    (call,) = run.calls
    assert (call.formula, call.batch, call.heads) == (formula, B, H)
    assert call.scale.effective == pytest.approx(EXACT)
    assert run.not_measured == ()


@needs("_cudnn_attention_forward", torch="2.8")
def test_heads_first_and_upper_left() -> None:
    """Torch's cuDNN operator runs with a stand-in for its CUDA kernel."""

    def cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Any, ends: Any, other: Any, longest: int, further: int,
              lse: bool, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
              scale: float | None = None) -> Any:  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out = kernels.attend_all(q, k, v, scale, right=0 if causal else -1, lower_right=False)
        none = torch.zeros(1)
        return out.transpose(1, 2), none, none, none, 0, 0, none, none, none

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        operator = torch.ops.aten._cudnn_attention_forward
        return operator(q, k, v, None, None, None, q.shape[2], S, False, 0.0, True, scale=0.5)[0]

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_cudnn_attention_forward", cudnn, "CPU")
        call, _ = trace_of(Attention(attend, rows=3))
    finally:
        library._destroy()
    assert call.formula == "softmax(0.5 * q.k + causal)"
    assert (call.batch, call.heads, call.query_len, call.key_len) == (B, H, 3, S)
    assert call.scale.agree is True


@each("rows, mask", [(3, "causal_lower_right"), (S, "causal")])
def test_the_flag_of_the_flash_kernel_of_sdpa_is_lower_right(rows: int, mask: str) -> None:
    """As `torch.nn.attention.bias.causal_lower_right` calls it; without a GPU it runs without data."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=0.5)[0]

    with torch.device("meta"), torch.no_grad():
        model = Attention(attend, rows=rows)
        with sqrtdk.trace(model) as run:
            model(torch.randn(B, S, 16))
    (call,) = run.calls
    assert call.formula == f"softmax(0.5 * q.k + {mask})"


def test_every_operator_has_a_row() -> None:
    assert set(kernels.OPERATORS) <= set(KERNELS)
