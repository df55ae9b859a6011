"""Each module against its formula, written out in float64 a head at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk import positions, scales, scores
from sqrtdk.nn import (
    AdditiveAttention,
    BilinearAttention,
    CosineAttention,
    MultiHeadAttention,
    RelativeAttention,
    ScaledDotProductAttention,
    TransformerBlock,
)
from tests.tolerances import complaint, gradient_complaints

B, H, L, S, E, EV = 2, 4, 5, 6, 8, 3
LONGEST = 20  # sum of a row: the block's network
F64 = torch.float64


def softened(logits: Tensor, value: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax over keys that are seen, times the value."""
    shown = torch.ones_like(logits, dtype=torch.bool) if seen is None else seen.expand(logits.shape)
    e = torch.where(shown, (logits - logits.amax(-1, keepdim=True)).exp(), 0.0)
    return torch.einsum("...ls,...sd->...ld", e / e.sum(-1, keepdim=True), value)


def check(actual: Tensor, expected: Tensor, logit: float = 50.0) -> None:
    assert actual.dtype == F64
    assert complaint(actual, expected, F64, length=LONGEST, logit=logit) is None
    generator = torch.Generator().manual_seed(2)
    probe = torch.randn(actual.shape, dtype=F64, generator=generator)
    leaves = {f"leaf {i} {tuple(leaf.shape)}": leaf for i, leaf in enumerate(LEAVES) if leaf.requires_grad}
    mine, its = (
        dict(zip(leaves, torch.autograd.grad((x * probe).sum(), list(leaves.values()), allow_unused=True), strict=True))
        for x in (actual, expected)
    )
    wrong = gradient_complaints(mine, its, F64, length=LONGEST, logit=logit, rows=B * H * L)
    assert not wrong, wrong


LEAVES: list[Tensor] = []


def leaf(*shape: int) -> Tensor:
    LEAVES.append(torch.randn(*shape, dtype=F64).requires_grad_())
    return LEAVES[-1]


def stirred(module: nn.Module) -> nn.Module:
    """The module with parameters far from their start, and its parameters among the leaves."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    LEAVES.extend(module.parameters())
    return module.to(F64)


@pytest.fixture(autouse=True)
def _no_leaves() -> None:
    LEAVES.clear()


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return leaf(B, H, L, E), leaf(B, H, S, E), leaf(B, H, S, EV)


@pytest.mark.parametrize("masked", [False, True])
def test_dot_product(qkv: tuple[Tensor, ...], masked: bool) -> None:
    q, k, v = qkv
    seen = torch.rand(B, 1, L, S) < 0.5
    seen[..., 0] = True
    hidden, seen = (~seen, seen) if masked else (None, None)
    check(ScaledDotProductAttention(E)(q, k, v, hidden), softened(q @ k.mT / math.sqrt(E), v, seen))


def test_dot_product_with_all_options(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = leaf(B, H, L, E), leaf(B, 2, S, E), leaf(B, 2, S, EV)
    rule = stirred(scales.learned(H, dtype=F64))
    module = ScaledDotProductAttention(
        E, scale=rule, bias=positions.alibi(H), softcap=2.0, window=(2, 1), enable_gqa=True
    )
    z = torch.stack([q[:, h] @ k[:, h // 2].mT for h in range(H)], 1)
    z = z * rule.log_factor.exp()[:, None, None] / math.sqrt(E)
    rows, columns = torch.arange(L)[:, None], torch.arange(S)
    z = 2.0 * torch.tanh(z / 2.0)
    z = z - torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)]).double()[:, None, None] * (rows - columns)
    seen = (columns >= rows - 2) & (columns <= rows + 1)
    values = torch.stack([v[:, h // 2] for h in range(H)], 1)
    check(module(q, k, v), softened(z, values, seen))


@pytest.mark.parametrize("bias", [False, True])
def test_additive(bias: bool) -> None:
    q, k, v = leaf(B, L, E), leaf(B, S, 7), leaf(B, S, EV)
    module = stirred(AdditiveAttention(E, 7, 5, bias=bias, dtype=F64))
    score = module.score
    hidden = (q @ score.query_weight).unsqueeze(2) + (k @ score.key_weight).unsqueeze(1)
    hidden = hidden + score.bias if bias else hidden
    check(module(q, k, v), softened(torch.tanh(hidden) @ score.v, v))


def test_bilinear() -> None:
    q, k, v = leaf(B, H, L, E), leaf(B, H, S, 7), leaf(B, H, S, EV)
    module = stirred(BilinearAttention(E, 7, heads=H, dtype=F64))
    for scale, factor in ((None, 1 / math.sqrt(E)), (1.0, 1.0)):
        module.scale = scale
        z = torch.einsum("bhle,hef,bhsf->bhls", q, module.score.weight, k)
        check(module(q, k, v), softened(factor * z, v))


def test_cosine(qkv: tuple[Tensor, ...]) -> None:
    q, k, v = qkv
    module = stirred(CosineAttention(H, dtype=F64))
    cosine = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
    check(module(q, k, v), softened(cosine * module.score.gain.logit_scale.exp(), v))


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_cosine_of_other_norms(qkv: tuple[Tensor, ...], norm: str) -> None:
    q, k, v = qkv
    module = CosineAttention(norm=norm, learned=False, gain=1.5)

    def normed(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True) if norm == "layer" else x
        return x / (x.square().mean(-1, keepdim=True) + (1e-5 if norm == "layer" else 1e-6)).sqrt()

    check(module(q, k, v), softened(1.5 * normed(q) @ normed(k).mT / math.sqrt(E), v))


@pytest.mark.parametrize("values", [False, True])
def test_relative(qkv: tuple[Tensor, ...], values: bool) -> None:
    q, k, v = qkv
    module = stirred(RelativeAttention(E, 2, relative_values=values, value_dim=EV, dtype=F64))
    index = (torch.arange(S)[None, :] - torch.arange(L)[:, None]).clamp(-2, 2) + 2
    z = (q @ k.mT + torch.einsum("bhle,lse->bhls", q, module.bias.table[index])) / math.sqrt(E)
    expected = softened(z, v)
    if values:
        expected = expected + torch.einsum("bhls,lsd->bhld", z.softmax(-1), module.value_table[index])
    check(module(q, k, v), expected)


def heads_of(x: Tensor, count: int) -> Tensor:
    return torch.stack(x.chunk(count, -1), 1)


def multi_head(
    module: MultiHeadAttention,
    tensors: tuple[Tensor, ...],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    bias: bool = True,
) -> Tensor:
    """Projections by slices of the packed weight, one head at a time; key heads are repeated to the query's."""
    kv, group = module.kv_heads, module.num_heads // module.kv_heads
    sizes = (module.num_heads * module.head_dim, kv * module.head_dim, kv * module.value_head_dim)
    parts, at = [], 0
    for x, size in zip(tensors, sizes, strict=True):
        rows = slice(at, at + size)
        parts.append(x @ module.in_proj_weight[rows].T + (module.in_proj_bias[rows] if bias else 0.0))
        at += size
    q, k, v = heads_of(parts[0], module.num_heads), heads_of(parts[1], kv), heads_of(parts[2], kv)
    if module.q_norm is not None:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
            for x, norm in ((q, module.q_norm), (k, module.k_norm))
        )
    k, v = (torch.stack([x[:, h // group] for h in range(module.num_heads)], 1) for x in (k, v))
    joined = torch.cat(list(attend(q, k, v).unbind(1)), -1)
    out = joined @ module.out_proj.weight.T
    return out + module.out_proj.bias if bias else out


def test_multi_head_with_grouped_heads_norms_and_rotation() -> None:
    module = stirred(
        MultiHeadAttention(12, H, batch_first=True, kv_heads=2, head_dim=6, value_head_dim=5, qk_norm="rms", dtype=F64)
    )
    module.position = positions.rope
    x = leaf(B, L, 12)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        angles = torch.arange(L)[:, None].double() * 10000.0 ** (-torch.arange(3).double() / 3)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.complex(t[..., :3], t[..., 3:]) * turn for t in (q, k))
        z = torch.einsum("bhle,bhse->bhls", q, k.conj()).real / math.sqrt(6)
        return softened(z, v, torch.ones(L, L, dtype=torch.bool).tril())

    check(module(x, x, x, is_causal=True)[0], multi_head(module, (x, x, x), attend))


def test_multi_head_with_score_scale_position_softcap_and_sinks() -> None:
    score = scores.fresh_bilinear(4, 4, heads=H, dtype=F64)
    sinks = nn.Parameter(torch.randn(H, dtype=F64))
    term = positions.t5_bias(H, dtype=F64)
    module = stirred(
        MultiHeadAttention(
            16,
            H,
            bias=False,
            batch_first=True,
            score=score,
            scale=0.7,
            position=term,
            softcap=3.0,
            sinks=sinks,
            dtype=F64,
        )
    )
    x, y = leaf(B, L, 16), leaf(B, S, 16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = 3.0 * torch.tanh(0.7 * torch.einsum("bhle,hef,bhsf->bhls", q, score.weight, k) / 3.0)
        offset = torch.arange(S)[None, :] - torch.arange(L)[:, None]
        bucket = offset.abs() + 16 * (offset > 0)  # offsets this small have a bucket each
        z = z + term.embedding.weight[bucket].permute(2, 0, 1)
        e = z.exp()
        return (e / (e.sum(-1, keepdim=True) + sinks.exp()[:, None, None])) @ v

    check(module(x, y, y)[0], multi_head(module, (x, y, y), attend, bias=False))


def test_multi_head_with_a_pair_score_and_relative_keys() -> None:
    score = scores.fresh_additive(4, 4, 5, dtype=F64)
    module = stirred(MultiHeadAttention(16, H, batch_first=True, score=score, dtype=F64))
    x = leaf(B, L, 16)

    def additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = (q @ score.query_weight).unsqueeze(-2) + (k @ score.key_weight).unsqueeze(-3)
        return softened(torch.tanh(hidden) @ score.v, v)

    check(module(x, x, x)[0], multi_head(module, (x, x, x), additive))
    LEAVES.clear()
    table = positions.shaw(4, max_distance=2, dtype=F64)
    module = stirred(MultiHeadAttention(16, H, batch_first=True, position=table, dtype=F64))
    x = leaf(B, L, 16)

    def shaw(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = (torch.arange(L)[None, :] - torch.arange(L)[:, None]).clamp(-2, 2) + 2
        return softened((q @ k.mT + torch.einsum("bhle,lse->bhls", q, table.table[index])) / 2.0, v)

    check(module(x, x, x)[0], multi_head(module, (x, x, x), shaw))


def test_multi_head_with_appended_keys_in_fewer_heads() -> None:
    options = {"add_bias_kv": True, "add_zero_attn": True, "kv_heads": 2, "value_head_dim": 3, "dtype": F64}
    module = stirred(MultiHeadAttention(16, H, batch_first=True, **options))
    x = leaf(B, L, 16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = {}
        for name, t, width in (("bias_k", k, 4), ("bias_v", v, 3)):
            last = torch.stack([getattr(module, name)[0, 0].view(2, width)[h // 2] for h in range(H)])
            last = last[None, :, None].expand(B, H, 1, width)
            rows[name] = torch.cat([t, last, torch.zeros(B, H, 1, width, dtype=F64)], -2)
        seen = torch.cat([torch.ones(L, L).tril(), torch.ones(L, 2)], -1).bool()
        return softened(q @ rows["bias_k"].mT / 2.0, rows["bias_v"], seen)

    check(module(x, x, x, is_causal=True)[0], multi_head(module, (x, x, x), attend))


@pytest.mark.parametrize("norm_first", [False, True])
def test_block(norm_first: bool) -> None:
    block = stirred(TransformerBlock(16, H, LONGEST, 0.0, functional.silu, 1e-3, True, norm_first, dtype=F64))
    x = leaf(B, L, 16)

    def attention(x: Tensor) -> Tensor:
        seen = torch.ones(L, L, dtype=torch.bool).tril()
        return multi_head(block.self_attn, (x, x, x), lambda q, k, v: softened(q @ k.mT / 2.0, v, seen))

    def network(x: Tensor) -> Tensor:
        hidden = x @ block.linear1.weight.T + block.linear1.bias
        return (hidden * hidden.sigmoid()) @ block.linear2.weight.T + block.linear2.bias

    def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias

    if norm_first:
        first = x + attention(normed(x, block.norm1))
        expected = first + network(normed(first, block.norm2))
    else:
        first = normed(x + attention(x), block.norm1)
        expected = normed(first + network(first), block.norm2)
    check(block(x, is_causal=True), expected)
