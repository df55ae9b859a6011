"""`assert_gradients`: the backward pass of an attention function against the formula that its author states.

`torch.autograd.gradcheck` needs float64 and takes a forward pass for each number. Here the gradients of the formula are
computed in float64, and those of the function, in its own dtype, may differ by the rounding of that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sqrtdk._arguments import check_head_counts, check_tensors, finite_number, scale_number, window_sides
from sqrtdk.errors import InvalidTypeError, InvalidValueError, kind_and_text
from sqrtdk.laws.backward.case import Fault
from sqrtdk.laws.backward.judge import judge_gradients
from sqrtdk.laws.backward.words import fault_text
from sqrtdk.tracing.calls.terms import is_proven
from sqrtdk.tracing.tensors import CallTensors, Term, Vector

_GROWN = 4.0  # factor on q: logits that are spread as those of a trained model
_MOST_FAULT_LINES = 24
_ABSENT = ("none", "weights_detached")  # codes of gradients that do not arrive


@dataclass(frozen=True, slots=True)
class GradientCase:
    """One call of the function.

    Attributes:
        name: How its tensors differ from those given: "as given", "one sample", ...
        kept: Names whose gradient is the formula's: "q", "k", "v", "bias", "sinks".
        faults: A sentence for each gradient that is not; or one that the forward pass differs or raises.
        refused: What the function raises if it does not take these tensors; it does take those given.
    """

    name: str
    kept: tuple[str, ...]
    faults: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class GradientReport:
    """What `assert_gradients` compared: a case for each kind of tensors, in the order in which they ran."""

    function: str
    dtype: str
    cases: tuple[GradientCase, ...]

    def __repr__(self) -> str:
        refused = sum(bool(case.refused) for case in self.cases)
        return f"GradientReport({self.function}; {self.dtype}; {len(self.cases)} cases{_refused_text(refused)})"


@dataclass(frozen=True, slots=True, eq=False)
class _Formula:
    """The formula that the author states."""

    attn_mask: Tensor | None
    is_causal: bool
    lower_right: bool
    scale: float
    softcap: float | None
    window: tuple[int | None, int | None]
    sinks: Tensor | None
    lse: bool

    def terms(self, q: Tensor, k: Tensor) -> tuple[Term, ...]:
        terms = [Term("scale", self.scale)]
        if self.softcap is not None:
            terms.append(Term("softcap", self.softcap))
        visible = self._visible(q.shape[2], k.shape[2], q.device)
        if self.attn_mask is not None and self.attn_mask.dtype == torch.bool:
            visible = self.attn_mask if visible is None else visible & self.attn_mask
        elif self.attn_mask is not None:
            terms.append(Term("bias", self.attn_mask.detach(), "attn_mask"))
        if visible is not None:
            terms.append(Term("mask", visible))
        if self.sinks is not None:
            terms.append(Term("sinks", self.sinks.detach()))
        return tuple(terms)

    def _visible(self, rows: int, keys: int, device: torch.device) -> Tensor | None:
        left, right = self.window
        right = 0 if self.is_causal else right
        if left is None and right is None:
            return None
        distance = torch.arange(rows, device=device)[:, None] - torch.arange(keys, device=device)
        distance = distance + (keys - rows if self.lower_right else 0)
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen = seen if left is None else seen & (distance <= left)
        return seen if right is None else seen & (distance >= -right)


def assert_gradients(
    function: Callable[[Tensor, Tensor, Tensor], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    window: Any = None,
    sinks: Tensor | None = None,
    causal_lower_right: bool = False,
    grid: bool = True,
    seed: int = 0,
) -> GradientReport:
    """Hold the gradients of an attention function against those of a formula, and fail if they differ.

    The formula is softmax(mask(cap(scale q k^T) + attn_mask)) v, as of `sqrtdk.attention`. `function(q, k, v)` computes
    it for any batch and lengths, with what the keywords state built in. If it returns a tuple, the second tensor is
    lse, the logarithm of the sum of exponentials over the keys, which gets a gradient too once that of the output is
    right. The gradient of the output is
    random; it lies in memory once as that of an output that is transposed, once contiguous, and once it is the
    expanded one of `sum()`.

    Args:
        function: Takes q (B, Hq, L, E), k (B, H, S, E), v (B, H, S, Ev); H divides Hq. Returns (B, Hq, L, Ev), or a
            tuple of it and lse (B, Hq, L).
        query: q, in the dtype of the test. Its values are used, so those of a model say more than random ones.
        key: k.
        value: v.
        attn_mask: True where a key is seen, or an addend, which broadcasts to (B, Hq, L, S). If it requires a gradient,
            its own is compared too; the function then reads this very tensor.
        is_causal: Whether row i sees keys j <= i alone.
        scale: Factor on q k^T; None for 1/sqrt(E).
        softcap: Cap c of c tanh(z / c); None for none.
        window: (left, right), or the number of keys of a causal call, as in `sqrtdk.attention`.
        sinks: One logit per query head, (Hq,), a key without a value; with a gradient if it requires one.
        causal_lower_right: Whether `is_causal` and `window` count from the last key.
        grid: Whether other tensors made of those given are tried too: strided ones, one sample, shorter lengths, one
            row, larger logits, equal tokens. A function that raises for some of these refuses them, which is no
            fault. False tries those given alone.
        seed: Seed of the gradients of the output.

    Returns:
        What was compared.

    Raises:
        AssertionError: A gradient is not the formula's, or the function's output is not.
        InvalidTypeError: A tensor has another dtype or is none.
        InvalidValueError: Shapes don't fit, or a number is out of range.

    Example:
        >>> q, k, v = (torch.randn(2, 4, 20, 8) for _ in range(3))
        >>> def mine(q, k, v):
        ...     later = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
        ...     return (q @ k.detach().mT * 8**-0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        >>> assert_gradients(mine, q, k, v, is_causal=True, grid=False)
        Traceback (most recent call last):
        AssertionError: gradients of mine in float32: wrong in 1 of 1 case
          as given: no gradient reaches k: detached, or left out of the backward pass
    """
    check_tensors(query, key, value)
    check_head_counts(query, key, value, True)
    if query.dim() != 4:
        raise InvalidValueError(f"query has 4 axes (B, Hq, L, E); got {tuple(query.shape)}", hint="Use unsqueeze(0).")
    own = query.shape[-1] ** -0.5 if scale is None else scale_number(scale)
    cap = None if softcap is None else finite_number("softcap", softcap, above=0.0)
    if isinstance(window, int) and not isinstance(window, bool) and is_causal and window >= 1:
        window = (window - 1, 0)
    sides = (None, None) if window is None else window_sides(window)
    formula = _Formula(attn_mask, is_causal, causal_lower_right, own, cap, sides, sinks, False)
    name = _name_of(function)
    dtype = str(query.dtype).removeprefix("torch.")
    asked: list[tuple[str, _Judged]] = []
    for label, tensors, cotangent in _cases(query, key, value, formula, grid):
        takes = bool(asked) and not asked[0][1].raised  # a function that takes the tensors given may refuse others
        asked.append((label, _judged(function, formula, tensors, cotangent, seed, may_refuse=takes)))
    cases = tuple(
        GradientCase(label, one.kept, tuple(said.text for said in one.said), one.refused) for label, one in asked
    )
    bad = [case for case in cases if case.faults]
    if bad:
        told: dict[tuple[Any, ...], list[tuple[str, str]]] = {}
        for label, judged in asked:
            for said in judged.said:
                told.setdefault(said.key, []).append((label, said.text))
        lines = [
            f"  {group[0][0]}{f' and {len(group) - 1} more' if len(group) > 1 else ''}: {group[0][1]}"
            for group in told.values()
        ]
        refused = _refused_text(sum(bool(case.refused) for case in cases))
        count = f"{len(bad)} of {len(cases)} case{'s' * (len(cases) > 1)}"
        head = f"gradients of {name} in {dtype}: wrong in {count}{refused}"
        more = [f"  ... and {len(lines) - _MOST_FAULT_LINES} more"] if len(lines) > _MOST_FAULT_LINES else []
        raise AssertionError("\n".join([head, *lines[:_MOST_FAULT_LINES], *more]))
    return GradientReport(name, dtype, cases)


Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class _Said:
    """A sentence about a case; of those with one key the first is shown."""

    text: str
    key: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Judged:
    """What was judged of a case: the names whose gradient is the formula's, and what is wrong."""

    kept: tuple[str, ...] = ()
    said: tuple[_Said, ...] = ()
    refused: str = ""
    raised: bool = False


def _refused_text(count: int) -> str:
    return f", {count} refused" if count else ""


def _said(text: str) -> _Said:
    return _Said(text, (text,))


def _said_of(fault: Fault) -> _Said:
    text = str(fault_text(fault))
    if fault.code == "unknown" or fault.code.startswith("rounded_"):  # the size is another in each case
        return _Said(text, (fault.code, fault.operands, fault.values.get("dtype")))
    return _said(text)


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, an operator of `torch.library`, or what `functools.partial` calls."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", None) or getattr(function, "_qualname", None) or type(function).__name__


def _cases(q: Tensor, k: Tensor, v: Tensor, formula: _Formula, grid: bool) -> Iterator[tuple[str, Tensors, str]]:
    """Yield a name, q, k and v, and how the gradient of the output lies in memory."""
    yield "as given", (q, k, v), "transposed"
    if not grid:
        return
    yield "contiguous gradient of the output", (q, k, v), "contiguous"
    yield "expanded gradient of the output", (q, k, v), "expanded"
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    yield "strided q, k and v", (strided[0], strided[1], strided[2]), "transposed"
    yield f"q times {_GROWN:g}", (q * _GROWN, k, v), "transposed"
    yield "equal tokens", (q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), v), "transposed"
    free = formula.attn_mask is None
    if q.shape[0] > 1 and (free or _is_one(formula.attn_mask, 0)):
        yield "one sample", (q[:1], k[:1], v[:1]), "transposed"
    if free:
        same = q.shape[2] == k.shape[2]
        for length in dict.fromkeys(n for n in (1, 17, q.shape[2] - 1) if 0 < n < q.shape[2]):
            rows = f"{length} token{'s' * (length > 1)}"
            yield rows, (q[:, :, :length], *(x[:, :, : length if same else None] for x in (k, v))), "transposed"  # type: ignore[misc]
        if not (formula.is_causal or formula.window != (None, None)) and q.shape[2] > 1:
            yield "fewer rows than keys", (q[:, :, : q.shape[2] // 2], k, v), "transposed"


def _is_one(mask: Tensor | None, axis: int) -> bool:
    return mask is None or mask.dim() < 4 or mask.shape[axis] == 1


def _judged(
    function: Callable[[Tensor, Tensor, Tensor], Any], formula: _Formula, tensors: Tensors, cotangent: str, seed: int,
    *, may_refuse: bool,
) -> _Judged:  # fmt: skip
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]
    try:
        result = function(*leaves)
        output, lse = (result[0], result[1]) if isinstance(result, tuple | list) else (result, None)
    except Exception as error:  # of the user's function
        text = kind_and_text(error, 200)
        if may_refuse:
            return _Judged(refused=text)
        return _Judged(said=(_said(f"the function raises {text}"),), raised=True)
    if not isinstance(output, Tensor):
        raise InvalidTypeError(
            f"function returns a {type(output).__name__}", hint="Return the output, or (output, lse)."
        )
    expected = (*leaves[0].shape[:3], leaves[2].shape[3])
    if output.shape != expected:
        text = f"function returns {tuple(output.shape)} for {tuple(expected)}"
        if not may_refuse:
            raise InvalidValueError(text, hint="Transpose it.")
        return _Judged(said=(_said(f"the {text}"),))
    call = _call(formula, leaves, output)
    if not is_proven(call):
        return _Judged(said=(_said("the output is not that of the formula: state its scale, mask and terms first"),))
    if not output.requires_grad:
        return _Judged(said=(_said("the output has no gradient"),))
    with_lse = lse is not None and lse.requires_grad
    learned = {"bias 1" if formula.softcap is None else "bias 2": formula.attn_mask, "sinks": formula.sinks}
    extra = {key: x for key, x in learned.items() if isinstance(x, Tensor) and x.requires_grad}

    def backward(d_out: Tensor, d_lse: Tensor | None, strided: bool) -> Mapping[str, Tensor | None]:
        inputs = [*leaves, *extra.values()]
        outputs = [output] if d_lse is None else [output, lse]
        given = [_laid_out(d_out, cotangent if strided else "contiguous")]
        given += [] if d_lse is None else [d_lse.to(lse.dtype).reshape(lse.shape)]  # type: ignore[union-attr]
        found = torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
        return dict(zip(["q", "k", "v", *extra], found, strict=True))

    judge = partial(judge_gradients, call, backward, seed=seed, dtypes=(output.dtype,), ones=cotangent == "expanded")
    try:
        judged = judge()
        faults = judged.faults
        if with_lse and not faults:  # two mistakes in one gradient would have no name
            judged = judge(lse=True)
            # That of the output is right, so what is missing is that of lse.
            faults = tuple(replace(one, code="no_lse") if one.code in _ABSENT else one for one in judged.faults)
    except Exception as error:  # of the user's backward pass
        return _Judged(said=(_said(f"the backward pass raises {kind_and_text(error, 200)}"),))
    said = [_said_of(fault) for fault in faults]
    if lse is not None and not with_lse:
        said.append(
            _said("lse has no gradient: mark it as non-differentiable in the documentation, or return it alone")
        )
    return _Judged(tuple(key.split()[0] for key in judged.kept), tuple(said))


def _laid_out(d_out: Tensor, how: str) -> Tensor:
    if how == "expanded":  # that of `output.sum()`
        return d_out[:1, :1, :1, :1].expand_as(d_out)
    return d_out.transpose(1, 2).contiguous().transpose(1, 2) if how == "transposed" else d_out.contiguous()


def _call(formula: _Formula, leaves: list[Tensor], output: Tensor) -> CallTensors:
    q, k, v = (x.detach() for x in leaves)
    dtype = str(q.dtype).removeprefix("torch.")
    return CallTensors(
        site="", index=0, query=Vector(q), key=Vector(k), value=Vector(v), output=output.detach(),
        terms=formula.terms(q, k), dtype=dtype, logits_dtype=dtype, weights_dtype=dtype,
    )  # fmt: skip
