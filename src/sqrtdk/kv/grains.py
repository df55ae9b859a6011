"""Which numbers of k, or of v, share a scale: their least and largest, broadcast against (B, H, S, E).

"tensor": all of one call. "head": all of a head, of every sequence. "channel": one channel of a head, over all
sequences and keys. "token": the E numbers of one key of one head. "group": 64 numbers of a head that follow one
another, key after key; its last group may be shorter. "tokens64": one channel of 64 keys that follow one another.
"block": 32 channels of one key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # transformers' QuantizedCache: q_group_size = 64
BLOCK = 32  # ggml: QK8_0
SCALE_BITS = {"group": 32 / GROUP, "tokens64": 32 / GROUP, "block": 16 / BLOCK}  # a number, of int4 and q8_0
SHARED = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "channel": (0, 2)}  # axes that are reduced, over the whole of k
ORDER = ("tensor", "head", "group", "token", "channel")  # coarse to fine; "token" and "channel" differ in kind


def bounds(x: Tensor, grain: str) -> tuple[Tensor, Tensor]:
    """Least and largest number among those that share a scale with each; both broadcast to (B, H, S, E).

    Example:
        >>> low, high = bounds(torch.arange(8.0).reshape(1, 2, 2, 2), "head")
        >>> low.flatten().tolist(), high.flatten().tolist()
        ([0.0, 4.0], [3.0, 7.0])
    """
    if grain in SHARED:
        return x.amin(SHARED[grain], keepdim=True), x.amax(SHARED[grain], keepdim=True)
    if grain == "token":
        return x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    if grain == "tokens64":
        low, high = _runs(x.mT, GROUP)
        return low.mT, high.mT
    if grain == "block":
        return _runs(x, BLOCK)
    low, high = _runs(x.flatten(2), GROUP)
    return low.reshape(x.shape), high.reshape(x.shape)


def wide(x: Tensor) -> Tensor:
    """The numbers in float32, as engines divide them by their scale; in float64 where they are."""
    return x if x.dtype == torch.float64 else x.float()


def _runs(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Least and largest of each run of `size` numbers along the last axis, one for each number."""
    length = x.shape[-1]
    padded = F.pad(x.reshape(-1, 1, length), (0, -length % size), mode="replicate") if length % size else x
    runs = padded.reshape(*x.shape[:-1], -1, size)
    low, high = (edge.repeat_interleave(size, -1)[..., :length] for edge in (runs.amin(-1), runs.amax(-1)))
    return low, high
