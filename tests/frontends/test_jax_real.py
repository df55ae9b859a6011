"""Attention layers of packages that port Gemma: gemma's own and penzai's, with small random weights.

python scripts/real.py; out/real/ports/bin/python -m pytest -m slow tests/frontends/test_jax_real.py
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_jax
from tests.frontends.programs import B, D, T, jax, jnp, lower, tokens

pytestmark = pytest.mark.slow
ROPE = "softmax(0.3536 * rope(q).rope(k) + causal)"


def checked(function: Any, parameters: Any, *inputs: Any) -> list[tuple[str, str, str, int | None]]:
    module = from_jax(function, parameters, *inputs)
    report = sqrtdk.check(module, tuple(torch.tensor(x.tolist()) for x in inputs), laws="none")
    assert not report.not_measured
    return [(one.call.site, one.call.formula, one.verdict, one.call.kv_heads) for one in report.calls]


GEMMA = [
    # heads of k and v, sliding, softcap, norms of q and k: the formula
    (4, False, None, False, ROPE),
    (2, False, 5.0, False, "softmax(5 * tanh(0.3536 * rope(q).rope(k) / 5) + causal)"),
    (2, True, None, True, "softmax(0.3536 * rope(rms(q)).rope(rms(k)) + window)"),
    (1, False, None, False, ROPE),
]


@pytest.mark.skipif(find_spec("gemma") is None, reason="needs gemma")
@pytest.mark.parametrize(("kv", "slides", "cap", "normed", "formula"), GEMMA)
def test_gemma_s_own_attention(kv: int, slides: bool, cap: float | None, normed: bool, formula: str) -> None:
    from gemma import modules

    kind = modules.AttentionType.LOCAL_SLIDING if slides else modules.AttentionType.GLOBAL
    layer = modules.Attention(
        num_heads=4, num_kv_heads=kv, features=D, head_dim=8, attn_type=kind, query_pre_attn_scalar=8**-0.5,
        attn_logits_soft_cap=cap, sliding_window_size=4, use_qk_norm=normed,
    )  # fmt: skip
    inputs = tokens(), jnp.tile(jnp.arange(T), (B, 1)), jnp.tile(lower(), (B, 1, 1))
    parameters = layer.init(jax.random.key(0), inputs[0], inputs[1], None, inputs[2])
    found = checked(lambda p, x, at, mask: layer.apply(p, x, at, None, mask)[1], parameters, *inputs)
    assert found == [("", formula, "exact", kv)]


@pytest.mark.skipif(find_spec("penzai") is None, reason="needs penzai")
@pytest.mark.parametrize("stacked", [False, True])
def test_penzai_s_llama(stacked: bool) -> None:
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=D, projection_dim=8, mlp_hidden_dim=64,
        num_decoder_blocks=2, vocab_size=40, mlp_variant="swiglu", tie_embedder_and_logits=False,
        use_layer_stack=stacked,
    )  # fmt: skip
    model = llamalike_common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0), name="llama")
    unbound, variables = pz.unbind_variables(model)

    def function(values: Any, ids: Any) -> Any:
        held = [dataclasses.replace(one.freeze(), value=x) for one, x in zip(variables, values, strict=True)]
        places = pz.nx.arange("seq", ids.shape[1])
        made = pz.bind_variables(unbound, held)(pz.nx.wrap(ids).tag("batch", "seq"), token_positions=places)
        return made.unwrap("batch", "seq", "vocabulary")

    ids = jax.random.randint(jax.random.key(1), (B, T), 0, 40)
    found = checked(function, [one.value for one in variables], ids)
    assert [what[1:] for what in found] == [(ROPE, "exact", 2)] * 2
