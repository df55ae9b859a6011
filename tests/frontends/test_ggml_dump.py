"""Dumps of ggml: what the C++ example writes gives the same module as the file itself; odd dumps are one error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.frontends.ggml.dump import read_dump
from tests.frontends.gguf_models import original, write_gguf
from tests.support.paths import ROOT
from tests.support.program import called

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is missing: make .venv/.ggml")
pytestmark = pytest.mark.full

IDS = list(range(1, 21))
Line = dict[str, Any]


@pytest.fixture(scope="module")
def dumper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled against the headers and libraries of llama-cpp-python."""
    compiler = shutil.which("c++")
    assert compiler, "the example needs a C++ compiler"
    program = tmp_path_factory.mktemp("dumper") / "llama_cpp_dump"
    headers, libraries = Path(sysconfig.get_path("purelib"), "include"), Path(llama_cpp.__file__).parent / "lib"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{headers}", ROOT / "examples" / "llama_cpp_dump" / "main.cpp",
         "-o", program, f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"],
        check=True,
    )  # fmt: skip
    return program


def _dump(dumper: Path, folder: Path, model: Any, dtype: str, *options: str, **otherwise: Any) -> Path:
    file = write_gguf(folder / "model.gguf", model, dtype, **otherwise)
    subprocess.run([dumper, file, folder / "run.ggmldump", *options, *map(str, IDS)], check=True, capture_output=True)
    return folder / "run.ggmldump"


@pytest.mark.parametrize(("kind", "dtype", "options"), [("llama", "Q4_0", ("--flash",)), ("gemma3_text", "F16", ())])
def test_a_dump_is_the_same_as_its_model(
    kind: str, dtype: str, options: tuple[str, ...], dumper: Path, tmp_path: Path
) -> None:
    model = original(kind)
    path = _dump(dumper, tmp_path, model, dtype, *options)
    assert read_dump(path).vocabulary == 97
    report = sqrtdk.check(str(path), laws="causal")
    assert [call.site for call in report.calls] == ["blk.0.attn", "blk.1.attn"]
    assert not report.findings
    compared = sqrtdk.diff(model, str(path))
    assert compared.same, compared.paragraphs


def test_a_fault_is_named_from_a_dump(dumper: Path, tmp_path: Path) -> None:
    model = original("llama")
    path = _dump(dumper, tmp_path, model, "F16", keys={"rope.freq_base": 500000.0})
    report = sqrtdk.diff(model, str(path))
    assert {cause.name for pair in report.pairs for cause in pair.causes} == {"rope_base"}


def test_other_ids_than_those_of_the_dump(dumper: Path, tmp_path: Path) -> None:
    model = original("llama")
    path = _dump(dumper, tmp_path, model, "F32")
    with pytest.raises(ModelError, match="is of 20 tokens, and 8 came"):
        sqrtdk.diff(model, str(path), seq_len=8)


def _records(content: bytes) -> list[tuple[Line, bytes]]:
    found = []
    while content:
        line, _, content = content.partition(b"\n")
        record = json.loads(line)
        found.append((record, content[: record.get("bytes", 0)]))
        content = content[record.get("bytes", 0) :]
    return found


def _written(records: list[tuple[Line, bytes]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" + memory for record, memory in records)


def test_odd_dumps_are_one_error(dumper: Path, tmp_path: Path) -> None:
    path = _dump(dumper, tmp_path, original("llama"), "F32")
    content = path.read_bytes()
    right = _records(content)
    odd = {
        "nothing": b"",
        "no dump": b"GGUF" + bytes(100),
        "another version": _written([({"sqrtdk_ggml_dump": 2}, b""), *right[1:]]),
        "cut off": content[: len(content) // 2],
        "without an end": _written(right[:-1]),
        "no nodes": _written([right[0], ({"end": 0}, b"")]),
        "a source that is not there": _written(
            [(record | ({"src": [7]} if "node" in record else {}), memory) for record, memory in right]
        ),
        "sizes that are no numbers": _written(
            [(record | ({"ne": "64"} if "node" in record else {}), memory) for record, memory in right]
        ),
        "sizes beyond the bytes": _written(
            [
                (record | ({"ne": [2**20, 2**20, 1, 1]} if "tensor" in record else {}), memory)
                for record, memory in right
            ]
        ),
        "bytes without an end": _written([right[0], (right[1][0] | {"bytes": 2**39}, b"")]),
        "more elements than any memory": _written(
            [(record | ({"ne": [2**30] * 4} if "node" in record else {}), x) for record, x in right]
        ),
    }
    for name, content in odd.items():
        path.write_bytes(content)
        with pytest.raises(ModelError) as caught:
            read_dump(path)
        assert caught.value.hint, name
    # sizes that fit no operation
    wrong = [(record | ({"ne": [3, 5, 1, 1]} if record.get("op") == "MUL_MAT" else {}), x) for record, x in right]
    path.write_bytes(_written(wrong))
    done = called("check", str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_dump_needs_no_llama_cpp(dumper: Path, tmp_path: Path) -> None:
    import sys

    path = _dump(dumper, tmp_path, original("llama"), "Q8_0")
    script = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "import sqrtdk\n"
        f"print(len(sqrtdk.check({str(path)!r}, laws='none').calls))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "2", done.stderr


def test_ids_of_a_run(dumper: Path, tmp_path: Path) -> None:
    from sqrtdk.models.ggml import dump_ids

    path = _dump(dumper, tmp_path, original("llama"), "F32")
    assert torch.equal(dump_ids(str(path))["input_ids"], torch.tensor([IDS]))
