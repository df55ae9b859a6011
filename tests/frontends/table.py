"""The JAX programs that are tried, with what `check` says of each."""

from __future__ import annotations

from tests.frontends.copied import gemma, maxtext, nnx_cross, table_of_angles
from tests.frontends.libraries import equinox_layers, linen_layers, linen_scan, nnx_layers
from tests.frontends.programs import (
    CAUSAL,
    PLAIN,
    ROPE,
    B,
    E,
    Expected,
    H,
    Program,
    T,
    branches,
    by_blocks,
    by_jit,
    by_lines,
    by_scan,
    cross,
    decode,
    in_bfloat16,
    jnp,
    language_model,
    latent,
    lower,
    normal,
    of_jax_nn,
    online,
    own_derivative,
    padded,
    per_row,
    rms,
    rope,
    sharded,
    simple,
    vision,
    with_key,
    written_out,
)

THREE = tuple(f"layers.{n}.attention.written_out" for n in range(3))
WRITTEN = ("written_out",)
PROGRAMS: dict[str, tuple[Program, Expected]] = {
    "nn": (of_jax_nn(), Expected(PLAIN)),
    "nn_causal": (of_jax_nn(is_causal=True), Expected(CAUSAL)),
    "nn_window": (of_jax_nn(is_causal=True, local_window_size=(3, 0)), Expected("softmax(0.3536 * q.k + window)")),
    "nn_mask": (of_jax_nn(mask=padded), Expected("softmax(0.3536 * q.k + padding)")),
    "nn_bias": (of_jax_nn(bias=lambda: normal(1, H, T, T)), Expected("softmax(0.3536 * q.k + bias)")),
    "nn_scale": (of_jax_nn(scale=1.0), Expected("softmax(q.k)", "unexplained")),
    "nn_lengths": (
        of_jax_nn(
            query_seq_lengths=lambda: jnp.array([T, 7]), key_value_seq_lengths=lambda: jnp.array([T, 7]), is_causal=True
        ),
        Expected(CAUSAL),
    ),
    "nn_xla": (of_jax_nn(implementation="xla", is_causal=True), Expected(CAUSAL)),
    "nn_all": (
        of_jax_nn(is_causal=True, mask=padded, bias=lambda: normal(B, H, T, T), scale=E**-0.5),
        Expected("softmax(0.3536 * q.k + bias + causal)"),
    ),
    "nn_bfloat16": (in_bfloat16(of_jax_nn(is_causal=True)), Expected(CAUSAL)),
    "heads": (simple(lambda q, k, v, p: written_out(q, k, v), heads=H, kv=H), Expected(PLAIN, sites=WRITTEN)),
    "one_key_head": (simple(lambda q, k, v, p: written_out(q, k, v, lower()), kv=1), Expected(CAUSAL, sites=WRITTEN)),
    "rope_half": (simple(lambda q, k, v, p: written_out(rope(q), rope(k), v, lower())), Expected(ROPE, sites=WRITTEN)),
    "rope_pairs": (
        simple(lambda q, k, v, p: written_out(rope(q, "pairs"), rope(k, "pairs"), v, lower())),
        Expected(ROPE, sites=WRITTEN),
    ),
    "softcap": (
        simple(lambda q, k, v, p: written_out(q, k, v, lower(), cap=30.0)),
        Expected("softmax(30 * tanh(0.3536 * q.k / 30) + causal)", sites=WRITTEN),
    ),
    "qk_norm": (
        simple(
            lambda q, k, v, p: written_out(rms(q, p["gq"]), rms(k, p["gk"]), v, lower()),
            {"gq": lambda: jnp.linspace(1, 2, E), "gk": lambda: jnp.ones(E)},
        ),
        Expected("softmax(0.3536 * rms(q).rms(k) + causal)", sites=WRITTEN),
    ),
    "l2_norm": (
        simple(
            lambda q, k, v, p: written_out(
                *(x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v, scale=10.0
            )
        ),
        Expected("softmax(10 * l2(q).l2(k))", "declared", sites=WRITTEN),
    ),
    "sinks": (
        simple(lambda q, k, v, p: written_out(q, k, v, lower(), sinks=p["sinks"]), {"sinks": lambda: normal(H)}),
        Expected("softmax(0.3536 * q.k + causal + sinks)", sites=WRITTEN),
    ),
    "alibi": (
        simple(
            lambda q, k, v, p: written_out(
                q, k, v, lower(), bias=-0.3 * jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
            )
        ),
        Expected("softmax(0.3536 * q.k + alibi + causal)", sites=WRITTEN),
    ),
    "scale_on_q": (
        simple(lambda q, k, v, p: written_out(q * E**-0.25, k * E**-0.25, v, scale=1.0)),
        Expected(PLAIN, sites=WRITTEN),
    ),
    "scale_computed": (
        simple(lambda q, k, v, p: written_out(q / jnp.sqrt(jnp.float32(q.shape[-1])), k, v, scale=1.0)),
        Expected(PLAIN, sites=WRITTEN),
    ),
    "unscaled": (
        simple(lambda q, k, v, p: written_out(q, k, v, scale=1.0)),
        Expected("softmax(q.k)", "unexplained", sites=WRITTEN),
    ),
    "twice": (
        simple(lambda q, k, v, p: written_out(q * E**-0.5, k, v)),
        Expected("softmax(0.125 * q.k)", "unexplained", sites=WRITTEN),
    ),
    "latent": (latent, Expected("softmax(0.25 * rope(q).rope(k) + causal)", sites=WRITTEN)),
    "decode": (decode, Expected("softmax(0.3536 * q.k + padding)")),
    "vision": (vision, Expected(PLAIN)),
    "cross": (cross, Expected(PLAIN)),
    "online": (online, Expected(ROPE)),
    "vmap": (per_row, Expected(CAUSAL, sites=("one",))),
    "shard_map": (sharded, Expected(CAUSAL)),
    "key": (with_key, Expected(CAUSAL, sites=WRITTEN)),
    "branches": (branches, Expected(CAUSAL, sites=WRITTEN)),
    "custom_vjp": (own_derivative, Expected(PLAIN)),
    "scan": (language_model(by_scan, stacked=True), Expected(ROPE, sites=THREE)),
    "scan_bfloat16": (
        in_bfloat16(language_model(by_scan, stacked=True)),
        Expected(ROPE.replace("0.3536", "0.3535"), sites=THREE),
    ),
    "blocks": (language_model(by_blocks, stacked=False), Expected(ROPE, sites=THREE)),
    "lines": (language_model(by_lines, stacked=False), Expected(ROPE, sites=THREE)),
    "jit": (language_model(by_jit, stacked=False), Expected(ROPE, sites=THREE)),
    "linen": (linen_layers, Expected(CAUSAL, sites=("block_0.attn", "block_1.attn"), package="flax.linen")),
    "linen_scan": (
        linen_scan,
        Expected(CAUSAL, sites=("layers.0.attn", "layers.1.attn", "layers.2.attn"), package="flax.linen"),
    ),
    "nnx": (nnx_layers, Expected(CAUSAL, sites=("blocks.0.attn", "blocks.1.attn"), package="flax.nnx")),
    "equinox": (equinox_layers, Expected(CAUSAL, sites=("blocks.0.attn", "blocks.1.attn"), package="equinox")),
    "gemma": (gemma, Expected("softmax(50 * tanh(0.3536 * rope(q).rope(k) / 50) + window)")),
    "maxtext": (maxtext, Expected("softmax(0.3535 * rope(q).rope(k) + mask)")),
    "table_of_angles": (table_of_angles, Expected(ROPE, sites=WRITTEN)),
    "nnx_cross": (nnx_cross, Expected("softmax(0.3536 * layer(q).layer(k))", sites=("attn",), package="flax.nnx")),
}
