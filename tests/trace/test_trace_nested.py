"""Nested tensors, jagged and strided: attention over them is one call, and what does not exist is not counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as sdpa

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.each import each

pytestmark = pytest.mark.filterwarnings("ignore:.*nested:UserWarning")

H, E = 4, 8
EXACT = E**-0.5
LENGTHS = (6, 3, 1)
LAYOUTS = [torch.jagged, torch.strided]


class Nested(nn.Module):
    """Projections of a nested batch, made of padded rows, and an attention of (N, H, *, E)."""

    def __init__(self, layout: torch.layout, attend: Callable[..., Tensor] = sdpa, *, norm: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, H * E) for _ in range(3))
        self.out = nn.Linear(H * E, 16)
        self.layout, self.attend, self.norm = layout, attend, norm

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        if not x.is_nested:
            return tuple(f(x).unflatten(-1, (H, E)).transpose(1, 2) for f in (self.q, self.k, self.v))
        heads = [f(x) for f in (self.q, self.k, self.v)]
        if self.layout == torch.strided:
            return tuple(y.view(len(LENGTHS), -1, H, E).transpose(1, 2).contiguous() for y in heads)
        q, k, v = (y.unflatten(-1, (H, E)) for y in heads)
        if self.norm:
            q, k = (functional.rms_norm(y, (E,)) for y in (q, k))
        return tuple(y.transpose(1, 2) for y in (q, k, v))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row[:length] for row, length in zip(x, LENGTHS, strict=True)]
        batch = torch.nested.as_nested_tensor(rows, layout=self.layout)
        joined = self.attend(*self.split(batch)).transpose(1, 2)
        if self.layout == torch.strided:
            return self.out(joined.contiguous().values().view(-1, H * E))
        return self.out(joined.flatten(-2).values())


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * EXACT).softmax(-1) @ v


def run_of(model: nn.Module, *, train: bool = False) -> tuple[Trace, Tensor]:
    model = model.double()
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16, dtype=torch.float64)
    with torch.set_grad_enabled(train):
        plain = model(x)
        with sqrtdk.trace(model) as run:
            output = model(x)
    assert torch.equal(plain, output)
    return run, x


@pytest.mark.parametrize(
    ("name", "layout", "attend"),
    [("jagged", torch.jagged, sdpa), ("strided", torch.strided, sdpa), ("eager, strided", torch.strided, eager)],
)
def test_a_nested_batch_is_one_call(name: str, layout: torch.layout, attend: Callable[..., Tensor]) -> None:
    model = Nested(layout, attend)
    run, x = run_of(model)
    assert run.not_measured == run.not_attention == ()
    (call,) = run.calls
    assert (call.kind, call.formula) == ("eager" if "eager" in name else "sdpa", "softmax(0.3536 * q.k)")
    assert (call.batch, call.heads, call.query_len, call.key_len, call.head_dim) == (3, H, 6, 6, E)
    assert call.scale.ratio == pytest.approx(1.0)
    assert call.scale.agree is (True if name == "jagged" else None)  # of a strided projection no values are kept
    with torch.no_grad():
        q, k, _ = model.split(x)
        sequences = [(q[n, :, :length] @ k[n, :, :length].mT) * EXACT for n, length in enumerate(LENGTHS)]
    entropy = torch.cat([torch.special.entr(z.softmax(-1)).sum(-1) for z in sequences], -1).mean(-1)
    assert call.stats is not None
    assert (call.stats.rows, call.stats.blind_rows) == (sum(LENGTHS), (0,) * H)
    assert call.stats.max_logit == pytest.approx(torch.stack([z.amax((1, 2)) for z in sequences]).amax(0).tolist())
    assert call.stats.entropy_nats == pytest.approx(entropy.tolist())


@each("factor", [EXACT, 0.5, E**0.5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_scale_is_read(layout: torch.layout, factor: float) -> None:
    """As the argument, and before the call."""
    for attend in (
        lambda q, k, v: sdpa(q, k, v, scale=EXACT * factor),
        lambda q, k, v: sdpa(q * factor, k, v),
        lambda q, k, v: sdpa(q, k / (1 / factor), v),
    ):
        (call,) = run_of(Nested(layout, attend))[0].calls
        assert call.scale.effective == pytest.approx(EXACT * factor)
        assert call.scale.agree is not False


def test_a_norm_of_jagged_tensors() -> None:
    (call,) = run_of(Nested(torch.jagged, lambda q, k, v: sdpa(q, k, v, scale=1.0), norm=True))[0].calls
    assert call.formula == "softmax(rms(q).rms(k))"
    assert call.scale.agree is True


def test_in_training() -> None:
    (call,) = run_of(Nested(torch.jagged), train=True)[0].calls
    assert call.formula == "softmax(0.3536 * q.k)"
    assert call.scale.agree is True


def test_what_is_not_read_is_named() -> None:
    model = Nested(torch.strided, lambda q, k, v: ((q @ k.transpose(-1, -2)).tanh() * EXACT).softmax(-1) @ v)
    (call,) = run_of(model)[0].calls
    assert (call.unknown, call.scale.effective) == (("tanh",), None)
    assert call.stats is None


def test_two_traces_at_once() -> None:
    model = Nested(torch.jagged).double()
    x = torch.randn(len(LENGTHS), max(LENGTHS), 16, dtype=torch.float64)
    with torch.no_grad(), sqrtdk.trace(model) as outer, sqrtdk.trace(model) as inner:
        model(x)
    assert [call.formula for run in (outer, inner) for call in run.calls] == ["softmax(0.3536 * q.k)"] * 2
