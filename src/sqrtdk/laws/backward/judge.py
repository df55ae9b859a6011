"""Holds the gradients that a backward pass gives against those of the formula."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sqrtdk.laws.backward.case import OF_LEARNED, Backward, Case, Judged, Learned
from sqrtdk.laws.backward.faults import blind_rows
from sqrtdk.laws.backward.logits import RIGHT_FORMULA
from sqrtdk.laws.backward.naming import named_faults
from sqrtdk.tracing.tensors import CallTensors


def judge_gradients(
    call: CallTensors, backward: Backward, *, lse: bool = False, factors: Mapping[str, Tensor] | None = None,
    same: tuple[tuple[str, str], ...] = (), most: int | None = None, seed: int = 0,
    dtypes: tuple[torch.dtype, ...] = (), ones: bool = False, learned: Learned | None = None,
) -> Judged:  # fmt: skip
    """Judge the backward pass of one attention.

    Args:
        call: The attention, with all its terms; its k and v have as many heads as their gradients.
        backward: Gives the gradients for a cotangent; it is called once if they are right.
        lse: Whether the lse gets a cotangent as well.
        factors: Learned factors on the logits by name: gradients "factor NAME" are those of such a parameter.
        same: Pairs of operands that are one tensor, whose gradient is the sum.
        most: BlockLogits that are computed at most; None for all.
        seed: Seed of the cotangents.
        learned: Gives the gradients and bounds of the parameters "learned NAME"; None without such.
        ones: Whether the cotangent of the output is that of `output.sum()`.
        dtypes: Dtypes of the output and of the operands in the run, if a kernel casts them; the first is the output's.
    """
    output = call.output
    generator = torch.Generator(device="cpu").manual_seed(seed)
    d_out = torch.randn(output.shape, generator=generator).to(output.device, dtypes[0] if dtypes else output.dtype)
    d_out = torch.ones_like(d_out) if ones else d_out
    # A row that sees no key has no gradient: what a kernel gives it is of no use to anyone.
    blind = blind_rows(call)
    if blind is not None and not ones:
        d_out = d_out.masked_fill(blind[..., None], 0.0)
    d_lse = torch.randn(output.shape[:3], generator=generator).to(output.device) if lse else None
    if d_lse is not None and blind is not None:
        d_lse = d_lse.masked_fill(blind, 0.0)
    got = backward(d_out, d_lse, True)
    return judge_delivered(call, d_out, d_lse, got, backward, factors=factors, same=same, most=most, dtypes=dtypes,
        learned=learned,
    )  # fmt: skip


def judge_delivered(
    call: CallTensors, d_out: Tensor, d_lse: Tensor | None, got: Mapping[str, Tensor | None],
    backward: Backward | None = None, *, factors: Mapping[str, Tensor] | None = None,
    same: tuple[tuple[str, str], ...] = (), most: int | None = None, dtypes: tuple[torch.dtype, ...] = (),
    misread: Tensor | None = None, turn: int = 0, learned: Learned | None = None,
) -> Judged:  # fmt: skip
    """Judge the gradients that a backward pass has delivered.

    Args:
        call: The attention.
        d_out: The gradient of its output, (B, Hq, L, Ev).
        d_lse: That of its lse, (B, Hq, L); None if nothing reads it.
        got: The gradients delivered.
        backward: Gives them for other cotangents; None if it can't. Mistakes that it would prove then have no name.
        factors: Learned factors by name.
        same: Pairs of operands that are one tensor.
        most: Logits that are computed at most.
        dtypes: Dtypes of the output and of the operands in the run.
        misread: `d_out` as a kernel reads it that takes its memory for contiguous; None if it is.
        turn: Where to begin among the heads if `most` leaves some out.
        learned: Gives the gradients and bounds of the parameters "learned NAME"; None without such.
    """
    biases = tuple(int(name.split()[1]) for name in got if name.startswith("bias "))
    case = Case(call, d_out, d_lse, biases, most, factors or {}, same, dtypes, turn, learned)
    right = case.gradients(RIGHT_FORMULA)
    parameters = learned(right) if learned is not None and bool(right.looked.all()) else {}
    right.values |= {f"{OF_LEARNED}{name}": value for name, (value, _) in parameters.items()}
    right.sums |= {f"{OF_LEARNED}{name}": allowed for name, (_, allowed) in parameters.items()}
    right.squares |= {f"{OF_LEARNED}{name}": torch.zeros_like(value) for name, (value, _) in parameters.items()}
    got = {name: gradient for name, gradient in got.items() if not name.startswith(OF_LEARNED) or name in right.values}
    wrong = [one for name, gradient in got.items() if (one := case.wrong(name, gradient, right)) is not None]
    kept = tuple(name for name in got if name not in {one.name for one in wrong})
    if not wrong:
        return Judged(kept)
    return Judged(kept, tuple(named_faults(case, backward, got, wrong, right, misread)))
