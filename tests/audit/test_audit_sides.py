"""The verdict on attentions whose q and k went through more than a projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.audit.check import check
from sqrtdk.audit.records import CheckReport

B, L, DIM, H, E = 2, 8, 24, 4, 16
ROOT = E**-0.5
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()

everywhere = pytest.mark.parametrize("meta", [False, True])


class Attention(nn.Module):
    """Attention whose `attend` gets (B, H, L, E) of q, k and v."""

    def __init__(self, attend: Callable[..., Tensor], *, shared: bool = False, **parts: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, H * E) for _ in range(3))
        if shared:
            self.k = self.q
        self.attend = attend
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        q = self.q(x)
        k = q if self.k is self.q else self.k(x)
        q, k, v = (y.unflatten(-1, (-1, E)).transpose(1, 2) for y in (q, k, self.v(x)))
        return self.attend(self, q, k, v, *others)


def scores(q: Tensor, k: Tensor, v: Tensor, scale: float = ROOT) -> Tensor:
    """The plain attention."""
    return (q @ k.mT * scale).softmax(-1) @ v


def judged(attend: Callable[..., Tensor], *others: Tensor, meta: bool = False, **options: Any) -> CheckReport:
    """The audit of one attention."""
    report = check(Attention(attend, **options), (torch.randn(B, L, DIM), *others), static=meta)
    assert len(report.calls) == 1
    return report


def verdict(report: CheckReport) -> tuple[str, str | None]:
    """The verdict and the mistake of the one call."""
    (call,) = report.calls
    return call.verdict, call.mistake


# -- sums and positions that are data ----------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.0, 1.0, ROOT), ("exact", None)),
        ((ROOT, ROOT, 1.0), ("exact", None)),
        ((ROOT, ROOT, ROOT), ("unexplained", "twice")),
        ((1.0, 1.0, 1.0), ("unexplained", "missing")),
        ((ROOT, 1.0, ROOT), ("unmeasured", None)),
        ((ROOT, 1.0, 1.0), ("unmeasured", None)),
    ],
)
def test_factors_before_a_sum(
    factors: tuple[float, float, float], expected: tuple[str, str | None], meta: bool
) -> None:
    first, second, outer = factors

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> Tensor:
        other = m.other(y).unflatten(-1, (-1, E)).transpose(1, 2)
        return scores((q * first if first != 1.0 else q) + (other * second if second != 1.0 else other), k, v, outer)

    report = judged(attend, torch.randn(B, L, DIM), other=nn.Linear(DIM, H * E), meta=meta)
    assert verdict(report) == expected


@everywhere
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1.0, ROOT, ("exact", None)),
        (ROOT, ROOT, ("unexplained", "twice")),
        (1.0, 1.0, ("unexplained", "missing")),
    ],
)
def test_a_factor_before_tables_of_float_positions(
    before: float, after: float, expected: tuple[str, str | None], meta: bool
) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None, :, None] * 100.0 ** (-torch.arange(0, E, 2, device=q.device) / E)

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

        return scores(turn(q * before), turn(k), v, after)

    positions = torch.arange(L).float().expand(B, L).contiguous()
    assert verdict(judged(attend, positions, meta=meta)) == expected


# -- zeros and gains ---------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    ("scale", "expected"),
    [(ROOT, ("exact", None)), (1.0, ("unexplained", "missing")), (ROOT**2, ("unexplained", "twice"))],
)
def test_a_key_of_zeros_is_no_padded_head(scale: float, expected: tuple[str, str | None], meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = functional.pad(k.mT, (0, 1)).mT, functional.pad(v, (0, 0, 0, 1))
        return scores(q, k, v, scale)

    assert verdict(judged(attend, meta=meta)) == expected


@everywhere
def test_the_root_of_a_padded_transposed_head_is_named(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (functional.pad(q, (0, 8)) @ functional.pad(k.mT, (0, 0, 0, 8)) * 24**-0.5).softmax(-1) @ v

    assert verdict(judged(attend, meta=meta)) == ("unexplained", "padded_head")


def test_a_gain_of_two_behind_a_factor_is_no_scale_of_four() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (functional.rms_norm(x, (E,)) * E**-0.25 * m.gain for x in (q, k))
        return scores(q, k, v, 1.0)

    report = judged(attend, gain=nn.Parameter(torch.full((E,), 2.0)))
    (call,) = report.calls
    assert (call.verdict, call.call.scale.ratio) == ("exact", pytest.approx(1.0, rel=1e-4))


# -- an unknown order --------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("scale", "expected"),
    [(ROOT, ("exact", None)), (1.0, ("unexplained", "missing")), (ROOT**2, ("unexplained", "twice"))],
)
def test_sorted_keys_are_neither_causal_nor_a_leak(
    scale: float, expected: tuple[str, str | None], masked: bool, meta: bool
) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = k.norm(dim=-1).argsort(-1)[..., None].expand_as(k)
        z = q @ k.gather(-2, index).mT * scale
        if masked:
            z = z.masked_fill(~CAUSAL.to(z.device), -torch.inf)
        return z.softmax(-1) @ v.gather(-2, index)

    report = judged(attend, is_causal=True, meta=meta)
    assert verdict(report) == expected
    found = [f for f in report.findings if f.rule == "mask_audit"]
    assert [(f.severity, "gathered" in f.message) for f in found] == [("note", True)]


@pytest.mark.parametrize("own", [-5e4, -1e5])
def test_a_shared_projection_hides_its_own_key_without_alarm(own: float) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = (q @ k.mT * ROOT).masked_fill(torch.eye(L, dtype=torch.bool), own)
        return z.masked_fill(~CAUSAL, torch.finfo(z.dtype).min).softmax(-1) @ v

    report = judged(attend, shared=True)
    assert report.calls[0].call.shared_qk
    assert verdict(report) == ("exact", None)
    assert report.findings == ()


# -- rotations, decays, pools, factors of the rows ---------------------------------------------------------------------


def angles(x: Tensor) -> Tensor:
    """(L, E / 2)."""
    return torch.arange(L, device=x.device)[:, None] * 100.0 ** (-torch.arange(0, E, 2, device=x.device) / E)


def by_matrices(x: Tensor, inverse: bool) -> Tensor:
    c, s = angles(x).cos(), angles(x).sin()
    turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    return torch.einsum("ldij,bhldj->bhldi", turn, x.unflatten(-1, (-1, 2))).flatten(-2)


def by_points(x: Tensor, inverse: bool) -> Tensor:
    points = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(points * torch.polar(torch.ones_like(angles(x)), angles(x))).flatten(-2)


def by_decay(x: Tensor, inverse: bool) -> Tensor:
    """XPos: by the power of the position on q, by its inverse on k."""
    scale = torch.linspace(0.3, 1.0, E // 2, device=x.device) ** (torch.arange(L, device=x.device)[:, None] / 8)
    scale = 1 / scale if inverse else scale
    (a, b), cos, sin = x.chunk(2, -1), angles(x).cos() * scale, angles(x).sin() * scale
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def by_mean(x: Tensor, inverse: bool) -> Tensor:
    return x.unflatten(-2, (-1, 2)).mean(-2)


@everywhere
@pytest.mark.parametrize("change", [by_matrices, by_points, by_decay, by_mean])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (1.0, ROOT, ("exact", None)),
        (ROOT, 1.0, ("exact", None)),
        (ROOT, ROOT, ("unexplained", "twice")),
        (1.0, 1.0, ("unexplained", "missing")),
    ],
)
def test_the_scale_on_either_side_of_a_change(
    change: Callable[[Tensor, bool], Tensor],
    before: float,
    after: float,
    expected: tuple[str, str | None],
    meta: bool,
) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = change(q * before, False), change(k, True)
        return scores(q, k, change(v, False) if change is by_mean else v, after)

    assert verdict(judged(attend, meta=meta)) == expected


@everywhere
@pytest.mark.parametrize("where", ["gate", "rows"])
@pytest.mark.parametrize(
    ("scale", "expected"), [(ROOT, {"declared"}), (ROOT**2, {"unexplained"}), (1.0, {"unexplained", "unmeasured"})]
)
def test_a_factor_of_the_data_or_of_the_rows_is_no_mistake(
    scale: float, expected: set[str], where: str, meta: bool
) -> None:
    """What stands beside it is judged; a missing scale may stand in the factor of the rows."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths = 1.0 + torch.arange(L, device=q.device).float()[:, None]
        return scores(q * (m.gate(q).sigmoid() if where == "gate" else lengths.log1p()), k, v, scale)

    report = judged(attend, gate=nn.Linear(E, 1), meta=meta)
    assert verdict(report)[0] in expected
    if scale == 1.0:
        assert verdict(report) == (("unmeasured", None) if where == "rows" else ("unexplained", "missing"))
    if scale == ROOT**2:
        (call,) = report.calls
        assert "beside" in (call.reason or "")
