"""Verdicts on products, values and scores in other words: mistakes by name, scores and axes with rules of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import check
from sqrtdk.audit.records import CheckReport
from tests.attentions import products as styles
from tests.attentions import scores as others
from tests.attentions.each import each
from tests.attentions.products import DIM, ROOT, Attend, Attention, B, E, H, L

# name -> the factor that makes it
MISTAKES = {"missing": 1.0, "inverted": math.sqrt(E), "model_dim": DIM**-0.5, "head_count": H**-0.5}
PRODUCTS = styles.WHOLE | styles.SINGLE | {name: row[0] for name, row in (styles.ONE_QUERY | styles.WINDOWS).items()}


def report(attend: Attend, factor: float = ROOT, *, static: bool = False) -> CheckReport:
    return check(Attention(attend, factor).eval(), styles.inputs(), static=static)


def verdicts(checked: CheckReport) -> list[tuple[str, str | None]]:
    return [(judged.verdict, judged.mistake) for judged in checked.calls]


@each("mistake", MISTAKES)
@each("name", ["broadcast", "heads_last", "three_operands_features", "vector", "summed", "patches"])
def test_wrong_is_named(name: str, mistake: str) -> None:
    checked = report(PRODUCTS[name], MISTAKES[mistake])
    if mistake == "head_count" and checked.calls[0].call.heads == 1:
        assert verdicts(checked) == [("unexplained", "unknown")]  # one head: no number of heads to mistake
    else:
        assert verdicts(checked) == [("unexplained", mistake)]


def test_a_mean_over_the_features_is_a_scale() -> None:
    """(q * k).mean(-1) is q.k / d: one factor, muP's rule or a mistake; with the scale besides it is neither."""

    def attend(m: Attention, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        return (q.unsqueeze(-2) * k.unsqueeze(-3)).mean(-1).softmax(-1) @ v

    assert verdicts(report(attend)) == [("unexplained", "twice")]


@each("factor", [ROOT, 1.0, DIM**-0.5])
@each("name", others.DISTANCES)
def test_a_distance_is_no_mistake(name: str, factor: float) -> None:
    checked = report(others.DISTANCES[name][0], factor)
    assert verdicts(checked) == [("unmeasured", None)]
    (finding,) = checked.unjudged
    assert finding.severity == "note"
    assert "a distance score" in finding.message
    assert "|q - k|" in finding.message


@each("name", others.ADDITIVE)
def test_an_additive_score_is_no_mistake(name: str) -> None:
    checked = report(others.ADDITIVE[name][0])
    assert verdicts(checked) == [("unmeasured", None)]
    (finding,) = checked.unjudged
    assert (finding.severity, "an additive score" in finding.message) == ("note", True)


@each(
    "name, by",
    [
        ("cross_covariance", "parameter gain (learned)"),
        ("cross_covariance_columns", "parameter gain (learned)"),
        ("cross_covariance_fused", "parameter gain (learned)"),
        ("cosine_of_channels", "q/k norm (l2): scale 1.0"),
        ("channels_turned", "attention over channels: no scale (Fu et al. 2019, DANet)"),
    ],
)
@each("static", [False, True])
def test_channels_have_rules_of_their_own(name: str, by: str, static: bool) -> None:
    checked = report(others.CHANNELS[name][0], static=static)
    assert [(judged.verdict, judged.declared_by) for judged in checked.calls] == [("declared", by)]


@each(
    "factor, verdict",
    [(1.0, "declared"), (ROOT, "declared"), (1 / L, "declared"), (L**-0.5, "exact"), (0.3, "unmeasured")],
)
def test_scales_of_channels(factor: float, verdict: str) -> None:
    """No scale, 1/sqrt(channels), the mean and 1/sqrt(positions) are used; another is named and no mistake."""
    checked = report(others.channels, factor)
    assert verdicts(checked) == [(verdict, None)]
    if verdict == "unmeasured":
        assert checked.calls[0].reason == "attention over channels has no textbook scale, and nothing declares 0.3"


class Causal(nn.Module):
    """Says that it is causal, and attends over a window of earlier keys, or over channels."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.inner = Attention(attend)
        self.inner.is_causal = True

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def earlier(m: Attention, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.pad(t, (0, 0, L - 1, 0)).unfold(2, L, 1) for t in (k, v))
    before = torch.arange(L)[:, None] + torch.arange(L) < L - 1
    z = (q.unsqueeze(-2) @ k).squeeze(-2) * s
    return (z.masked_fill(before, -torch.inf).softmax(-1).unsqueeze(-2) @ v.mT).squeeze(-2)


@pytest.mark.parametrize("attend", [earlier, others.cross_covariance])
@pytest.mark.parametrize("static", [False, True])
def test_no_leak_where_keys_are_no_later_positions(attend: Attend, static: bool) -> None:
    """Key j of a window, or channel j, is not a key after row i: nothing is said of the future."""
    if static and attend is earlier:  # its mask is made on another device
        return
    checked = check(Causal(attend).eval(), styles.inputs(), static=static)
    assert not [finding for finding in checked.findings if finding.severity in ("fail", "critical")]


def test_a_mask_is_read_all_the_same() -> None:
    def leaking(m: Attention, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        z = styles.pairs(q, k) * s
        z = z.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(2), -torch.inf)
        return styles.average(z.softmax(-1), v)

    checked = report(leaking)
    assert verdicts(checked) == [("exact", None)]
    assert any(f.severity == "critical" and "off by one" in f.message for f in checked.findings)


class Covariance(nn.Module):
    """Cross-covariance attention of a vision transformer (El-Nouby et al. 2021), with one projection for all three."""

    def __init__(self, heads: int = 4, *, fused: bool = False) -> None:
        super().__init__()
        self.num_heads, self.fused = heads, fused
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 4, 1)
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        if self.fused:
            y = functional.scaled_dot_product_attention(q * self.temperature, k, v, scale=1.0)
        else:
            y = (q @ k.transpose(-2, -1) * self.temperature).softmax(-1) @ v
        return self.proj(y.permute(0, 3, 1, 2).reshape(x.shape))


class Transposed(nn.Module):
    """Attention over channels of an image restorer (Zamir et al. 2022): convolutions make q, k and v."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.depthwise = nn.Conv2d(3 * dim, 3 * dim, 3, padding=1, groups=3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(1, (self.heads, -1)).flatten(3) for t in self.depthwise(self.qkv(x)).chunk(3, 1))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        return ((q @ k.mT * self.temperature).softmax(-1) @ v).view(x.shape)


class ChannelMap(nn.Module):
    """The channel attention of a segmenter (Fu et al. 2019): a feature map with itself, no projections."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        query = y.flatten(2)
        energy = torch.bmm(query, query.mT)
        energy = energy.max(-1, keepdim=True)[0].expand_as(energy) - energy
        return torch.bmm(energy.softmax(-1), query).view(x.shape) + x


@each("static", [False, True])
@each(
    "made, shape, layout",
    [
        (Covariance, (2, 9, DIM), (2, 4, 16, 9)),
        (lambda: Covariance(fused=True), (2, 9, DIM), (2, 4, 16, 9)),
        (lambda: Covariance(heads=1), (2, 9, DIM), (2, 1, DIM, 9)),
        (Transposed, (2, 16, 4, 5), (2, 2, 8, 20)),
        (ChannelMap, (2, 8, 4, 4), (2, 1, 8, 16)),
    ],
)
def test_models_over_channels(
    made: Callable[[], nn.Module], shape: tuple[int, ...], layout: tuple[int, ...], static: bool
) -> None:
    """(batch, heads, channels, positions); a temperature is a rule, and the lack of any is no missing scale."""
    checked = check(made().eval(), torch.randn(shape), static=static)
    (judged,) = checked.calls
    call = judged.call
    assert call.axis == "channels"
    assert (call.batch, call.heads, call.query_len, call.head_dim) == layout
    assert call.query_len == call.key_len
    assert (judged.verdict, judged.mistake) == ("declared", None)


class Pooled(nn.Module):
    """A query that the model computes, against every token."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.factor = (factor,)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x.mean(1)), self.k(x), self.v(x)
        weights = ((k @ q.unsqueeze(-1)).squeeze(-1) * self.factor[0]).softmax(-1)
        return (weights.unsqueeze(-1) * v).sum(1)


@each("factor, expected", [(DIM**-0.5, ("exact", None)), (1.0, ("unexplained", "missing"))])
def test_pooling_by_a_computed_query(factor: float, expected: tuple[str, str | None]) -> None:
    checked = check(Pooled(factor).eval(), torch.randn(B, L, DIM))
    assert verdicts(checked) == [expected]
    call = checked.calls[0].call
    assert (call.batch, call.heads, call.query_len, call.key_len, call.head_dim) == (B, 1, 1, L, DIM)
