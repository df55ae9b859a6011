"""The optimizer's own copies of a model's weights, which it writes back at its next step.

`scale_` multiplies rows in place: of a plain parameter, of a shard, and of these copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, UnsupportedError
from sqrtdk.repair.ranks import laid_as, local_part
from sqrtdk.repair.rows import HeadRows

if TYPE_CHECKING:
    from jaxtyping import Float

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


class Copies:
    """Copies of parameters in optimizers, found by their values: a copy rounds to its weight.

    Args:
        scaled: the parameters, by name.
        others: ids of all parameters of the model.
        optimizers: one, several or none.

    Raises:
        InvalidTypeError: Something is not an optimizer.
        UnsupportedError: An optimizer's parameters are not the model's, and none of them is a copy of a scaled one.
    """

    def __init__(self, scaled: Mapping[str, Tensor], others: frozenset[int], optimizers: Optimizers) -> None:
        self._of: dict[str, list[Tensor]] = defaultdict(list)
        for optimizer in _optimizer_list(optimizers):
            # An optimizer of parameters that are not the model's own holds master weights, and would write them over a
            # clip.
            own = {id(p): p for each in optimizer.param_groups for p in each["params"]}
            for name, copies in _in_state(scaled, optimizer.state).items():
                self._of[name] += copies
            foreign = [p for key, p in own.items() if key not in others]
            if foreign:
                self._of_foreign({n: p for n, p in scaled.items() if id(p) not in own and p.requires_grad}, foreign)

    def of(self, name: str) -> tuple[Tensor, ...]:
        """Return the copies that optimizers hold of a parameter, such as float32 masters."""
        return tuple(self._of[name])

    def _of_foreign(self, scaled: Mapping[str, Tensor], foreign: list[Tensor]) -> None:
        for name, parameter in scaled.items():
            found = [copy for copy in foreign if _is_copy(copy, parameter)]
            if not found and not self._of[name]:
                raise UnsupportedError(
                    f"{name} has a copy among the {len(foreign)} parameters of the optimizer that are not the model's; "
                    "none rounds to it",
                    hint="Flattened or sharded master weights are not supported: clip before they are made.",
                )
            self._of[name] += found


def _optimizer_list(optimizers: Optimizers) -> list[Any]:
    if optimizers is None:
        return []
    listed = (
        [optimizers] if hasattr(optimizers, "param_groups") or not isinstance(optimizers, Iterable) else [*optimizers]
    )
    for optimizer in listed:
        if not hasattr(optimizer, "param_groups") or not hasattr(optimizer, "state"):
            raise InvalidTypeError(
                f"optimizer is a torch optimizer, or several; got {type(optimizer).__name__}",
                hint="Pass the one that steps the model.",
            )
    return listed


def _in_state(scaled: Mapping[str, Tensor], state: Mapping[Any, Any]) -> dict[str, list[Tensor]]:
    """Return the state entries that are copies. A moment looks like one only if it and the weight are all zeros."""
    return {
        name: [entry for entry in (state.get(parameter) or {}).values() if _is_copy(entry, parameter)]
        for name, parameter in scaled.items()
    }


def _is_copy(entry: Any, parameter: Tensor) -> bool:
    """Return whether a tensor of a finer dtype rounds to the parameter, to nearest or stochastically to either side."""
    if not isinstance(entry, Tensor) or entry.shape != parameter.shape or not entry.is_floating_point():
        return False
    finfo, one, other = torch.finfo(parameter.dtype), local_part(entry), local_part(parameter)
    # A master copy is more precise than the parameter; momentum has its dtype, and is not one.
    if torch.finfo(entry.dtype).eps >= finfo.eps or one.shape != other.shape:
        return False
    # eps, not eps / 2: an optimizer that rounds stochastically may store either neighbour
    other = other.to(one)
    return bool(((one - other).abs() <= finfo.eps * one.abs() + finfo.tiny).all())


def scale_(parameter: Tensor, copies: Sequence[Tensor], pairs: Sequence[tuple[HeadRows, Float[Tensor, " Hq"]]]) -> None:
    """Multiply rows of a parameter and of its copies in place; all other rows stay the same bit for bit.

    Args:
        parameter: The parameter, whole or sharded (DTensor).
        copies: Its copies, which are scaled by the same factors in their own dtype.
        pairs: Rows of one parameter, and their factors, (Hq,).
    """
    axis, offset = pairs[0][0].axis, pairs[0][0].offset
    count = parameter.numel() if axis is None else parameter.shape[axis]
    # A factor rounded to bfloat16 is off by up to 0.4%, which a clip at every step would add up.
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    factor = torch.ones(count, dtype=dtype, device=parameter.device)
    for rows, by in pairs:
        factor[rows.index.to(factor.device)] = by.to(device=factor.device, dtype=dtype)[:, None].expand(
            rows.index.shape
        )
    shape = parameter.shape if axis is None else [count if i == axis else 1 for i in range(parameter.dim())]
    factor = laid_as(factor.view(shape), parameter)
    for tensor in copies or (parameter,):
        by = factor.to(tensor.device)
        if offset:
            # Gemma's gain is 1 + w: (1 + w) by - 1. Rows with a factor of 1 are not computed, as adding and taking off
            # 1 rounds.
            tensor.copy_(torch.where(by == 1, tensor, (tensor + offset) * by - offset))
        else:
            tensor.mul_(by)
    if copies:  # exactly as the optimizer would write it back
        parameter.copy_(torch.where(factor == 1, parameter, copies[0].to(parameter.device)))
