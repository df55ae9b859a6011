"""What a function of one pair depends on, read from the operations that it runs.

A `score_mod` that only adds to the score, score + f(b, h, i, j), is a bias; f of the distance i - j alone is a table of
L + S - 1 numbers per head; a `mask_mod` of the distance alone is a band. Kernels run all three, and a softcap before.

The function runs once on tensors without dimensions, and each operation hands on what its operands depend on. This is a
proof and not a trial of some values: a function that decides by a value in Python is given up at that operation, so the
operations are the same for every pair. An operation that is not known depends on all that its operands depend on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk._modes import EagerMode
from sqrtdk.impl.mods import IndexByTensors, MaskMod, ReadMod, ScoreMod
from sqrtdk.impl.program import PairProgram, PairRecording, operands_of

aten = torch.ops.aten
SCORE, BATCH, HEAD, ROW, KEY, DISTANCE = "score", "b", "h", "i", "j", "i - j"
ANYTHING = frozenset((SCORE, BATCH, HEAD, ROW, KEY))
_COMPARING = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_WITHOUT_A_VALUE = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)
# methods that read a value or change a gradient without an operation
_OUT_OF_SIGHT = (Tensor.register_hook, Tensor.numpy, Tensor.tolist, Tensor.item)
# What autograd calls the operations that are followed from the score to the logit.
_FOLLOWED = {"Add", "Sub", "Where", "MaskedFill", "Div", "Tanh", "Mul"}


@dataclass(frozen=True)
class Added:
    """What a `score_mod` of the form score + f, or cap tanh(score / cap) + f, adds to a score.

    Attributes:
        places: What f depends on, such as "h" or "i - j"; f may be -inf, which hides a key.
        cap: The cap; None if there is none.
        table: The tensor of which f is an entry, as in bias[h, q_idx, kv_idx]; None if f is not of this kind.
        axes: What indexes each dimension of the table.
    """

    places: frozenset[str]
    cap: float | None = None
    table: Tensor | None = None
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ReadScore(ReadMod):
    """A score_mod that was read.

    Attributes:
        added: what it adds to the score, if it only adds.
        factor: what f depends on, if it is score * f(b, h, i) or score / f(b, h, i).
    """

    added: Added | None
    factor: frozenset[str] | None


@dataclass(frozen=True)
class _Form:
    """A value is `row` i + `column` j + something that depends on `rest`, plus the score if it `adds`.

    It is `pure` if it is the score, or the capped score, and nothing else, not even a constant beside it.
    The score may be capped: `stage` is ("over", c) for score / c, ("tanh", c) for its tanh; that times c has the `cap`.
    It is the score times a `factor` that depends on these places, if that is not None.
    """

    row: int = 0
    column: int = 0
    rest: frozenset[str] = frozenset()
    adds: bool = False
    pure: bool = False
    cap: float | None = None
    stage: tuple[str, float] | None = None
    table: Tensor | None = field(default=None, compare=False)
    axes: tuple[str, ...] = ()
    factor: frozenset[str] | None = None

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
        row, column = self.row + sign * other.row, self.column + sign * other.column
        form = _Form(row, column, rest, self.adds is not other.adds, cap=self.cap or other.cap)
        score, added = (self, other) if self.adds else (other, self)
        return replace(form, table=added.table, axes=added.axes) if score.pure and form.adds and sign > 0 else form


# in the order of the dimensions of the logits
_INDICES = {
    BATCH: _Form(rest=frozenset((BATCH,))),
    HEAD: _Form(rest=frozenset((HEAD,))),
    ROW: _Form(row=1),
    KEY: _Form(column=1),
}


class _Unknown(Exception):
    """The function does what can't be followed: it reads a value, writes in place or draws random numbers."""


class _Follow(EagerMode):
    """Keeps the form of every tensor that the operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.learns = torch.is_grad_enabled()
        # By storage, which a view shares, and which is not used again while its tensor is held.
        self.forms: dict[int, tuple[Tensor, _Form]] = {}
        self.indices: dict[int, str] = {}
        self.recording = PairRecording()

    def keep(self, tensor: Tensor, form: _Form) -> Tensor:
        place = _place(tensor)
        held = self.forms.setdefault(place, (tensor, form))[0]
        if held.dtype != tensor.dtype:  # the bits of a float, read as an integer
            self.forms[place] = tensor, _Form(rest=ANYTHING)
        return tensor

    def form(self, value: Any) -> _Form:
        """Return the form of an operand; what the function got from elsewhere is the same for all pairs."""
        found = self.forms.get(_place(value)) if isinstance(value, Tensor) else None
        if found is None:
            return _Form()
        # a part that was detached, or made under no_grad, has the value of the score and not its gradient
        followed = found[1].adds or found[1].stage is not None
        return _Form(rest=ANYTHING) if followed and self.learns and not value.requires_grad else found[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or func._schema.is_mutable or func is aten._local_scalar_dense.default:
            raise _Unknown
        found = func(*args, **kwargs)
        self.recording.add(func, args, kwargs, found)
        form = self._after(func, args, kwargs)
        for tensor in operands_of(found):
            # large integers are rounded in floats, so that i - j of floats need not be exact
            floats = replace(form, row=0, column=0, rest=form.places)
            self.keep(tensor, floats if tensor.dtype.is_floating_point else form)
        return found

    def _after(self, func: Any, args: Any, kwargs: Any) -> _Form:
        operands = operands_of((args, kwargs))
        anything = _Form(rest=frozenset().union(*(self.form(operand).everything for operand in operands)))
        if func.overloadpacket in _WITHOUT_A_VALUE:
            return _Form(rest=ANYTHING)
        if kwargs:  # a + alpha b, for one
            return anything
        if len(args) < 2:
            return self._capped(func, args, None) or anything
        integers = all(not t.dtype.is_floating_point and t.dtype != torch.bool for t in operands)
        first, second = (self.form(value) for value in args[:2])
        if func in _COMPARING and integers:  # i >= j is i - j >= 0
            return _Form(rest=first.plus(second, -1).places)
        if func in (aten.add.Tensor, aten.sub.Tensor):
            if not integers:
                first, second = (replace(form, row=0, column=0, rest=form.places) for form in (first, second))
            return first.plus(second, 1 if func is aten.add.Tensor else -1)
        if func is aten.index.Tensor and first == _Form():
            axes = tuple(self.indices.get(_place(index), "") for index in args[1])
            in_order = axes == tuple(name for name in _INDICES if name in axes)
            return replace(anything, table=args[0], axes=axes) if in_order and len(axes) == args[0].ndim else anything
        if func is aten.where.self:
            return self._selected(*args) or anything
        if func in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            return self._selected(args[1], args[0], args[2]) or anything
        factor = self._factor(func, first, second)
        found = self._capped(func, args, factor)
        return found or (anything if factor is None else replace(anything, factor=factor))

    def _selected(self, condition: Any, one: Any, other: Any) -> _Form | None:
        """Return the form of one value or another, if each is the score plus something, or -inf for every pair."""
        chosen = [self.form(value) for value in (one, other)]
        places = self.form(condition).everything.union(*(form.places for form in chosen))
        scores = [form for form in chosen if form.adds]
        if SCORE in places or not scores or scores[0].cap != scores[-1].cap:
            return None
        for form, value in zip(chosen, (one, other), strict=True):
            if not (form.adds or (form == _Form() and float(value) == -math.inf)):
                return None
        return _Form(rest=places, adds=True, cap=scores[0].cap)

    def _factor(self, func: Any, first: _Form, second: _Form) -> frozenset[str] | None:
        """Return what f depends on, if the operation makes score * f(b, h, i) or score / f(b, h, i)."""
        if func is aten.mul.Tensor and second.pure:
            first, second = second, first
        multiplies = func in (aten.mul.Tensor, aten.div.Tensor) and first.pure and first.cap is None
        return second.places if multiplies and second.everything <= {BATCH, HEAD, ROW} else None

    def _capped(self, func: Any, args: Any, factor: frozenset[str] | None) -> _Form | None:
        """Return the form of a step of c * tanh(score / c)."""
        forms = [self.form(value) for value in args]
        numbers = [float(value) for value in args if isinstance(value, int | float) and 0 < value < math.inf]
        if func is aten.div.Tensor and forms[0].pure and forms[0].cap is None and len(numbers) == 1:
            return _Form(rest=frozenset((SCORE,)), stage=("over", numbers[0]), factor=factor)
        stages = [form.stage for form in forms if form.stage is not None]
        if func is aten.tanh.default and stages and stages[0][0] == "over":
            return _Form(rest=frozenset((SCORE,)), stage=("tanh", stages[0][1]))
        if func is aten.mul.Tensor and len(numbers) == 1 and stages == [("tanh", numbers[0])]:
            return _Form(adds=True, pure=True, cap=numbers[0])
        return None


class _InSight(TorchFunctionMode):
    """Gives up where a method leaves no operation behind."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OUT_OF_SIGHT:
            raise _Unknown
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def read_score(function: ScoreMod, dtype: torch.dtype) -> ReadScore:
    """Return what is known of a `score_mod`, found by running it once on tensors without dimensions.

    Args:
        function: The `score_mod`; a `ReadScore` is returned as it is.
        dtype: Dtype of the scores.
    """
    if isinstance(function, ReadScore):
        return function
    learns = torch.is_grad_enabled()
    score = torch.zeros((), dtype=dtype, device="cpu", requires_grad=learns)
    since = torch._C._autograd._get_sequence_nr()
    found, form, program = _followed(function, score)
    places = None if found is None else form.everything
    program = None if found is None or found.dtype == torch.bool else program
    known = found is not None and (found is score or not learns)
    known = known or (found is not None and found.requires_grad and _known_path(found.grad_fn, score, since))
    factor = form.factor if found is not None and known and found.dtype == dtype else None
    return ReadScore(function, places, program, _added(found, form, score, known), factor)


def added_by(function: ScoreMod, dtype: torch.dtype) -> Added | None:
    """Return what f depends on, if the function is score + f(b, h, i, j) or hides keys; None if it may be another.

    Example:
        >>> sorted(added_by(lambda score, b, h, q_idx, kv_idx: score - h * (q_idx - kv_idx), torch.float32).places)
        ['h', 'i - j']
        >>> added_by(lambda score, b, h, q_idx, kv_idx: 30.0 * torch.tanh(score / 30.0), torch.float32).cap
        30.0
        >>> added_by(lambda score, b, h, q_idx, kv_idx: score * score, torch.float32)
    """
    return read_score(function, dtype).added


def _added(found: Tensor | None, form: _Form, score: Tensor, known: bool) -> Added | None:
    if found is None or not form.adds or SCORE in form.places or found.dtype != score.dtype:
        return None
    learns = score.requires_grad
    # the gradient of a function of its own, as autograd.Function is, need not be that of its operations
    if not known:
        return None
    if form.table is not None and learns and form.table.requires_grad and not _straight_to(form.table, found.grad_fn):
        return Added(form.places, form.cap)  # detached, or with a gradient of its own
    return Added(form.places, form.cap, form.table, form.axes)


def read_mask(function: MaskMod) -> ReadMod:
    """Return what is known of a `mask_mod`, found by running it once on tensors without dimensions.

    A `ReadMod` is returned as it is. For a function that can't be followed, its fields `places` and `program` are None.
    """
    if isinstance(function, ReadMod):
        return function
    found, form, program = _followed(function)
    if found is None or found.dtype != torch.bool:
        return ReadMod(function, None, None)
    return ReadMod(function, form.places, program)


def shown_by(function: MaskMod) -> frozenset[str] | None:
    """Return what a mask_mod depends on; None if it can't be followed.

    Example:
        >>> shown_by(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 128))
        frozenset({'i - j'})
    """
    return read_mask(function).places


def _followed(function: Callable[..., Any], *score: Tensor) -> tuple[Tensor | None, _Form, PairProgram | None]:
    """Return the function's result for one pair, what it depends on, and its operations."""
    mode = _Follow()
    for tensor in score:
        mode.keep(tensor, _Form(adds=True, pure=True))
    pair = [mode.keep(torch.zeros((), dtype=torch.int64, device="cpu"), form) for form in _INDICES.values()]
    mode.indices = {_place(index): name for index, name in zip(pair, _INDICES, strict=True)}
    try:
        with _disable_current_modes(), IndexByTensors(), _InSight(), mode:
            found = function(*score, *pair)
    except Exception:  # whatever it is: the run over all pairs raises it in the user's sight, or does not meet it
        return None, _Form(), None
    if not isinstance(found, Tensor) or found.ndim:
        return None, _Form(), None
    return found, mode.form(found), mode.recording.program((*score, *pair), found)


def _known_path(root: Any, leaf: Tensor, since: int) -> bool:
    """Return whether a result's gradient reaches the leaf, and on each way by operations that are followed.

    Nodes from before the number `since` are of captured tensors, whose graphs may be large and do not lead to the leaf.
    """
    leads: dict[Any, bool] = {}
    waiting = [(root, False)]
    while waiting:
        node, after = waiting.pop()
        steps = [step for step, _ in node.next_functions if step is not None]
        if after:
            leads[node] = any(leads[step] for step in steps)
        elif node not in leads:
            leads[node] = getattr(node, "variable", None) is leaf
            if not leads[node] and node._sequence_nr() >= since:
                waiting += [(node, True), *((step, False) for step in steps)]
    ways = [node for node, there in leads.items() if there and getattr(node, "variable", None) is not leaf]
    return leads[root] and all(node.name().split("Backward")[0] in _FOLLOWED for node in ways)


def _straight_to(table: Tensor, root: Any) -> bool:
    """Return whether one of the terms that are added up is the table, read by its indices and changed by nothing."""
    reads = [step for step, _ in root.next_functions if step is not None and step.name() == "IndexBackward0"]
    sources = [read.next_functions[0][0] for read in reads]
    return any(
        source is not None and (source is table.grad_fn or getattr(source, "variable", None) is table)
        for source in sources
    )
