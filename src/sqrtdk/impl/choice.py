"""The implementations, and the choice that "auto" makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from sqrtdk.errors import InvalidValueError, UnsupportedError
from sqrtdk.impl.call import UNBOUNDED, Call, has_values
from sqrtdk.impl.cpu import CPU_DTYPES, cpu
from sqrtdk.impl.cpu import obstacle as against_cpu
from sqrtdk.impl.extremes import wants_gradients
from sqrtdk.impl.fused import LARGEST_MASK, fused, held_by_torch, loses_mass, mask_elements
from sqrtdk.impl.fused import obstacle as against_fused
from sqrtdk.impl.gpu import GPUS
from sqrtdk.impl.gpu.load import interpreted
from sqrtdk.impl.kernel.load import beats_torch, loaded, why_not_loaded
from sqrtdk.impl.operands import by_distance, only_by_blocks
from sqrtdk.impl.product import as_product
from sqrtdk.impl.rows import block_rows, dense
from sqrtdk.impl.simplify import SMALLEST_READ, simplified
from sqrtdk.impl.tiled import tiled
from sqrtdk.impl.triton import obstacle as against_kernel
from sqrtdk.impl.triton import triton
from sqrtdk.stats.request import AuxOutput

if TYPE_CHECKING:
    from sqrtdk._shapes import Key, Query, Value

Implementation = Callable[[Call], tuple[Tensor, AuxOutput]]
IMPLEMENTATIONS: dict[str, Implementation] = {
    "cpu": cpu,
    "dense": dense,
    "fused": fused,
    "tiled": tiled,
    "triton": triton,
}
LARGEST_DENSE = 2**28  # above this many pairs dense warns, and auto takes no implementation that holds them
# Pairs times width of a plain call above which the compiled kernel is worth the 0.1 ms that calling it from Python
# costs; with few rows, where torch's kernel is slow, a fraction (1 / FEW_ROWS_PART) of that.
SMALLEST_COMPILED = {torch.float32: 2**26, torch.bfloat16: 2**24, torch.float16: 2**24}
FEW_ROWS, FEW_ROWS_PART = 16, 32  # 16: FEW of kernel/decode.h
FEW_TO_LEARN = 64  # rows up to which torch's backward pass is faster


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation that runs a call, and why; `sqrtdk.explain` shows both.

    Attributes:
        impl: "cpu", "triton", "fused", "dense" or "tiled".
        reason: The reason for the choice, in English.
    """

    impl: str
    reason: str


def choose(call: Call, impl: str = "auto", *, weights: bool = False) -> Choice:
    """Return the implementation for a resolved call, and the reason.

    Args:
        call: The call.
        impl: Name of an implementation, or "auto".
        weights: Whether the weights are requested.

    Raises:
        InvalidValueError: No implementation has that name.
        UnsupportedError: The weights are requested from an implementation that never holds them.
    """
    if weights and impl in IMPLEMENTATIONS and impl != "dense":
        raise UnsupportedError(f"impl={impl!r} never holds the weights, which are requested", hint="Use impl='dense'.")
    if impl != "auto":
        if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
            raise InvalidValueError(f"impl is {impl!r}", hint=f"Use one of: auto, {', '.join(IMPLEMENTATIONS)}.")
        if impl == "dense" and call.elements > LARGEST_DENSE:
            warnings.warn(f"impl='dense' holds {call.elements} pairs at once", stacklevel=4)
        return Choice(impl, "asked for")
    if weights:
        return Choice("dense", "the weights are requested")
    compiled = against_compiled(call)
    if compiled is None:
        why = only_by_blocks(call)
        return Choice("cpu", "the compiled kernel runs it" + (f", in blocks of rows: {why}" if why is not None else ""))
    reason = _against_torch(call)
    refused = f"; not the compiled kernel: {compiled}" if call.query.device.type == "cpu" and compiled != reason else ""
    if call.query.device.type in GPUS:
        triton_reason = against_triton(call) if reason or more_than_torch(call) else "torch's kernels do all of it"
        if triton_reason is None:
            return Choice("triton", "the Triton kernel runs it")
        refused = f"; not the Triton kernel: {triton_reason}"
    if reason is None:
        return Choice("fused", f"torch's kernels run it{_unchecked(call)}{refused}")
    height = block_rows(call)
    if height >= call.length:
        return Choice("dense", f"{reason}; the call fits one block{refused}")
    return Choice("tiled", f"{reason}; blocks of {height} rows{refused}")


def settle(call: Call, impl: str = "auto", *, weights: bool = False) -> tuple[Call, Call, Choice]:
    """Return a call as it will run, and the implementation that runs it.

    For "auto" and "cpu", score and mask functions are replaced by a bias and bounds of the distance where they can.

    Args:
        call: A resolved call.
        impl: Name of an implementation, or "auto".
        weights: Whether the weights are requested.

    Returns:
        The call, with functions replaced; the call that runs, whose score is a dot product if possible (see
        `as_product`); and the choice.

    Raises:
        InvalidValueError, UnsupportedError: As `choose`.
    """
    read = simplified(call) if isinstance(impl, str) and impl in ("auto", "cpu") and not weights else call
    product = as_product(read)
    choice = choose(product, impl, weights=weights)
    if product is not call and choice.impl == "fused" and impl == "auto":
        choice = _with_second_derivatives(product, choice)
    if read is call:
        return call, product, choice
    names = {
        "score_mod": call.score_mod is not None and read.score_mod is None,
        "mask_mod": len(read.mask_mods) < len(call.mask_mods),
    }
    changed = " and ".join(name for name, replaced in names.items() if replaced)
    if not changed:
        return read, product, choice
    return read, product, Choice(choice.impl, f"{choice.reason}; {changed} read as bias, scale, softcap or band")


def _with_second_derivatives(call: Call, choice: Choice) -> Choice:
    """Return an implementation with second derivatives: torch's kernels lack them, the call as it was given did not."""
    if not wants_gradients(call.query, call.key, call.value):
        return choice
    if against_cpu(call) is None and loaded() and _plain(call.query, call.key, call.value):
        return Choice("cpu", "the compiled kernel runs it, with second derivatives")
    impl = "dense" if block_rows(call) >= call.length else "tiled"
    reason = f"not the compiled kernel: {against_compiled(call)}"
    return Choice(impl, f"torch's kernels have no second derivatives; {reason}")


def _against_torch(call: Call) -> str | None:
    """Return why "auto" does not take torch's kernels; None if it does."""
    reason = against_fused(call)
    if reason is not None:
        return reason
    masked = mask_elements(call)
    if masked > LARGEST_MASK:
        return f"torch's kernels would need a mask of {masked} elements"
    if call.elements > LARGEST_DENSE and held_by_torch(call):
        return f"torch would hold {call.elements} pairs at once"
    if loses_mass(call):
        looked = call.query.device.type == "cpu" and has_values(call.query, call.key, call.value)
        rows = "rows" if looked else "any rows, which is not looked at,"
        return f"torch's kernels give wrong gradients if a bias or float mask moves {rows} as a whole by a large number"
    return None


def more_than_torch(call: Call) -> bool:
    """Return whether a call needs more than one of torch's kernels gives.

    That is so for statistics, a tensor as scale, and masks or terms that must be built first.
    """
    masked = call.visible is not None or call.bias is not None
    return (
        call.aux is not None
        or isinstance(call.scale, Tensor)
        or call.term is not None
        or call.window != UNBOUNDED
        or (call.diagonal is not None and (masked or call.diagonal != 0))
    )


def against_exported() -> str | None:
    """Return the reason, in English, why a program that is being exported takes no kernel of this package, or None."""
    if hasattr(torch.compiler, "is_exporting"):
        return "a program that is exported shall run without this package" if torch.compiler.is_exporting() else None
    if torch.compiler.is_compiling():  # torch 2.6
        return (
            f"torch {torch.__version__} compiles or exports it, and does not say which; an exported one shall run alone"
        )
    return None


def against_triton(call: Call) -> str | None:
    """Return the reason, in English, why "auto" does not take the Triton kernel for a call; None if it takes it."""
    reason = against_kernel(call)
    if reason is not None:
        return reason
    if interpreted():
        return "TRITON_INTERPRET is set, and its interpreter is slow"
    if not _plain(call.query, call.key, call.value):
        return "the tensors are of a class of their own"
    if (reason := against_exported()) is not None:
        return reason
    table = by_distance(call) and call.bias is None
    if call.term is not None and not table and mask_elements(call) > LARGEST_MASK:
        return f"it would need the position term as a bias of {mask_elements(call)} elements"
    return None


def against_compiled(call: Call) -> str | None:
    """Return the reason, in English, why "auto" does not take the compiled CPU kernel for a call; None if it does."""
    reason = against_cpu(call)
    if reason is not None:
        return reason
    if not _plain(call.query, call.key, call.value):
        return "the tensors are of a class of their own"
    if (reason := against_exported()) is not None:
        return reason
    if call.term is not None and not by_distance(call) and mask_elements(call) > LARGEST_MASK:
        return f"it would need the position term as a bias of {mask_elements(call)} elements"
    if not loaded():
        return why_not_loaded()
    if only_by_blocks(call) is not None and call.elements < SMALLEST_READ:
        return "the call is small"
    if call.aux is None and against_fused(call) is None and not loses_mass(call):
        if not beats_torch() and not by_distance(call):  # torch's takes a term as a bias over all pairs
            return "torch's kernel is faster on this CPU where no statistics are asked for"
        if _is_small(call.elements, call.query, call.key, call.value):
            return "the call is small"
    return None


def _unchecked(call: Call) -> str:
    """Say what was not checked before torch's kernels were chosen."""
    numbers = has_values(call.query, call.key, call.value)
    lost = []
    if call.hides and not (numbers and call.query.device.type == "cpu"):
        lost.append("whether NaN or infinity stands at a hidden key")
    if call.elements > LARGEST_DENSE and not numbers:
        lost.append("whether torch would hold all pairs at once")
    return f"; not looked at: {', '.join(lost)}" if lost else ""


def pays_compiled(pairs: int, query: Query, key: Key, value: Value) -> bool:
    """Return whether the compiled kernel is faster for a plain call than torch's own.

    Args:
        pairs: Number of pairs of row and key over all heads.
        query: (..., Hq, L, E).
        key: (..., H, S, E).
        value: (..., H, S, Ev).
    """
    return (
        beats_torch()
        and query.device.type == "cpu"
        and query.dtype in CPU_DTYPES
        and _plain(query, key, value)
        and against_exported() is None
        and not _is_small(pairs, query, key, value)
    )


def _plain(*tensors: Tensor) -> bool:
    """Return whether no tensor subclass overrides operations; while compiling, subclasses stand for plain tensors."""
    return torch.compiler.is_compiling() or all(type(t) in (Tensor, Parameter) for t in tensors)


def _is_small(pairs: int, query: Query, key: Key, value: Value) -> bool:
    """Return whether torch's kernel is faster; for few rows its backward pass is."""
    rows = query.shape[-2]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if learns and rows <= FEW_TO_LEARN:
        return True
    return pairs * query.shape[-1] < SMALLEST_COMPILED[query.dtype] // (FEW_ROWS_PART if rows <= FEW_ROWS else 1)
