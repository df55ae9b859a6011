"""A port of Qwen3 to MLX against transformers' own: the right one is the same, each mistake is named at its line."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

import sqrtdk
from sqrtdk.frontends import from_mlx
from tests.frontends.mlx_models import FAMILIES, ids, original
from tests.frontends.mlx_models import port as of_family
from tests.frontends.mlx_qwen import port, qwen
from tests.support.optional import optional
from tests.support.paths import ROOT

mx = optional("mlx.core")

FILE = "tests/frontends/mlx_qwen.py"
ATTENTION = r"mx\.fast\.scaled_dot_product_attention"
# mistake: what stands on the line that is named with the cause of this name
CAUSES = {
    "scale": ATTENTION,
    "rope_layout": "# turned",
    "rope_base": "# turned",
    "rope_missing": "# qk norm|# turned",
    "mask_offset": ATTENTION,
    "window": ATTENTION,
    "sinks": ATTENTION,
    "group_order": r"mx\.tile|self\.k_proj",
    "softcap": "# capped",
    "qk_norm": r"self\.q_proj|self\.k_proj",
}
# mistake: (first module that differs, cause or "", what stands on a line that is named)
MODULES = {
    "norm_eps": ("model.layers.0.input_layernorm", "norm_eps", r"self\.input_layernorm\(x\)"),
    "activation": ("model.layers.0.mlp", "", "act"),
    "residual": ("model.layers.0", "residual_scale", r"mistake == \"residual\"|h = self\.mlp"),
    "embedding_scale": ("model", "output_scale", r"mistake == \"embedding_scale\"|self\.input_layernorm\(x\)"),
}


@functools.cache
def _original() -> Any:
    return qwen()


def _diff(mistake: str) -> Any:
    ported = from_mlx(port(_original(), mistake), None, mx.array(ids().numpy().astype("int32")))
    return sqrtdk.diff(_original(), ported, {"input_ids": ids()})


def _text(place: str) -> str:
    file, _, lines = place.rpartition(":")
    assert file == FILE
    first, _, last = lines.partition("-")
    return "\n".join((ROOT / FILE).read_text(encoding="utf-8").splitlines()[int(first) - 1 : int(last or first)])


@pytest.mark.full
def test_the_right_port_is_the_same() -> None:
    report = _diff("")
    assert report.same
    assert [(pair.site_a, pair.site_b) for pair in report.pairs] == [
        (f"model.layers.{n}.self_attn", f"model.layers.{n}.self_attn") for n in range(2)
    ]
    assert report.first_module is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake", CAUSES)
def test_a_mistake_in_the_attention_is_named_at_its_line(mistake: str) -> None:
    report = _diff(mistake)
    assert not report.same
    found = {one.name: one for pair in report.pairs for one in pair.causes}
    assert set(found) == {mistake}
    assert re.search(CAUSES[mistake], _text(found[mistake].at_b))


@pytest.mark.full
@pytest.mark.parametrize("mistake", MODULES)
def test_a_mistake_elsewhere_is_found_in_its_module(mistake: str) -> None:
    module, cause, line = MODULES[mistake]
    report = _diff(mistake)
    assert not report.same
    assert report.first_module.b == module
    assert re.search(line, _text(report.first_module.place))
    assert not cause or cause in {one.name for one in report.module_causes}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "args", "cause"),
    [
        ("gemma2", {"attn_logit_softcapping": 50.0}, "softcap"),
        ("gemma2", {"query_pre_attn_scalar": 64}, "scale"),
        ("gemma3", {"rope_local_base_freq": 500000.0}, "rope_base"),
        ("gpt_oss", {"sliding_window": 7}, "window"),
        ("llama", {"rope_traditional": True}, "rope_layout"),
    ],
)
def test_a_wrong_argument_of_mlx_lm_is_named(name: str, args: dict[str, Any], cause: str) -> None:
    model = original(FAMILIES[name])
    module = of_family(FAMILIES[name], model, **args)
    report = sqrtdk.diff(model, from_mlx(module, None, mx.array(ids().numpy().astype("int32"))), {"input_ids": ids()})
    named = {one.name: one for pair in report.pairs for one in pair.causes if one.name != "input"}
    assert set(named) == {cause}
    assert named[cause].at_b.startswith("mlx_lm/models/")
