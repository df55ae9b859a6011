"""Small models that are watched while they train, and what a watch must leave as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from sqrtdk.monitor.watch import Watch

SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=61, **IDS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=24, num_key_value_heads=1, attention_dropout=0.1, max_position_embeddings=16, **IDS
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, intermediate_size=24, max_position_embeddings=16, **IDS)
    return transformers.BertForMaskedLM(config)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.embed, self.body, self.head = nn.Embedding(61, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 61)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(self.embed(input_ids)))
        return transformers.utils.ModelOutput(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Attend(nn.Module):
    """The smallest model: one attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "encoder": Encoder}


def called(model: nn.Module, steps: int = 1, **options: Any) -> Watch:
    """A run of some steps."""
    with Watch(model, **options) as health:
        for _ in range(steps):
            model(torch.randn(1, 3, 8)).sum().backward()
            health.step()
    return health


def one_step(health: Watch, work: Callable[[], object]) -> None:
    with health:
        work()
        health.step()


def module_state(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": list(value) if isinstance(value, dict) else id(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    }


def global_hooks() -> dict[str, int]:
    return {name: len(value) for name, value in vars(torch_module).items() if name.startswith("_global_") and value}


def alarming() -> nn.Module:
    model = Attend()
    with torch.no_grad():
        model.qkv.weight *= 100.0
    return model
