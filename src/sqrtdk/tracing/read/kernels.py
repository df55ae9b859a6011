"""Attentions that are one operation: the reader of each, by the operator's whole name.

A reader takes the call, with the arguments by the names of the operator's schema, and returns a `Reading`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqrtdk.tracing.read.fused import read_fused
from sqrtdk.tracing.read.native import read_native
from sqrtdk.tracing.read.own import read_own
from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.events import KernelCall


class Kernel(NamedTuple):
    """A reader, and the name of the argument that is q; None where the operation projects q itself."""

    read: Callable[[KernelCall], Reading]
    query: str | None = "query"


KERNELS: dict[str, Kernel] = {
    **{f"aten::{name}": Kernel(read_fused) for name in ops.FUSED},
    **{f"aten::{name}": Kernel(read_native, None) for name in ops.NATIVE},
    ops.OWN: Kernel(read_own),
}
