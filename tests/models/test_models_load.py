"""Forms of the MODEL argument, and what is refused with which words."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sqrtdk.errors import MissingExtraError, ModelError
from sqrtdk.models.build import build_model, parse_dtype
from sqrtdk.models.extras import check_version
from sqrtdk.models.factory import call_factory
from sqrtdk.models.hub import _refuse_pickles
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


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(path)
    return path


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


def test_an_id_in_the_cache_is_found_offline(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "cache" / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots").mkdir()
    checkpoint.rename(repo / "snapshots" / ("a" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    loaded = resolve_model("org/name")
    assert (loaded.kind, loaded.id) == ("hub", "org/name")
    assert not any("random, with seed" in note and "weights" in note for note in loaded.notes)
    with pytest.raises(ModelError):
        resolve_model("org/name", LoadOptions(revision="other"))


def test_weights_come_from_safetensors(checkpoint: Path) -> None:
    loaded = resolve_model(str(checkpoint))
    stored = load_file(checkpoint / "model.safetensors")
    assert torch.equal(loaded.module.model.layers[1].mlp.up_proj.weight, stored["model.layers.1.mlp.up_proj.weight"])
    assert not any("weights" in note for note in loaded.notes)
    assert resolve_model(str(checkpoint), LoadOptions(static=True)).module.lm_head.weight.is_meta


def test_a_trace_file_leads_to_diff(tmp_path: Path) -> None:
    (tmp_path / "run.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="not a transformers config") as caught:
        resolve_model(str(tmp_path / "run.safetensors"), LoadOptions())
    assert f"sqrtdk diff {str(tmp_path / 'run.safetensors')!r}" in (caught.value.hint or "")


def test_the_config_of_a_directory_stands_for_the_directory(checkpoint: Path) -> None:
    loaded = resolve_model(str(checkpoint / "config.json"))
    assert loaded.kind == "directory"
    for one, other in zip(loaded.module.parameters(), resolve_model(str(checkpoint)).module.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ModelError, match="is a file, but not a transformers config") as caught:
        resolve_model(str(checkpoint / "model.safetensors"))
    assert caught.value.hint == f"Give its directory: {str(checkpoint)!r}."


def test_a_sharded_checkpoint_is_read_whole(checkpoint: Path, tmp_path: Path) -> None:
    whole = resolve_model(str(checkpoint)).module
    whole.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    again = resolve_model(str(tmp_path / "shards")).module
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    shards[0].unlink()
    with pytest.raises(ModelError, match=f"1 of {len(shards)} weight files are missing"):
        resolve_model(str(tmp_path / "shards"))


@pytest.mark.parametrize("shard", ["evil.bin", "../model.safetensors", "/etc/passwd", 7])
def test_an_index_that_leaves_the_directory_or_names_a_pickle_is_refused(checkpoint: Path, shard: object) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "evil.bin").write_bytes(b"")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ModelError, match="no safetensors file beside it"):
        resolve_model(str(checkpoint))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"w": "a", "v": []}}'])
def test_a_broken_index_is_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="not a valid index"):
        resolve_model(str(checkpoint))


def test_the_three_lines_convert(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(str(checkpoint)).module
    (checkpoint / "model.safetensors").unlink()
    torch.save(model.state_dict(), checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled") as caught:
        resolve_model(str(checkpoint))
    monkeypatch.chdir(checkpoint)
    exec("\n".join(caught.value.hint.split("\n")[1:]), {})
    converted = resolve_model(str(checkpoint)).module
    assert all(torch.equal(value, converted.state_dict()[name]) for name, value in model.state_dict().items())


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return (Path.touch, (self.mark,))


def test_a_hub_repository_of_pickles_is_refused_before_the_download() -> None:
    with pytest.raises(ModelError, match=r"pickled \('pytorch_model\.bin'\)"):
        _refuse_pickles(["config.json", "pytorch_model.bin"], "org/name")
    _refuse_pickles(["config.json", "pytorch_model.bin", "model.safetensors"], "org/name")
    _refuse_pickles(["config.json"], "org/name")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "weights.pth"])
def test_a_pickle_only_checkpoint_is_refused_unopened(checkpoint: Path, name: str, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(ModelError, match=f"pickled .*{name}.*runs the code") as caught:
        resolve_model(str(checkpoint))
    first, *lines = caught.value.hint.split("\n")
    assert "safetensors" not in first
    assert len(lines) == 3
    assert name in lines[1]
    assert resolve_model(str(checkpoint), LoadOptions(static=True)).module.lm_head.weight.is_meta
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(checkpoint / name))
    assert not (tmp_path / "ran").exists()


def test_a_pickle_beside_safetensors_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    resolve_model(str(checkpoint))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("size", [0, 5, 100, 40_000])
def test_truncated_safetensors_are_refused(checkpoint: Path, size: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match="can't build this model") as caught:
        resolve_model(str(checkpoint))
    assert "damaged or incomplete" in caught.value.hint


def test_weights_of_another_shape_are_refused_and_missing_ones_noted(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    state = load_file(file)
    save_file({k: v for k, v in state.items() if "up_proj" not in k} | {"odd": torch.ones(1)}, file, {"format": "pt"})
    notes = resolve_model(str(checkpoint)).notes
    assert any("2 tensors are not in the checkpoint and are random" in note for note in notes)
    assert any("1 tensor of the checkpoint is not used, first 'odd'" in note for note in notes)
    save_file({k: v[..., :-1].contiguous() for k, v in state.items()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match="can't build this model"):
        resolve_model(str(checkpoint))


def test_other_kinds_of_directories_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no readable config\.json") as caught:
        resolve_model(str(tmp_path / "empty"))
    assert caught.value.hint
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    with pytest.raises(ModelError, match="an adapter, not a whole model"):
        resolve_model(str(checkpoint))
    (checkpoint / "adapter_config.json").unlink()
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    with pytest.raises(ModelError, match=r"'other.safetensors' is not a name"):
        resolve_model(str(checkpoint))


def test_quantized_weights_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantized"):
        resolve_model(str(checkpoint))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"dtype": "load"}, "no dtype 'load'"),
        ({"device": "abacus"}, "no device 'abacus'"),
        ({"attn": "flash"}, "no attention implementation 'flash'"),
        ({"batch": 0}, "must be at least 1"),
        ({"seq_len": 0}, "must be at least 1"),
        ({"text": "no-such-file.txt"}, "can't read the text"),
    ],
)
def test_wrong_options_are_refused(checkpoint: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises((ModelError, ValueError), match=message) as caught:
        resolve_model(str(checkpoint), LoadOptions(**options))
    assert caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="sees no CUDA device"):
        resolve_model("demo", LoadOptions(device="cuda"))


def test_an_old_transformers_is_refused_with_the_pip_command() -> None:
    class Old:
        __version__ = "5.4.9"

    with pytest.raises(MissingExtraError, match=r"5\.4\.9 is too old") as caught:
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
