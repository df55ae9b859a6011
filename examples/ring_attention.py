"""Attention over a sequence that no rank holds whole: a ring of processes, held to the same attention in one process.

Each rank has the tokens of two chunks, one near the start and one near the end (zigzag), so that all have as much to
do under a causal mask. Outputs, gradients and statistics are compared with those of one process in float64.

    python examples/ring_attention.py                            2 ranks, 512 tokens
    python examples/ring_attention.py --ranks 4 --length 16384
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import sqrtdk

HEADS, DIM = 2, 32
WINDOW = None  # a number of keys, for a sliding window


def sequence(length: int) -> list[Tensor]:
    """q, k, v of the whole sequence, and the gradient that its output gets; float32, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM, generator=generator) for _ in range(4)]


def positions(rank: int, ranks: int, length: int) -> Tensor:
    """Where in the sequence this rank's tokens are: chunk `rank`, and the chunk as far from the end."""
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def work(rank: int, ranks: int, length: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    at = positions(rank, ranks, length)
    q, k, v, grad = (whole[:, :, at].clone() for whole in sequence(length))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for tensor in (q, k, v):
        tensor.requires_grad_()
    output, aux = sqrtdk.ring_attention(
        q, k, v, is_causal=True, window=WINDOW, positions=at, return_aux=sqrtdk.AuxRequest.all()
    )
    output.backward(grad)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    dist.barrier()
    dist.destroy_process_group()
    found = {"at": at, "output": output, "query": q.grad, "key": k.grad, "value": v.grad, **aux._asdict()}
    torch.save({name: values.detach() for name, values in found.items()}, f"{folder}/{rank}.pt")
    print(f"rank {rank}: {len(at)} tokens, {peak:.0f} MiB for attention and gradients", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    if options.length % (2 * options.ranks):
        parser.error(f"--length is a multiple of {2 * options.ranks}, two chunks for each rank; got {options.length}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (options.ranks, options.length, folder), nprocs=options.ranks)
        parts = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(options.ranks)]

    *tensors, grad = (tensor.double() for tensor in sequence(options.length))
    q, k, v = (tensor.requires_grad_() for tensor in tensors)
    output, aux = sqrtdk.attention(q, k, v, is_causal=True, window=WINDOW, return_aux=True, impl="tiled")
    output.backward(grad)
    whole = {"output": output, "query": q.grad, "key": k.grad, "value": v.grad, **aux._asdict()}
    worst = 0.0
    for name, values in whole.items():
        rows = -1 if values.dim() == 3 else -2
        for part in parts:
            right = values.detach().index_select(rows, part["at"])
            off = float((part[name] - right).nan_to_num().abs().max() / right[right.isfinite()].abs().max())
            worst = max(worst, off)
    print(f"{len(whole)} results of {options.ranks} ranks, the largest difference from one process: {worst:.1e}")
    print("equal up to rounding:", worst < 1e-4)


if __name__ == "__main__":
    main()
