"""Weights of a local directory or of the hub: read from safetensors, never from a pickle, whole or not at all."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sqrtdk.errors import ModelError
from sqrtdk.models.hub import _refuse_pickles
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from tests.hf.families import FAMILIES


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(FAMILIES["llama"]()).save_pretrained(path)
    return path


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
    with pytest.raises(ModelError, match="needs its base model, 'someone/base'"):
        resolve_model(str(checkpoint))
    (checkpoint / "adapter_config.json").unlink()
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    with pytest.raises(ModelError, match=r"'other.safetensors' is not a name"):
        resolve_model(str(checkpoint))


def test_weights_of_another_quantisation_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "vptq", "bits": 4}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised by 'vptq', which is not read"):
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
