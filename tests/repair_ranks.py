"""What each of two gloo processes does: a clip of a sharded model by maxima of its own half of the batch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from repair_layouts import GROUPED, IDS, LATENT, randomised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

RANKS = 2
THRESHOLDS = {"qwen2": 12.0, "gemma3": 0.5, "deepseek": 20.0, "gpt2": 8.0, "mha": 25.0}


def build(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    configs: dict[str, Any] = {
        "qwen2": lambda: hf.Qwen2Config(**GROUPED),
        "gemma3": lambda: hf.Gemma3TextConfig(**GROUPED, head_dim=8),
        "deepseek": lambda: hf.DeepseekV3Config(**LATENT),
        "gpt2": lambda: hf.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=16, bos_token_id=1, eos_token_id=2),
    }
    if name == "mha":
        return randomised(nn.MultiheadAttention(32, 4, batch_first=True)).train()
    return randomised(hf.AutoModel.from_config(configs[name](), experts_implementation="eager"))


def inputs(name: str) -> tuple[Any, ...]:
    """The joined batch: of two sequences, whose maxima differ."""
    if name == "mha":
        x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return (x, x, x)
    return (IDS,)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in model.named_parameters()
    }


def clip(name: str, model: nn.Module, batch: tuple[Any, ...], **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    import sqrtdk
    from sqrtdk.repair import qk_clip_

    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(*batch)
    return qk_clip_(model, run, THRESHOLDS[name], 0.3, **options), weights(model)


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    try:
        for name in THRESHOLDS:
            half = tuple(each[rank : rank + 1] for each in inputs(name))
            for way in ("fsdp", "replicas", "tensor"):
                model = build(name)
                if way == "fsdp":
                    for layer in getattr(model, "layers", getattr(model, "h", ())):
                        fully_shard(layer)
                    fully_shard(model)
                if way == "tensor" and name != "qwen2":
                    continue
                try:
                    if way == "tensor":
                        results[name, way] = _sharded_by_plan(name, model, half)
                    else:
                        records, after = clip(name, model, half, group=dist.group.WORLD)
                        results[name, way] = (records[0].gamma, records[0].measured, records[0].refused, after)
                except Exception as error:
                    results[name, way] = repr(error)
        try:
            clip("qwen2", build("qwen2"), tuple(each[rank : rank + 1] for each in inputs("qwen2")))
        except ValueError as error:
            results["no group"] = str(error)
        torch.save(results, os.path.join(folder, f"rank{rank}.pt"))
    finally:
        dist.destroy_process_group()


def _sharded_by_plan(name: str, model: nn.Module, batch: tuple[Any, ...]) -> Any:
    """Weights that are made DTensors after the plan: sharded along either axis, one of them unevenly."""
    import sqrtdk
    from sqrtdk.repair import clip_, plan_of

    with torch.no_grad(), sqrtdk.trace(model, keep=True) as run:
        model(*inputs(name))
    plans = plan_of(model, run)
    mesh = init_device_mesh("cpu", (RANKS,))
    attention = model.layers[0].self_attn
    for part, axis in (("q_proj", 0), ("k_proj", 1)):
        layer = getattr(attention, part)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(axis)]))
    attention.q_proj.bias = nn.Parameter(distribute_tensor(attention.q_proj.bias.detach(), mesh, [Shard(0)]))
    maxima = torch.tensor(run.calls[0].stats.max_logit)
    (record,) = clip_(model, plans, [maxima], THRESHOLDS[name], 0.3)
    return record.gamma, record.measured, record.refused, weights(model)
