"""Position terms and rotations next to transformers' own, with copied weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DebertaV2Config, GPTJConfig, LlamaConfig, T5Config, XLNetConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, build_relative_position
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from sqrtdk import positions, scales
from tests.positions.positions_oracle import deberta_bucket as exact_deberta_bucket
from tests.positions.positions_oracle import t5_bucket as exact_t5_bucket
from tests.tolerances import complaint, gradient_complaints

H, E, L = 4, 8, 40


def line(length: int = L, start: int = 0) -> Tensor:
    return torch.arange(start, start + length)


# -- ALiBi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 112])
def test_alibi_is_blooms_up_to_a_constant_a_row(heads: int) -> None:
    """Bloom's bias depends on the key alone, which a softmax over the row does not notice."""
    q = torch.zeros(heads, L, E)
    bloom = build_alibi_tensor(torch.ones(1, L), heads, torch.float32)
    ours = positions.alibi(heads).term(q, q, line(), line())
    slopes = (bloom - bloom[..., :1]).expand(heads, L, L)
    assert complaint(ours - ours[..., :1], slopes, torch.float32, length=2, logit=0.0) is None


# -- T5 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (32, 20), (8, 9), (6, 100), (64, 512), (33, 77), (4, 3)])
def test_t5_buckets(bidirectional: bool, count: int, most: int) -> None:
    offset = torch.arange(-3000, 3001)
    theirs = T5Attention._relative_position_bucket(offset, bidirectional, count, most)
    ours = positions.t5_bucket(offset, bidirectional=bidirectional, num_buckets=count, max_distance=most)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_buckets_in_whole_numbers(bidirectional: bool) -> None:
    offset = torch.arange(-300, 301)
    ours = positions.t5_bucket(offset, bidirectional=bidirectional)
    assert ours.tolist() == [exact_t5_bucket(n, bidirectional, 32, 128) for n in offset.tolist()]


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("past", [0, 11])
def test_t5_bias(is_decoder: bool, past: int) -> None:
    config = T5Config(
        d_model=H * E,
        num_heads=H,
        d_kv=E,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=30,
        is_decoder=is_decoder,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = positions.t5_bias(H, bidirectional=not is_decoder, num_buckets=16, max_distance=30)
    ours.embedding.load_state_dict(theirs.relative_attention_bias.state_dict())
    q, k = torch.zeros(H, L - past, E), torch.zeros(H, L, E)
    bias = theirs.compute_bias(L - past, L, past_seen_tokens=past)[0]
    assert torch.equal(ours.term(q, k, line(L - past, past), line()), bias)


# -- Transformer-XL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0, 9])
def test_transformer_xl_is_xlnets_attention(memory: int) -> None:
    """XLNet keeps Transformer-XL's attention: its weights with `memory` keys before the first row."""
    config = XLNetConfig(d_model=H * E, n_head=H, n_layer=1, d_inner=8, dropout=0.0, vocab_size=11)
    theirs = XLNetRelativeAttention(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    q, k = torch.randn(2, H, L, E), torch.randn(2, H, L + memory, E)
    with torch.no_grad():
        sinusoids = XLNetModel(config).relative_positional_encoding(L, L + memory, bsz=2)
        relative = torch.einsum("ibh,hnd->ibnd", sinusoids, theirs.r)
        by_length = (q.permute(2, 0, 1, 3), *[k.permute(2, 0, 1, 3)] * 2)
        _, expected = theirs.rel_attn_core(*by_length, relative, output_attentions=True)
        ours = positions.transformer_xl(H, E)
        ours.content_bias.copy_(theirs.r_w_bias)
        ours.position_bias.copy_(theirs.r_r_bias)
        ours.projection.weight.copy_(theirs.r.permute(1, 2, 0).reshape(H * E, H * E))
        term = ours.term(q, k, line(L, memory), line(L + memory))
        weights = ((q @ k.transpose(-1, -2) + term) / E**0.5).softmax(-1)
    z = (q @ k.transpose(-1, -2) + term).abs().max().item() / E**0.5
    found = complaint(weights, expected.permute(2, 3, 0, 1), torch.float32, length=H * E, logit=z, magnitude=1.0)
    assert found is None, found


# -- DeBERTa -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buckets", "most"), [(256, 512), (32, 64), (8, 20), (7, 30), (2, 9), (64, 2000)])
def test_deberta_buckets(buckets: int, most: int) -> None:
    x = torch.zeros(3000, 1)
    theirs = build_relative_position(x[:1], x, buckets, most)[0, 0]
    ours = positions.deberta_bucket(-torch.arange(3000), buckets=buckets, max_distance=most)
    assert torch.equal(ours, theirs)
    assert torch.equal(positions.deberta_bucket(torch.arange(3000), buckets=buckets, max_distance=most), -theirs)
    exact = [exact_deberta_bucket(-n, buckets, most) for n in range(3000)]
    off = sum(a != b for a, b in zip(exact, ours.tolist(), strict=True))
    assert off <= 2, "float32 may miss a border by one, and no more"


@pytest.mark.parametrize("share", [False, True], ids=["own projections", "shared projections"])
@pytest.mark.parametrize("kinds", [["c2p", "p2c"], ["p2c", "c2p"], ["c2p"], ["p2c"]], ids="+".join)
@pytest.mark.parametrize("buckets", [-1, 16])
def test_deberta_terms(share: bool, kinds: list[str], buckets: int) -> None:
    config = DebertaV2Config(
        hidden_size=H * E,
        num_attention_heads=H,
        relative_attention=True,
        max_relative_positions=24,
        position_buckets=buckets,
        pos_att_type=kinds,
        share_att_key=share,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = DisentangledSelfAttention(config).eval()
    ours = positions.deberta(
        H,
        E,
        max_distance=24,
        buckets=buckets if buckets > 0 else None,
        terms=kinds,
        key_proj=theirs.key_proj if share and "c2p" in kinds else None,
        query_proj=theirs.query_proj if share and "p2c" in kinds else None,
    )
    torch.nn.init.normal_(ours.embedding)
    if not share:
        for name, mine in (("pos_key_proj", ours.key_proj), ("pos_query_proj", ours.query_proj)):
            assert hasattr(theirs, name) is (mine is not None)
            if mine is not None:
                mine.load_state_dict(getattr(theirs, name).state_dict())
    q, k = torch.randn(2, H, L, E), torch.randn(2, H, L, E)
    expected = theirs.disentangled_attention_bias(
        q.flatten(0, 1), k.flatten(0, 1), None, ours.embedding, 1 + len(kinds)
    ).view(2, H, L, L)
    assert ours.factor == 1 + len(kinds)
    scale = scales.disentangled(terms=ours.factor).beta(scales.sizes(E))
    term = scale * ours.term(q, k, line(), line())
    assert complaint(term, expected, torch.float32, length=H * E, logit=0.0) is None
    parameters = [p for p in (ours.embedding, *theirs.parameters()) if p.requires_grad]
    gradients = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    (copied,) = torch.autograd.grad(term.square().sum(), ours.embedding)
    named = ({"embedding": gradient} for gradient in (copied, gradients[0]))
    wrong = gradient_complaints(*named, torch.float32, length=H * E, logit=0.0, rows=2 * H * L)
    assert not wrong, wrong


# -- rotations ---------------------------------------------------------------------------------------------------------


def llama(**rope: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=H * 64,
        num_attention_heads=H,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default", **rope},
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_llamas_rotation(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, H, L, 64), torch.randn(2, 2, L, 64)
    at = line(L, 1000).expand(2, L)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(llama())(q, at)
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = positions.rope(q, k, base=5000.0, positions=at)
    for mine, its in zip(ours, expected, strict=True):
        assert torch.equal(mine, its)
    wide = positions.rope(q.to(dtype), k.to(dtype), base=5000.0, positions=line(L, 1000))
    # angles of up to 1000 radians and more, rounded in float32
    assert complaint(wide[0], expected[0], torch.float32, length=2, logit=1000.0 + L) is None


@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_gptjs_rotation(rotary_dim: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read off its attention: projections are the identity, and what reaches the product is recorded."""
    config = GPTJConfig(n_embd=H * E, n_head=H, rotary_dim=rotary_dim or E, n_positions=64, attn_pdrop=0.0)
    theirs = modeling_gptj.GPTJAttention(config, layer_idx=0).eval()
    for projection in (theirs.q_proj, theirs.k_proj, theirs.v_proj):
        torch.nn.init.eye_(projection.weight)
    reached: list[Tensor] = []
    x, at = torch.randn(2, L, H * E), line(L, 20)
    places = at.expand(2, L)
    if hasattr(theirs, "_attn"):  # up to transformers 5.23: the module has the table of sines, and its own attention
        theirs.embed_positions = torch.nn.Buffer(modeling_gptj.create_sinusoidal_positions(64, rotary_dim or E))
        owner, name, angles = theirs, "_attn", {"position_ids": places}
    else:
        config._attn_implementation = "eager"
        owner, name = modeling_gptj, "eager_attention_forward"
        angles = {"position_embeddings": modeling_gptj.GPTJRotaryEmbedding(config)(x, places)}
    plain = getattr(owner, name)

    def record(*args: Any, **named: Any) -> Any:
        reached.extend([value for value in args if isinstance(value, Tensor)][:2])
        return plain(*args, **named)

    monkeypatch.setattr(owner, name, record)
    theirs(x, **angles)
    heads = x.view(2, L, H, E).transpose(1, 2)
    ours = positions.rope(heads, heads, layout="interleaved", rotary_dim=rotary_dim, positions=at)
    for mine, its in zip(ours, reached, strict=True):
        assert complaint(mine, its, torch.float32, length=2, logit=20.0 + L) is None  # angles, in radians


YARNS = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 64},
    "betas": {"factor": 16.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0, "beta_slow": 2.0},
    "not truncated": {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    "shorter": {"factor": 0.5, "original_max_position_embeddings": 512},
    "own factor": {"factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.5},
    "short context": {"factor": 8.0, "original_max_position_embeddings": 5},
}
OURS = {"original_max_position_embeddings": "original_length"}


@pytest.mark.parametrize("numbers", YARNS.values(), ids=YARNS)
def test_yarn(numbers: dict[str, float]) -> None:
    config = llama(rope_type="yarn", **numbers)
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    options = {OURS.get(name, name): value for name, value in numbers.items()}
    given = options.pop("attention_factor", None)
    frequencies = positions.yarn_frequencies(64, base=5000.0, **options)
    exponent = math.log(5000.0)
    assert complaint(frequencies, theirs, torch.float32, length=4, logit=exponent, each=True) is None
    assert given or positions.yarn_attention_factor(options["factor"]) == pytest.approx(amplitude)
    q, k = torch.randn(2, H, L, 64), torch.randn(2, 2, L, 64)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, line()[None])
    expected = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    ours = positions.yarn(q, k, base=5000.0, attention_factor=given, **options)
    for mine, its in zip(ours, expected, strict=True):
        assert complaint(mine, its, torch.float32, length=2, logit=float(L)) is None  # angles, in radians


def test_the_two_mscales_of_deepseek() -> None:
    numbers = {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7}
    _, amplitude = ROPE_INIT_FUNCTIONS["yarn"](llama(rope_type="yarn", **numbers))
    assert positions.yarn_attention_factor(40.0, 1.0, 0.7) == pytest.approx(amplitude, rel=1e-12)
    assert amplitude != pytest.approx(positions.yarn_attention_factor(40.0), rel=1e-3)
