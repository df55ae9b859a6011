"""Calls of `sqrtdk.attention` by a module, each with the formula that anyone would write for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.audit.records import CheckReport
from sqrtdk.impl import choice
from sqrtdk.impl.kernel import build
from sqrtdk.tracing import AttentionCall, Trace

B, H, L, E, WIDTH = 2, 4, 11, 16, 24
PLAIN = "0.25 * q.k"
PAST = torch.ones(L, L).tril().bool()
LOWEST = torch.finfo(torch.float32).min
BAND = torch.arange(L)[:, None] - torch.arange(L)


class Attend(nn.Module):
    """Projections, and one call of `sqrtdk.attention`; an option that is a name stands for the module's attribute."""

    def __init__(self, impl: str, kv: int = H, value_dim: int = E, on_q: float = 1.0, **options: Any) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, H * E)
        self.k, self.v = nn.Linear(WIDTH, kv * E), nn.Linear(WIDTH, kv * value_dim)
        self.gains = nn.Parameter(torch.linspace(0.1, 0.4, H).view(H, 1, 1))
        self.gain = nn.Parameter(torch.tensor(0.3))
        self.table = nn.Parameter(torch.linspace(0.1, 0.9, 3 * H).view(3, H))
        self.logits = nn.Parameter(torch.linspace(-1.0, 2.0, H))
        self.kv, self.on_q, self.impl, self.options = kv, on_q, impl, options
        with torch.no_grad():
            self.q.weight.mul_(6.0)  # logits that matter

    @property
    def row(self) -> Tensor:
        """Gains of a layer among several."""
        return self.table[1].view(H, 1, 1)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.q(x), *(f(x if memory is None else memory) for f in (self.k, self.v))
        heads = zip((q, k, v), (H, self.kv, self.kv), strict=True)
        q, k, v = (t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in heads)
        q = q if self.on_q == 1.0 else q * self.on_q
        options = {n: getattr(self, o) if isinstance(o, str) else o for n, o in self.options.items()}
        found = sqrtdk.attention(q, k, v, impl=self.impl, enable_gqa=self.kv != H, **options)
        return found if isinstance(found, Tensor) else found[0]


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, and the formula that anyone would write for it."""

    formula: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    keys: int | None = None  # of another sequence

    def inputs(self) -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(1)
        x = torch.randn(B, L, WIDTH, generator=drawn)
        return (x,) if self.keys is None else (x, torch.randn(B, self.keys, WIDTH, generator=drawn))

    def model(self, impl: str) -> Attend:
        torch.manual_seed(0)
        return Attend(impl, **self.options)


def case(formula: str, keys: int | None = None, **options: Any) -> Case:
    return Case(f"softmax({formula})", options, keys)


def hiding(seen: Tensor, fill: float) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, fill)


PADDED = (torch.arange(L) < torch.tensor([[L], [L - 3]])).view(B, 1, 1, L)
RANDOM = torch.rand(B, 1, L, L, generator=torch.Generator().manual_seed(2)) < 0.5
BLIND = PAST & (torch.arange(L) != 4)[:, None]  # row 4 sees nothing
BIAS = torch.randn(H, L, L, generator=torch.Generator().manual_seed(3))
ALIBI = sqrtdk.positions.alibi(H)
CASES: dict[str, Case] = {
    "plain": case(PLAIN),
    "causal": case(f"{PLAIN} + causal", is_causal=True),
    "cross": case(PLAIN, 7),
    "causal_cross": case(f"{PLAIN} + causal", 15, is_causal=True),
    "lower_right": case(f"{PLAIN} + causal_lower_right", 15, causal_lower_right=True),
    "lower_right_blind_rows": case(f"{PLAIN} + causal_lower_right", 7, causal_lower_right=True),
    "lower_right_of_a_square": case(f"{PLAIN} + causal", causal_lower_right=True),
    "window": case(f"{PLAIN} + window", window=(3, 0)),
    "window_of_two_sides": case(f"{PLAIN} + window", window=(2, 1)),
    "window_ahead": case(f"{PLAIN} + window", window=(0, None)),
    "window_of_everything": case(PLAIN, window=(L, L)),
    "window_as_wide_as_causal": case(f"{PLAIN} + causal", window=(L - 1, 0)),
    "window_and_causal": case(f"{PLAIN} + window", is_causal=True, window=(3, 2)),
    "window_lower_right": case(f"{PLAIN} + window", 15, causal_lower_right=True, window=(3, None)),
    "one_ahead": case(f"{PLAIN} + mask", window=(None, 1)),
    "bool_causal": case(f"{PLAIN} + causal", attn_mask=PAST),
    "bool_any": case(f"{PLAIN} + mask", attn_mask=RANDOM),
    "bool_blind_row": case(f"{PLAIN} + causal", attn_mask=BLIND),
    "bool_all_true": case(PLAIN, attn_mask=torch.ones(L, L, dtype=torch.bool)),
    "bool_inverted": case(f"{PLAIN} + window", attn_mask=~PAST),
    "padding": case(f"{PLAIN} + padding", attn_mask=PADDED),
    "padding_one_row": case(f"{PLAIN} + padding", attn_mask=torch.arange(L) < L - 2),
    "padding_and_causal": case(f"{PLAIN} + causal", attn_mask=PADDED, is_causal=True),
    "padding_and_window": case(f"{PLAIN} + window", attn_mask=PADDED, window=(3, 0)),
    "float_causal": case(f"{PLAIN} + causal", attn_mask=hiding(PAST, -math.inf)),
    "float_lowest": case(f"{PLAIN} + causal", attn_mask=hiding(PAST, LOWEST)),
    "float_uniform_row": case(f"{PLAIN} + causal", attn_mask=hiding(BLIND, LOWEST)),
    "float_lowest_padding_and_causal": case(
        f"{PLAIN} + padding + causal", attn_mask=hiding(PADDED, LOWEST), is_causal=True
    ),
    "float_and_bias": case(f"{PLAIN} + bias + causal", attn_mask=BIAS.masked_fill(~PAST, -math.inf)),
    "float_lowest_and_bias": case(f"{PLAIN} + bias + causal", attn_mask=BIAS.masked_fill(~PAST, LOWEST)),
    "zero_one": case(f"{PLAIN} + zero-one mask", attn_mask=PAST.float()),
    "bias": case(f"{PLAIN} + bias", bias=BIAS),
    "bias_of_zeros": case(PLAIN, bias=torch.zeros(L, L)),
    "bias_by_position": case(f"{PLAIN} + relative + causal", bias=torch.sin(BAND.float()), is_causal=True),
    "bias_that_hides": case(f"{PLAIN} + padding + causal", bias=hiding(PADDED, LOWEST), is_causal=True),
    "alibi": case(f"{PLAIN} + alibi + causal", bias=ALIBI, is_causal=True),
    "alibi_both_ways": case(f"{PLAIN} + alibi", bias=ALIBI),
    "softcap": case(f"5 * tanh({PLAIN} / 5)", softcap=5.0),
    "softcap_bias_causal": case(f"5 * tanh({PLAIN} / 5) + bias + causal", softcap=5.0, bias=BIAS, is_causal=True),
    "sinks": case(f"{PLAIN} + sinks", sinks="logits"),
    "sinks_one_number": case(f"{PLAIN} + causal + sinks", sinks=0.0, is_causal=True),
    "sinks_and_window": case(f"{PLAIN} + window + sinks", sinks="logits", is_causal=True, window=(4, 0)),
    "grouped": case(f"{PLAIN} + causal", kv=2, is_causal=True),
    "one_key_head": case(PLAIN, kv=1),
    "wide_values": case(PLAIN, value_dim=40),
    "gain_a_head": case("gains[h] * q.k", scale="gains"),
    "gain_of_a_table": case("table[h] * q.k", scale="row"),
    "gain": case("gain * q.k + causal", scale="gain", is_causal=True),
    "gain_softcap": case("5 * tanh(gains[h] * q.k / 5)", scale="gains", softcap=5.0),
    "gain_a_head_grouped": case("gains[h] * q.k", scale="gains", kv=2),
    "log_n": case(f"{math.log(L) / 4:.4g} * q.k", scale=sqrtdk.scales.log_n()),
    "log_n_causal": case("rows * q.k + causal", scale=sqrtdk.scales.log_n(), is_causal=True),
    "fixed": case("0.5 * q.k", scale=0.5),
    "missing": case("q.k", scale=1.0),
    "inverted": case("4 * q.k", scale=4.0),
    "twice": case("0.0625 * q.k", on_q=0.25),
    "scaled_on_q": case(PLAIN, on_q=0.25, scale=1.0),
    "cosine": case("10 * l2(q).l2(k)", score=sqrtdk.scores.cosine(gain=10.0)),
    "statistics": case(f"{PLAIN} + causal", is_causal=True, return_aux=sqrtdk.AuxRequest.all()),
}


# -- running them ------------------------------------------------------------------------------------------------------


def load_kernel() -> None:
    """Build it, if it is not there, and load it."""
    build.ready()


@contextlib.contextmanager
def kernel(taken: bool) -> Iterator[None]:
    """`impl="auto"` takes the compiled kernel for every call that it can run, or for none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "SMALLEST_COMPILED", dict.fromkeys(choice.SMALLEST_COMPILED, 0))
        if not taken:
            patched.setattr(choice, "loaded", lambda: False)
            patched.setattr(choice, "why_not_loaded", lambda: "left out")
        yield


def traced(model: nn.Module, *inputs: Tensor, grad: bool = False, **options: Any) -> Trace:
    with torch.set_grad_enabled(grad), sqrtdk.trace(model, **options) as run:
        model(*inputs)
    return run


def only(run: Trace, kind: str = "compiled") -> AttentionCall:
    assert (run.not_measured, run.not_attention) == ((), ())
    (call,) = run.calls
    assert call.kind == kind
    return call


def checked(model: nn.Module, inputs: Any, **options: Any) -> CheckReport:
    return sqrtdk.check(model.eval(), inputs, **options)


def told(report: CheckReport) -> list[Any]:
    """What an audit says, without the numbers and the ways of measuring."""
    calls = [(j.call.formula, j.verdict, j.mistake, j.declared_by, without_fit(j.reason)) for j in report.calls]
    return [calls, [(f.rule, f.severity, f.site, without_fit(f.message)) for f in report.findings], report.not_measured]


def without_fit(reason: str | None) -> str | None:
    """Without R^2, which is of all pairs in a kernel's call, and of the visible ones in a dense call."""
    return reason and re.sub(r" \(R\^2 = [^)]*\)", "", reason)
