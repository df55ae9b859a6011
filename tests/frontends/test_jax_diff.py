"""A port of Llama to JAX against transformers' own: the right one is the same, each mistake is named at its line."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_jax
from tests.frontends.llama import original, parameters_of, port
from tests.frontends.programs import jax, jnp
from tests.support.paths import ROOT

FILE = "tests/frontends/llama.py"
# mistake: (cause that is named, or first module that differs; what stands on a line that is named)
CAUSES = {
    "scale": ("scale", "dot_product_attention"),
    "rope_layout": ("rope_layout", r"stack|\[\.\.\., ::2\]|q, k = rope"),
    "rope_base": ("rope_base", r"concatenate|split|q, k = rope"),
    "rope_missing": ("rope_missing", "q, k = rope|einsum"),
    "mask_offset": ("mask_offset", "dot_product_attention"),
    "group_order": ("group_order", "jnp.tile"),
    "softcap": ("softcap", "tanh"),
}
MODULES = {
    "norm_eps": ("layers.0.rms", "# norm"),
    "activation": ("layers.0.mlp", r"gate|act"),
    "residual": ("layers.0", r"mistake == \"residual\"|rms\(x"),
}


@functools.cache
def _sides() -> tuple[Any, Any, torch.Tensor]:
    model = original()
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    return model, parameters_of(model), ids


def _diff(mistake: str) -> Any:
    model, parameters, ids = _sides()
    return sqrtdk.diff(model, from_jax(port(mistake), parameters, jnp.asarray(ids)), {"input_ids": ids})


def _text(place: str) -> str:
    file, _, lines = place.rpartition(":")
    assert file == FILE
    first, _, last = lines.partition("-")
    return "\n".join((ROOT / FILE).read_text(encoding="utf-8").splitlines()[int(first) - 1 : int(last or first)])


def test_the_right_port_is_the_same() -> None:
    report = _diff("")
    assert report.same
    assert [(pair.site_a, pair.site_b) for pair in report.pairs] == [
        (f"model.layers.{n}.self_attn", f"layers.{n}.attention") for n in range(2)
    ]
    assert not any(pair.causes for pair in report.pairs)
    assert report.first_module is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake", CAUSES)
def test_a_mistake_in_the_attention_is_named_at_its_line(mistake: str) -> None:
    cause, line = CAUSES[mistake]
    report = _diff(mistake)
    assert not report.same
    found = {one.name: one for pair in report.pairs for one in pair.causes}
    assert set(found) == {cause}
    assert re.search(line, _text(found[cause].at_b))


@pytest.mark.full
@pytest.mark.parametrize("mistake", MODULES)
def test_a_mistake_elsewhere_is_found_in_its_function(mistake: str) -> None:
    module, line = MODULES[mistake]
    report = _diff(mistake)
    assert not report.same
    assert report.first_module.b == module
    assert re.search(line, _text(report.first_module.place))


@pytest.mark.full
def test_behind_a_layer_in_one_function_no_second_difference_is_claimed() -> None:
    """`def layer(x, p)` with norms, attention and MLP returns no output of an attention that A could go on with."""
    model, parameters, ids = _sides()

    def norm(x: Any, gain: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain

    def layer(x: Any, p: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhe->bthe", norm(x, p["n1"]), p["attn"][name]) for name in ("wq", "wk", "wv"))
        angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(0, 16, 2) / 16)  # for 10000
        c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
        q, k = (jnp.concatenate([a * c - b * s, b * c + a * s], -1) for a, b in (jnp.split(y, 2, -1) for y in (q, k)))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bthe,hed->btd", out, p["attn"]["wo"])
        h = norm(x, p["n2"])
        return x + (jax.nn.silu(h @ p["mlp"]["gate"]) * (h @ p["mlp"]["up"])) @ p["mlp"]["down"], None

    def llama(p: Any, ids: Any) -> Any:
        return norm(jax.lax.scan(layer, p["embed"][ids], p["layers"])[0], p["norm"]) @ p["head"]

    report = sqrtdk.diff(model, from_jax(llama, parameters, jnp.asarray(ids)), {"input_ids": ids})
    assert {cause.name for pair in report.pairs for cause in pair.causes} == {"rope_base"}
    assert not report.module_causes
    assert report.first_module is None
