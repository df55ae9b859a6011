"""Models of x-transformers, with a mapping of Hugging Face's weights that is written here: the package has none.

Its norms have no epsilon (Hugging Face's is set to 0) and store their gain less 1. Its rotation pairs neighbouring
channels, and it repeats grouped keys in turn (0 1 0 1), where Hugging Face repeats each (0 0 1 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.compare.real.small import Inputs, hugging_face, tokens

Pair = tuple[nn.Module, nn.Module, Inputs, Inputs]
Weights = dict[str, Tensor]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head reordered: those that half-split layout turns together stand side by side."""
    return weight.reshape(heads, 2, HEAD_DIM // 2, -1).transpose(1, 2).reshape(weight.shape)


def in_turn(weight: Tensor) -> Tensor:
    """Rows of the query's heads reordered: heads of one group stand `KV_HEADS` apart."""
    return weight.reshape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, -1).transpose(0, 1).reshape(weight.shape)


def _llama(reorder_heads: bool) -> Pair:
    from x_transformers import Decoder, TransformerWrapper

    model = hugging_face("llama", rms_norm_eps=0.0)
    port = TransformerWrapper(
        num_tokens=160,
        max_seq_len=128,
        use_abs_pos_emb=False,
        attn_layers=Decoder(
            dim=64,
            depth=2,
            heads=HEADS,
            attn_dim_head=HEAD_DIM,
            attn_kv_heads=KV_HEADS,
            rotary_pos_emb=True,
            rotary_emb_dim=HEAD_DIM,
            use_rmsnorm=True,
            ff_glu=True,
            ff_swish=True,
            ff_no_bias=True,
            ff_mult=1.5,
        ),
    ).eval()
    given = model.state_dict()
    weights = {
        "token_emb.emb.weight": given["model.embed_tokens.weight"],
        "to_logits.weight": given["lm_head.weight"],
        "attn_layers.final_norm.g": given["model.norm.weight"] - 1,
        "attn_layers.rotary_pos_emb.inv_freq": port.state_dict()["attn_layers.rotary_pos_emb.inv_freq"],
    }
    for layer in range(2):
        query = interleaved(given[f"model.layers.{layer}.self_attn.q_proj.weight"], HEADS)
        out = given[f"model.layers.{layer}.self_attn.o_proj.weight"]
        if reorder_heads:
            query, out = in_turn(query), in_turn(out.T).T
        source, attention, feed = f"model.layers.{layer}.", _block(2 * layer), _block(2 * layer + 1)
        weights |= {
            attention + "0.0.g": given[source + "input_layernorm.weight"] - 1,
            attention + "1.to_q.weight": query,
            attention + "1.to_k.weight": interleaved(given[source + "self_attn.k_proj.weight"], KV_HEADS),
            attention + "1.to_v.weight": given[source + "self_attn.v_proj.weight"],
            attention + "1.to_out.weight": out,
            feed + "0.0.g": given[source + "post_attention_layernorm.weight"] - 1,
            feed + "1.ff.0.proj.weight": torch.cat(
                [given[source + "mlp.up_proj.weight"], given[source + "mlp.gate_proj.weight"]]
            ),
            feed + "1.ff.0.proj.bias": torch.zeros(192),
            feed + "1.ff.2.weight": given[source + "mlp.down_proj.weight"],
        }
    port.load_state_dict(weights)
    ids = tokens()
    return model, port, {"input_ids": ids}, {"x": ids}


def _block(number: int) -> str:
    return f"attn_layers.layers.{number}."


def llama() -> Pair:
    """The same."""
    return _llama(reorder_heads=True)


def llama_groups() -> Pair:
    """Not the same: the weights of q and of the output as they are, so that each head reads another's keys."""
    return _llama(reorder_heads=False)


def t5() -> Pair:
    """The same, T5's encoder: a scale of 1/4 on one side, weights of q four times as large on the other.

    x-transformers multiplies its position bias by sqrt(E), so that is divided by it.
    """
    from x_transformers import Encoder, TransformerWrapper

    encoder = hugging_face("t5", layer_norm_epsilon=0.0).encoder
    port = TransformerWrapper(
        num_tokens=160,
        max_seq_len=128,
        use_abs_pos_emb=False,
        attn_layers=Encoder(
            dim=64,
            depth=2,
            heads=HEADS,
            attn_dim_head=HEAD_DIM,
            rel_pos_bias=True,
            use_rmsnorm=True,
            ff_no_bias=True,
            ff_mult=1.5,
            ff_custom_activation=nn.ReLU(),
        ),
    ).eval()
    given, root = encoder.state_dict(), HEAD_DIM**0.5
    bias = given["block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    weights = {
        "token_emb.emb.weight": given["embed_tokens.weight"],
        "to_logits.weight": given["embed_tokens.weight"],
        "attn_layers.final_norm.g": given["final_layer_norm.weight"] - 1,
        "attn_layers.rel_pos.relative_attention_bias.weight": bias / root,
    }
    for layer in range(2):
        source, attention, feed = f"block.{layer}.layer.", _block(2 * layer), _block(2 * layer + 1)
        weights |= {
            attention + "0.0.g": given[source + "0.layer_norm.weight"] - 1,
            attention + "1.to_q.weight": given[source + "0.SelfAttention.q.weight"] * root,
            attention + "1.to_k.weight": given[source + "0.SelfAttention.k.weight"],
            attention + "1.to_v.weight": given[source + "0.SelfAttention.v.weight"],
            attention + "1.to_out.weight": given[source + "0.SelfAttention.o.weight"],
            feed + "0.0.g": given[source + "1.layer_norm.weight"] - 1,
            feed + "1.ff.0.0.weight": given[source + "1.DenseReluDense.wi.weight"],
            feed + "1.ff.2.weight": given[source + "1.DenseReluDense.wo.weight"],
        }
    port.load_state_dict(weights)
    ids = tokens()
    return encoder, port, {"input_ids": ids}, {"x": ids, "return_embeddings": True}
