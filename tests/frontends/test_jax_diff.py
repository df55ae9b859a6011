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
from tests.frontends.programs import jnp
from tests.support.paths import ROOT

FILE = "tests/frontends/llama.py"
# mistake: (cause that is named, or first module that differs; what stands on a line that is named)
CAUSES = {
    "scale": ("scale", "dot_product_attention"),
    "rope_layout": ("rope_layout", r"stack|\[\.\.\., ::2\]|q, k = rope"),
    "rope_base": ("rope_base", r"concatenate|split|q, k = rope"),
    "rope_missing": ("rope_missing", "q, k = rope|einsum"),
    "mask_offset": ("mask_offset", "dot_product_attention"),
    "group_order": ("group_order", "jnp.tile|q, k = rope|einsum"),
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
