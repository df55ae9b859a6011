"""Rings of ranks beside one process: each rank saves what it has of every case, in float64; and bad rings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import sqrtdk
from tests.monitor.ranks_at_work import join

LENGTH, HEADS, KEY_HEADS, DIM = 22, 4, 2, 8
DOCUMENTS = torch.tensor([0] * 9 + [1] * 13)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 5},
    "both_sides": {"window": (3, 2), "scale": 0.7, "softcap": 4.0},
}
ORDERS = ("whole", "uneven", "zigzag", "striped")
CASES = [(order, option) for order in ORDERS for option in OPTIONS] + [("zigzag", "documents"), ("whole", "documents")]
BAD = ("dim", "dtype", "option", "tokens")


def sides() -> dict[str, Tensor]:
    """The whole sequence, and the gradients of its output and lse."""
    made = torch.Generator().manual_seed(0)
    sizes = {"query": (2, HEADS), "key": (2, KEY_HEADS), "value": (2, KEY_HEADS), "output": (2, HEADS)}
    whole = {n: torch.randn(*lead, LENGTH, DIM, dtype=torch.float64, generator=made) for n, lead in sizes.items()}
    return whole | {"lse": torch.randn(2, HEADS, LENGTH, dtype=torch.float64, generator=made)}


def parts(order: str, size: int) -> list[Tensor]:
    """The places in the sequence of each rank's tokens."""
    places = torch.arange(LENGTH)
    if order == "zigzag":
        chunks = places.tensor_split(2 * size)
        return [torch.cat((chunks[rank], chunks[2 * size - 1 - rank])) for rank in range(size)]
    if order == "striped":
        return [places[rank::size] for rank in range(size)]
    if order == "uneven":
        return list(places.tensor_split([1 + 2 * rank for rank in range(size - 1)]))
    return list(places.tensor_split(size))


def options_of(option: str, at: Tensor) -> dict[str, Any]:
    """The arguments of the attention of the tokens at some places."""
    if option == "documents":
        return {"is_causal": True, "window": 6, "documents": DOCUMENTS[at]}
    return OPTIONS[option]


def of_rank(rank: int, size: int) -> dict[str, Any]:
    """What a rank has of every case: its places, output, statistics and gradients."""
    found: dict[str, Any] = {}
    whole = sides()
    for order, option in CASES:
        at = parts(order, size)[rank]
        q, k, v = (whole[name][:, :, at].requires_grad_() for name in ("query", "key", "value"))
        places = at if order in ("zigzag", "striped") else None
        output, aux = sqrtdk.ring_attention(
            q, k, v, positions=places, enable_gqa=True, return_aux=True, **options_of(option, at)
        )
        loss = (output * whole["output"][:, :, at]).sum() + (aux.lse * whole["lse"][..., at]).sum()
        loss.backward()
        rows = {name: rows.detach() for name, rows in aux._asdict().items()}
        found[f"{order}-{option}"] = {
            "at": at, "output": output.detach(), **rows, "query": q.grad, "key": k.grad, "value": v.grad,
        }  # fmt: skip
    for bad in BAD:
        found[bad] = refused(bad, rank)
    return found


def refused(bad: str, rank: int) -> str:
    """What a rank hears of a ring that does not fit together."""
    q = k = v = torch.zeros(1, 2, 3, 8 if bad == "dim" and rank else 4, dtype=torch.float64)
    if bad == "dtype" and rank:
        q = k = v = q.float()
    options = {"is_causal": True} if bad == "option" and rank else {}
    if bad == "tokens" and rank:
        options = {"positions": torch.arange(3)}
    try:
        sqrtdk.ring_attention(q, k, v, **options)
    except sqrtdk.SqrtdkError as error:
        return str(error)
    return "no error"


def work_of(rank: int, size: int, folder: Path) -> None:
    """Join the ring and save what this rank has."""
    folder.mkdir(parents=True, exist_ok=True)
    join(rank, size, folder)
    torch.save(of_rank(rank, size), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
