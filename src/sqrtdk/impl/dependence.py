"""What a function of one pair depends on, read from the operations that it runs.

A `score_mod` that only adds to the score, score + f(b, h, i, j), is a bias; f of the distance i - j alone is a table of
L + S - 1 numbers a head; a `mask_mod` of the distance alone is a band. Kernels run all three.

The function runs once on tensors without dimensions, and each operation hands on what its operands depend on. This is a
proof and not a trial of some values: a function that decides by a value in Python is given up at that operation, so the
operations are the same for every pair. An operation that is not known depends on all that its operands depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk._modes import EagerMode
from sqrtdk.impl.mods import IndexByTensors, MaskMod, ScoreMod

aten = torch.ops.aten
SCORE, BATCH, HEAD, ROW, KEY, DISTANCE = "score", "b", "h", "i", "j", "i - j"
ANYTHING = frozenset((SCORE, BATCH, HEAD, ROW, KEY))
_ADD, _SUBTRACT = (aten.add.Tensor, aten.add.Scalar), (aten.sub.Tensor, aten.sub.Scalar)
_COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_WITHOUT_A_VALUE = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)
# what autograd calls the operations of which the gradient of the score is known to be 1, or 0 where it is not taken
_STRAIGHT = {"AddBackward0", "SubBackward0", "WhereBackward0", "MaskedFillBackward0", "MaskedFillBackward1"}


@dataclass(frozen=True)
class _Form:
    """A value is `row` i + `column` j + something that depends on `rest`, plus the score if it `adds`."""

    row: int = 0
    column: int = 0
    rest: frozenset[str] = frozenset()
    adds: bool = False

    @property
    def places(self) -> frozenset[str]:
        """What the value depends on beside the score that it adds to."""
        if self.row == -self.column:
            return self.rest | ({DISTANCE} if self.row else set())
        return self.rest | ({ROW} if self.row else set()) | ({KEY} if self.column else set())

    @property
    def everything(self) -> frozenset[str]:
        return self.places | ({SCORE} if self.adds else set())

    def plus(self, other: _Form, sign: int) -> _Form:
        rest = self.rest | other.rest
        if other.adds and (sign < 0 or self.adds):
            rest |= {SCORE}
        return _Form(self.row + sign * other.row, self.column + sign * other.column, rest, self.adds is not other.adds)


class _Unknown(Exception):
    """The function does what can't be followed: it reads a value, writes in place or draws random numbers."""


class _Follow(EagerMode):
    """Keeps the form of every tensor that the operations make."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, which a view shares, and which is not used again while its tensor is held.
        self.forms: dict[int, tuple[Tensor, _Form]] = {}

    def keep(self, tensor: Tensor, form: _Form) -> Tensor:
        self.forms[tensor.untyped_storage()._cdata] = tensor, form
        return tensor

    def form(self, value: Any) -> _Form:
        """Return the form of an operand; what the function got from elsewhere is the same for all pairs."""
        found = self.forms.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
        return _Form() if found is None else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or func._schema.is_mutable or func is aten._local_scalar_dense.default:
            raise _Unknown
        found = func(*args, **kwargs)
        form = self._after(func, args, kwargs)
        for tensor in _tensors(found):
            if not tensor.dtype.is_floating_point:
                self.keep(tensor, form)
            else:  # large integers are rounded in floats, so that i - j of floats need not be exact
                exact = form if form.adds else _Form(rest=form.everything)
                self.keep(tensor, replace(exact, row=0, column=0, rest=exact.places))
        return found

    def _after(self, func: Any, args: Any, kwargs: Any) -> _Form:
        if func.overloadpacket in _WITHOUT_A_VALUE:
            return _Form(rest=ANYTHING)
        operands = [self.form(value) for value in _tensors((args, kwargs))]
        anything = _Form(rest=frozenset().union(*(form.everything for form in operands)))
        integers = all(not t.dtype.is_floating_point and t.dtype != torch.bool for t in _tensors((args, kwargs)))
        if func in _ADD or func in _SUBTRACT:
            first, second = (self.form(value) for value in args[:2])
            if not integers:
                first, second = (_Form(rest=form.places, adds=form.adds) for form in (first, second))
            if len(args) > 2 or kwargs.get("alpha", 1) != 1:  # a + alpha b
                return anything
            return first.plus(second, 1 if func in _ADD else -1)
        if func in _COMPARISONS and integers:  # i >= j is i - j >= 0
            return _Form(rest=self.form(args[0]).plus(self.form(args[1]), -1).places)
        if func is aten.where.self:
            return self._selected(args[0], args[1], args[2]) or anything
        if func in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            return self._selected(args[1], args[0], args[2]) or anything
        return anything

    def _selected(self, condition: Any, one: Any, other: Any) -> _Form | None:
        """Return the form of one value or another, if each is the score plus something, or -inf for every pair."""
        chosen = [self.form(value) for value in (one, other)]
        places = self.form(condition).everything.union(*(form.places for form in chosen))
        if SCORE in places or not any(form.adds for form in chosen):
            return None
        for form, value in zip(chosen, (one, other), strict=True):
            if not (form.adds or (form == _Form() and float(value) == -torch.inf)):
                return None
        return _Form(rest=places, adds=True)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def added_by(function: ScoreMod, dtype: torch.dtype) -> frozenset[str] | None:
    """Return what f depends on, if the function is score + f(b, h, i, j) or hides keys; None if it may be another.

    Example:
        >>> sorted(added_by(lambda score, b, h, q_idx, kv_idx: score - 0.5 * h * (q_idx - kv_idx), torch.float32))
        ['h', 'i - j']
        >>> added_by(lambda score, b, h, q_idx, kv_idx: 30.0 * (score / 30.0).tanh(), torch.float32)
    """
    learns = torch.is_grad_enabled()
    score = torch.zeros((), dtype=dtype, device="cpu", requires_grad=learns)
    found, form = _followed(function, score)
    if found is None or not form.adds or SCORE in form.places or found.dtype != dtype:
        return None
    # a function of its own that autograd runs, or no_grad around a part, makes another gradient than the values say
    if learns and not (found is score or _straight(found.grad_fn, score)):
        return None
    return form.places


def shown_by(function: MaskMod) -> frozenset[str] | None:
    """Return what a mask_mod depends on; None if it can't be followed.

    Example:
        >>> shown_by(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 128))
        frozenset({'i - j'})
    """
    found, form = _followed(function)
    return None if found is None or found.dtype != torch.bool else form.places


def _followed(function: Callable[..., Any], *score: Tensor) -> tuple[Tensor | None, _Form]:
    mode = _Follow()
    forms = [_Form(rest=frozenset((BATCH,))), _Form(rest=frozenset((HEAD,))), _Form(row=1), _Form(column=1)]
    for tensor in score:
        mode.keep(tensor, _Form(adds=True))
    pair = [mode.keep(torch.zeros((), dtype=torch.int64, device="cpu"), form) for form in forms]
    try:
        with _disable_current_modes(), IndexByTensors(), mode:
            found = function(*score, *pair)
    except Exception:  # whatever it is: the run over all pairs raises it in the user's sight, or does not meet it
        return None, _Form()
    if not isinstance(found, Tensor) or found.ndim:
        return None, _Form()
    return found, mode.form(found)


def _straight(node: Any, leaf: Tensor) -> bool:
    """Return whether the gradient of a result reaches the leaf, and by sums and selections alone."""
    reached = False
    for step, _ in node.next_functions if node is not None else ():
        if getattr(step, "variable", None) is leaf:
            reached = True
        elif step is not None and _leads(step, leaf):
            if not _straight(step, leaf):
                return False
            reached = True
    return reached and node.name() in _STRAIGHT


def _leads(node: Any, leaf: Tensor) -> bool:
    return getattr(node, "variable", None) is leaf or any(
        _leads(step, leaf) for step, _ in node.next_functions if step is not None
    )
