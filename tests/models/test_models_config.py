"""A config is a stranger's text: what chooses code is dropped, what would take forever is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from sqrtdk import check
from sqrtdk.errors import ModelError
from sqrtdk.models.config import MAX_CONFIG_BYTES, clean_config_dict, load_config
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
from tests.hf.families import FAMILIES

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
}


def write(directory: Path, config: Any) -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return str(directory)


@pytest.mark.parametrize(
    "key",
    ["attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_experts_implementation",
     "experts_implementation", "_attn_implementation_autoset"],
)  # fmt: skip
def test_implementation_names_are_dropped_at_every_depth(tmp_path: Path, key: str) -> None:
    raw = FAMILIES["clip"]().to_dict()
    raw["model_type"] = "clip"
    raw[key] = "someone/kernel"
    raw["text_config"][key] = "someone/kernel"
    raw["vision_config"][key] = "someone/kernel"
    config, notes = load_config(Path(write(tmp_path, raw)))
    assert "someone/kernel" not in repr(config) + repr(vars(config)) + repr(vars(config.text_config))
    assert [note for note in notes if key in note] == [
        f"{place}{key} = 'someone/kernel' was ignored" for place in sorted(("text_config.", "vision_config.", ""))
    ] or sum(key in note for note in notes) == 3
    assert resolve_model(str(tmp_path), LoadOptions(static=True)).attn == "sdpa"


def test_an_attn_implementation_in_a_config_does_not_choose(tmp_path: Path) -> None:
    assert (
        resolve_model(write(tmp_path, LLAMA | {"attn_implementation": "eager"}), LoadOptions(static=True)).attn
        == "sdpa"
    )
    assert resolve_model(write(tmp_path, LLAMA | {"output_attentions": True}), LoadOptions(attn="sdpa")).attn == "sdpa"


def test_code_packages_and_downloads_in_a_config_are_dropped(tmp_path: Path) -> None:
    clean, _ = clean_config_dict(
        {
            "auto_map": {"AutoConfig": "x.Y"},
            "quantization_config": {"quant_method": "gptq"},
            "dtype": "load",
            "__class__": "x",
            "use_pretrained_backbone": True,
            "backbone_config": {"use_pretrained_backbone": True, "torch_dtype": "float16"},
            "limit": {"__float__": "Infinity"},
        }
    )
    assert clean == {
        "use_pretrained_backbone": False,
        "backbone_config": {"use_pretrained_backbone": False, "torch_dtype": "float16"},
        "limit": float("inf"),
    }
    loaded = resolve_model(
        write(tmp_path, LLAMA | {"quantization_config": {"quant_method": "gptq"}}), LoadOptions(static=True)
    )
    assert any("quantization_config was ignored" in note for note in loaded.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is over the limit of 1000"),
        ({"num_hidden_layers": -(10**9)}, "over the limit"),
        ({"text_config": {"n_layer": 10**6}}, r"text_config\.n_layer = 1000000 is over the limit of 1000"),
        ({"depths": [2, 10**9]}, "depths = 1000000000 is over the limit"),
        ({"num_labels": 10**9}, "num_labels = 1000000000 is over the limit"),
        ({"num_attention_heads": 10**8}, "over the limit of 4096"),
        ({"max_position_embeddings": 10**10}, "over the limit"),
        ({"hidden_size": 10**12}, "over the limit of 2147483648"),
        ({"num_hidden_layers": 900, "num_local_experts": 4000}, "900 layers of 4000 experts"),
        (
            {"hidden_size": 2**31 - 64, "intermediate_size": 2**31 - 1, "vocab_size": 2**31 - 1},
            "GiB for its weights|can't build",
        ),
        ({"hidden_size": "many"}, "rejects this config|can't build"),
        ({"num_attention_heads": 0}, "rejects this config|can't build"),
        ({"vocab_size": -5}, "rejects this config|can't build"),
        ({"hidden_act": "os.system"}, "can't build"),
        ({"model_type": "no_such_type"}, "model type 'no_such_type'"),
        ({"model_type": ["llama"]}, r"model type \['llama'\]"),
        ({"model_type": None}, "model type None"),
    ],
)
def test_sizes_and_values_no_model_has_are_refused_at_once(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(write(tmp_path, LLAMA | change))
    assert caught.value.hint
    assert time.monotonic() - start < 60  # an endless build is the failure, not a slow machine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1, 2]", "holds a list"),
        ('"llama"', "holds a str"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a":' * 50 + "1" + "}" * 50, "nested too deep"),
        ('{"n_layer": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": [' + "0," * 1_200_000 + "0]}", "too many entries"),
        ('{"a": "' + "x" * MAX_CONFIG_BYTES + '"}', "bytes; at most"),
    ],
    ids=["truncated", "empty", "list", "string", "deep list", "deep object", "digits", "entries", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(write(tmp_path, text))
    assert caught.value.hint


def test_a_broken_config_is_named_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in (write(tmp_path / "model", "{"), write(tmp_path / "model", "{") + "/config.json"):
        with pytest.raises(ModelError) as caught:
            resolve_model(name)
        assert str(caught.value).startswith(f"{str(tmp_path / 'model' / 'config.json')!r} is not valid JSON: ")


@pytest.mark.parametrize("static", [False, True])
def test_a_config_under_another_name_is_a_model(tmp_path: Path, static: bool) -> None:
    """It is read alone: of the files beside it nobody says that they are of this model."""
    directory = Path(write(tmp_path, LLAMA))
    file = directory / "my_llama.JSON"
    file.write_text(json.dumps(LLAMA | {"num_attention_heads": 2}, indent=1))
    (directory / "model.safetensors").write_bytes(b"of another model")
    (directory / "generation_config.json").write_text("{")
    loaded = resolve_model(str(file), LoadOptions(static=static))
    assert (loaded.kind, loaded.home, loaded.config.num_attention_heads) == ("config", file, 2)
    assert f"{str(file)!r} is a config alone: no other file is read" in loaded.notes
    assert ("there are no weights: they are random, with seed 0" in loaded.notes) is not static
    report = check(str(file), static=static)
    assert [call.call.formula for call in report.calls] == ["softmax(0.1768 * rope(q).rope(k) + causal)"] * 2
    assert report.model.at == f"{file}:2"
    assert str(file) in {source.path for source in report.sources}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sizes.json", '{"model_type": null}', "'sizes.json' is a file, but not a transformers config"),
        ("sizes.json", '{"hidden_size": 64}', "'sizes.json' is a file, but not a transformers config"),
        ("sizes.yaml", "model_type: llama", "'sizes.yaml' is a file, but not a transformers config"),
        ("sizes.json", "{", "'sizes.json' is not valid JSON: "),
        ("sizes.json", "[]", "'sizes.json' holds a list, not an object"),
    ],
)
def test_a_file_that_is_no_config_is_told_what_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert str(caught.value).startswith(message)
    hint = "Give a model's directory, or a transformers config: a JSON file that names a model_type."
    assert caught.value.hint == hint if "but not" in message else caught.value.hint


def test_code_of_a_config_alone_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match=r"own\.json names the model type 'own'") as caught:
        resolve_model(str(file), LoadOptions(trust_remote_code=True))
    assert "from a model's directory only" in caught.value.hint


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve_model(str(tmp_path))


def test_memory_is_counted_before_weights_are_made(tmp_path: Path) -> None:
    large = LLAMA | {
        "hidden_size": 2**20,
        "intermediate_size": 2**20,
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
    }
    with pytest.raises(ModelError, match=r"needs [\d.]+ GiB for its weights, and [\d.]+ GiB are free") as caught:
        resolve_model(write(tmp_path, large))
    assert "--static" in caught.value.hint
    assert "--offload-folder" in caught.value.hint
    assert resolve_model(str(tmp_path), LoadOptions(static=True)).module.lm_head.weight.is_meta


def test_an_architecture_is_looked_for_in_transformers_own_tables_only(tmp_path: Path) -> None:
    odd = [7]
    try:
        LlamaConfig(architectures=odd)
    except Exception:  # releases of transformers that look at the types of a config's fields
        odd = []
    for name in ("GPT2LMHeadModel", "Trainer", "os.system", "__init__"):
        loaded = resolve_model(write(tmp_path, LLAMA | {"architectures": [name, *odd]}), LoadOptions(static=True))
        assert type(loaded.module).__name__ == "LlamaModel"
        assert any("is not known for this model type" in note for note in loaded.notes)
    for name in ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel"):
        loaded = resolve_model(
            write(tmp_path, LLAMA | {"architectures": [name], "pad_token_id": 0}), LoadOptions(static=True)
        )
        assert type(loaded.module).__name__ == name
        assert not any("is not known" in note for note in loaded.notes)


REMOTE = {
    "model_type": "from_elsewhere",
    "architectures": ["Elsewhere"],
    "auto_map": {"AutoConfig": "elsewhere.ElsewhereConfig", "AutoModel": "elsewhere.Elsewhere"},
}
CODE = """
import pathlib
import torch
from transformers import PretrainedConfig, PreTrainedModel

pathlib.Path(MARK).write_text("ran")

class ElsewhereConfig(PretrainedConfig):
    model_type = "from_elsewhere"

class Elsewhere(PreTrainedModel):
    config_class = ElsewhereConfig
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(4, 4)
        self.post_init()
    def forward(self, x):
        return self.linear(x)
"""
RUN = """
import sys
import torch
from safetensors.torch import save_file
from sqrtdk import check
from sqrtdk.errors import ModelError
from sqrtdk.models.load import resolve_model
from sqrtdk.models.options import LoadOptions
save_file({"x": torch.ones(2, 4)}, "../x.safetensors")
try:
    loaded = resolve_model(".", LoadOptions(trust_remote_code=sys.argv[1] == "trust", input_file="../x.safetensors"))
    print(type(loaded.module).__name__, tuple(loaded.module(**loaded.inputs).shape))
except ModelError as error:
    print(error, "|", error.hint)
"""


@pytest.mark.parametrize("trust", [False, pytest.param(True, marks=pytest.mark.full)])
def test_code_of_the_directory_runs_only_when_trusted(tmp_path: Path, trust: bool) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    model.mkdir()
    write(model, REMOTE)
    (model / "elsewhere.py").write_text(CODE.replace("MARK", repr(str(mark))))
    done = subprocess.run(
        [sys.executable, "-c", RUN, "trust" if trust else "no"],
        cwd=model,
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert mark.exists() == trust
    if trust:
        assert done.stdout.strip() == "Elsewhere (2, 4)"
    else:
        assert "model type 'from_elsewhere', which transformers" in done.stdout
        assert "--trust-remote-code" in done.stdout
