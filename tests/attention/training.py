"""Judges the compiled kernel in training: dropout against its replay, and gradients of a bias that repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import sqrtdk
from tests.tolerances import HALF, complaint, gradient_complaints, half_complaint

F64 = torch.float64
RATE = 0.3
LARGEST = 1.0  # logit of the calls whose gradients add up many terms
SHAPES = {
    "many tiles": ((2, 4, 2, 300, 1100, 8), {}),
    "few rows": ((1, 4, 2, 3, 700, 8), {}),
    "causal": ((1, 2, 2, 200, 200, 8), {"is_causal": True}),
    "window and softcap": ((2, 2, 1, 150, 600, 8), {"window": (70, 5), "softcap": 3.0}),
    "learned bias": ((2, 4, 2, 150, 333, 8), {"bias": (4, 150, 333), "softcap": 3.0}),
}
BIASES = [
    tuple(1 if repeated >> dim & 1 else size for dim, size in enumerate((2, 4, 150, 601))) for repeated in range(16)
]


def philox(counter: np.ndarray[Any, Any], key: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Philox 4x32-10 of counters (4, n) in plain integers; Salmon et al. 2011, section 3.3."""
    a, b, c, d = (row.astype(np.uint64) for row in counter)
    low, high = key
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        left, right = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (
            (right >> np.uint64(32)) ^ b ^ np.uint64(low),
            right & mask,
            (left >> np.uint64(32)) ^ d ^ np.uint64(high),
            left & mask,
        )
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([a, b, c, d]).astype(np.uint32)


def replay(seed: int, rate: float, batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """1 where a weight is kept, (batch, heads, rows, keys), from the description in dropout.h."""
    head, row, key = np.meshgrid(np.arange(batch * heads), np.arange(rows), np.arange(keys), indexing="ij")
    counter = np.stack([row, key // 64 * 16 + key % 16, head, np.zeros_like(row)]).reshape(4, -1)
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
    word = np.take_along_axis(words, (key.reshape(1, -1) // 16) % 4, 0)
    kept = (word >> 8) * 2.0**-24 >= np.float32(rate)
    return torch.from_numpy(kept.reshape(batch, heads, rows, keys).astype(np.float32))


def drawn(*sizes: int) -> Tensor:
    """What the next call with these sizes keeps, where nothing else draws before it."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**63 - 1, ()))
    torch.set_rng_state(state)
    return replay(seed, RATE, *sizes)


def grads(results: tuple[tuple[Tensor, Tensor], ...], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    outputs, cotangents = zip(*results, strict=True)
    return dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), cotangents), strict=True))


def judge_dropout(name: str, dtype: torch.dtype) -> list[str]:
    """What is wrong with output, lse and gradients of a call with dropout; empty where nothing is."""
    (batch, heads, kv, rows, keys, dim), options = SHAPES[name]
    sizes = {"query": (batch, heads, rows, dim), "key": (batch, kv, keys, dim), "value": (batch, kv, keys, dim)}
    sizes |= {name: size for name, size in options.items() if name == "bias"}
    options = {name: value for name, value in options.items() if name != "bias"}
    given = {name: (0.4 * torch.randn(size)).to(dtype).requires_grad_() for name, size in sizes.items()}
    kept = drawn(batch, heads, rows, keys)
    output, aux = sqrtdk.attention(
        **given, enable_gqa=True, dropout_p=RATE, impl="cpu", return_aux=sqrtdk.AuxRequest(lse=True), **options
    )
    cotangent = torch.randn(output.shape).to(dtype)
    results = (output, cotangent), (aux.lse, torch.randn(aux.lse.shape))
    found = grads(results, given)

    def formula(wide: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        leaves = {name: t.detach().to(wide).requires_grad_() for name, t in given.items()}
        _, weights, statistics = sqrtdk.attention(
            **leaves, enable_gqa=True, return_weights=True, return_aux=sqrtdk.AuxRequest(lse=True), **options
        )
        out = (weights * kept.to(wide) / (1 - RATE)) @ leaves["value"].repeat_interleave(heads // kv, 1)
        pairs = (out, cotangent.to(wide)), (statistics.lse, results[1][1].to(statistics.lse.dtype))
        return out.detach(), statistics.lse.detach(), grads(pairs, leaves)

    exact, lse, wanted = formula(F64)
    if dtype != torch.float32:
        plain, _, beside = formula(dtype)
        pairs = {"output": (output, exact, plain)}
        pairs |= {n: (found[n], wanted[n], beside[n]) for n in found}
        judged = {n: half_complaint(mine, true, [theirs], dtype) for n, (mine, true, theirs) in pairs.items()}
        return [f"{n}: {text}" for n, text in judged.items() if text]
    close = {"output": (output, exact), "lse": (aux.lse, lse)}
    wrong = gradient_complaints(found, wanted, dtype, length=keys, logit=LARGEST, rows=heads // kv * rows)
    for label, (mine, true) in close.items():
        text = complaint(mine.detach(), true, dtype, length=keys, logit=LARGEST, magnitude=1.0)
        wrong += [f"{label}: {text}"] if text else []
    return wrong


# How a bias may lie in memory, and its dtype.
LAID: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "bfloat16": (torch.bfloat16, lambda bias: bias),
    "float16": (torch.float16, lambda bias: bias),
    "float64": (torch.float64, lambda bias: bias),
    "turned": (torch.float32, lambda bias: bias.mT.contiguous().mT),
    "turned bfloat16": (torch.bfloat16, lambda bias: bias.mT.contiguous().mT),
    "every second key": (torch.float32, lambda bias: bias.repeat_interleave(2, -1)[..., ::2]),
    "the same row": (torch.float32, lambda bias: bias[..., :1, :].expand(bias.shape)),
    "the same key": (torch.float32, lambda bias: bias[..., :1].expand(bias.shape)),
}


@dataclass(frozen=True)
class Table:
    """A bias of the distance j - i alone, from 1 - L on: one number for each, of a head or of all."""

    numbers: Float[Tensor, "#Hq distances"]
    content: bool = False

    def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Float[Tensor, "#Hq R S"]:
        return self.of_distance(rows[:, None] - columns, query)

    def of_distance(self, distance: Tensor, query: Tensor) -> Float[Tensor, "#Hq *distances"]:
        return self.numbers[:, 149 - distance]


def judge_table(heads: int, sizes: tuple[int, ...] | None) -> list[str]:
    """What is wrong with the gradients of a call with a table of distances, and beside it a float mask of these
    sizes."""
    shapes = {"query": (2, 4, 150, 8), "key": (2, 2, 601, 8), "value": (2, 2, 601, 4), "table": (heads, 750)}
    shapes |= {} if sizes is None else {"mask": sizes}
    given = {name: (0.2 * torch.randn(shape)).requires_grad_() for name, shape in shapes.items()}
    cotangent = torch.randn(2, 4, 150, 4)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    three = (given["query"], given["key"], given["value"], given.get("mask"))
    options = {"bias": Table(given["table"]), "enable_gqa": True, "window": (None, 460)}
    output = sqrtdk.attention(*three, impl="cpu", **options)
    found = grads(((output, cotangent),), given)
    key, value = (wide[name].repeat_interleave(2, 1) for name in ("key", "value"))
    distance = torch.arange(601) - torch.arange(150).unsqueeze(-1)
    logits = wide["query"] @ key.mT * 8**-0.5 + wide["table"][:, 149 + distance] + wide.get("mask", 0.0)
    answer = torch.softmax(logits.masked_fill(distance > 460, -math.inf), -1) @ value
    wanted = grads(((answer, cotangent.double()),), wide)
    return gradient_complaints(
        found, wanted, torch.float32, length=601, logit=logits.abs().max().item(), rows=2 * 4 * 150
    )


def judge_bias(sizes: tuple[int, ...], laid: str | None = None, rows: int = 150) -> list[str]:
    """What is wrong with the gradients of a call with a bias of these sizes, laid in memory so; empty where nothing
    is."""
    shapes = {"query": (2, 4, rows, 8), "key": (2, 2, 601, 8), "value": (2, 2, 601, 4), "bias": sizes}
    dtype, view = (torch.float32, lambda bias: bias) if laid is None else LAID[laid]
    given = {name: 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    given["bias"] = given["bias"].to(dtype)
    given = {name: t.requires_grad_() for name, t in given.items()}
    cotangent = torch.randn(2, 4, rows, 4)
    wide = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    options = {"enable_gqa": True, "window": (None, 460)}
    output = sqrtdk.attention(**given | {"bias": view(given["bias"])}, impl="cpu", **options)
    found = grads(((output, cotangent),), given)
    key, value = (wide[name].repeat_interleave(2, 1) for name in ("key", "value"))
    logits = wide["query"] @ key.mT * 8**-0.5 + view(wide["bias"])
    hidden = torch.arange(601) > torch.arange(rows).unsqueeze(-1) + 460
    answer = torch.softmax(logits.masked_fill(hidden, -math.inf), -1) @ value
    wanted = grads(((answer, cotangent.double()),), wide)
    wrong = []
    if dtype in HALF:  # rounded once
        size = max(g.abs().max().item() for g in wanted.values())
        text = half_complaint(found.pop("bias"), wanted.pop("bias"), [], dtype, floor=size)
        wrong = [f"gradient of bias: {text}"] if text else []
    return wrong + gradient_complaints(
        found, wanted, torch.float32, length=601, logit=logits.abs().max().item(), rows=2 * 4 * rows
    )
