"""FlexAttention's functions of one pair, mapped over a block of rows as torch's eager FlexAttention maps them.

    score_mod(score, b, h, q_idx, kv_idx) -> logit
    mask_mod(b, h, q_idx, kv_idx) -> True if the row sees the key

All arguments are tensors without dimensions. `torch.vmap` turns the operations on them into operations on a block, so
that the whole block takes as many of them as one pair does. Index tensors that broadcast would give some functions
another meaning: in `tables[b][h, q_idx]` the first index gives one table, and not one of every batch element.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sqrtdk.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from sqrtdk.impl.program import PairProgram

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_OUTPUTS = {"score_mod": "one floating logit", "mask_mod": "one bool"}


@dataclass(frozen=True, eq=False)
class ReadMod:
    """A function of one pair that was read; see `dependence.py`.

    Attributes:
        function: the function.
        places: what its result depends on; None if it can't be followed.
        program: its operations, if they run over many pairs at once; otherwise it is mapped.
    """

    function: Callable[..., Tensor]
    places: frozenset[str] | None
    program: PairProgram | None

    def __call__(self, *pair: Tensor) -> Tensor:
        """Call the function."""
        return self.function(*pair)


class IndexByTensors(TorchFunctionMode):
    """A mode in which `table[h, q_idx]` with tensors without dimensions as indices is an operation on these tensors.

    Without it torch turns such an index into a Python number, so that a function of one pair could not be recorded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(i, Tensor | int) and not isinstance(i, bool) for i in index):
                return torch.ops.aten.index(table, [torch.as_tensor(i, device=table.device) for i in index])
        return func(*args, **(kwargs or {}))


def captured_tensors(function: Callable[..., Any]) -> list[Tensor]:
    """Return the tensors that a function reads from its closure, its module or, if it is a partial, its arguments.

    Tensors inside lists and objects are not found.

    Example:
        >>> bias = torch.zeros(4)
        >>> [tensor is bias for tensor in captured_tensors(lambda score, b, h, q_idx, kv_idx: score + bias[h])]
        [True]
    """
    if isinstance(function, ReadMod):
        return captured_tensors(function.function)
    if isinstance(function, functools.partial):
        own = [*function.args, *function.keywords.values()]
        return [value for value in own if isinstance(value, Tensor)] + captured_tensors(function.func)
    try:
        names = inspect.getclosurevars(function)
    except TypeError:  # no Python function
        return []
    return [value for value in (*names.nonlocals.values(), *names.globals.values()) if isinstance(value, Tensor)]


def map_scores(
    function: ScoreMod, scores: Float[Tensor, "B Hq R S"], rows: Int[Tensor, " R"], first: int = 0
) -> Float[Tensor, "B Hq R S"]:
    """Return scores after a `score_mod`, (B, Hq, R, S).

    Args:
        function: The `score_mod`.
        scores: (B, Hq, R, S).
        rows: (R,) int64 positions of the rows.
        first: Position of the first key.
    """
    if not scores.numel():
        return scores
    batch, heads, _, keys = scores.shape
    columns = torch.arange(first, first + keys, device=rows.device)
    found = _mapped("score_mod", function, (scores,), batch, heads, rows, columns)
    return found.to(scores.dtype).expand(scores.shape)


def map_one(
    function: ScoreMod,
    score: float,
    dtype: torch.dtype,
    batch: int,
    heads: int,
    rows: Int[Tensor, " R"],
    columns: Int[Tensor, " S"],
    *,
    together: bool = False,
) -> Float[Tensor, "..."]:
    """Return what a `score_mod` makes of one and the same score at many places.

    Given the score 0, this is what a `score_mod` adds to any score, if it only adds.

    Args:
        function: The `score_mod`.
        score: The score.
        dtype: Dtype of the score and of the result.
        batch: Batch size, B.
        heads: Number of query heads, Hq.
        rows: (R,) int64 positions of the rows.
        columns: (S,) int64 positions of the keys.
        together: Whether rows and columns are the places of N pairs, (N,) each.

    Returns:
        (B, Hq, R, S), or (B, Hq, N) if `together`; a dimension on which nothing depends has size 1.
    """
    one = torch.full((), score, dtype=dtype, device=rows.device)
    found = _mapped("score_mod", function, (one,), batch, heads, rows, columns, together=together)
    return _without_copies(found.to(dtype))


def map_mask(
    function: MaskMod, batch: int, heads: int, rows: Int[Tensor, " R"], keys: int
) -> Bool[Tensor, "#{batch} #{heads} #R #{keys}"]:
    """Return the keys that rows see by a `mask_mod`, bool; a dimension on which it does not depend has size 1.

    Args:
        function: The `mask_mod`.
        batch: Batch size, B.
        heads: Number of query heads, Hq.
        rows: (R,) int64 positions of the rows.
        keys: Number of keys, S.
    """
    if 0 in (batch, heads, rows.numel(), keys):
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=rows.device)
    columns = torch.arange(keys, device=rows.device)
    return _without_copies(_mapped("mask_mod", function, (), batch, heads, rows, columns))


def map_pairs(
    function: MaskMod, batch: int, heads: int, rows: Int[Tensor, " N"], columns: Int[Tensor, " N"]
) -> Bool[Tensor, "#{batch} #{heads} #N"]:
    """Return whether the row of each pair sees its key by a `mask_mod`, bool (B or 1, Hq or 1, N).

    Args:
        function: The `mask_mod`.
        batch: Batch size, B.
        heads: Number of query heads, Hq.
        rows: (N,) int64 position of each pair's row.
        columns: (N,) int64 position of each pair's key.
    """
    return _without_copies(_mapped("mask_mod", function, (), batch, heads, rows, columns, together=True))


def _without_copies(found: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    # vmap expands what does not depend on a dimension: one triangle of a causal mask would become one for every head
    return found[tuple(slice(0, 1) if step == 0 else slice(None) for step in found.stride())]


def _mapped(
    name: str,
    function: Callable[..., Tensor],
    scores: tuple[Float[Tensor, "..."], ...],
    batch: int,
    heads: int,
    rows: Int[Tensor, " R"],
    columns: Int[Tensor, " S"],
    *,
    together: bool = False,
) -> Shaped[Tensor, "..."]:
    if isinstance(function, ReadMod) and function.program is not None:
        return _broadcast(function.program, scores, batch, heads, rows, columns, together=together)

    def checked(*pair: Tensor) -> Tensor:
        found = function(*pair)
        if not isinstance(found, Tensor):
            raise InvalidTypeError(
                f"{name} returns a tensor, {_OUTPUTS[name]}; got {found!r}",
                hint="Use torch.where in place of an if: the arguments are tensors.",
            )
        if (found.dtype == torch.bool) is (name == "score_mod"):
            raise InvalidTypeError(
                f"{name} returns {_OUTPUTS[name]}; got {found.dtype}",
                hint="A function of bools is mask_mod(b, h, q_idx, kv_idx), one of logits score_mod(score, b, h, ...).",
            )
        if found.ndim:
            raise InvalidValueError(
                f"{name} returns {_OUTPUTS[name]} for one pair; got {tuple(found.shape)}",
                hint="Index a captured table by all its dimensions: bias[h, q_idx, kv_idx].",
            )
        return found

    # the innermost first: keys, rows, heads, batch
    for dims in ((2, 3), (1,), (0,)) if together else ((3,), (2,), (1,), (0,)):
        places = [0 if dim in dims else None for dim in range(4)]
        checked = torch.vmap(checked, in_dims=(*(0 if score.ndim else None for score in scores), *places))
    counts = (torch.arange(count, device=rows.device) for count in (batch, heads))
    try:
        with IndexByTensors():
            return checked(*scores, *counts, rows, columns)
    except RuntimeError as error:
        if "data-dependent control flow" not in str(error):
            raise
        raise UnsupportedError(
            f"{name} decides by the value of a tensor, as in `if q_idx >= kv_idx`",
            hint="Use torch.where(q_idx >= kv_idx, a, b) in place of an if.",
        ) from error


def _broadcast(
    program: PairProgram,
    scores: tuple[Float[Tensor, "..."], ...],
    batch: int,
    heads: int,
    rows: Int[Tensor, " R"],
    columns: Int[Tensor, " S"],
    *,
    together: bool,
) -> Shaped[Tensor, "..."]:
    last = 1 if together else 2
    b = torch.arange(batch, device=rows.device).reshape(-1, *(1,) * (last + 1))
    h = torch.arange(heads, device=rows.device).reshape(-1, *(1,) * last)
    score = tuple(score if score.ndim else score.reshape((1,) * (last + 2)) for score in scores)
    found = program(*score, b, h, rows if together else rows.unsqueeze(-1), columns)
    return found.reshape((1,) * (last + 2 - found.ndim) + tuple(found.shape))
