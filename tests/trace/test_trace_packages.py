"""Attentions as released packages write them: tables and positions as inputs, shifted positions, slots, gains."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sqrtdk import check
from sqrtdk.audit.records import JudgedCall

B, H, L, E = 2, 4, 6, 8
WIDTH, ROOT = H * E, E**-0.5


class Heads(nn.Module):
    """Projections to heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (self.q, self.k, self.v))

    def back(self, y: Tensor) -> Tensor:
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


def judged(model: nn.Module, *inputs: Tensor) -> JudgedCall:
    return check(model.eval(), inputs, laws="none").calls[0]


# -- rotary tables that are inputs -------------------------------------------------------------------------------------


class Turned(Heads):
    """Rows are turned by tables that forward is given, as Hugging Face's layers take `position_embeddings`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(x)

        def turn(y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            return y * cos + torch.cat((-b, a), -1) * sin

        return self.back(F.scaled_dot_product_attention(turn(q * self.scale), turn(k), v))


@pytest.mark.parametrize(("scale", "mistake"), [(1.0, None), (ROOT, "twice")])
def test_a_scale_before_tables_that_are_inputs_counts(scale: float, mistake: str | None) -> None:
    angle = torch.arange(L)[:, None] * 1e4 ** (-torch.arange(0, E, 2) / E)
    angle = torch.cat((angle, angle), -1)[None, None]
    call = judged(Turned(scale), torch.randn(B, L, WIDTH), angle.cos(), angle.sin())
    assert (call.mistake, call.call.rope) == (mistake, True)
    assert call.call.scale.effective == pytest.approx(scale * ROOT)
    assert call.call.scale.agree is True


# -- relative positions that are shifted to the keys -------------------------------------------------------------------


def by_view(z: Tensor) -> Tensor:
    """One column of zeros, and rows that are one longer: each begins one number later (Dai et al. 2019)."""
    padded = F.pad(z, (1, 0)).view(*z.shape[:2], z.shape[3] + 1, z.shape[2])
    return padded[:, :, 1:].reshape(z.shape)[..., : z.shape[3] // 2 + 1]


def by_cat(z: Tensor) -> Tensor:
    """The same by a column that is joined, and a last view of rows."""
    padded = torch.cat((z.new_zeros(*z.shape[:3], 1), z), -1).reshape(*z.shape[:2], -1, z.shape[2])
    return padded[:, :, 1:].view_as(z)[:, :, :, : z.shape[3] // 2 + 1]


class Conformer(Heads):
    """(q + u) . k + shift((q + w) . p) over a root."""

    def __init__(self, shift: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.p = nn.Linear(WIDTH, WIDTH, bias=False)
        self.u, self.w = (nn.Parameter(0.1 * torch.randn(H, 1, E)) for _ in range(2))
        self.shift, self.width = shift, width

    def forward(self, x: Tensor, distances: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        p = self.p(distances).view(1, -1, H, E).transpose(1, 2)
        z = ((q + self.u) @ k.mT + self.shift((q + self.w) @ p.mT)) / math.sqrt(self.width)
        return self.back(z.softmax(-1) @ v)


@pytest.mark.parametrize("shift", [by_view, by_cat])
@pytest.mark.parametrize(("width", "mistake"), [(E, None), (WIDTH, "model_dim")])
def test_shifted_positions_are_a_term_beside_the_product(
    shift: Callable[[Tensor], Tensor], width: int, mistake: str | None
) -> None:
    call = judged(Conformer(shift, width), torch.randn(B, L, WIDTH), torch.randn(1, 2 * L - 1, WIDTH))
    assert (call.mistake, call.call.terms) == (mistake, 2)
    assert call.call.scale.effective == pytest.approx(width**-0.5)
    assert call.call.formula.endswith("* (q.k + relative))")


# -- slots -------------------------------------------------------------------------------------------------------------


class Slots(nn.Module):
    """Slots compete for inputs; what each has of them is divided by its sum."""

    def __init__(self, slots_first: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.slots, self.slots_first = nn.Parameter(torch.randn(3, WIDTH)), slots_first

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(self.slots.expand(len(x), -1, -1) + 0 * x[:, :3]), self.k(x), self.v(x)
        if self.slots_first:
            weights = (q @ k.mT * WIDTH**-0.5).softmax(1) + 1e-8
            return (weights / weights.sum(-1, keepdim=True)) @ v
        weights = (k @ q.mT * WIDTH**-0.5).softmax(-1) + 1e-8
        return (weights / weights.sum(1, keepdim=True)).mT @ v


@pytest.mark.parametrize("slots_first", [True, False])
def test_slots_by_either_layout(slots_first: bool) -> None:
    call = judged(Slots(slots_first), torch.randn(B, L, WIDTH))
    assert (call.verdict, call.call.unknown) == ("exact", ())
    assert call.call.scale.effective == pytest.approx(WIDTH**-0.5)


# -- gains for each channel --------------------------------------------------------------------------------------------


class Gained(Heads):
    """q times softplus(p) * 1.44 / sqrt(E), a number for each channel, and SDPA with scale 1."""

    def __init__(self, norm: bool, spread: float) -> None:
        super().__init__()
        self.gain, self.norm = nn.Parameter(spread * torch.randn(E)), norm

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.norm:
            q, k = F.rms_norm(q, (E,)), F.rms_norm(k, (E,))
        return self.back(F.scaled_dot_product_attention(q * self.by(), k, v, scale=1.0))

    def by(self) -> Tensor:
        return F.softplus(self.gain) * (ROOT / math.log(2))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_computed_gain_holds_the_scale(norm: bool, spread: float) -> None:
    model = Gained(norm, spread)
    scale = judged(model, torch.randn(B, L, WIDTH)).call.scale
    assert scale.effective == pytest.approx(float(model.by().detach().square().mean().sqrt()), rel=1e-5)
    assert (scale.agree, scale.factors[0].learned, "gain" in scale.factors[0].source) == (True, True, True)


def test_a_gain_after_a_norm_that_is_a_parameter_is_none_of_the_scale() -> None:
    model = Gained(True, 0.0)
    model.gain = nn.Parameter(torch.rand(E) + 0.5)
    model.by = lambda: model.gain  # type: ignore[method-assign]
    call = judged(model, torch.randn(B, L, WIDTH)).call
    assert (call.norm_gain, call.scale.effective) == (True, 1.0)


# -- rotated keys before those of the rows: as many as there are rows --------------------------------------------------


def turned(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None] * 1e4 ** (-torch.arange(0, E, 2) / E)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Past(Heads):
    """Keys of a past, rotated on their own, as a cache or a prefix holds them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.by = scale

    def forward(self, x: Tensor, past: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        _, old, old_v = self.heads(past)
        before, rows = past.shape[1], x.shape[1]
        here = torch.arange(before, before + rows)
        keys = torch.cat((turned(old, torch.arange(before)), turned(k, here)), 2)
        seen = torch.ones(rows, before + rows).bool().tril(before)
        values = torch.cat((old_v, v), 2)
        return self.back(F.scaled_dot_product_attention(turned(q, here), keys, values, attn_mask=seen, scale=self.by))


class LookBack(Past):
    """Each bucket sees itself and the one before, as lucidrains' local-attention writes it."""

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        bucket = size.shape[1]
        q, k, v = self.heads(x)
        here = torch.arange(x.shape[1])
        q, k, v = (t.unflatten(2, (-1, bucket)) for t in (turned(q, here), turned(k, here), v))
        k, v = (torch.cat((F.pad(t, (0, 0, 0, 0, 1, 0))[:, :, :-1], t), 3) for t in (k, v))
        seen = torch.ones(bucket, 2 * bucket).bool().tril(bucket).repeat(q.shape[2], 1, 1)
        seen[0, :, :bucket] = False
        logits = (q @ k.mT * self.by).masked_fill(~seen, -torch.inf)
        return self.back((logits.softmax(-1) @ v).flatten(2, 3))


@pytest.mark.parametrize("made", [Past, LookBack])
@pytest.mark.parametrize(("scale", "verdict"), [(ROOT, "exact"), (1.0, "unexplained")])
def test_as_many_keys_of_a_past_as_rows_are_not_at_their_positions(
    made: type[Past], scale: float, verdict: str
) -> None:
    call = judged(made(scale), torch.randn(B, 16, WIDTH), torch.randn(B, 16 if made is Past else 4, WIDTH))
    assert call.call.key_len == 2 * call.call.query_len
    assert (call.verdict, call.call.scale.agree) == (verdict, None)
    assert call.call.scale.effective == pytest.approx(scale)
