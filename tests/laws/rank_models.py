"""Decoders on several ranks, right and with faults planted; each also runs on one process, where it is the same model.

A case is a factory of this module: `tests.laws.rank_models:ring`. On ranks it cuts its inputs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sqrtdk

LENGTH, HEADS, DIM, WINDOW, VOCABULARY = 32, 4, 8, 6, 40
WIDTH = HEADS * DIM
FLAWED_MASKS = (  # faults that lack what their names hold, of all keys or of those of other ranks
    "window", "documents", "padding", "remote_window", "remote_documents", "remote_window_documents",
    "remote_padding", "remote_window_documents_padding", "remote_causal",
)  # fmt: skip


def ranks() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 on one process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Gather(torch.autograd.Function):
    """All ranks' parts along an axis; backward sums over the ranks, or averages: a fault."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: int, averages: bool) -> Tensor:
        ctx.axis, ctx.averages = axis, averages
        parts = [torch.empty_like(part) for _ in range(ranks()[1])]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rank, size = ranks()
        grad = grads[0].contiguous()
        dist.all_reduce(grad)
        return grad.chunk(size, ctx.axis)[rank] / (size if ctx.averages else 1), None, None


class AllToAll(torch.autograd.Function):
    """Cuts one axis over the ranks and joins another; backward does the reverse."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cut: int, join: int) -> Tensor:
        ctx.axes = cut, join
        rank, size = ranks()
        every = [torch.empty_like(part) for _ in range(size)]
        dist.all_gather(every, part.contiguous())  # gloo has no all-to-all of lists
        return torch.cat([one.chunk(size, cut)[rank] for one in every], join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cut, join = ctx.axes
        return AllToAll.apply(grads[0], join, cut), None, None


class HandRing(torch.autograd.Function):
    """Attention to the keys of all ranks, with a backward pass written by hand, right or with a fault."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, fault: str) -> Tensor:
        keys, values = _of_all(k, 2), _of_all(v, 2)
        p = (q @ keys.mT / DIM**0.5).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)
        o = p @ values
        ctx.fault = fault
        ctx.save_for_backward(q, keys, values, p, o)
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, p, o = ctx.saved_tensors
        (rank, size), fault, d_out = ranks(), ctx.fault, grads[0]
        blocks = p.unflatten(-1, (size, -1))  # (B, H, L, N, S / N)
        share = blocks.sum(-1, keepdim=True)
        d_weights = d_out @ values.mT
        row_sum = (d_out * o).sum(-1, keepdim=True)
        if fault == "lse_cut":
            of_block = (blocks * d_weights.unflatten(-1, (size, -1))).sum(-1, keepdim=True) / share
            row_sum = of_block.nan_to_num(0.0).expand_as(blocks).flatten(-2)
        if fault == "lse_of_block":
            p = (blocks / share).nan_to_num(0.0).flatten(-2)
        dz = p * (d_weights - row_sum) / DIM**0.5
        dk, dv = dz.mT @ q, p.mT @ d_out
        if fault == "own_keys":
            own = torch.arange(keys.shape[2]) // q.shape[2] == rank
            dz = dz * own
        dq = dz @ keys
        if fault in ("own_rows", "own_dk"):
            dk = dk.chunk(size, 2)[rank]
            dv = _sum_of_all(dv).chunk(size, 2)[rank] if fault == "own_dk" else dv.chunk(size, 2)[rank]
        elif fault == "not_sent":
            dk, dv = (sum(part.chunk(size, 2)) for part in (dk, dv))
        else:
            home = (rank + (fault == "wrong_rank")) % size
            dk, dv = (_sum_of_all(part).chunk(size, 2)[home] / (size if fault == "mean" else 1) for part in (dk, dv))
        return dq, dk, dv, None, None


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angle = positions[:, None, :, None] * 50.0 ** -(torch.arange(0, DIM, 2) / DIM)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def places(order: str, rank: int, size: int, length: int = LENGTH) -> Tensor:
    """The places of a rank's tokens."""
    if order == "zigzag":
        chunks = torch.arange(length).chunk(2 * size)
        return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))
    if order == "striped":
        return torch.arange(length)[rank::size]
    return torch.arange(length).chunk(size)[rank]


class Attention(nn.Module):
    """Causal, with documents and a window, over the keys of all ranks; with a sink for each head if asked."""

    def __init__(self, how: str, fault: str, window: int | None, sinks: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.how, self.fault, self.window = how, fault if ranks()[1] > 1 else "", window
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(HEADS, 1, 1)) if sinks else None

    def forward(self, x: Tensor, positions: Tensor, at: Tensor, documents: Tensor, shown: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, positions), rotated(k, positions)
        rank, size = ranks()
        keys, key_documents, key_shown = at, documents, shown
        if self.fault == "documents_numbered":
            documents = key_documents = (positions == 0).cumsum(-1)
        if size > 1 and self.how == "ulysses":
            q, k, v = (AllToAll.apply(t, 1, 2) for t in (q, k, v))
            at = keys = _of_all(at, 0)
            documents = key_documents = _of_all(documents, 1)
            key_shown = _of_all(shown, 1)
        elif size > 1 and self.how == "by_hand":
            keys, key_documents, key_shown = _of_all(at, 0), _of_all(documents, 1), _of_all(shown, 1)
        elif size > 1:
            k, v = (Gather.apply(t, 2, self.fault == "averaged_gradient") for t in (k, v))
            keys, key_documents, key_shown = _of_all(at, 0), _of_all(documents, 1), _of_all(shown, 1)
            count = len(at)
            if self.fault == "local_rows":
                at, keys = torch.arange(count), torch.arange(count).repeat(size)
            if self.fault == "plain_order":
                at, keys = torch.arange(count) + rank * count, torch.arange(count * size)
        gap = at[:, None] - keys[None]
        same = documents[:, :, None] == key_documents[:, None]

        def seen(lacks: str) -> Tensor:
            causal = self.causal and "causal" not in lacks
            mask = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
            mask = mask & same if "documents" not in lacks else mask.expand_as(same)
            mask = mask & key_shown[:, None] if "padding" not in lacks else mask
            return mask & (gap < self.window) if self.window is not None and "window" not in lacks else mask

        lacks = self.fault if self.fault in FLAWED_MASKS else ""
        mask = seen(lacks)
        if lacks.startswith("remote_"):
            own = torch.arange(k.shape[2]) // x.shape[1] == rank
            mask = torch.where(own, seen(""), mask)
        o = self.attend(q, k, v, mask[:, None], size)
        if size > 1 and self.how == "ulysses":
            o = AllToAll.apply(o, 2, 1)
        return self.o(o.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, size: int) -> Tensor:
        if size > 1 and self.how == "by_hand":
            o: Tensor = HandRing.apply(q, k, v, seen, self.fault)
            return o
        if self.sinks is None and (size == 1 or self.how in ("gather", "ulysses")):
            o = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return o * size if self.fault == "summed" else o
        if size == 1:
            z = (q @ k.mT / DIM**0.5).masked_fill(~seen, float("-inf"))
            return torch.cat((z, self.sinks.expand(*z.shape[:3], 1)), -1).softmax(-1)[..., :-1] @ v
        outputs, lses, most = [], [], []
        for step in range(size):  # a ring: one block of keys after another
            block = (ranks()[0] - step) % size
            if self.fault == "left_out" and block == 1:
                continue
            part = slice(block * k.shape[2] // size, (block + 1) * k.shape[2] // size)
            if not seen[..., part].any():
                continue
            z = (q @ k[:, :, part].mT / DIM**0.5).masked_fill(~seen[..., part], float("-inf"))
            if self.fault == "sink_per_block":
                z = torch.cat((z, self.sinks.expand(*z.shape[:3], 1)), -1)
            lse = z.logsumexp(-1)
            weights = (z - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
            for _ in range(2 if self.fault == "twice" and block == 0 else 1):
                outputs.append(weights[..., : v[:, :, part].shape[2]] @ v[:, :, part])
                lses.append(lse)
                most.append(z.amax(-1))
        return self.joined(outputs, lses, most)

    def joined(self, outputs: list[Tensor], lses: list[Tensor], most: list[Tensor]) -> Tensor:
        """The output over all blocks."""
        if self.fault == "block_mean":
            return torch.stack(outputs).mean(0)
        if self.fault == "last_block":
            return outputs[-1]
        if self.fault == "lse_base":
            lses = [lse / math.log(2) for lse in lses]
        if self.fault == "max_for_lse":
            lses = most
        if self.fault == "not_rescaled":
            so_far = torch.stack(most).cummax(0).values
            lses = [lse - top.masked_fill(top.isinf(), 0.0) for lse, top in zip(lses, so_far, strict=True)]
        output, lse = sqrtdk.merge(outputs, lses)
        if self.sinks is None or self.fault in ("sink_per_block", "sink_dropped"):
            return output
        return output * (lse[..., None] - self.sinks).sigmoid()


def _sum_of_all(part: Tensor) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def _of_all(part: Tensor, axis: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(ranks()[1])]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, axis)


class Decoder(nn.Module):
    """Two layers; a rank has its tokens, their global positions, and the documents that these tell."""

    def __init__(
        self, how: str, fault: str = "", window: int | None = WINDOW, dropout: float = 0.0, *, sinks: bool = False,
        packs: bool = True, causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.packs = fault, packs
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Attention(how, fault, window, sinks, causal) for _ in range(2))
        self.drop = nn.Dropout(dropout)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, places: Tensor | None = None,
        attention_mask: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert places is not None
        position_ids = places if position_ids is None else position_ids
        x = self.embed(input_ids)
        if self.fault == "dropout" and self.training:
            torch.manual_seed(7)
        x = self.drop(x)
        at = places[0]
        shown = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        documents = at - position_ids if self.packs else torch.zeros_like(position_ids)  # where the document begins
        documents = documents if document_ids is None else document_ids
        positions = position_ids
        if self.fault == "positions" and ranks()[1] > 1:
            positions = torch.arange(input_ids.shape[1]).expand_as(position_ids)
        for layer in self.layers:
            x = x + layer(x, positions, at, documents, shown.bool())
        return self.head(x)


def packed_inputs(first: int = 20) -> dict[str, Tensor]:
    """One row of two documents."""
    at = torch.arange(LENGTH)[None]
    ids = torch.randint(1, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.where(at < first, at, at - first), "places": at}


def sharded(
    how: str, order: str = "whole", fault: str = "", first: int = 20, counted: bool = True, **options: Any
) -> tuple[nn.Module, Any]:
    """A decoder and its inputs, of which a rank has its tokens; with their positions if `counted`."""
    rank, size = ranks()
    mine = places(order, rank, size)
    inputs = {name: value[:, mine] for name, value in packed_inputs(first).items() if counted or name != "position_ids"}
    if fault == "position_input" and size > 1:
        inputs["position_ids"] = torch.arange(len(mine))[None]
    return Decoder(how, fault, **options).eval(), inputs


def uneven(fault: str = "") -> tuple[nn.Module, Any]:
    """30 tokens, which 2 or 4 ranks fill up to 32; every row sees all tokens."""
    rank, size = ranks()
    ids = packed_inputs()["input_ids"][:, :30]
    inputs = {"input_ids": ids, "places": torch.arange(30)[None], "attention_mask": torch.ones(1, 30).long()}
    if size > 1:
        whole = {"places": torch.arange(32)[None]}
        whole |= {name: nn.functional.pad(inputs[name], (0, 2)) for name in ("input_ids", "attention_mask")}
        inputs = {name: whole[name].chunk(size, 1)[rank] for name in inputs}
    return Decoder("gather", fault, window=None, packs=False, causal=False).eval(), inputs


RIGHT: dict[str, Callable[[], Any]] = {
    "gather": partial(sharded, "gather"),
    "gather_zigzag": partial(sharded, "gather", "zigzag"),
    "ring": partial(sharded, "ring"),
    "ring_zigzag": partial(sharded, "ring", "zigzag"),
    "ring_striped": partial(sharded, "ring", "striped"),
    "ulysses": partial(sharded, "ulysses"),
    "dropout_right": partial(sharded, "ring", dropout=0.3),
    "by_hand_zigzag": partial(sharded, "by_hand", "zigzag"),
    "ring_no_window": partial(sharded, "ring", window=None),
    "sinks": partial(sharded, "ring", sinks=True),
    "uneven_right": uneven,
    "document_ids_right": partial(sharded, "gather", counted=False),
}
# The name that the law gives; "" for none.
FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "local_rows": ("local_rows", partial(sharded, "gather", fault="local_rows")),
    "plain_order": ("order", partial(sharded, "gather", "zigzag", "plain_order", window=None, first=LENGTH)),
    "documents": ("documents", partial(sharded, "ring", fault="documents")),
    "document_ids": ("documents", partial(sharded, "gather", fault="documents", counted=False)),
    "window": ("window", partial(sharded, "ring", fault="window")),
    "positions": ("positions", partial(sharded, "gather", fault="positions", first=LENGTH)),
    "position_input": ("positions", partial(sharded, "ring", fault="position_input", first=LENGTH)),
    "left_out": ("keys_left_out", partial(sharded, "ring", fault="left_out", window=None, first=LENGTH)),
    "twice": ("keys_twice", partial(sharded, "ring", fault="twice", window=None)),
    "block_mean": ("blocks_averaged", partial(sharded, "ring", fault="block_mean", window=None, first=LENGTH)),
    "summed": ("scale", partial(sharded, "gather", fault="summed")),
    **{
        f"backward_{fault}": (code, partial(sharded, "by_hand", "zigzag", fault))
        for fault, code in (
            ("own_rows", "own_rows"),
            ("own_dk", "own_rows"),
            ("mean", "scale"),
            ("not_sent", "not_sent"),
            ("wrong_rank", "wrong_rank"),
            ("lse_cut", "lse_cut"),
            ("lse_of_block", "lse_of_block"),
            ("own_keys", "own_keys"),
        )
    },
    "averaged_gradient": ("scale", partial(sharded, "gather", fault="averaged_gradient")),
    "remote_window": ("remote_window", partial(sharded, "ring", fault="remote_window")),
    "remote_documents": ("remote_documents", partial(sharded, "ring", fault="remote_documents", window=None)),
    "remote_both": ("remote_window_and_documents", partial(sharded, "ring", fault="remote_window_documents")),
    "remote_causal": ("remote_causal", partial(sharded, "ring", fault="remote_causal", window=None, first=LENGTH)),
    "remote_padding": ("remote_padding", partial(sharded, "ring", fault="remote_padding", window=None, packs=False)),
    "documents_numbered": ("documents_numbered", partial(sharded, "ring", fault="documents_numbered", window=None)),
    "lse_base": ("lse_base", partial(sharded, "ring", fault="lse_base", window=None, first=LENGTH)),
    "max_for_lse": ("max_for_lse", partial(sharded, "ring", fault="max_for_lse", window=None, first=LENGTH)),
    "not_rescaled": ("not_rescaled", partial(sharded, "ring", fault="not_rescaled", window=None, first=LENGTH)),
    "last_block": ("last_block", partial(sharded, "ring", fault="last_block", window=None, first=LENGTH)),
    "sink_per_block": ("sink_per_block", partial(sharded, "ring", fault="sink_per_block", sinks=True)),
    "sink_dropped": ("sink_dropped", partial(sharded, "ring", fault="sink_dropped", sinks=True)),
    "uneven": ("uneven", partial(uneven, "padding")),
    "padding": ("padding", partial(sharded, "ring", fault="padding", window=None, first=LENGTH)),
    "dropout": ("", partial(sharded, "ring", fault="dropout", dropout=0.3)),
}


def __getattr__(name: str) -> Callable[[], Any]:
    """The factories by name."""
    if name in RIGHT:
        return RIGHT[name]
    if name in FAULTS:
        return FAULTS[name][1]
    raise AttributeError(name)
