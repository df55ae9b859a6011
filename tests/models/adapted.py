"""Small base models, and adapters for them as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sqrtdk.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PLACES = ("q_proj", "v_proj")
_OF_GPT2: dict[str, Any] = {"target_modules": ["c_attn"], "fan_in_fan_out": True}

CONFIGS: Mapping[str, Callable[[Any], Any]] = {  # name -> PEFT's config, given PEFT
    "lora": lambda peft: peft.LoraConfig(r=8, lora_alpha=16, target_modules=[*PLACES]),
    "rslora": lambda peft: peft.LoraConfig(r=8, lora_alpha=16, target_modules=[*PLACES], use_rslora=True),
    "dora": lambda peft: peft.LoraConfig(r=4, lora_alpha=8, target_modules=[*PLACES, "down_proj"], use_dora=True),
    "patterns": lambda peft: peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=[*PLACES], rank_pattern={"layers.1.self_attn.q_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 3},
    ),
    "saved head": lambda peft: peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=[*PLACES], modules_to_save=["lm_head"]
    ),
    "ia3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "gpt2 lora": lambda peft: peft.LoraConfig(r=8, lora_alpha=16, **_OF_GPT2),
    "gpt2 dora": lambda peft: peft.LoraConfig(r=8, lora_alpha=16, use_dora=True, **_OF_GPT2),
    "gpt2 bias": lambda peft: peft.LoraConfig(r=8, lora_alpha=16, bias="lora_only", **_OF_GPT2),
    "gpt2 ia3": lambda peft: peft.IA3Config(
        target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True
    ),
}  # fmt: skip


def base_model(kind: str = "lora") -> Any:
    """A model of two layers with fixed weights; GPT-2 for the kinds that are named so."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind.startswith("gpt2"):
            return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32)).eval()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
        ).eval()


def written_base(path: Path, kind: str = "lora") -> None:
    """Write the model to a directory."""
    base_model(kind).save_pretrained(path)


def adapter(path: Path, places: tuple[str, ...] = PLACES, **fields: Any) -> dict[str, Tensor]:
    """Write a LoRA of rank 4 and scale 2 for the base beside it, and return its tensors."""
    path.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in base_model().named_parameters():
        module = name.removesuffix(".weight")
        if module.endswith(places):
            rows, columns = weight.shape
            for letter, shape in (("A", (4, columns)), ("B", (rows, 4))):
                key = f"base_model.model.{module}.lora_{letter}.weight"
                tensors[key] = 0.1 * torch.randn(*shape, generator=generator)
    save_file(tensors, path / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "../base"}
    (path / ADAPTER_CONFIG).write_text(json.dumps(config | fields))
    return tensors
