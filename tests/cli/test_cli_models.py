"""Models and inputs from directories, files and factories: right ones, wrong ones, and one larger than the memory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.errors import check_error
from tests.support.program import ENVIRONMENT, called, fresh

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.qkv, self.factor = nn.Linear(32, 96), factor
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, scale=self.factor)

def good(): return Net(16 ** -0.5), (torch.randn(2, 6, 32),)
def bad(): return Net(16 ** 0.5), {"x": torch.randn(2, 6, 32)}
def bare(): return Net(None)
def raises(): raise KeyError("no such layer")
def nothing(): return None
def text(): return Net(None), "some text"
def leaves(): raise SystemExit(0)
def wrong_shape(): return Net(None), (torch.randn(2, 6, 31),)
def wrong_name(): return Net(None), {"y": torch.randn(2, 6, 32)}
def no_attention(): return nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), (torch.randn(2, 4),)
number = 7
"""
MODULES = {"zoo/nets.py": NETS, "broken_nets.py": "1 / 0\n"}


def save(directory: Path, **changes: Any) -> Path:
    """Save a Llama of random weights; small unless `changes` say otherwise."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    small: dict[str, Any] = {
        "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "pad_token_id": 0,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**small | changes)).save_pretrained(directory, max_shard_size="20MB")
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "llama")


def check(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """The document of a run without findings."""
    done = called("check", *arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_sizes_dtype_and_both_attentions(llama: Path) -> None:
    document = check(llama, "--batch", "2", "--seq-len", "12", "--dtype", "bf16", "--attn", "both")
    calls = [(call["kind"], call["site"]) for call in document["calls"]]
    assert calls == [(kind, f"model.layers.{i}.self_attn") for kind in ("eager", "sdpa") for i in (0, 1)]
    for call in document["calls"]:
        assert (call["batch"], call["query_len"], call["dtype"], call["verdict"]) == (2, 12, "bfloat16", "exact")
        assert call["stats"]["rows"] == 24


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_one_attention(llama: Path, attn: str) -> None:
    document = check(llama, "--attn", attn, "--seq-len", "8")
    assert {call["kind"] for call in document["calls"]} == {attn}
    assert document["environment"]["attn"] == attn


def test_a_text_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aa " * 50)
    (tmp_path / "b.txt").write_text("The keys, and the queries; 12 + 30 = 42!\n" * 5)
    one, other = (check("demo", "--text", name, "--seq-len", "32", cwd=tmp_path) for name in ("a.txt", "b.txt"))
    assert one["calls"][0]["stats"]["entropy_nats"] != other["calls"][0]["stats"]["entropy_nats"]


def test_inputs_from_a_file(llama: Path, tmp_path: Path) -> None:
    ids = torch.arange(3 * 7).reshape(3, 7)
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, tmp_path / "in.safetensors")
    document = check(llama, "--input", "in.safetensors", cwd=tmp_path)
    assert {(call["batch"], call["query_len"]) for call in document["calls"]} == {(3, 7)}


def test_a_factory_of_the_current_directory(nets: Path) -> None:
    done = called("check", "zoo.nets:bad", cwd=nets)
    assert done.returncode == 1, done.stderr
    assert "unexplained: inverted" in done.stdout
    document = check("zoo.nets:good", "--dtype", "half", cwd=nets)
    assert {(call["verdict"], call["dtype"]) for call in document["calls"]} == {("exact", "float16")}


def test_static_needs_a_config_only(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path / "config.json")
    document = check(tmp_path, "--static")
    assert [call["verdict"] for call in document["calls"]] == ["exact", "exact"]


def test_nan_weights_are_a_finding(llama: Path, tmp_path: Path) -> None:
    model = tmp_path / "sick"
    shutil.copytree(llama, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = torch.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    done = called("check", model, "--seq-len", "8", "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout, parse_constant=pytest.fail)
    assert {(f["rule"], f["severity"]) for f in document["findings"]} >= {("nonfinite", "critical")}


FACTORIES = {
    "no_such_module:make": "no_such_module",
    "zoo.nothing:make": "zoo.nothing",
    "broken_nets:make": "ZeroDivisionError",
    "zoo.nets:no_such_name": "no_such_name",
    "zoo.nets:raises": "no such layer",
    "zoo.nets:nothing": "NoneType",
    "zoo.nets:text": "str",
    "zoo.nets:number": "int",
    "zoo.nets:leaves": "SystemExit",
    "zoo.nets:bare": "a factory may return (module, inputs); on the command line --input FILE.safetensors",
    "zoo.nets:wrong_shape": "(2, 6, 31)",
    "zoo.nets:wrong_name": "y",
    "zoo.nets:no_attention": "no attention",
}


@pytest.mark.parametrize("model", FACTORIES)
def test_a_factory_that_is_wrong(nets: Path, model: str) -> None:
    (nets / "out").mkdir()
    done = called("check", model, "--html", "out/r.html", "--output", "out/r.json", cwd=nets)
    check_error(done)
    assert FACTORIES[model] in done.stderr
    assert os.listdir(nets / "out") == []


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _half_a_config(model: Path) -> None:
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text[: len(text) // 2])


def _half_the_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def _missing_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickles_only(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": 1}))


def _unreadable(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()


def _unknown_type(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "no-such-type"}')


def _nonsense(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_attention_heads": 0}))


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_no_config, "config.json"),
    "half a config": (_half_a_config, "not valid JSON"),
    "half the weights": (_half_the_weights, "weight file is damaged"),
    "empty weights": (_empty_weights, "weight file is damaged"),
    "missing shard": (_missing_shard, "missing"),
    "pickles only": (_pickles_only, "pickle"),
    "config is a directory": (_unreadable, "config.json"),
    "unknown type": (_unknown_type, "no-such-type"),
    "no heads": (_nonsense, "Check the values in config.json"),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_that_is_wrong(llama: Path, tmp_path: Path, name: str) -> None:
    harm, words = DIRECTORIES[name]
    model = tmp_path / "model"
    shutil.copytree(llama, model)
    harm(model)
    (tmp_path / "r.html").write_text("old")
    done = called("check", "model", "--html", "r.html", "--output", "r.json", "--force", cwd=tmp_path)
    check_error(done)
    assert words in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["model", "r.html"]
    assert (tmp_path / "r.html").read_text() == "old"


INPUTS: dict[str, tuple[dict[str, torch.Tensor] | bytes, str]] = {
    "unknown name": ({"input_idz": torch.ones(1, 4, dtype=torch.long)}, "input_idz"),
    "one dimension": ({"input_ids": torch.ones(4, dtype=torch.long)}, "2 dimensions"),
    "floats": ({"input_ids": torch.ones(1, 4)}, "int64"),
    "ids too large": ({"input_ids": torch.full((1, 4), 160)}, "0 to 159"),
    "no tensor": ({}, "lack input_ids"),
    "not safetensors": (b"PK\x03\x04 and so on", "not valid safetensors"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_file_that_is_wrong(llama: Path, tmp_path: Path, name: str) -> None:
    content, words = INPUTS[name]
    if isinstance(content, bytes):
        (tmp_path / "in.safetensors").write_bytes(content)
    else:
        save_file(content, tmp_path / "in.safetensors")
    done = called("check", llama, "--input", "in.safetensors", "--output", "r.json", cwd=tmp_path)
    check_error(done)
    assert words in done.stderr
    assert os.listdir(tmp_path) == ["in.safetensors"]


def _limited(limit: int) -> Callable[[], None]:
    resource = pytest.importorskip("resource", reason="needs Unix resource limits")
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


PROBE = """
import sys
from sqrtdk.cli import main
sys.argv = ["sqrtdk", "check", *sys.argv[1:]]
try:
    main()
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmData:")), file=sys.stderr)
"""


def ledger(document: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What must not depend on where the weights were: site, formula, verdict, ratio."""
    names = ("site", "index", "formula", "verdict", "mistake")
    return [(*(call[name] for name in names), round(call["scale"]["ratio"], 6)) for call in document["calls"]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and RLIMIT_DATA counts private maps on Linux only")
def test_a_model_larger_than_memory_is_audited_from_disk(llama: Path, tmp_path: Path) -> None:
    big = save(tmp_path / "big", hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    size = sum(path.stat().st_size for path in big.glob("*.safetensors"))
    assert size > 150 * 2**20
    offload = ["--device-map", "auto", "--offload-folder"]

    small = [str(llama), *offload, str(tmp_path / "none")]
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, *small], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    program = int(probe.stderr.split("VmData:")[1].split()[0]) * 1024
    # The limit also counts safetensors' maps of the files (private and writable), so the weights get what is above.
    limit = _limited(program + size + 96 * 2**20)

    short = ["--seq-len", "8", "--json"]
    check_error(fresh(str(big), *short, before=limit), "GiB for its weights")
    done = fresh(str(big), *offload, str(tmp_path / "offload"), *short, before=limit)
    assert done.returncode == 0, done.stderr
    plain = fresh(str(big), *short)
    assert ledger(json.loads(done.stdout)) == ledger(json.loads(plain.stdout))
    assert len(json.loads(done.stdout)["calls"]) == 12
