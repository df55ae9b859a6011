"""Llama in plain JAX, with weights of transformers' Llama, and mistakes that a port makes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.frontends.programs import jax, jnp, lax

HEADS, KV, E, D, LAYERS = 4, 2, 16, 64, 2


def original() -> LlamaForCausalLM:
    """Return the model of transformers, with weights that make a difference."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=D, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV, head_dim=E, rms_norm_eps=1e-6,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4)
    return model


def parameters_of(model: LlamaForCausalLM) -> Any:
    """Return the weights as the JAX code has them: matrices transposed, layers stacked."""
    state = {name: jnp.asarray(value.detach().numpy()) for name, value in model.state_dict().items()}

    def stacked(name: str, *shape: int) -> Any:
        rows = [state[f"model.layers.{n}.{name}.weight"] for n in range(LAYERS)]
        return jnp.stack([row.T.reshape(shape) if shape else row for row in rows])

    return {
        "embed": state["model.embed_tokens.weight"],
        "norm": state["model.norm.weight"],
        "head": state["lm_head.weight"].T,
        "layers": {
            "attn": {
                "wq": stacked("self_attn.q_proj", D, HEADS, E),
                "wk": stacked("self_attn.k_proj", D, KV, E),
                "wv": stacked("self_attn.v_proj", D, KV, E),
                "wo": stacked("self_attn.o_proj", HEADS, E, D),
            },
            "n1": stacked("input_layernorm"),
            "n2": stacked("post_attention_layernorm"),
            "mlp": {
                "gate": stacked("mlp.gate_proj", D, 128),
                "up": stacked("mlp.up_proj", D, 128),
                "down": stacked("mlp.down_proj", 128, D),
            },
        },
    }


def stated(mistake: str) -> Any:
    """Return the attention with a derivative of its own, as a kernel has, right or with a mistake."""

    def spread(x: Any) -> Any:
        return jnp.repeat(x, HEADS // KV, 2)

    def weights(q: Any, k: Any, mask: Any) -> Any:
        s = jnp.einsum("bthe,bshe->bhts", q, spread(k)) * E**-0.5
        return jax.nn.softmax(jnp.where(mask, s, -1e30), -1)

    def group(x: Any) -> Any:
        x = x.reshape(*x.shape[:2], KV, HEADS // KV, E)
        return x[:, :, :, 0] if mistake == "backward group" else x.sum(3)

    @jax.custom_vjp
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jnp.einsum("bhts,bshe->bthe", weights(q, k, mask), spread(v))

    def backward(saved: Any, do: Any) -> Any:
        q, k, v, mask = saved
        p = weights(q, k, jnp.ones_like(mask) if mistake == "backward mask" else mask)
        dp = jnp.einsum("bthe,bshe->bhts", do, spread(v))
        dz = p * (dp - (0 if mistake == "backward D" else (p * dp).sum(-1, keepdims=True)))
        dq = jnp.einsum("bhts,bshe->bthe", dz, spread(k)) * E**-0.5
        dk = jnp.einsum("bhts,bthe->bshe", dz, q) * (1 if mistake == "backward scale" else E**-0.5)
        return dq, group(dk), group(jnp.einsum("bhts,bthe->bshe", p, do)), None

    attend.defvjp(lambda *saved: (attend(*saved), saved), backward)
    return attend


def port(mistake: str = "") -> Any:
    """Return the port, `llama(parameters, ids)`, with a mistake."""

    def rms(x: Any, gain: Any, eps: float = 1e-6) -> Any:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * gain  # norm

    def rope(x: Any) -> Any:
        base = 500000.0 if mistake == "rope_base" else 10000.0
        angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(0, E, 2) / E)
        c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        if mistake == "rope_layout":
            a, b = x[..., ::2], x[..., 1::2]
            return jnp.stack([a * c - b * s, b * c + a * s], -1).reshape(x.shape)
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    def attention(h: Any, p: Any) -> Any:
        n = h.shape[1]
        q, k, v = (jnp.einsum("btd,dhe->bthe", h, p[name]) for name in ("wq", "wk", "wv"))
        q, k = rope(q), k if mistake == "rope_missing" else rope(k)
        if mistake == "group_order":
            k, v = (jnp.tile(x, (1, 1, HEADS // KV, 1)) for x in (k, v))
        mask = jnp.tril(jnp.ones((n, n), bool), 1 if mistake == "mask_offset" else 0)
        scale = D**-0.5 if mistake == "scale" else None
        if mistake == "softcap":
            s = jnp.einsum("bthe,bshe->bhts", q, jnp.repeat(k, HEADS // KV, 2)) / 4
            w = jax.nn.softmax(jnp.where(mask, 30 * jnp.tanh(s / 30), -1e30), -1)
            out = jnp.einsum("bhts,bshe->bthe", w, jnp.repeat(v, HEADS // KV, 2))
        elif mistake.startswith("backward"):
            out = stated(mistake)(q, k, v, mask)
        else:
            out = jax.nn.dot_product_attention(q, k, v, mask=mask[None, None], scale=scale)
        return jnp.einsum("bthe,hed->btd", out, p["wo"])

    def mlp(h: Any, p: Any) -> Any:
        act = jax.nn.gelu if mistake == "activation" else jax.nn.silu
        return (act(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def layer(x: Any, p: Any) -> Any:
        x = x + attention(rms(x, p["n1"], 1e-3 if mistake == "norm_eps" else 1e-6), p["attn"])
        h = rms(x, p["n2"])
        return (x * 0.5 if mistake == "residual" else x) + mlp(h, p["mlp"]), None

    def llama(p: Any, ids: Any) -> Any:
        x, _ = lax.scan(jax.checkpoint(layer), p["embed"][ids], p["layers"])
        return rms(x, p["norm"]) @ p["head"]

    return llama
