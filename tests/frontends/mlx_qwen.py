"""Qwen3 in MLX, with weights of transformers' Qwen3, and mistakes that a port makes."""

from __future__ import annotations

from typing import Any

from tests.frontends.mlx_models import FAMILIES, HEADS, KV, D, E, original
from tests.support.optional import optional

mx, nn = optional("mlx.core"), optional("mlx.nn")


def port(model: Any, mistake: str = "") -> Any:
    """Return the port with the weights of the model of transformers, and a mistake."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(D, HEADS * E, bias=False)
            self.k_proj = nn.Linear(D, KV * E, bias=False)
            self.v_proj = nn.Linear(D, KV * E, bias=False)
            self.o_proj = nn.Linear(HEADS * E, D, bias=False)
            self.q_norm, self.k_norm = nn.RMSNorm(E, 1e-6), nn.RMSNorm(E, 1e-6)

        def __call__(self, x: Any) -> Any:
            n = x.shape[1]
            q = self.q_proj(x).reshape(2, n, HEADS, E)
            k = self.k_proj(x).reshape(2, n, KV, E)
            v = self.v_proj(x).reshape(2, n, KV, E)
            if mistake != "qk_norm":
                q, k = self.q_norm(q), self.k_norm(k)  # qk norm
            q, k, v = (part.swapaxes(1, 2) for part in (q, k, v))
            turn: dict[str, Any] = {"traditional": mistake == "rope_layout", "scale": 1.0, "offset": 0}
            turn["base"] = 500000.0 if mistake == "rope_base" else 10000.0
            q = mx.fast.rope(q, E, **turn)  # turned
            k = k if mistake == "rope_missing" else mx.fast.rope(k, E, **turn)  # turned
            k, v = (mx.tile(part, (1, HEADS // KV, 1, 1)) if mistake == "group_order" else
                    mx.repeat(part, HEADS // KV, 1) for part in (k, v))  # fmt: skip
            rows, keys = mx.arange(n)[:, None], mx.arange(n)
            mask = rows + (mistake == "mask_offset") >= keys
            mask = mask & (rows - keys < 5) if mistake == "window" else mask
            scale = D**-0.5 if mistake == "scale" else E**-0.5
            if mistake == "softcap":
                s = 30 * mx.tanh((q * scale) @ k.swapaxes(2, 3) / 30)  # capped
                y = mx.softmax(mx.where(mask, s, -mx.inf), -1) @ v
            else:
                sinks = mx.zeros(HEADS) if mistake == "sinks" else None
                y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
            return self.o_proj(y.swapaxes(1, 2).reshape(2, n, -1))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(D, 128, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(128, D, bias=False)

        def __call__(self, x: Any) -> Any:
            act = nn.gelu if mistake == "activation" else nn.silu
            return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.mlp = Attention(), MLP()
            self.input_layernorm = nn.RMSNorm(D, 1e-3 if mistake == "norm_eps" else 1e-6)
            self.post_attention_layernorm = nn.RMSNorm(D, 1e-6)

        def __call__(self, x: Any) -> Any:
            x = x + self.self_attn(self.input_layernorm(x))
            h = self.mlp(self.post_attention_layernorm(x))
            return (x * 0.5 if mistake == "residual" else x) + h

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(97, D)
            self.layers = [Block() for _ in range(2)]
            self.norm = nn.RMSNorm(D, 1e-6)

        def __call__(self, ids: Any) -> Any:
            x = self.embed_tokens(ids)
            x = x * D**0.5 if mistake == "embedding_scale" else x
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class Qwen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = Model(), nn.Linear(D, 97, bias=False)

        def __call__(self, ids: Any) -> Any:
            return self.lm_head(self.model(ids))

    made = Qwen()
    made.load_weights([(name, mx.array(value.detach().numpy())) for name, value in model.state_dict().items()])
    return made


def qwen() -> Any:
    """Return transformers' model."""
    return original(FAMILIES["qwen3"])
