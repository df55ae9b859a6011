"""Turns a call of `sqrtdk.attention` that ran in blocks of rows into one reading."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from sqrtdk.tracing.calls.places import ValueOperands, of_kernel, value_operands
from sqrtdk.tracing.calls.statistics import why_unmeasured
from sqrtdk.tracing.readback.eager import read_eager
from sqrtdk.tracing.readback.fused import read_kernel
from sqrtdk.tracing.readback.kernels import KERNELS
from sqrtdk.tracing.readback.own import (
    OPERATION,
    arguments_of_product,
    first_rows,
    is_all_of,
    kernel_arguments,
    whole_reading,
)
from sqrtdk.tracing.readback.reading import Reading
from sqrtdk.tracing.tape.node import SoftmaxRun
from sqrtdk.tracing.tape.recorder import KernelCall, Scene, TapeListener, WholeCall, unseen


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What the tape has of a call.

    Attributes:
        kernel: the call as one of our kernels, or with its operands only.
        plain: whether a kernel computes such logits, so that the arguments are all of the formula.
        sample: the reading of its first rows; None if it is plain, or can't be read.
        used: the operands of weights . v in these rows.
    """

    kernel: KernelCall
    plain: bool
    sample: Reading | None = None
    used: ValueOperands | None = None


def under_the_tape(ran: WholeCall, scene: Scene, heads: int | None) -> Prepared:
    """Return the operands of a call of `sqrtdk.attention` with their nodes.

    The tape must be recording, so that the operands are followed to the projections that they come from.

    Args:
        ran: the call and its output.
        scene: state of the trace.
        heads: the number of heads, if it is known.
    """
    plain = kernel_arguments(ran.call)
    sample, used = (None, None) if plain is not None else _sampled(ran, scene, heads)
    arguments = arguments_of_product(ran.call) if plain is None else plain
    nodes = {name: scene.store.node(x) for name, x in arguments.items() if isinstance(x, Tensor)}
    kernel = KernelCall(OPERATION, dict(arguments), nodes, ran.output, ran.site, ran.place)
    return Prepared(kernel, plain is not None, sample, used)


def reading_of_whole(ran: WholeCall, prepared: Prepared) -> tuple[Reading, ValueOperands | None]:
    """Return the reading of a whole call that ran in blocks of rows.

    Args:
        ran: the call and its output.
        prepared: what `under_the_tape` returned for it.

    Returns:
        (the reading, the operands of the product of weights and values, None if they are unknown).
    """
    kernel, sample = prepared.kernel, prepared.sample
    if prepared.plain:
        reading = read_kernel(kernel, KERNELS[OPERATION])
    elif sample is not None and is_all_of(ran.call, sample) and why_unmeasured(sample) is None:
        return replace(sample, site=ran.site, place=ran.place), prepared.used
    else:
        reading = whole_reading(ran, sample, kernel.arguments["query"], kernel.arguments["key"])
    return replace(reading, place=ran.place), of_kernel(kernel)


def _sampled(ran: WholeCall, scene: Scene, heads: int | None) -> tuple[Reading | None, ValueOperands | None]:
    """Return the reading of the first rows of a call, which are computed again; None if it can't be read."""
    found: list[tuple[Reading, ValueOperands]] = []

    def read(softmax_run: SoftmaxRun, value: Tensor, output: Tensor) -> None:
        with unseen(), contextlib.suppress(Exception):
            reading = read_eager(softmax_run, value, output, heads_hint=heads)
            if not isinstance(reading, str):
                found.append((reading, value_operands(value, scene.store.node(value), softmax_run)))

    def nothing(*_: object) -> None:
        """The rows have already run: nothing else is noted."""

    listener, lists = scene.listener, cast(list[list[Any]], [scene.entries, scene.exponentials, scene.online])
    lengths = [len(each) for each in lists]
    scene.listener = TapeListener(read, nothing, nothing, listener.enlarge, nothing, nothing, nothing)
    try:
        first_rows(ran.call)
    finally:
        scene.listener = listener
        for each, length in zip(lists, lengths, strict=True):
            del each[length:]
    return found[0] if len(found) == 1 else (None, None)
