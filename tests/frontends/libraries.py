"""Attentions of flax linen, flax nnx and equinox: each a function that returns `(module, parameters, inputs)`."""

from __future__ import annotations

from typing import Any

from tests.frontends.programs import D, jax, jnp, tokens
from tests.support.optional import optional

linen, nnx, eqx = optional("flax.linen"), optional("flax.nnx"), optional("equinox")


def linen_layers() -> Any:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            mask = linen.make_causal_mask(x[..., 0])
            x = x + linen.MultiHeadDotProductAttention(4, name="attn")(linen.LayerNorm()(x), mask=mask)
            return x + linen.Dense(D)(linen.gelu(linen.Dense(D)(linen.LayerNorm()(x))))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for at in range(2):
                x = Block(name=f"block_{at}")(x)
            return x

    return Net(), Net().init(jax.random.key(0), tokens()), (tokens(),)


def linen_scan() -> Any:
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x: Any, _: Any) -> Any:
            mask = linen.make_causal_mask(x[..., 0])
            return x + linen.MultiHeadDotProductAttention(4, name="attn")(linen.RMSNorm()(x), mask=mask), None

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            layers = linen.scan(linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]

    return Net().apply, Net().init(jax.random.key(0), tokens()), (tokens(),)


def nnx_layers() -> Any:
    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attn = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(D, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.attn(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            for each in self.blocks:
                x = each(x)
            return x

    return Net(nnx.Rngs(0)), None, (tokens(),)


def equinox_layers() -> Any:
    class Block(eqx.Module):
        attn: Any
        norm: Any

        def __call__(self, x: Any) -> Any:
            h = jax.vmap(self.norm)(x)
            return x + self.attn(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))

    class Net(eqx.Module):
        blocks: list[Any]

        def __call__(self, x: Any) -> Any:
            for each in self.blocks:
                x = jax.vmap(each)(x)
            return x

    keys = jax.random.split(jax.random.key(0))
    return Net([Block(eqx.nn.MultiheadAttention(4, D, key=k), eqx.nn.LayerNorm(D)) for k in keys]), None, (tokens(),)
