"""Several processes: factors for sharded parameters, and maxima merged over ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Float

Ranks: TypeAlias = "dist.ProcessGroup | Literal['merged'] | None"


def is_sharded(parameter: Tensor) -> bool:
    """Return whether each rank holds only a part of the parameter (a DTensor)."""
    return hasattr(parameter, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a tensor that is not sharded is returned as it is."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def laid_as(factor: Float[Tensor, "..."], parameter: Tensor) -> Tensor:
    """Return a tensor that every rank holds whole as a DTensor that can multiply a sharded parameter; nothing is sent.

    Args:
        factor: The tensor, equal on all ranks.
        parameter: The parameter; if it is not sharded, the factor is returned as it is.
    """
    if not is_sharded(parameter):
        return factor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    # Replicated without a check, which would send it: every rank computed the same factor from gathered maxima.
    laid: Tensor = DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return laid


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 gathered for a forward pass.

    Until then the modules hold copies rather than the shards that are trained.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def merged(maxima: Sequence[Sequence[float] | None], heads: Sequence[int], group: Ranks) -> list[Tensor]:
    """Return the maxima of a trace as tensors, (Hq,) of each call, merged over ranks by one collective.

    A maximum that is NaN on one rank becomes NaN on all; a maximum missing on some ranks is taken from the others.

    Args:
        maxima: of each call; None if they were not measured.
        heads: query heads of each call.
        group: the ranks, "merged" if there is nothing to merge; None for one process.

    Raises:
        InvalidTypeError: `group` is something else.
        InvalidValueError: `group` is None in one of several processes.
    """
    # Minus infinity is neutral in the maximum over ranks: another rank may have run the call.
    absent = [math.nan if group is None or group == "merged" else -math.inf]
    values = [
        torch.tensor(absent * count if each is None else list(each), dtype=torch.float64)
        for each, count in zip(maxima, heads, strict=True)
    ]
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if group is None and several:
        raise InvalidValueError(
            f"each of {dist.get_world_size()} processes saw maxima of its own: weights clipped by them would part",
            hint="Pass group=torch.distributed.group.WORLD (the ranks with the same weights), or group='merged'.",
        )
    if group is None or group == "merged":
        return values
    if not is_group(group):
        raise InvalidTypeError(
            f"group is a process group, 'merged' or None; got {group!r}", hint="torch.distributed.group.WORLD, for one."
        )
    return list(torch.split(_over_ranks(torch.cat(values), group), list(heads)))


def is_group(group: Any) -> TypeGuard[dist.ProcessGroup]:
    """Return whether an object is a process group of `torch.distributed`."""
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def gathered(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, in the order of the ranks; every rank must call this.

    Args:
        own: This rank's value, which must be picklable.
        group: The ranks.
    """
    each = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, own, group=group)
    return each


def _over_ranks(values: Float[Tensor, " n"], group: dist.ProcessGroup) -> Float[Tensor, " n"]:
    broken = values.isnan()
    # The maximum of NaN over ranks depends on the backend, so NaN travels as a flag of its own.
    packed = torch.stack([values.masked_fill(broken, -math.inf), broken.double()])
    # NCCL takes tensors on GPUs only.
    on = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    packed = packed.to(on)
    dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
    packed = packed.cpu()
    return packed[0].masked_fill(packed[1] > 0, math.nan)
