"""docs/en/trace-file.md: its writer runs as it is printed, without torch, and its examples say what happens."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from sqrtdk.recording import limits, read_trace_file
from sqrtdk.recording.format import FLOAT_DTYPES, FORMULA_TERMS, TENSOR_LAYOUTS
from sqrtdk.tracing.tensors import Vector
from tests.recording_files.sample_calls import computed

PAGE = (Path(__file__).parents[2] / "docs" / "en" / "trace-file.md").read_text(encoding="utf-8")
WRITER, EXAMPLE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
WITHOUT_TORCH = "import sys\nsys.modules.update(torch=None, sqrtdk=None, ml_dtypes=None)\n"


def run(folder: Path, code: str) -> None:
    """Run the writer and more in a process that has numpy and safetensors alone."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + WRITER + code],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_writer_is_short_and_needs_two_packages() -> None:
    assert len(WRITER.splitlines()) <= 40
    assert re.findall(r"^(?:import|from) (\w+)", WRITER, re.MULTILINE) == ["json", "os", "numpy", "safetensors"]


def test_the_example_writes_two_calls_that_compute_what_they_say(tmp_path: Path) -> None:
    run(tmp_path, EXAMPLE)
    assert [path.name for path in tmp_path.iterdir()] == ["engine.safetensors"]
    read = read_trace_file(tmp_path / "engine.safetensors")
    smallest, whole = read.calls
    assert (read.metadata.writer, read.metadata.model, read.notes) == ("my engine 1.2", "org/name", ())
    assert (smallest.site, smallest.terms, smallest.lse, smallest.dtype) == ("layers.0.attn", None, None, "float32")
    assert (whole.dtype, whole.weights_dtype, whole.logits_dtype) == ("bfloat16", "bfloat16", "float32")
    assert [part.values.shape for part in (whole.query, whole.key)] == [(1, 8, 7, 16), (1, 2, 7, 16)]
    output, lse = computed(whole)
    torch.testing.assert_close(whole.output.float(), output.float())
    torch.testing.assert_close(whole.lse.float(), lse.float())  # type: ignore[union-attr]
    torch.testing.assert_close(smallest.output, whole.output)


def test_every_field_can_be_written_with_it(tmp_path: Path) -> None:
    code = """
a = lambda *shape: numpy.arange(numpy.prod(shape), dtype="float16").reshape(shape)
steps = [{"name": "norm", "detail": "rms", "values": a(2, 3, 4)[:, ::-1]}, {"name": "rope"}]
q = {"values": a(2, 3, 4), "projected": a(2, 3, 4), "factor": a(2, 1, 1), "steps": steps}
k = {"values": a(1, 5, 4), "factor": 0.5, "projection": "k_proj.weight", "input": a(1, 5, 6), "weight": a(1, 4, 6),
     "bias": a(1, 4), "features": numpy.arange(4).reshape(1, 4)}
terms = [{"name": "scale", "value": numpy.float32(0.5)}, {"name": "softcap", "value": 50},
         {"name": "bias", "value": a(2, 3, 5)},
         {"name": "mask", "least": -2, "greatest": 1, "padding": numpy.array([1, 1, 1, 0, 0], dtype="uint8")[None]},
         {"name": "mask", "value": numpy.tri(3, 5) > 0, "fill": -1e9, "added": True},
         {"name": "mask", "shape": [1, 1, 3, 5], "bits": numpy.packbits(numpy.tri(3, 5) > 0)},
         {"name": "sinks", "value": a(2)}, {"name": "unknown", "detail": "clamp"}]
call = {"site": "x", "index": 4, "layout": "HLE", "q": q, "k": k, "v": a(1, 5, 2), "output": a(2, 3, 2), "lse": a(2, 3),
        "terms": terms, "kept": {"value": numpy.ones((2, 3, 5), dtype=bool)}, "dropout": 0.1, "missing": None}
lost = {"site": "y", "missing": "unseen"}
write_trace("a", [call, lost], packages={"engine": "1"}, not_measured=[{"site": "z", "reason": "lost"}])
"""
    run(tmp_path, code)
    read = read_trace_file(tmp_path / "a")
    call, lost = read.calls
    assert (call.site, call.index, call.dtype, call.dropout, lost.missing) == ("x", 4, "float16", 0.1, "unseen")
    assert call.query.factor.shape == (2, 1, 1)  # type: ignore[union-attr]
    assert (call.key.factor, call.key.projection.name) == (0.5, "k_proj.weight")  # type: ignore[union-attr]
    norm, rope = call.query.steps
    assert torch.equal(norm.values, call.query.values.flip(2))  # type: ignore[arg-type]  # a view was written as it is seen
    assert (norm.detail, rope.name, rope.values) == ("rms", "rope", None)
    assert call.kept is not None
    assert bool(call.kept.all())
    assert call.terms is not None
    scale, softcap, bias, bounds, plain, bits, sinks, unknown = call.terms
    lower = torch.ones(3, 5, dtype=torch.bool).tril()
    assert (scale.value, softcap.value, unknown.value, unknown.detail) == (0.5, 50, None, "clamp")
    assert (bias.value.shape, sinks.value.shape) == ((2, 3, 5), (2,))  # type: ignore[union-attr]
    assert torch.equal(bounds.value[0, 0], lower.new_ones(3, 5).tril(2).triu(-1) & (torch.arange(5) < 3))  # type: ignore[index]
    assert (plain.fill, plain.added, bits.fill, bits.added) == (-1e9, True, -torch.inf, False)
    assert torch.equal(plain.value, lower)  # type: ignore[arg-type]
    assert torch.equal(bits.value[0, 0], lower)  # type: ignore[index]
    assert read.metadata.not_measured[0].reason == "lost"


def test_bfloat16_as_arrays_of_ml_dtypes_and_as_float32(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    namespace: dict[str, object] = {}
    exec(WRITER, namespace)
    q = torch.randn(1, 2, 3, 4).bfloat16()
    array = q.float().numpy()
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name in ("q", "k", "v", "output")}
    wide = dict.fromkeys(narrow, array)
    calls = [{"site": "a", **narrow}, {"site": "b", **wide, "dtype": "bfloat16"}]
    namespace["write_trace"](tmp_path / "a", calls)  # type: ignore[operator]
    first, second = read_trace_file(tmp_path / "a").calls
    assert (first.dtype, second.dtype) == ("bfloat16", "bfloat16")
    assert (first.query.values.dtype, second.query.values.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(first.query.values, q)
    assert torch.equal(second.query.values, q.float())


@pytest.mark.parametrize("layout", TENSOR_LAYOUTS)
def test_layouts(tmp_path: Path, layout: str) -> None:
    namespace: dict[str, object] = {}
    exec(WRITER, namespace)
    batch = 2 if "B" in layout else 1
    whole = {name: torch.randn(batch, heads, rows, 4) for name, heads, rows in
             (("q", 4, 3), ("k", 2, 5), ("v", 2, 5), ("output", 4, 3))}  # fmt: skip
    laid = {name: x if layout.endswith("HLE") else x.transpose(1, 2) for name, x in whole.items()}
    arrays = {name: (x if "B" in layout else x[0]).numpy() for name, x in laid.items()}
    lse = numpy.zeros((2, 4, 3) if "B" in layout else (4, 3))
    vector = {**arrays, "q": {"values": arrays["q"], "projected": arrays["q"]}, "lse": lse}
    namespace["write_trace"](tmp_path / "a", [{"site": "a", "layout": layout, **vector}])  # type: ignore[operator]
    (read,) = read_trace_file(tmp_path / "a").calls
    for name, vector_of in (("q", read.query), ("k", read.key), ("v", read.value), ("output", Vector(read.output))):
        assert torch.equal(vector_of.values, whole[name])
    assert torch.equal(read.query.projected, whole["q"])  # type: ignore[arg-type]
    assert read.lse is not None
    assert read.lse.shape == (batch, 4, 3)


def test_the_page_says_what_the_code_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (*FORMULA_TERMS, *TENSOR_LAYOUTS):
        assert f'"{name}"' in PAGE
    for dtype in FLOAT_DTYPES:
        assert str(dtype).removeprefix("torch.") in PAGE
    table = PAGE[PAGE.index("## Limits") :]
    small = ("MAX_NAME_CHARACTERS", "MAX_STEPS", "MAX_RECORD_DEPTH", "MAX_DIMENSIONS")
    large = [
        getattr(limits, name)
        for name in dir(limits)
        if name.startswith("MAX_") and name not in (*small, "MAX_TEXT_CHARACTERS")
    ]
    assert len(large) == 10
    for limit in large:
        assert f"2^{limit.bit_length() - 1}" in table
        assert limit.bit_count() == 1
    for name in small:
        assert f" {getattr(limits, name)} " in table
    example = doctest.DocTestParser().get_doctest(PAGE, {}, "trace-file.md", "trace-file.md", 0)
    runner, said = doctest.DocTestRunner(), []
    runner.run(example, out=said.append)
    assert not said, "".join(said)
    assert runner.summarize(verbose=False).attempted >= 5
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == ["rank0.safetensors", "rank1.safetensors", "run.safetensors"]
