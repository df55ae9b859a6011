"""What to change in B: the fix of a proven cause, applied to the wrong GGUF file, gives a file without a fault.

The sentence is read as a user would: the key that `--override-kv` takes, the number by which rows are multiplied, the
expression that puts them in order.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from sqrtdk.answers import AnswersReport, diff_answers
from sqrtdk.answers.dialects import DIALECTS
from sqrtdk.answers.edited import copy_of, watch_attentions
from sqrtdk.answers.edits import edits_of
from sqrtdk.answers.fixes import fix_of_edit
from sqrtdk.messages import said
from sqrtdk.messages._catalogue import topic
from tests.answers.planted import prompts, reference
from tests.answers.planted_types import TYPES, drawn
from tests.compare.test_fixes import TORCH_ONLY

ROWS = re.compile(r"w\.reshape\(H, .*?\)\.swapaxes\(1, 2\)")
TIMES = re.compile(r"multiply the rows of q by ([\d.e+-]+)")


@pytest.mark.parametrize("kind", ["gemma2", *TYPES])
def test_every_edit_has_a_fix_in_both_languages(kind: str) -> None:
    model = reference() if kind == "gemma2" else drawn(kind)
    facts = watch_attentions(model, prompts()[0])
    for edit in edits_of(copy_of(model, facts), len(prompts()[0])):
        fix = fix_of_edit(edit.what, edit.a, edit.b, kind="llama-server", config=model.config)
        assert fix, edit.key
        assert said(fix, "zh") != fix


def test_a_key_has_the_architecture_of_the_file_in_front() -> None:
    config = SimpleNamespace(model_type="gpt_oss", rope_parameters={"rope_type": "default"})

    def override(what: str, a: Any, b: Any) -> str:
        return str(fix_of_edit(what, a, b, kind="llama-server", config=config))

    assert "--override-kv gpt-oss.rope.freq_base=float:150000," in override("base", 150000.0, 1e4)
    assert "--override-kv gpt-oss.attention.sliding_window=int:128," in override("window", 128, 64)
    assert "--override-kv gpt-oss.attn_logit_softcapping=float:1e9," in override("softcap", None, 50.0)
    assert "--override-kv gpt-oss.rope.scaling.factor=float:1," in override("linear", 1.0, 4.0)
    # B scales less than A does: the factor of its file is not known
    assert "override-kv" not in override("linear", 1.0, 0.25)
    assert fix_of_edit("base", None, 5e5) == ""
    # no factor on q makes a scale of 0 another
    assert "by 2" in str(fix_of_edit("scale", 0.25, 0.125))
    assert fix_of_edit("scale", 0.25, 0.0) == ""


OPTIONS = {
    "vllm": ('--hf-overrides \'{"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}\'',),
    "sglang": ('--json-model-override-args \'{"rope_parameters":',),
    "llama-server": ("--override-kv llama.rope.freq_base=float:10000",),
    "ollama": ("llama.rope.freq_base=float:10000 in the GGUF file",),
    "openai": ("vLLM: --hf-overrides", "SGLang: --json-model-override-args", "llama.cpp: --override-kv"),
    "completions": ("vLLM: --hf-overrides", "SGLang: --json-model-override-args", "llama.cpp: --override-kv"),
}
EVERY_OPTION = ("--hf-overrides", "--json-model-override-args", "--override-kv")


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_server_is_told_the_option_that_it_takes(kind: str) -> None:
    config = drawn("llama").config
    fix = str(fix_of_edit("base", 10000.0, 5e5, kind=kind, config=config))
    assert fix.startswith("rotate with base 10000: rope_parameters.rope_theta in the config that B reads")
    for words in OPTIONS.get(kind, ()):
        assert words in fix
    for words in EVERY_OPTION:
        assert (words in fix) is any(words in option for option in OPTIONS.get(kind, ()))


def test_the_field_is_that_of_the_config() -> None:
    older = SimpleNamespace(model_type="llama", rope_theta=10000.0, layer_norm_eps=1e-5)
    assert "10000: rope_theta in" in fix_of_edit("base", 10000.0, 5e5, config=older)
    assert "set layer_norm_eps to" in fix_of_edit("norm_eps", 1e-5, 1e-3, config=older)


@pytest.mark.parametrize("key", [key for key in topic("answers") if key.startswith("fix.")])
def test_no_word_of_torch_is_advised_to_a_server(key: str) -> None:
    text = topic("answers")[key]
    assert not TORCH_ONLY.search(f"{text.en} {text.zh}".replace("config", ""))


@cache
def gemma() -> PreTrainedModel:
    return reference()


def unpermuted(name: str, value: Any, config: Any) -> Any:
    """Rows of q and k as they are in A, which llama.cpp's rotation of a Llama does not fit."""
    if "attn_q." in name or "attn_k." in name:
        return value.reshape(-1, config.head_dim // 2, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
    return value


def mended(conversion: Any, fix: str) -> tuple[Any, dict[str, Any]]:
    """Do what a fix says: a conversion without the mistake, and what --override-kv gives."""
    if key := re.search(r"--override-kv (\S+)=(int|float):([\d.e+-]+)", fix):
        return conversion, {key[1]: int(key[3]) if key[2] == "int" else float(key[3])}
    if "add 1 to their weights" in fix:
        return replace(conversion, plus=conversion.plus + 1), {}

    def change(name: str, value: Any, config: Any) -> Any:
        value = conversion.change(name, value, config)
        if (times := TIMES.search(fix)) and "attn_q." in name:
            return value * np.float32(float(times[1]))
        if (rows := ROWS.search(fix)) and ("attn_q." in name or "attn_k." in name):
            heads = len(value) // config.head_dim
            return eval(rows[0], {"w": value, "H": heads, "d": config.head_dim}).reshape(value.shape)
        return value

    return replace(conversion, change=change), {}


FIXED = (
    "base 1e6", "linear 2", "window 24", "no window", "softcap 5", "softcap missing", "eps 1e-3", "final cap 50",
    "q not scaled", "permuted", "one missing",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("mistake", [*FIXED, "a Llama whose rows are not permuted"])
def test_the_fix_gives_a_file_without_a_fault(mistake: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from tests.answers.ggufs import WRONG, Conversion, llama_cpp_side

    model = gemma() if mistake in FIXED else drawn("llama")
    cause, conversion = (
        WRONG[mistake] if mistake in FIXED else ("rope_layout", Conversion(scaled=False, change=unpermuted))
    )

    def asked(conversion: Conversion, overrides: dict[str, Any]) -> AnswersReport:
        side = llama_cpp_side(tmp_path / "m.gguf", model, "F16", conversion, overrides=overrides or None)
        return diff_answers(model, side, prompts())

    report = asked(conversion, {})
    assert (report.verdict, [each.name for each in report.causes]) == ("proven", [cause])
    better = asked(*mended(conversion, report.causes[0].fix))
    assert (better.verdict, better.same) == ("no fault", True), report.causes[0].fix
