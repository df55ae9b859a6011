"""Faults of a conversion, planted in the GGUF file: `diff` names each as it does between two torch models."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqrtdk
from tests.frontends.gguf_models import E, original, permuted, tensors_of, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: make .venv/.ggml")
pytestmark = pytest.mark.full


@functools.cache
def _model(kind: str) -> Any:
    if kind == "gemma2_scaled":  # llama.cpp has no key for it: a converter has to put it into the rows of q
        return original("gemma2", query_pre_attn_scalar=24)
    return original(kind)


def _swapped(kind: str, one: str, other: str) -> Any:
    def change(name: str, value: Any) -> Any:
        if one in name:
            return _right(kind)[name.replace(one, other)]
        return _right(kind)[name.replace(other, one)] if other in name else value

    return change


@functools.cache
def _right(kind: str) -> dict[str, Any]:
    return tensors_of(_model(kind))


def _rows(name: str, value: Any) -> Any:
    return permuted(value, value.shape[0] // E) if re.search(r"attn_[qk]\.weight", name) else value


def _heads(name: str, value: Any) -> Any:
    return value.reshape(2, -1, value.shape[1])[::-1].reshape(value.shape) if "attn_v.weight" in name else value


def _no_head(name: str, value: Any) -> Any:
    return None if name == "output.weight" else value


# fault: (model, what `write_gguf` does otherwise, causes that are named, a place of one, as <OPERATION name>)
CAUSES: dict[str, tuple[str, dict[str, Any], set[str], str]] = {
    "base": ("llama", {"keys": {"rope.freq_base": 500000.0}}, {"rope_base"}, "<ROPE Qcur-0>"),
    "base_of_qwen3": ("qwen3", {"keys": {"rope.freq_base": 500000.0}}, {"rope_base"}, "<ROPE Qcur-0>"),
    "base_of_gemma2": ("gemma2", {"keys": {"rope.freq_base": 500000.0}}, {"rope_base"}, "<ROPE"),
    "rope_scaling": (
        "llama", {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}}, {"rope_base"}, "<ROPE Qcur-0>",
    ),
    "permutation_left_out": ("llama", {"permute": False}, {"rope_layout"}, "<ROPE Qcur-0>"),
    "permutation_too_much": ("qwen3", {"change": _rows}, {"head_order"}, "<MUL_MAT Qcur-0>"),
    "window": ("gemma2", {"keys": {"attention.sliding_window": 4}}, {"window"}, "<FLASH_ATTN_EXT"),
    "window_of_gemma3": ("gemma3_text", {"keys": {"attention.sliding_window": 4}}, {"window"}, "<FLASH_ATTN_EXT"),
    "softcap": ("gemma2", {"keys": {"attn_logit_softcapping": 50.0}}, {"softcap"}, "<FLASH_ATTN_EXT"),
    "softcap_left_out": ("gemma2", {"without": ("attn_logit_softcapping",)}, {"softcap"}, "<FLASH"),
    "scale": ("gemma2_scaled", {}, {"scale"}, "<SCALE"),
    "declared_scale": ("granite", {"keys": {"attention.scale": 0.25}}, {"scale"}, ""),
    "eps_of_qk_norm": (
        "qwen3", {"keys": {"attention.layer_norm_rms_epsilon": 1e-3}}, {"qk_norm_eps", "input"}, "<RMS_NORM",
    ),
    "gain_of_qk_norm": (
        "qwen3", {"change": lambda name, x: np.ones_like(x) if "_q_norm" in name or "_k_norm" in name else x},
        {"weights"}, "",
    ),
    "value_heads": ("llama", {"change": _heads}, {"head_order"}, ""),
    "value_heads_of_gemma3": ("gemma3_text", {"change": _heads}, {"head_order"}, ""),
}  # fmt: skip
# fault: (model, what is otherwise, first module that differs, place or words of it)
MODULES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "eps": ("llama", {"keys": {"attention.layer_norm_rms_epsilon": 1e-3}}, "blk.0.attn_norm", "<RMS_NORM norm-0>"),
    "plus_one": ("gemma2", {"plus": 0.0}, "blk.0.attn_norm", "<RMS_NORM norm-0>"),
    "plus_one_of_gemma3": ("gemma3_text", {"plus": 0.0}, "blk.0.attn_norm", "<RMS_NORM norm-0>"),
    "embedding_scale": (
        "gemma3_text", {"change": lambda name, x: x / 8 if name == "token_embd.weight" else x}, "token_embd",
        "0.125 times A's",
    ),
    "final_softcap": (
        "gemma2", {"keys": {"final_logit_softcapping": 30.0}}, "", "between `lm_head` and the output",
    ),
    "gate_and_up": ("llama", {"change": _swapped("llama", "ffn_gate", "ffn_up")}, "blk.0.ffn.ffn_gate", "gate_proj"),
    "norms": (
        "gemma3_text", {"change": _swapped("gemma3_text", "post_attention_norm", "ffn_norm")},
        "blk.0", r"`blk\.#\.post_attention_norm\.weight` is A's `model\.layers\.#\.pre_feedforward_layernorm",
    ),
}  # fmt: skip


def _diff(kind: str, otherwise: dict[str, Any], dtype: str, folder: Path, attn: str = "sdpa") -> Any:
    path = write_gguf(folder / "model.gguf", _model(kind), dtype, **otherwise)
    return sqrtdk.diff(_model(kind), str(path), seq_len=24, attn_b=attn)


@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_in_the_attention_is_named_with_its_operation(fault: str, tmp_path: Path) -> None:
    kind, otherwise, causes, place = CAUSES[fault]
    report = _diff(kind, otherwise, "F16", tmp_path)
    found = [cause for pair in report.pairs for cause in pair.causes]
    assert not report.same
    assert {cause.name for cause in found} == causes, report.paragraphs
    assert any((cause.at_b or "").startswith(place) for cause in found), [cause.at_b for cause in found]


@pytest.mark.parametrize("fault", MODULES)
def test_a_fault_elsewhere_is_found_in_its_module(fault: str, tmp_path: Path) -> None:
    kind, otherwise, module, words = MODULES[fault]
    report = _diff(kind, otherwise, "F32", tmp_path)
    assert not report.same
    assert report.first_module.b == module, report.paragraphs
    assert re.search(words, " ".join((str(report.first_module.place), *report.paragraphs)))


def test_an_eps_is_named_in_all_layers_also_where_every_norm_holds_ones(tmp_path: Path) -> None:
    """A model that is not trained yet: the weights of its norms do not tell which of them is which."""
    model = original("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
    path = write_gguf(tmp_path / "ones.gguf", model, "F32", keys={"attention.layer_norm_rms_epsilon": 1e-3})
    (cause,) = sqrtdk.diff(model, str(path), seq_len=24).module_causes
    assert (cause.name, cause.proven, cause.site_b) == ("norm_eps", True, "blk.0.attn_norm")
    norms = {f"model.layers.{n}.{name}" for n in range(2) for name in ("input_layernorm", "post_attention_layernorm")}
    assert {cause.site_a, *cause.others} == norms | {"model.norm"}


def test_a_head_that_is_tied_on_one_side_alone_is_named(tmp_path: Path) -> None:
    model = original("llama")
    own = str(write_gguf(tmp_path / "own.gguf", model, "F32"))
    tied = str(write_gguf(tmp_path / "tied.gguf", model, "F32", change=_no_head))
    (cause,) = sqrtdk.diff(model, tied, seq_len=24).module_causes
    assert (cause.name, cause.proven, cause.a, cause.b) == ("tied_head", True, "lm_head", "model.embed_tokens")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert sqrtdk.diff(model, tied, seq_len=24).same
    (cause,) = sqrtdk.diff(model, own, seq_len=24).module_causes
    assert (cause.name, cause.proven, cause.a, cause.b) == ("tied_head", True, "model.embed_tokens", None)


@pytest.mark.parametrize("dtype", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("fault", ["base", "permutation_left_out", "softcap", "scale"])
def test_a_fault_is_named_in_any_dtype_and_without_flash_attention(fault: str, dtype: str, tmp_path: Path) -> None:
    kind, otherwise, causes, _ = CAUSES[fault]
    report = _diff(kind, otherwise, dtype, tmp_path, "eager")
    assert {cause.name for pair in report.pairs for cause in pair.causes} == causes, report.paragraphs
