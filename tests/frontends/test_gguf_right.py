"""GGUF files that are right: the same as the model that they were made from, with flash attention and without."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_gguf
from tests.frontends.gguf_models import LAYERS, VOCABULARY, original, write_gguf

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is missing: make .venv/.ggml")
pytestmark = pytest.mark.full

_NORMED = "softmax(0.1768 * rope(rms(q)).rope(rms(k)) + {})"
_CAPPED = "softmax(20 * tanh(0.1768 * rope(q).rope(k) / 20) + {})"
FORMULAS = {
    "llama": ("softmax(0.1768 * rope(q).rope(k) + causal)",) * 2,
    "qwen2": ("softmax(0.25 * rope(q).rope(k) + causal)",) * 2,
    "granite": ("softmax(0.2 * rope(q).rope(k) + causal)",) * 2,
    "qwen3": (_NORMED.format("causal"),) * 2,
    "gemma2": (_CAPPED.format("window"), _CAPPED.format("causal")),
    "gemma3_text": (_NORMED.format("window"), _NORMED.format("causal")),
    "phi3": ("softmax(0.25 * rope(q).rope(k) + causal)",) * 2,
    "gpt_oss": (
        "softmax(0.2292 * rope(q).rope(k) + window + sinks)",
        "softmax(0.2292 * rope(q).rope(k) + causal + sinks)",
    ),
}
DTYPES = ("F32", "F16", "Q8_0", "Q4_0")
CASES = [
    *((kind, dtype, (at + number) % 2 == 0) for number, kind in enumerate(FORMULAS) if kind != "gpt_oss"
      for at, dtype in enumerate(DTYPES)),
    *(("llama", dtype, at % 2 == 1) for at, dtype in enumerate(DTYPES)),
    ("gpt_oss", "F32", True), ("gpt_oss", "F32", False),
]  # fmt: skip


@functools.cache
def _model(kind: str) -> Any:
    return original(kind)


def _ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("kind", "dtype", "flash"), CASES)
def test_a_right_file(kind: str, dtype: str, flash: bool, tmp_path: Path) -> None:
    """Outputs within rounding of llama.cpp's (from_gguf judges), no finding of a rule, and the same as the model."""
    path = write_gguf(tmp_path / "model.gguf", _model(kind), dtype)
    ids = _ids(1, 24)
    module = from_gguf(path, ids, flash=flash)
    report = sqrtdk.check(module, (ids,), laws="none")
    assert [call.site for call in report.calls] == [f"blk.{n}.attn" for n in range(LAYERS)]
    assert tuple(call.formula for call in report.calls) == FORMULAS[kind]
    verdict = "declared" if kind in ("gpt_oss", "granite") else "exact"
    assert {call.verdict for call in report.calls} == {verdict}
    assert not report.findings
    assert not report.not_measured
    compared = sqrtdk.diff(_model(kind), module, {"input_ids": ids})
    assert compared.same, compared.paragraphs
    assert [pair.site_b for pair in compared.pairs] == [f"blk.{n}.attn" for n in range(LAYERS)]
    assert not any(pair.causes for pair in compared.pairs)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q5_K_M", "Q3_K_M", "Q2_K", "Q5_0", "Q4_1", "IQ4_NL", "BF16"])
def test_what_llama_quantize_makes(mixture: str, flash: bool, wide: tuple[Any, Path], tmp_path: Path) -> None:
    """Blocks of 256 with activations in 8 bits, and the other dtypes that gguf unpacks and does not pack."""
    model, path = wide
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mixture}"), 1
    out = tmp_path / "packed.gguf"
    assert not llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(params))
    ids = _ids(1, 24)
    compared = sqrtdk.diff(model, from_gguf(out, ids, flash=flash), {"input_ids": ids})
    assert compared.same, compared.paragraphs


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = original("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    return model, write_gguf(tmp_path_factory.mktemp("wide") / "model.gguf", model)


def test_many_rows_of_another_length(tmp_path: Path) -> None:
    """The program is of any number of rows; another length runs in llama.cpp again, here with tiles in float32."""
    model = _model("llama")
    module = from_gguf(write_gguf(tmp_path / "model.gguf", model), _ids(1, 12), flash=True)
    ids = _ids(3, 70)
    with torch.no_grad():
        ours, theirs = module(ids), model(ids).logits
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, atol=float(2e-3 * theirs.abs().max()), rtol=0)


def test_a_folded_scale_is_the_same(tmp_path: Path) -> None:
    """llama.cpp has no key for Gemma 2's query_pre_attn_scalar: a converter may put it into the rows of q."""
    model = original("gemma2", query_pre_attn_scalar=24)
    fold = lambda name, value: value * (32 / 24) ** 0.5 if "attn_q.weight" in name else value  # noqa: E731
    path = write_gguf(tmp_path / "model.gguf", model, change=fold)
    assert sqrtdk.diff(model, str(path), seq_len=24).same


@pytest.mark.parametrize("law", ["causal", "samples", "finite"])
def test_laws_are_asked_of_a_file(law: str, tmp_path: Path) -> None:
    ids = _ids(2, 16)
    module = from_gguf(write_gguf(tmp_path / "model.gguf", _model("qwen3")), ids)
    answers = sqrtdk.laws.ask(module, (ids,), law).answers
    assert {answer.state for answer in answers if answer.law == law} == {"kept"}
