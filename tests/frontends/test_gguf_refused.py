"""What llama.cpp, or the walk over its graph, does not take: one error that says the rule, what came, and the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError, MissingExtraError, ModelError, SqrtdkError
from sqrtdk.frontends import from_gguf
from tests.frontends.gguf_models import original, write_gguf
from tests.support.program import called

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is missing: make .venv/.ggml")
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", original("llama"))


def _refused(kind: type[SqrtdkError], *args: Any, **named: Any) -> str:
    with pytest.raises(kind) as caught:
        from_gguf(*args, **named)
    assert caught.value.hint
    return f"{caught.value.message} {caught.value.hint}"


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "mistery")
    writer.add_context_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = _refused(ModelError, path)
    assert "unknown model architecture: 'mistery'" in text
    assert "odd.gguf" in text


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_file_whose_tensors_are_cut_off(kept: float, file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(kept * len(content))])
    assert "llama.cpp can't load" in _refused(ModelError, tmp_path / "cut.gguf")


@pytest.mark.parametrize("kind", ["empty", "junk", "short", "metadata cut off", "version"])
def test_what_is_no_gguf_file_is_refused_for_the_reason_that_reading_gives(
    kind: str, file: Path, tmp_path: Path
) -> None:
    content, path = file.read_bytes(), tmp_path / "odd.gguf"
    known = {"empty": b"", "junk": b"{}" * 99, "short": content[:3], "metadata cut off": content[:100]}
    path.write_bytes(known.get(kind, content[:4] + b"\x09" + content[5:]))
    with pytest.raises(ModelError) as caught:
        sqrtdk.check(str(path))
    assert _refused(ModelError, path) == f"{caught.value.message} {caught.value.hint}"
    assert "is not a GGUF file" in caught.value.message


def test_no_file() -> None:
    assert "can't load" in _refused(ModelError, "nothing.gguf")
    done = called("check", "nothing.gguf", "--run")
    assert done.returncode == 2
    assert "nothing.gguf" in done.stderr


def test_all_unread_operations_are_in_one_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqrtdk.frontends.ggml import operations

    for name in ("SWIGLU", "RMS_NORM"):
        monkeypatch.delitem(operations.GGML_OPERATIONS, name)
    monkeypatch.setitem(operations.GGML_OPERATIONS, "ADD", operations.GGML_OPERATIONS["MUL"])
    text = _refused(ModelError, file)
    assert "RMS_NORM (<RMS_NORM norm-0>:1)" in text


def test_other_outputs_than_llama_cpps(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge: an operation that is read wrongly makes no model."""
    from sqrtdk.frontends.ggml import operations

    monkeypatch.setitem(operations.GGML_OPERATIONS, "ADD", operations.GGML_OPERATIONS["MUL"])
    assert "gives other outputs than llama-cpp-python" in _refused(ModelError, file)


def test_ids_beyond_the_vocabulary(file: Path) -> None:
    assert "the id 97; model.gguf knows 0 to 96" in _refused(ModelError, file, torch.tensor([[1, 97]]))
    assert "the id -1" in _refused(ModelError, file, torch.tensor([[1, -1]]))
    larger = original("llama", vocab_size=300)
    with pytest.raises(ModelError, match="knows 0 to 96"):
        sqrtdk.diff(larger, str(file), seq_len=64)


def test_inputs_that_are_no_ids(file: Path) -> None:
    assert "float32" in _refused(InvalidTypeError, file, torch.randn(1, 4))
    assert "(1, 2, 3)" in _refused(InvalidValueError, file, torch.zeros(1, 2, 3, dtype=torch.long))


@pytest.mark.parametrize("option", [("--dtype", "bf16"), ("--device", "cuda"), ("--static",)])
def test_options_that_the_file_settles(option: tuple[str, ...], file: Path) -> None:
    done = called("check", str(file), "--run", *option)
    assert done.returncode == 2
    assert f"{option[0]} given with" in done.stderr


def test_run_is_for_gguf_files() -> None:
    done = called("check", "demo", "--run")
    assert done.returncode == 2
    assert "no GGUF file" in done.stderr


def test_an_old_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", "0.2.90")
    assert "sqrtdk[ggml]" in _refused(MissingExtraError, file)


def test_without_the_extra(file: Path) -> None:
    script = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "import sqrtdk\n"
        f"try: sqrtdk.check({str(file)!r}, run=True)\n"
        "except ImportError as error: print(error.hint)\n"
        f"print(sqrtdk.check({str(file)!r}).mode)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "sqrtdk[ggml]" in done.stdout, done.stderr
    assert "static" in done.stdout
