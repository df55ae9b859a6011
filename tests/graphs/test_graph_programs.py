"""Programs of torch.export in files: traced like models, and refused where loading them could run code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.errors import ModelError
from sqrtdk.graphs import read_exported
from sqrtdk.graphs.program_file import refuse_code
from sqrtdk.models.run import call
from tests.attentions.programs import WIDTH, Net
from tests.graphs.exports import build, inputs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
SIZES = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (X,), dynamic_shapes={"x": SIZES}), path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "llama.pt2"
    given = {**inputs("llama"), "use_cache": False}
    torch.export.save(torch.export.export(build("llama", "sdpa"), (), given, strict=False), path)
    return path


def refused(path: Path, given: Any = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_exported(path, given)
    assert caught.value.hint
    return caught.value


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_program_is_traced_with_the_sites_of_its_model(llama: Path) -> None:
    given = inputs("llama")
    loaded = read_exported(llama, given)
    assert (loaded.kind, loaded.id) == ("exported", str(llama))
    with sqrtdk.trace(loaded.module) as run:
        output = call(loaded.module, loaded.inputs)
    model = build("llama", "sdpa")
    with sqrtdk.trace(model) as own, torch.no_grad():
        wanted = model(**given)
    torch.testing.assert_close(output.logits, wanted.logits)
    assert [(c.site, c.formula) for c in run.calls] == [(c.site, c.formula) for c in own.calls]
    assert len(run.calls) == 2


def test_other_sizes_and_its_own_inputs(saved: Path) -> None:
    loaded = read_exported(saved, {"x": torch.randn(3, 9, WIDTH)})
    assert call(loaded.module, loaded.inputs).shape[:2] == (3, 9)
    assert torch.equal(read_exported(saved).inputs[0], X)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "lacks its inputs x"),
        ({"x": X, "mask": X}, "takes no input mask"),
        ({"x": X.double()}, "float64"),
        ({"x": X[0]}, "(6, 32)"),
        ((X, X), "takes 1 inputs, got 2"),
    ],
)
def test_inputs_that_do_not_fit(given: Any, words: str, saved: Path) -> None:
    assert words in str(refused(saved, given))


# -- what is refused ---------------------------------------------------------------------------------------------------


def changed(saved: Path, path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The same file with its content changed."""
    with zipfile.ZipFile(saved) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    change(content)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def in_graph(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    """A change of the graph."""

    def made(content: dict[str, bytes]) -> None:
        name = next(name for name in content if "/models/" in name)
        graph = json.loads(content[name])
        change(graph)
        content[name] = json.dumps(graph).encode()

    return made


def in_text(old: str, new: str) -> Callable[[dict[str, bytes]], None]:
    """A change of a text in the graph."""

    def made(content: dict[str, bytes]) -> None:
        name = next(name for name in content if "/models/" in name)
        before = content[name]
        content[name] = before.replace(old.encode(), new.encode())
        assert content[name] != before

    return made


class Evil:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _node_name(graph: dict[str, Any]) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["name"] = "a=print()"


def _pickled_weight(content: dict[str, bytes]) -> None:
    name = next(name for name in content if name.endswith("weights_config.json"))
    config = json.loads(content[name])
    next(iter(config["config"].values()))["use_pickle"] = True
    content[name] = json.dumps(config).encode()


def _object(content: dict[str, bytes]) -> None:
    name = next(name for name in content if name.endswith("constants_config.json"))
    config = json.loads(content[name])
    config["config"]["it"] = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    content[name] = json.dumps(config).encode()
    content[name.rpartition("/")[0] + "/opaque_obj_0"] = pickle.dumps(1)


def _compiled(content: dict[str, bytes]) -> None:
    content["net/data/aotinductor/model/x.so"] = b"library"


HOSTILE: dict[str, Callable[[dict[str, bytes]], None]] = {
    "a function of torch": in_text("torch.ops.aten.matmul.default", "torch.hub.load"),
    "os by torch": in_text("torch.ops.aten.matmul.default", "torch.os.system"),
    "an operator that opens files": in_text("torch.ops.aten.matmul.default", "torch.ops.aten.from_file.default"),
    "an attribute of operators": in_text("torch.ops.aten.matmul.default", "torch.ops.aten.matmul.__class__"),
    "builtins": in_text("torch.ops.aten.matmul.default", "_operator.methodcaller"),
    "another's operator": in_text("torch.ops.aten.matmul.default", "torch.ops.other.matmul.default"),
    "code in a size": in_text("positive=True, integer=True)", "positive=True).__class__"),
    "a call in a size": in_text("Symbol('", "print('"),
    "code in a name": in_graph(_node_name),
    "an import by nesting": in_text('\\"builtins.tuple\\"', '\\"collections.defaultdict\\"'),
    "a pickled weight": _pickled_weight,
    "an object": _object,
    "a library": _compiled,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_code_is_refused_unless_it_is_trusted(name: str, saved: Path, tmp_path: Path) -> None:
    path = changed(saved, tmp_path / "net.pt2", HOSTILE[name])
    error = refused(path)
    assert "--trust-remote-code" in error.hint, error


def test_example_inputs_that_are_objects_are_refused_before_they_are_made(saved: Path, tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    buffer = io.BytesIO()
    torch.save(((Evil(sign),), {}), buffer)

    def change(content: dict[str, bytes]) -> None:
        content[next(name for name in content if "/sample_inputs/" in name)] = buffer.getvalue()

    path = changed(saved, tmp_path / "net.pt2", change)
    assert "--trust-remote-code" in refused(path).hint
    assert not sign.exists()
    read_exported(path, {"x": X}, trust_remote_code=True)
    assert sign.exists()  # so it would have been


def test_an_unchanged_copy_is_let_through(saved: Path, llama: Path, tmp_path: Path) -> None:
    refuse_code(changed(saved, tmp_path / "net.pt2", lambda content: None))
    refuse_code(llama)


def test_what_is_no_program_is_refused(saved: Path, tmp_path: Path) -> None:
    for content in (b"", b"no zip", saved.read_bytes()[:-100]):
        path = tmp_path / "broken.pt2"
        path.write_bytes(content)
        refused(path)
    refused(tmp_path / "none.pt2")
    refused(tmp_path)
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt2")
    refused(tmp_path / "weights.pt2")
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/models/model.json", "[" * 10**5)
    refused(packed)
    deep = changed(
        saved, tmp_path / "deep.pt2", lambda content: content.update({"net/models/model.json": b"[" * 10**6})
    )
    refused(deep)


def test_another_version_is_told(saved: Path, tmp_path: Path) -> None:
    def change(graph: dict[str, Any]) -> None:
        graph["schema_version"]["major"] = 99

    error = refused(changed(saved, tmp_path / "net.pt2", in_graph(change)))
    assert "does not load" in str(error)
