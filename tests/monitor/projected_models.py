"""Models whose q and k are projected in every way, and their gradients as autograd keeps them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from sqrtdk.monitor.samples import CallSample
from sqrtdk.monitor.watch import Watch
from tests.tolerances import complaint

HEADS, WIDTH, SIZE = 4, 4, 16
COLUMNS = ("p05", "p50", "p95", "max")


class Block(nn.Module):
    """q, k and v from `projections`, in whose outputs they stand at (which, first feature, features)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        kv = HEADS // 2 if kind == "gqa" else HEADS
        sizes = {"conv1d": [3 * SIZE], "fused": [3 * SIZE]}.get(kind, [SIZE, kv * WIDTH, kv * WIDTH])
        make: Callable[[int], nn.Module] = (
            (lambda n: Conv1D(n, SIZE)) if kind == "conv1d" else lambda n: nn.Linear(SIZE, n)
        )
        self.projections = nn.ModuleList(make(n) for n in sizes)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [project(x) for project in self.projections]
        q, k, v = outputs[0].chunk(3, -1) if len(outputs) == 1 else outputs
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kind == "gqa")
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Packed(nn.Module):
    """nn.MultiheadAttention, whose q, k and v no module returns; `weights` are asked for, and so no kernel runs."""

    def __init__(self, weights: bool = False, sequence_first: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=not sequence_first)
        self.weights, self.sequence_first = weights, sequence_first

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = x.transpose(0, 1) if self.sequence_first else x
        attended, _ = self.attention(y, y, y, attn_mask=hidden, need_weights=self.weights)
        return x + (attended.transpose(0, 1) if self.sequence_first else attended)

    def plain(self) -> Block:
        return as_block(self.attention.in_proj_weight, self.attention.in_proj_bias, self.attention.out_proj)


class Multiplied(nn.Module):
    """q, k and v by matrices of its own, each for itself or all in one."""

    def __init__(self, separate: bool = False) -> None:
        super().__init__()
        self.separate = separate
        self.matrices = nn.ParameterList(
            nn.Parameter(torch.randn(SIZE, n) / SIZE**0.5) for n in ([SIZE] * 3 if separate else [3 * SIZE])
        )
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [x @ each for each in self.matrices] if self.separate else (x @ self.matrices[0]).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))

    def plain(self) -> Block:
        return as_block(torch.cat(list(self.matrices), 1).mT, torch.zeros(3 * SIZE), self.out)


def as_block(weight: Tensor, bias: Tensor, out: nn.Module) -> Block:
    block = Block("fused")
    with torch.no_grad():
        block.projections[0].weight.copy_(weight)
        block.projections[0].bias.copy_(bias)
    block.out = out
    return block


OWN: dict[str, Callable[[], nn.Module]] = {
    "MultiheadAttention": Packed,
    "with weights": lambda: Packed(weights=True),
    "sequence first": lambda: Packed(sequence_first=True),
    "matrix": Multiplied,
    "matrices": lambda: Multiplied(separate=True),
}


class Model(nn.Module):
    """Two blocks, each kept or computed again."""

    def __init__(self, kind: str, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OWN[kind]() if kind in OWN else Block(kind) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def kept(model: Model, batches: list[Tensor], loss_scale: float = 1.0) -> list[dict[str, Tensor]]:
    """The gradients of q and k of each block as autograd keeps them, (heads, rows); without a checkpoint or a watch."""
    plain = copy.deepcopy(model)
    plain.reentrant = None
    plain.blocks = nn.ModuleList(block if isinstance(block, Block) else block.plain() for block in plain.blocks)
    found: list[dict[str, list[Tensor]]] = [{"query": [], "key": []} for _ in plain.blocks]
    for batch in batches:
        outputs: list[list[Tensor]] = [[] for _ in plain.blocks]

        def keep(into: list[Tensor], output: Tensor) -> None:
            output.retain_grad()
            into.append(output)

        for block, into in zip(plain.blocks, outputs, strict=True):
            for project in block.projections:
                project.register_forward_hook(lambda module, args, output, into=into: keep(into, output))
        (plain(batch) * loss_scale).backward()
        for block, into, one in zip(plain.blocks, outputs, found, strict=True):
            for project in block.projections:
                project._forward_hooks.clear()
            gradients = [y.grad for y in into]
            q, k, _ = gradients[0].chunk(3, -1) if len(gradients) == 1 else gradients
            for name, gradient in (("query", q), ("key", k)):
                size = gradient.double().unflatten(-1, (-1, WIDTH)).square().mean(-1).sqrt()
                one[name].append(size.flatten(0, 1).T / loss_scale)
    return [{name: torch.cat(parts, -1) for name, parts in one.items()} for one in found]


def wrong(call: CallSample, gradients: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> list[str]:
    """Complaints about the columns of one attention; keys are told for each head that reads them."""
    found = []
    for name, rows in gradients.items():
        rows = rows.repeat_interleave(HEADS // rows.shape[0], 0)
        wanted = {f"p{q:02d}": rows.quantile(q / 100, -1) for q in (5, 50, 95)} | {"max": rows.amax(-1)}
        for column in COLUMNS:
            got = torch.tensor(call.columns[f"{name}_grad_{column}"], dtype=torch.float64)
            text = complaint(got, wanted[column], dtype, length=SIZE, logit=4.0, magnitude=float(rows.max()))
            found += [] if text is None else [f"{name} {column}: {text}"]
    return found


def watched(model: nn.Module, batches: list[Tensor], **options: Any) -> tuple[CallSample, ...]:
    with Watch(model, every=1, **options) as health:
        for batch in batches:
            model(batch).backward()
        health.step()
    assert health.samples[0].not_measured == ()
    return health.samples[0].calls
