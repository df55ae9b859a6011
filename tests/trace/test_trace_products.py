"""Products, value sums and scores in other words: one call each, read right, with data and without."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions import products as styles
from tests.attentions import scores as others
from tests.attentions.each import each
from tests.attentions.products import DIM, ROOT, Attend, Attention, B, E, H, L


def run(attend: Attend, factor: float = ROOT, *, device: str = "cpu") -> Trace:
    with torch.device(device):
        model, x = Attention(attend, factor).eval(), styles.inputs()
        with torch.no_grad(), sqrtdk.trace(model) as traced:
            model(x)
    return traced


def record(attend: Attend, factor: float = ROOT, *, device: str = "cpu") -> AttentionCall:
    traced = run(attend, factor, device=device)
    assert len(traced.calls) == 1, (traced.not_attention, traced.not_measured)
    assert not traced.not_attention
    assert not traced.not_measured
    return traced.calls[0]


def layout(call: AttentionCall) -> tuple[int, ...]:
    return call.batch, call.heads, call.kv_heads, call.query_len, call.key_len, call.head_dim, call.value_dim


devices = each("device", ["cpu", "meta"])
PRODUCTS = {**styles.WHOLE, **styles.SINGLE, **{name: row[0] for name, row in styles.ONE_QUERY.items()}}


def oracle(model: Attention, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Logits and output in float64."""
    q, k, v = (t.double() for t in model.project(x))
    logits = factor * (q @ k.mT)
    return logits, logits.softmax(-1) @ v


def check_whole(name: str, factor: float) -> None:
    """Output, formula, both readings and the largest logit are those of the dense float64 attention."""
    model, x = Attention(styles.WHOLE[name], factor).eval(), styles.inputs()
    with torch.no_grad(), sqrtdk.trace(model) as traced:
        output = model(x)
    with torch.no_grad():
        logits, expected = oracle(model, x, factor)
    assert torch.allclose(output.double(), expected, atol=1e-5)
    (call,) = traced.calls
    assert call.formula == ("softmax(q.k)" if factor == 1.0 else "softmax(0.25 * q.k)")
    assert layout(call) == (B, H, H, L, L, E, E)
    assert call.scale.symbolic == pytest.approx(factor)
    assert call.scale.agree is True
    assert call.stats is not None
    assert max(call.stats.max_logit) == pytest.approx(float(logits.max()) + (name == "subtracted"), abs=1e-4)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_in_other_words_is_read(name: str) -> None:
    """With data and without, unless the third operand of an einsum holds the number; one query is one row."""
    if name in styles.WHOLE:
        check_whole(name, 1.0)
        check_whole(name, ROOT)
    for device in ("cpu", "meta")[: 1 if name.startswith("three_operands") else 2]:
        call = record(PRODUCTS[name], device=device)
        assert (call.score, call.formula, call.unknown) == ("dot", "softmax(0.25 * q.k)", ())
        assert call.scale.effective == pytest.approx(ROOT)
        assert call.scale.agree is (None if device == "meta" else True)
        assert ((call.stats is None) is (device == "meta"), call.axis) == (True, "positions")
        if name in styles.ONE_QUERY:
            _, batch, heads = styles.ONE_QUERY[name]
            assert (call.batch, call.heads, call.query_len, call.key_len) == (batch, heads, 1, L)
            assert (call.head_dim, call.value_dim) == (E, E)


class Projected(Attention):
    """The same by other projections: a normalised linear layer, a matrix a head, a convolution."""

    def __init__(self, attend: Attend, how: str) -> None:
        super().__init__(attend)
        self.how = how
        self.norm, self.matrices = nn.BatchNorm1d(DIM), nn.Parameter(torch.randn(3, H, DIM, E) * DIM**-0.5)
        self.convolution = nn.Conv1d(DIM, 3 * DIM, 1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.how == "normalised":
            q, k, v = (self.norm(p(x).flatten(0, 1)).view(B, L, H, E).transpose(1, 2) for p in (self.q, self.k, self.v))
        elif self.how == "matrices":
            q, k, v = torch.einsum("bld,nhde->nbhle", x, self.matrices).unbind(0)
        else:
            q, k, v = (t.unflatten(1, (H, E)).mT for t in self.convolution(x.mT).chunk(3, 1))
        return q, k, v


@devices
@each("how", ["normalised", "matrices", "convolution"])
@each("rows", [1, L])
@each("keys", [1, L])
def test_heads_and_rows_by_any_projection(how: str, rows: int, keys: int, device: str) -> None:
    """A product of few rows or keys is none of windows, channels or queries in the place of heads."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        q, k, v = q[:, :, :rows], k[:, :, :keys], v[:, :, :keys]
        weights = (q.flatten(0, 1) @ k.flatten(0, 1).mT * s).view(B, H, rows, keys).softmax(-1)
        return weights @ v

    with torch.device(device):
        model, x = Projected(attend, how).eval(), styles.inputs()
        with torch.no_grad(), sqrtdk.trace(model) as traced:
            model(x)
    (call,) = traced.calls
    assert (*layout(call), call.axis) == (B, H, H, rows, keys, E, E, "positions")
    assert call.scale.effective == pytest.approx(ROOT)


@each("rows", [1, 3])
def test_a_batch_in_the_second_axis_is_no_position(rows: int) -> None:
    """A probe against many keys in nn.MultiheadAttention, which puts positions first."""
    model, probe, x = nn.MultiheadAttention(DIM, H, batch_first=True), torch.randn(B, rows, DIM), styles.inputs()
    with sqrtdk.trace(model) as traced:
        model(probe, x, x, need_weights=True)
    (call,) = traced.calls
    assert (*layout(call), call.axis) == (B, H, H, rows, L, E, E, "positions")
    assert call.scale.agree is True


@devices
@pytest.mark.parametrize("name", styles.AXIAL)
def test_heads_of_a_grid_are_its_heads(name: str, device: str) -> None:
    """What lies between heads and rows is batch: (B, H, X, Y, E) attended along X or Y."""
    attend, batch, rows = styles.AXIAL[name]
    call = record(attend, device=device)
    assert layout(call) == (batch, H, H, rows, rows, E, E)
    assert call.formula == "softmax(0.25 * q.k)"
    assert call.scale.agree is (None if device == "meta" else True)


@devices
@pytest.mark.parametrize("name", styles.WINDOWS)
def test_windows_have_a_row_for_each_query(name: str, device: str) -> None:
    attend, keys = styles.WINDOWS[name]
    call = record(attend, device=device)
    assert layout(call) == (B, H, H, L, keys, E, E)
    assert (call.formula, call.axis) == ("softmax(0.25 * q.k)", "windows")
    assert call.scale.agree is (None if device == "meta" else True)
    assert call.future_weight is None


def test_a_mask_of_windows_has_no_shape() -> None:
    """Key j of a window is no position j: its mask is neither causal nor a window, and has no bounds."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        k, v = (torch.nn.functional.pad(t, (0, 0, 2, 0)).unfold(2, 3, 1) for t in (k, v))
        padding = torch.arange(L)[:, None] + torch.arange(3) < 2
        z = (q.unsqueeze(-2) @ k).squeeze(-2) * s
        return (z.masked_fill(padding, -torch.inf).softmax(-1).unsqueeze(-2) @ v.mT).squeeze(-2)

    call = record(attend)
    assert call.formula == "softmax(0.25 * q.k + mask)"
    assert call.mask is not None
    assert (call.mask.kind, call.mask.least, call.mask.greatest, call.mask.band) == ("mask", None, None, None)


@devices
@pytest.mark.parametrize("name", others.DISTANCES)
def test_a_distance_is_named(name: str, device: str) -> None:
    attend, formula = others.DISTANCES[name]
    call = record(attend, device=device)
    assert (call.score, call.formula) == ("distance", formula)
    assert call.scale.effective is None
    assert call.scale.symbolic == pytest.approx(-ROOT if "|^2" not in formula else -ROOT / 2)
    assert layout(call) == (B, H, H, L, L, E, E)
    assert (call.stats is None) is (device == "meta")


def test_a_distance_has_its_masks_and_its_statistics() -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
        return (torch.cdist(q, k).square() * -s).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    call = record(attend)
    assert call.formula == "softmax(-0.25 * |q - k|^2 + causal)"
    assert call.mask is not None
    assert call.stats is not None
    assert max(call.stats.max_logit) <= 0.0


@devices
def test_the_distances_of_many_points_have_a_kernel_of_their_own(device: str) -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        q, k, v = (t.repeat(1, 1, 6, 1) for t in (q, k, v))
        return (-(torch.cdist(q, k) ** 2) * s).softmax(-1) @ v

    call = record(attend, device=device)
    assert (call.score, call.formula) == ("distance", "softmax(-0.25 * |q - k|^2)")
    assert (call.heads, call.query_len, call.key_len, call.head_dim) == (H, 6 * L, 6 * L, E)


def test_a_curve_over_a_distance_is_not_guessed() -> None:
    """Nothing is said of a coefficient."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        return (-torch.log1p(torch.cdist(q, k) ** 2)).softmax(-1) @ v

    call = record(attend)
    assert call.unknown
    assert call.scale.effective is call.scale.symbolic is None


@each("side", ["q", "k"])
def test_lengths_that_do_not_complete_the_square_are_a_bias(side: str) -> None:
    """-q.k + |k|^2 is no distance."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        lengths = q.square().sum(-1)[..., None] if side == "q" else k.square().sum(-1)[:, :, None]
        return (q @ k.mT * s + lengths).softmax(-1) @ v

    call = record(attend)
    assert (call.score, call.formula) == ("dot", "softmax(0.25 * q.k + squares)")
    assert call.scale.agree is True


@devices
@each("name", others.ADDITIVE)
def test_an_additive_score_is_named(name: str, device: str) -> None:
    attend, rows = others.ADDITIVE[name]
    if name == "graph" and device == "meta":  # its mask is made on another device
        return
    call = record(attend, device=device)
    mask = " + causal" if name == "graph" else ""
    assert (call.score, call.formula) == ("additive", f"softmax(additive(q, k){mask})")
    assert (call.query_len, call.key_len, call.value_dim) == (rows, L, E)
    assert call.batch * call.heads == (B if rows == 1 else B * H)
    assert call.scale.effective is None


@devices
@pytest.mark.parametrize("name", others.CHANNELS)
def test_attention_over_channels_says_so(name: str, device: str) -> None:
    attend, formula, score = others.CHANNELS[name]
    call = record(attend, device=device)
    assert (call.axis, call.score) == ("channels", score)
    assert call.formula == (formula.replace("[h]", "") if device == "meta" else formula)
    assert layout(call) == (B, H, H, E, E, L, L)
    assert call.scale.agree is (None if device == "meta" else True)
    assert call.future_weight is None


@each("dim", [-1, -2])
def test_a_norm_along_another_axis_bounds_nothing(dim: int) -> None:
    """Unit columns in a product of rows are no cosine: the scale is not known to be right."""

    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        q, k = others.unit(q, dim), others.unit(k, dim)
        return (q @ k.mT).softmax(-1) @ v if dim == -2 else (q.mT @ k).softmax(-1) @ v.mT

    call = record(attend)
    assert call.score == "dot"
    assert call.unknown == ("a norm over another axis than the product sums over",)
    assert call.scale.effective is None


def test_a_cosine_of_spread_vectors() -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        return (8 * torch.cosine_similarity(q.unsqueeze(-2), k.unsqueeze(-3), dim=-1)).softmax(-1) @ v

    call = record(attend)
    assert (call.score, call.formula) == ("cosine", "softmax(8 * l2(q).l2(k))")
    assert call.scale.agree is True


def gain_of_heads(m: Attention, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return torch.einsum("bqhd,bkhd,h->bhqk", q, k, m.gain).softmax(-1) @ v


def gain_before(m: Attention, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return torch.einsum("h,bhqd,bhkd->bhqk", m.gain, q, k).softmax(-1) @ v


@each("attend", [gain_of_heads, gain_before])
def test_a_gain_a_head_in_the_einsum(attend: Attend) -> None:
    torch.manual_seed(1)
    model = Attention(attend).eval()
    with torch.no_grad(), sqrtdk.trace(model) as traced:
        model(styles.inputs())
    (call,) = traced.calls
    assert call.formula == "softmax(gain[h] * q.k)"
    assert call.scale.per_head == pytest.approx(model.gain.tolist())
    assert call.scale.agree is True


def test_a_gain_a_feature_is_not_guessed() -> None:
    """Sum over d of w_d q_d k_d: the scale is that of no number."""
    call = record(lambda m, q, k, v, s: torch.einsum("bhqd,bhkd,d->bhqk", q, k, m.vector).softmax(-1) @ v)
    assert call.unknown
    assert call.scale.effective is None
    call = record(lambda m, q, k, v, s: m.one(q.unsqueeze(-2) * k.unsqueeze(-3)).squeeze(-1).softmax(-1) @ v)
    assert call.unknown
    assert call.scale.effective is None


@each("value", [1, 0.25])
def test_addcmul(value: float) -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        mask = torch.full((L, L), -1e9).triu(1)
        return torch.addcmul(mask, q @ k.mT, torch.tensor(s / value), value=value).softmax(-1) @ v

    call = record(attend)
    assert call.formula == "softmax(0.25 * q.k + causal)"
    assert call.scale.agree is True


@each("kv_heads", [1, 2])
def test_grouped_heads_by_broadcasting(kv_heads: int) -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        q = q.unflatten(1, (kv_heads, -1))
        k, v = k[:, :kv_heads, None], v[:, :kv_heads, None]
        return styles.broadcast(m, q, k, v, s)

    call = record(attend)
    assert (call.batch, call.heads, call.kv_heads) == (B, H, kv_heads)
    assert call.scale.agree is True


def test_rotated_q_and_k() -> None:
    def rotate(x: Tensor) -> Tensor:
        angles = torch.arange(L)[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
        cos, sin = (torch.cat([t, t], -1) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin

    call = record(lambda m, q, k, v, s: styles.broadcast(m, rotate(q), rotate(k), v, s))
    assert call.formula == "softmax(0.25 * rope(q).rope(k))"
    assert call.scale.agree is True


@each("values", [styles.average, lambda w, v: w @ v])
@each("product", [styles.pairs, lambda q, k: q @ k.mT])
@devices
def test_a_softmax_over_the_queries_is_no_attention(product: object, values: object, device: str) -> None:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        return values((product(q, k) * s).softmax(-2), v)  # type: ignore[operator]

    call = record(attend, device=device)
    assert call.unknown == ("softmax over the queries",)
    assert call.scale.effective is None


class Gated(nn.Module):
    """A gated unit and a gated pooling: multiplications of activations that are no product of q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.score, self.down = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x) * self.gate(x).sigmoid()
        pooled = (y * self.score(x).mean(-1, keepdim=True)).sum(1, keepdim=True)
        excited = y * pooled.sigmoid()
        return self.down((excited.unsqueeze(2) * x.unsqueeze(1)).sum(-1) @ x).softmax(-1)


def test_gates_are_no_products() -> None:
    model = Gated()
    with torch.no_grad(), sqrtdk.trace(model) as traced:
        model(styles.inputs())
    assert not traced.calls


def test_a_gate_holds_nothing_longer() -> None:
    """What a gated unit multiplied is let go while its result lives on."""
    model, x = Gated(), styles.inputs()
    with torch.no_grad(), sqrtdk.trace(model):
        up, gate = model.up(x), model.gate(x)
        y = up * gate
        storages = {t.untyped_storage().data_ptr() for t in (up, gate)}
        del up, gate
        alive = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and torch._C._has_storage(t)]
        assert not [t.shape for t in alive if t.untyped_storage().data_ptr() in storages]
    assert y.shape == x.shape
