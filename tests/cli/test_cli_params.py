"""`sqrtdk params`: the presets against transformers' own models, directories, factories, streams and errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from sqrtdk.theory.parameters import PRESETS
from tests.cli.errors import check_error
from tests.support.program import called

LLAMA = {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 4096}
LLAMA_3 = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
# Sizes as the published configs have them
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama-2-7b": ("llama", LLAMA),
    "llama-3-8b": ("llama", LLAMA_3),
    "llama-3-70b": (
        "llama",
        LLAMA_3 | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
    "mistral-7b": ("mistral", {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "bert-base": ("bert", {}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "t5-small": ("t5", {}),
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "bert": "BertModel",
    "t5": "T5ForConditionalGeneration",
}


def params(*arguments: object) -> subprocess.CompletedProcess[str]:
    return called("params", *arguments)


def directory(path: Path, kind: str, **values: Any) -> Path:
    path.mkdir(exist_ok=True)
    config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **values}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_every_preset_has_a_config_here() -> None:
    assert CONFIGS.keys() == PRESETS.keys()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_counts_what_transformers_builds(name: str, tmp_path: Path) -> None:
    kind, values = CONFIGS[name]
    built = json.loads(params(str(directory(tmp_path, kind, **values)), "--json").stdout)
    preset = json.loads(params(name, "--json").stdout)
    assert preset["kind"] == "preset"
    assert preset["attention_parameters"] == built["attention_parameters"] == PRESETS[name].attention
    assert preset["parameters"] == built["parameters"]
    assert sum(layers["count"] for layers in preset["layers"]) == len(built["layers"])
    for layers in preset["layers"]:
        each = {layer["parameters"] for layer in built["layers"]}
        assert layers["parameters_each"] in each
        assert layers["count"] * layers["parameters_each"] + layers["parameters_once"] == layers["parameters"]


def test_the_table_of_all_presets() -> None:
    done = params()
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + sum(len(preset.layers) for preset in PRESETS.values())
    llama = next(line for line in lines if line.startswith("llama-3-8b"))
    assert llama.split() == ["llama-3-8b", "32", "4,096", "32", "8", "128", "41,943,040", "1,342,177,280", "16.7%"]
    document = json.loads(params("--json").stdout)
    assert [preset["name"] for preset in document["presets"]] == list(PRESETS)


def test_a_preset_shows_its_formula() -> None:
    text = params("t5-small").stdout
    assert text.startswith("t5-small: 18,874,880 of 60,506,624 parameters are attention's (31.2%)\n")
    assert "3 h d_k d_model + d_model^2; + 32 h in one of them" in text
    assert "2 kv d_k d_model" in params("mistral-7b").stdout


def test_a_directory_is_folded_and_needs_no_weights(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", "llama", **LLAMA_3, num_hidden_layers=3)
    done = params(str(path))
    assert done.returncode == 0
    row = next(line for line in done.stdout.splitlines() if line.startswith("model.layers"))
    assert row.split()[:5] == ["model.layers.0-2.self_attn", "LlamaAttention", "3", "41,943,040", "125,829,120"]
    assert "k_proj 1024x4096" in row
    assert params(str(path / "config.json")).stdout.splitlines()[2:] == done.stdout.splitlines()[2:]


def test_norms_of_the_residual_stream_are_not_attentions(tmp_path: Path) -> None:
    layers = json.loads(params(str(directory(tmp_path, "bert", num_hidden_layers=1)), "--json").stdout)["layers"]
    assert [layer["class"] for layer in layers] == ["BertAttention"]
    assert not [name for name in layers[0]["weights"] if "norm" in name.lower()]
    assert layers[0]["parameters"] == 4 * (768**2 + 768)


FACTORY = """
import torch
from sqrtdk.nn import MultiHeadAttention, TransformerBlock

def blocks():
    print("made")
    return torch.nn.Sequential(*[TransformerBlock(32, 4, 64, kv_heads=2) for _ in range(3)])

def large():
    return MultiHeadAttention(65536, 64)

def values():
    width = int(torch.ones(3).sum()) * 4
    return torch.nn.MultiheadAttention(width, 2), (torch.ones(2, width),) * 3

def shared():
    one = torch.nn.MultiheadAttention(8, 2)
    two = torch.nn.MultiheadAttention(8, 2)
    two.in_proj_weight = one.in_proj_weight
    return torch.nn.ModuleDict({"a": one, "b": two})

def none():
    return torch.nn.Linear(2, 2)

def lazy():
    class LazyAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = torch.nn.LazyLinear(4), torch.nn.LazyLinear(4)
    return LazyAttention()

def broken():
    raise RuntimeError("no such weights")
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of factories with a name of its own, in the current directory."""
    name = f"params_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_factory_of_our_own_modules_shows_their_formula(zoo: str) -> None:
    done = params(f"{zoo}:blocks")
    row = next(line for line in done.stdout.splitlines() if line.startswith("0-2.self_attn"))
    assert "h d_k d_model + 2 kv d_k d_model + d_model^2 + (h + 2 kv) d_k + d_model" in row
    each = 32 * 32 + 2 * 2 * 8 * 32 + 32 * 32 + (4 + 4) * 8 + 32
    assert f"{each:,}" in row
    assert f"{3 * each:,}" in row
    assert "made" in done.stderr
    assert "made" not in done.stdout


def test_a_factory_takes_no_memory_for_weights(zoo: str) -> None:
    assert json.loads(params(f"{zoo}:large", "--json").stdout)["attention_parameters"] == 4 * (65536**2 + 65536)


def test_a_factory_that_looks_at_values_is_built_for_real(zoo: str) -> None:
    document = json.loads(params(f"{zoo}:values", "--json").stdout)
    assert document["attention_parameters"] == 4 * (12 * 12 + 12)
    assert "can't run on the meta device" in document["notes"][0]
    assert "can't run on the meta device" in params(f"{zoo}:values").stdout


def test_shared_parameters_count_once(zoo: str) -> None:
    document = json.loads(params(f"{zoo}:shared", "--json").stdout)
    assert [layer["parameters"] for layer in document["layers"]] == [288, 288 - 192]
    assert document["attention_parameters"] == document["parameters"] == 384


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("none", "no module whose class is named an attention"),
        ("lazy", "no shape before the first call"),
        ("broken", "no such weights"),
        ("missing", "has no 'missing'"),
    ],
)
def test_errors_of_factories(zoo: str, target: str, words: str) -> None:
    done = params(f"{zoo}:{target}")
    check_error(done, words)


def test_a_directory_wins_over_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory(tmp_path / "gpt2", "gpt2", n_layer=2)
    monkeypatch.chdir(tmp_path)
    assert json.loads(params("gpt2", "--json").stdout)["attention_parameters"] == 2 * 2362368


def test_the_document_goes_to_a_file_that_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    done = params("gpt2", "--output", str(path))
    assert json.loads(path.read_text())["attention_parameters"] == 28_348_416
    assert "12 " in done.stdout
    assert "p.json" in done.stderr
    before = path.read_bytes()
    again = params("bert-base", "--output", str(path))
    assert (again.returncode, path.read_bytes()) == (2, before)
    assert params("bert-base", "--output", str(path), "--force").returncode == 0
    assert json.loads(path.read_text())["name"] == "bert-base"


def test_names_of_a_stranger_cannot_steer_the_terminal(zoo: str) -> None:
    Path(f"{zoo}.py").write_text(
        "import torch\ndef make():\n"
        "    return torch.nn.ModuleDict({'a\\x1b[31m': torch.nn.MultiheadAttention(8, 2)})\n",
        encoding="utf-8",
    )
    done = params(f"{zoo}:make")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "a\\x1b[31m" in done.stdout


def test_the_random_state_is_untouched(zoo: str) -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    params(f"{zoo}:blocks", "--seed", "9")
    assert torch.equal(torch.random.get_rng_state(), before)
