"""What to change in B where B is a GGUF file: each fix, applied as its sentence says, gives a file that is A."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import sqrtdk
from sqrtdk.compare.fixes import fix_of
from tests.frontends.gguf_models import E, original, permuted, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is missing: make .venv/.ggml")
pytestmark = pytest.mark.full

KEY = re.compile(r"--override-kv (\S+?)=(?:int|float):([\d.e+-]+)")
ROWS = re.compile(r"w\.reshape\(H, .*?\)\.swapaxes\(1, 2\)")


def _rows(name: str, value: Any) -> Any:
    return permuted(value, value.shape[0] // E) if re.search(r"attn_[qk]\.weight", name) else value


def _no_head(name: str, value: Any) -> Any:
    return None if name == "output.weight" else value


# fault: (model, changes of its config, what `write_gguf` does otherwise, the cause)
FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "base": ("llama", {}, {"keys": {"rope.freq_base": 500000.0}}, "rope_base"),
    "no base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
                {"without": ("rope.freq_base",)}, "rope_base"),
    "scaling": ("llama", {}, {"keys": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}}, "rope_base"),
    "window": ("gemma2", {}, {"keys": {"attention.sliding_window": 4}}, "window"),
    "softcap": ("gemma2", {}, {"keys": {"attn_logit_softcapping": 50.0}}, "softcap"),
    "no softcap in A": ("gemma2", {"attn_logit_softcapping": None}, {}, "softcap"),
    "scale": ("gemma2", {"query_pre_attn_scalar": 24}, {}, "scale"),
    "permutation left out": ("llama", {}, {"permute": False}, "rope_layout"),
    "permutation too much": ("qwen3", {}, {"change": _rows}, "head_order"),
    "eps": ("llama", {}, {"keys": {"attention.layer_norm_rms_epsilon": 1e-3}}, "norm_eps"),
    "eps of q and k": ("qwen3", {}, {"keys": {"attention.layer_norm_rms_epsilon": 1e-3}}, "qk_norm_eps"),
    "head": ("llama", {}, {"change": _no_head}, "tied_head"),
}  # fmt: skip


def fixes(report: Any) -> dict[str, str]:
    """What to change in B, by cause."""
    inside = {cause.name: fix_of(cause) for pair in report.pairs for cause in pair.causes}
    return {name: fix for name, fix in (inside | {each.name: each.fix for each in report.module_causes}).items() if fix}


def mended(fix: str, otherwise: dict[str, Any]) -> dict[str, Any]:
    """What `write_gguf` does once the fix is applied."""
    keys = dict(otherwise.get("keys", {}))
    own: Callable[[str, Any], Any] = otherwise.get("change", lambda _name, value: value)
    if "rope.freq_base" in fix:
        if base := re.search(r"base ([\d.e+]+)", fix):
            keys["rope.freq_base"] = float(base[1])
        if "rope.scaling.factor" in keys:
            keys["rope.scaling.factor"] = 1.0
        return otherwise | {"keys": keys, "without": ()}
    if key := KEY.search(fix):
        number = float(key[2])
        keys[key[1].partition(".")[2]] = int(number) if "sliding_window" in key[1] else number
        return otherwise | {"keys": keys}
    if "output.weight" in fix:
        return {}

    def change(name: str, value: Any) -> Any:
        value = own(name, value)
        if (times := re.search(r"attn_q\.weight by ([\d.e+-]+)", fix)) and "attn_q." in name:
            return value * np.float32(float(times[1]))
        if (rows := ROWS.search(fix)) and re.search(r"attn_[qk]\.weight", name):
            width = E if len(value) % E == 0 else len(value)
            return eval(rows[0], {"w": value, "H": len(value) // width, "d": width}).reshape(value.shape)
        return value

    return otherwise | {"change": change}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fix_gives_a_file_that_is_a(fault: str, tmp_path: Path) -> None:
    kind, changes, otherwise, cause = FAULTS[fault]
    # rows of q that are multiplied, and then rounded to float16, do not pass for A's own rows
    dtype = "F32" if fault == "scale" else "F16"
    model = original(kind, **changes)
    path = write_gguf(tmp_path / "wrong.gguf", model, dtype, **otherwise)
    found = fixes(sqrtdk.diff(model, str(path), seq_len=24))
    assert cause in found
    better = mended(found[cause], otherwise)
    path = write_gguf(tmp_path / "mended.gguf", model, dtype, **better)
    again = sqrtdk.diff(model, str(path), seq_len=24)
    assert again.same, (found[cause], again.paragraphs)


def test_a_key_is_set_in_the_file_itself(tmp_path: Path) -> None:
    model = original("llama")
    path = write_gguf(tmp_path / "m.gguf", model, "F16", keys={"attention.layer_norm_rms_epsilon": 1e-3})
    fix = fixes(sqrtdk.diff(model, str(path), seq_len=24))["norm_eps"]
    key = KEY.search(fix)
    assert key is not None
    script = [sys.executable, "-m", "gguf.scripts.gguf_set_metadata", "--force", str(path), key[1], key[2]]
    subprocess.run(script, check=True, capture_output=True)
    assert sqrtdk.diff(model, str(path), seq_len=24).same
    assert gguf.GGUFReader(path).fields[key[1]].parts[-1][0] == pytest.approx(1e-6)
