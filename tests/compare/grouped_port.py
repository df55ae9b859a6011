"""A port of transformers' Llama in plain PyTorch, with mistakes in how heads are split, repeated and ordered.

The line that one has to change is marked with the mistake's name: `# tiled k`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, E, D, LAYERS = 4, 16, 64, 2


def original(kv: int = 2) -> LlamaForCausalLM:
    """Return the model of transformers, with random weights that make a difference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=D, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=kv, head_dim=E,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, HEADS // x.shape[1], 1, 1)  # helper k, helper v


def repeat_kv(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    x = x[:, :, None].expand(batch, heads, HEADS // heads, length, width)
    return x.reshape(batch, HEADS, length, width)


def turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
    c, s = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


class Attention(nn.Module):
    def __init__(self, kv: int, mistake: str) -> None:
        super().__init__()
        self.kv, self.mistake = kv, mistake
        self.q_proj = nn.Linear(D, HEADS * E, bias=False)
        self.k_proj = nn.Linear(D, kv * E, bias=False)
        self.v_proj = nn.Linear(D, kv * E, bias=False)
        self.o_proj = nn.Linear(HEADS * E, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (b, n, _), kv = x.shape, self.kv
        if self.mistake == "mixed":
            weight = torch.stack([p.weight.view(HEADS, E, D) for p in (self.q_proj, self.k_proj, self.v_proj)], 1)
            qkv = nn.functional.linear(x, weight.flatten(0, 2))
            q, k, v = qkv.view(b, n, 3, HEADS, E).unbind(2)  # mixed
            q, k, v = (y.flatten(2) for y in (q, k, v))
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.mistake == "channel first q":
            q = q.view(b, n, E, HEADS)  # channel first q
            q = q.permute(0, 3, 1, 2)
        else:
            q = q.view(b, n, HEADS, E).transpose(1, 2)
        k = k.view(b, n, kv, E).transpose(1, 2)
        if self.mistake == "channel first v":
            v = v.view(b, n, E, kv)  # channel first v
            v = v.permute(0, 3, 1, 2)
        else:
            v = v.view(b, n, kv, E).transpose(1, 2)
        q, k = turned(q), turned(k)
        if self.mistake == "reversed k":
            k = k.flip(1)  # reversed k
        if self.mistake == "repeated k":
            k = k.repeat(1, HEADS // kv, 1, 1)  # repeated k
        elif self.mistake == "helper k":
            k = tiled(k)
        elif self.mistake != "grouped q":
            k = repeat_kv(k)
        if self.mistake == "repeated v":
            v = v.repeat(1, HEADS // kv, 1, 1)  # repeated v
        elif self.mistake == "joined v":
            v = torch.cat([v] * (HEADS // kv), 1)  # joined v
        elif self.mistake == "helper v":
            v = tiled(v)
        elif self.mistake != "grouped q":
            v = repeat_kv(v)
        if self.mistake == "grouped q":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            q = q.reshape(b, n, HEADS // kv, kv, E)  # grouped q
            z = torch.einsum("blghe,bshe->bghls", q, k) / E**0.5
            z = z.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
            return self.o_proj(torch.einsum("bghls,bshe->blghe", z.softmax(-1), v).reshape(b, n, HEADS * E))
        z = q @ k.mT / E**0.5
        z = z.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        return self.o_proj((z.softmax(-1) @ v).transpose(1, 2).reshape(b, n, HEADS * E))


class Block(nn.Module):
    def __init__(self, kv: int, mistake: str) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(D, 1e-6), nn.RMSNorm(D, 1e-6)
        self.self_attn = Attention(kv, mistake)
        self.gate_proj, self.up_proj = nn.Linear(D, 96, bias=False), nn.Linear(D, 96, bias=False)
        self.down_proj = nn.Linear(96, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Port(nn.Module):
    """The port, with the weights of the model."""

    def __init__(self, model: LlamaForCausalLM, mistake: str = "") -> None:
        super().__init__()
        kv = model.config.num_key_value_heads
        self.embed_tokens, self.norm = nn.Embedding(97, D), nn.RMSNorm(D, 1e-6)
        self.layers = nn.ModuleList([Block(kv, mistake) for _ in range(LAYERS)])
        self.lm_head = nn.Linear(D, 97, bias=False)
        state = model.state_dict()
        self.load_state_dict({name.removeprefix("model.").replace("mlp.", ""): x for name, x in state.items()})
        self.eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
