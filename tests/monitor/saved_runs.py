"""Checkpoints of tiny models on disk, whole and damaged in each way that a reader of them meets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MobileNetV2Config,
    MobileNetV2Model,
)

from sqrtdk.models.options import LoadOptions
from sqrtdk.monitor.checkpoints import CheckpointSeries, measure_checkpoints
from sqrtdk.monitor.reading import read_run

LAYERS, HEADS = 2, 2
STEPS = (5, 10, 100)
OPTIONS = LoadOptions(seq_len=12)
PLAIN: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


def model(**more: Any) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": LAYERS, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**(sizes | PLAIN | more)))


def llama(**more: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes, **PLAIN, **more))


def save(folder: Path, steps: Sequence[int], growth: float = 1.3, **more: Any) -> Path:
    """A run whose queries and keys grow from checkpoint to checkpoint, each beside what a Trainer notes of it."""
    here = model(**more)
    history = []
    for step in steps:
        with torch.no_grad():
            for block in here.transformer.h:
                block.attn.c_attn.weight[:, :32].mul_(growth)
                block.attn.c_attn.weight.add_(torch.randn_like(block.attn.c_attn.weight), alpha=0.01)
        history.append({"step": step, "loss": 100.0 / step, "learning_rate": 0.1})
        here.save_pretrained(folder / f"checkpoint-{step}")
        state = {"global_step": step, "log_history": [*history, {"step": step, "eval_loss": 7.0}]}
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    return folder


def measure(saved: Path, output: Path, options: LoadOptions = OPTIONS, **more: Any) -> CheckpointSeries:
    return measure_checkpoints([f"{saved}/checkpoint-*"], output, options, **more)


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


def _change(**more: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | more))

    return change


def _without_attention(path: Path) -> None:
    shutil.rmtree(path)
    MobileNetV2Model(MobileNetV2Config(image_size=32, depth_multiplier=0.1)).save_pretrained(path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut": (_cut("model.safetensors", 3000), "not fully covered"),
    "weights empty": (_cut("model.safetensors", 0), "header too small"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "there are no weights"),
    "pickled": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "are pickled"),
    "no config": (lambda path: (path / "config.json").unlink(), "no readable config.json"),
    "config no JSON": (_write("config.json", "{ no"), "config.json' is not valid JSON"),
    "config no object": (_write("config.json", "[1]"), "holds a list, not an object"),
    "unknown architecture": (_change(model_type="nonesuch", architectures=["No"]), "'nonesuch', which transformers"),
    "no attention": (_without_attention, "no attention ran"),
    "an adapter": (_write("adapter_config.json", "{}"), "holds an adapter"),
    "empty": (lambda path: [file.unlink() for file in path.iterdir()], "no readable config.json"),
}


def rows(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All that a reader gets of a run."""
    run = read_run(folder)
    assert not run.damaged
    assert not run.gaps
    return {name: getattr(run, name).to_pylist() for name in ("heads", "steps", "alarms")}
