"""GGUF files: what their metadata declares, and that the scale of the engine is not seen."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.graphs.gguf import read_metadata

SIZES = {"llama.attention.head_count": 4, "llama.embedding_length": 256}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(entry: Any) -> bytes:
    if isinstance(entry, str):
        return struct.pack("<I", 8) + text(entry)
    if isinstance(entry, list):
        return struct.pack("<IIQ", 9, 8, len(entry)) + b"".join(map(text, entry))
    return struct.pack("<If", 6, entry) if isinstance(entry, float) else struct.pack("<II", 4, entry)


def file(path: Path, family: str = "llama", **entries: Any) -> Path:
    own = {name.replace("llama", family): size for name, size in SIZES.items()}
    named = {f"{family}.{name.replace('__', '.')}": entry for name, entry in entries.items()}
    whole = {"general.architecture": family, "tokenizer.ggml.tokens": ["a", "b"], **own, **named}
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(whole))
    path.write_bytes(head + b"".join(text(name) + value(entry) for name, entry in whole.items()))
    return path


def test_metadata_is_read(tmp_path: Path) -> None:
    found = read_metadata(file(tmp_path / "m.gguf", attention__scale=0.25))
    assert found["llama.attention.scale"] == 0.25
    assert found["general.architecture"] == "llama"
    assert "tokenizer.ggml.tokens" not in found


def test_a_file_without_a_scale_is_not_judged(tmp_path: Path) -> None:
    report = sqrtdk.check(str(file(tmp_path / "m.gguf")), fail_on="unmeasured")
    assert report.calls == ()
    assert "4 heads of 64, no attention.scale" in report.unjudged[0].message
    assert "engine" in report.unjudged[0].message
    assert (report.exit_code, report.outcome) == (1, "failed")


@pytest.mark.parametrize(
    ("family", "scale", "verdict", "mistake"),
    [
        ("granite", 0.0078125, "declared", None),
        ("granitemoe", 0.0078125, "declared", None),
    ],
)
def test_what_a_file_declares(family: str, scale: float, verdict: str, mistake: str | None, tmp_path: Path) -> None:
    report = sqrtdk.check(str(file(tmp_path / "m.gguf", family, attention__scale=scale)))
    (judged,) = report.calls
    assert (judged.verdict, judged.mistake) == (verdict, mistake)
    assert report.unjudged  # whatever it declares
    assert report.exit_code == int(verdict == "unexplained")


@pytest.mark.parametrize("family", ["llama", "t5", "qwen3"])
def test_a_scale_that_its_engine_does_not_read_is_not_judged(family: str, tmp_path: Path) -> None:
    report = sqrtdk.check(str(file(tmp_path / "m.gguf", family, attention__scale=1.0)))
    assert report.calls == ()
    assert f"does not read for {family}" in report.unjudged[0].message
    assert report.exit_code == 0


def test_a_config_beside_it_is_its_rule(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granite", "attention_multiplier": 0.0625}))
    report = sqrtdk.check(str(file(tmp_path / "m.gguf", "granite", attention__scale=0.25)))
    assert report.calls[0].verdict == "unexplained"
    assert "attention_multiplier = 0.0625" in report.findings[0].message


def test_a_softcap_is_in_the_formula(tmp_path: Path) -> None:
    entries = {"attention__scale": 0.125, "attn_logit_softcapping": 50.0}
    report = sqrtdk.check(str(file(tmp_path / "m.gguf", "granite", **entries)))
    assert report.calls[0].call.formula == "softmax(50 * tanh(0.125 * q.k / 50))"


WHOLE = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML",
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        WHOLE + struct.pack("<Q", 2**60),
        WHOLE + text("a") + struct.pack("<I", 77),
        WHOLE + text("a") + struct.pack("<IIQ", 9, 4, 2**60),
        WHOLE + text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 20,
        WHOLE + text("a")[:-1],
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
    ],
)
def test_damaged_files(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        sqrtdk.check(str(path))
    assert caught.value.hint


def _sparse(path: Path, head: bytes, entries: int, kind: bytes, size: int) -> Path:
    """A file of entries whose values are zeros that take no room on the disk."""
    with path.open("wb") as out:
        out.write(head)
        for number in range(entries):
            out.write(text(f"k{number}") + kind)
            out.seek(size, 1)
        out.truncate(out.tell())
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("entries", "kind", "size", "message"),
    [
        (400, struct.pack("<IQ", 8, 2**20), 2**20, r"4194\d+ bytes of names and texts, at most 4194304 are read"),
        (4, struct.pack("<IIQ", 9, 8, 2**20), 2**23, "3145728 texts and arrays in arrays, at most 2097152 are passed"),
        (1, struct.pack("<IIQ", 9, 8, 2**24), 2**27, "16777216 texts and arrays in arrays, at most 2097152 are"),
        (1, struct.pack("<IIQ", 9, 8, 2**24 + 1), 0, "a length of 16777217, at most 16777216 is read"),
        (1, struct.pack("<IQ", 8, 2**20 + 1), 0, "a length of 1048577, at most 1048576 is read"),
    ],
)
def test_memory_and_work_are_bounded(entries: int, kind: bytes, size: int, message: str, tmp_path: Path) -> None:
    """A few KiB on the disk that stand for gigabytes, or for 2^27 texts of no length."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, entries)
    path = _sparse(tmp_path / "m.gguf", head, entries, kind, size)
    assert path.stat().st_blocks * 512 < 2**22
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message) as caught:
            read_metadata(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    assert caught.value.hint


def test_a_vocabulary_and_a_chat_template_are_within_the_limits(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    words = {
        "tokenizer.ggml.tokens": [f"token {number}" for number in range(3000)],
        "tokenizer.chat_template": "a" * 10**5,
    }
    whole = {"general.architecture": "llama", **SIZES, **words}
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(whole))
    path.write_bytes(head + b"".join(text(name) + value(entry) for name, entry in whole.items()))
    assert read_metadata(path)["llama.embedding_length"] == 256
