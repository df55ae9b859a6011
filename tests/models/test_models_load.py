"""Forms of the MODEL argument, and what is refused with which words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sqrtdk.errors import MissingExtraError, ModelError
from sqrtdk.models.build import build_model, parse_dtype
from sqrtdk.models.extras import check_version
from sqrtdk.models.factory import call_factory
from sqrtdk.models.load import iter_attn, resolve_model
from sqrtdk.models.options import LoadOptions
from sqrtdk.models.run import call
from tests.hf.families import FAMILIES

FACTORIES = """
import torch
from torch import nn
import helper_beside

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
    @classmethod
    def make(cls):
        return cls()

def enormous(): return nn.Linear(2**20, 2**20), (torch.ones(2, 2**20),)
def plain(): return nn.Linear(4, 3)
def with_tuple(): return nn.Linear(4, 3), (torch.ones(2, 4),)
def with_dict(): return nn.Linear(4, 3), {"input": torch.ones(2, 4)}
def with_tensor(): return nn.Linear(4, 3), torch.ones(2, 4)
def with_list(): return [nn.Linear(4, 3), torch.ones(2, 4)]
def with_string(): return nn.Linear(4, 3), "x"
def with_numbers(): return nn.Linear(4, 3), {1: torch.ones(2, 4)}
def nothing(): return None
def raises(): raise KeyError("no such layer")
def leaves(): raise SystemExit(3)
def needs(size): return nn.Linear(size, 3)
ready = nn.Linear(4, 3)
number = 7
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_nets.py").write_text(FACTORIES)
    (tmp_path / "helper_beside.py").write_text("")
    (tmp_path / "broken_nets.py").write_text("import not_installed_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("zoo_nets", "helper_beside", "broken_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "zoo_nets"


@pytest.mark.parametrize("name", ["with_tuple", "with_dict", "with_tensor", "with_list"])
@pytest.mark.parametrize("static", [False, True])
def test_a_factory_gives_module_and_inputs(zoo: str, name: str, static: bool) -> None:
    loaded = resolve_model(f"{zoo}:{name}", LoadOptions(static=static))
    assert (loaded.kind, loaded.id, loaded.config) == ("factory", f"{zoo}:{name}", None)
    assert loaded.module.weight.is_meta == static
    out = loaded.module(**loaded.inputs) if isinstance(loaded.inputs, dict) else loaded.module(*loaded.inputs)
    assert out.shape == (2, 3)
    assert out.is_meta == static


@pytest.mark.parametrize("name", ["plain", "ready", "Net", "Net.make"])
def test_a_factory_without_inputs_takes_an_input_file(zoo: str, name: str) -> None:
    save_file({"input": torch.ones(5, 4)}, "x.safetensors")
    loaded = resolve_model(f"{zoo}:{name}", LoadOptions(input_file="x.safetensors", dtype="float64"))
    assert loaded.module(**loaded.inputs).dtype == torch.float64
    assert not loaded.module.training
    with pytest.raises(ValueError, match="no inputs were given") as caught:
        resolve_model(f"{zoo}:{name}")
    assert "forward(input)" in caught.value.hint


def test_a_static_factory_takes_no_memory(zoo: str) -> None:
    loaded = resolve_model(f"{zoo}:enormous", LoadOptions(static=True))  # 4 TiB of weights
    assert call(loaded.module, loaded.inputs).shape == (2, 2**20)


def test_a_factory_is_seeded(zoo: str) -> None:
    weights = [call_factory(f"{zoo}:plain", seed=seed)[0].weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("zoo_nets:nothing", "gave an object of type NoneType"),
        ("zoo_nets:number", "gave an object of type int"),
        ("zoo_nets:with_string", "a module with inputs of type str"),
        ("zoo_nets:with_numbers", "a module with inputs of type dict"),
        ("zoo_nets:raises", "calling 'zoo_nets:raises' raised KeyError: 'no such layer'"),
        ("zoo_nets:leaves", "raised SystemExit: 3"),
        ("zoo_nets:needs", "raised TypeError"),
        ("zoo_nets:absent", "has no 'absent'"),
        ("zoo_nets:Net.absent", "has no 'Net.absent'"),
        ("no_such_nets:make", "no Python module 'no_such_nets'"),
        ("zoo_nets.sub:make", "importing|no Python module"),
        ("broken_nets:make", "importing 'broken_nets:make' raised ModuleNotFoundError"),
    ],
)
def test_a_factory_that_is_wrong_is_refused(zoo: str, model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(model)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("zoo_nets.py:plain", "Name the module, not its file: 'zoo_nets:plain'."),
        ("./nets/zoo.py:Net.make", "Name the module, not its file: 'zoo:Net.make', in the directory './nets'."),
        ("/zoo.py:make", "Name the module, not its file: 'zoo:make', in the directory '/'."),
        ("zoo_nets", "Name the function that makes the model with its module, such as 'zoo_nets:make'."),
        ("zoo_nets.py", "Name the function that makes the model with its module, such as 'zoo_nets:make'."),
    ],
)
def test_the_file_of_a_factory_is_refused_with_its_module(zoo: str, model: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    assert caught.value.hint == hint


def test_a_factory_of_a_hugging_face_model_follows_attn(zoo: str, tmp_path: Path) -> None:
    (tmp_path / "hf_nets.py").write_text(
        "from tests.hf.families import FAMILIES\nfrom transformers import AutoModelForCausalLM\n"
        "def llama(): return AutoModelForCausalLM.from_config(FAMILIES['llama']())\n"
        "def bloom(): return AutoModelForCausalLM.from_config(FAMILIES['bloom']())\n"
    )
    builds = {b.attn: b for b in iter_attn("hf_nets:llama")}
    assert {name: b.loaded.attn for name, b in builds.items() if b.loaded} == {"eager": "eager", "sdpa": "sdpa"}
    assert builds["eager"].loaded is not None
    assert "input_ids" in builds["eager"].loaded.inputs
    bloom = {b.attn: b for b in iter_attn("hf_nets:bloom")}
    assert bloom["sdpa"].loaded is None
    (own,) = iter_attn("zoo_nets:with_tuple")
    assert own.attn == "own"
    assert "no choice" in (own.reason or "")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./no-such-dir", "no directory './no-such-dir'"),
        ("/no/such/dir", "no directory"),
        ("a/b/c", "no directory"),
        ("bad id!", "neither a hub id, nor a directory"),
        ("<script>alert(1)</script>", "neither|no directory"),
        ("", "neither"),
        ("no-such-org/no-such-model", "'no-such-org/no-such-model' is neither a local directory nor a model"),
    ],
)
def test_a_wrong_id_or_path_is_refused(model: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(model)
    assert caught.value.hint


def test_an_unknown_id_offline_says_so() -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("no-such-org/no-such-model")
    assert "HF_HUB_OFFLINE" in caught.value.hint
    assert "HF_HOME" in caught.value.hint


def test_a_trace_file_leads_to_diff(tmp_path: Path) -> None:
    (tmp_path / "run.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="not a transformers config") as caught:
        resolve_model(str(tmp_path / "run.safetensors"), LoadOptions())
    assert f"sqrtdk diff {str(tmp_path / 'run.safetensors')!r}" in (caught.value.hint or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="sees no CUDA device"):
        resolve_model("demo", LoadOptions(device="cuda"))


def test_an_old_transformers_is_refused_with_the_pip_command() -> None:
    class Old:
        __version__ = "4.47.9"

    with pytest.raises(MissingExtraError, match=r"4\.47\.9 is too old") as caught:
        check_version(Old)
    assert "pip install 'sqrtdk[hf]'" in caught.value.hint


def test_a_device_map_without_weights_is_refused(tmp_path: Path) -> None:
    FAMILIES["llama"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="there are none here"):
        build_model(tmp_path, device_map="auto")


DTYPES = {
    "fp16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float": torch.float32,
    "fp64": torch.float64,
    "double": torch.float64,
    "torch.fp16": torch.float16,
    "float64": torch.float64,
}


def test_a_dtype_has_several_names() -> None:
    assert {name: parse_dtype(name) for name in DTYPES} == DTYPES
    assert parse_dtype(None) is None
    assert parse_dtype(torch.float16) is torch.float16
    for name in ("float8", "int64", "FP16", "Tensor", "torch.torch.half", ""):
        with pytest.raises(ModelError, match=f"there is no dtype '{name}'"):
            parse_dtype(name)
