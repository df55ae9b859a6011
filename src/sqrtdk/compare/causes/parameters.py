"""Parameters and buffers of two modules that differ: scaled, transposed, rounded, another module's, other numbers.

What B's tensor is to A's is looked for before what it is to other weights of A. A checkpoint is loaded through a table
of names, and a wrong row of the table puts a right weight into a wrong place. Names can't show that: the numbers do.
Candidates are found by the first numbers of a row, and compared in full before anything is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import submodule
from sqrtdk.compare.numbers import same, single_ratio
from sqrtdk.compare.outside.parts import ModuleDifference, ModulePair, TensorPair
from sqrtdk.compare.rounding.precision import rounded_to, rounding_unit, same_rows
from sqrtdk.compare.words import short
from sqrtdk.messages import Message

_FIRST_NUMBERS = 8  # numbers that rule out nearly every candidate
_NEAR_WEIGHT = 2.0**-7  # relative: a bfloat16 copy of a float32 weight begins alike
_ROWS_AT_ONCE = 2**10
_COPY_NEAR = 0.2  # relative: a head quantised in fewer bits than the embedding is still a copy of it
_SHARE_OF_FEW_ROWS = 0.5  # share of a parameter's rows: fewer are reported as a count


def differing_tensors(modules: ModulePair, but: Collection[str] = ()) -> Iterator[TensorPair]:
    """Yield the modules' own parameters and buffers that differ by more than the rounding of their dtypes.

    A tensor that only one side has is yielded only between modules of one class: other classes hold other tensors.

    Args:
        modules: both modules; tensors of their submodules are not compared.
        but: names that are left out.
    """
    a, b = modules.a, modules.b
    own = [{**dict(m.named_parameters(recurse=False)), **dict(m.named_buffers(recurse=False))} for m in (a, b)]
    for name in dict.fromkeys((*own[0], *own[1])):
        x, y = (None if (tensor := tensors.get(name)) is None else tensor.detach() for tensors in own)
        if name in but or ((x is None or y is None) and type(a) is not type(b)):
            continue
        if x is None or y is None:
            yield TensorPair(modules, name, x, y)
            continue
        y = y.to(x.device)
        off = entries_off(x, y)
        if off is None or bool(off.any()):
            yield TensorPair(modules, name, x, y, off)


def entries_off(a: Tensor, b: Tensor) -> Tensor | None:
    """Return which entries of two tensors differ by more than the rounding of both dtypes.

    Floating-point entries may differ by 2 (u_a + u_b) times the larger one, u the unit roundoff; others must be equal.

    Returns:
        Booleans in the common shape; None if the shapes differ.

    Example:
        >>> third = torch.tensor([1 / 3, 1.0])
        >>> entries_off(third, third.bfloat16()).tolist(), entries_off(third, third + 0.1).tolist()
        ([False, False], [True, True])
    """
    if a.shape != b.shape:
        return None
    # A checkpoint in bfloat16 and one in float32 hold the same weights, rounded.
    coarse = sum(rounding_unit(x.dtype) for x in (a, b) if x.is_floating_point()) * 2
    x, y = a.double(), b.double()
    return (x - y).abs() > coarse * torch.maximum(x.abs(), y.abs()) if coarse else x != y


# -- rows of the table -------------------------------------------------------------------------------------------------


def compare_tied_head(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if one side's tensor is that of an embedding: `lm_head.weight = embed_tokens.weight`.

    If it is B's, `a` and `b` are the paths of the two modules of A. If it is A's, and B's embedding is not near
    B's tensor, `a` is the path of A's embedding and `b` is None. None if the first other module of A that holds
    B's tensor is no embedding.
    """
    return _no_longer_tied(part) or _of_another(part, embeddings=True)


def compare_place(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if another module of A holds exactly B's tensor under the same name; else None.

    `a` and `b` are the paths of A's partner and of the module that holds it.
    """
    return _of_another(part, embeddings=False)


def compare_shape(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if both tensors exist and their shapes differ, as text "(4, 8)"; else None."""
    if part.a is None or part.b is None or part.off is not None:
        return None
    one, other = (f"{tuple(x.shape)}" for x in (part.a, part.b))
    return _difference(part, one, other, one=one, other=other)


def compare_factor(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if B's tensor is A's times one number, which is `b` (`a` is 1.0); else None."""
    factor = None if part.numbers is None else single_ratio(*part.numbers)
    return None if factor is None else _difference(part, 1.0, factor, factor=f"{factor:.4g}")


def compare_offset(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if B's `weight` is A's plus or minus 1; else None.

    Norms store it so for x * (1 + weight), and for x * weight.
    """
    if part.numbers is None or part.name != "weight":
        return None
    x, y = part.numbers
    for sign in (1, -1):
        if same(x + sign, y):
            return _difference(part, part.name, f"{part.name} {sign:+d}", by=f"{sign:+d}")
    return None


def compare_transposed(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if B's tensor is A's square matrix, transposed; else None."""
    if part.numbers is None:
        return None
    x, y = part.numbers
    turned = x.dim() == 2 and x.shape == x.mT.shape and same(x.mT, y)
    return _difference(part, part.name, f"{part.name}.mT") if turned else None


def compare_rounded(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if B's tensor is A's, rounded to bfloat16 or float16; else None.

    `a` and `b` are names of dtypes: A's, and the coarser one.
    """
    return None if part.b is None else _rounded(part, part.a, part.b, by_b=True)


def compare_not_rounded(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if A's tensor is B's, rounded to bfloat16 or float16; else None.

    `a` and `b` are names of dtypes: the coarser one, and B's.
    """
    return None if part.b is None else _rounded(part, part.b, part.a, by_b=False)


def compare_few(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if fewer than half of a vector's entries differ; else None.

    `a` and `b` are the root mean squares of these entries.
    """
    return _few(part) if part.off is not None and part.off.dim() <= 1 else None


def compare_few_rows(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if fewer than half of the rows of a matrix (first axis) differ; else None.

    `a` and `b` are the root mean squares of these rows.
    """
    return _few(part) if part.off is not None and part.off.dim() > 1 else None


def compare_held(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if a weight of A holds B's matrix in another form; else None.

    It may be another weight, the transpose, the rows in another order, or a part of the rows (`holder_of`). `a` and `b`
    are the names of A's own weight and of the one that holds B's numbers.
    """
    if part.off is None or part.b is None:
        return None
    others = part.modules.others.items()
    weights = {f"{path}.{key}": x for path, m in others for key, x in m.named_parameters(recurse=False)}
    place = next((f"{path}.{part.name}" for path, module in others if module is part.modules.a), "")
    holder = holder_of(part.b, weights, place)
    if holder is None or holder == Holder(place):  # its own, as rounded to bfloat16: near enough to be recognised
        return None
    return _difference(part, place or part.name, holder.name, what=holder.text)


def compare_numbers(part: TensorPair) -> ModuleDifference | None:
    """Return the difference of two tensors of one shape; None if a tensor is missing or the shapes differ.

    `a` and `b` are their root mean squares.
    """
    if part.numbers is None:
        return None
    x, y = part.numbers
    size = _size(x)
    return _difference(part, size, _size(y), share=short(_size(x - y) / size if size else 1.0))


def compare_layer_bias(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if only one side has the tensor and it is named "bias"; else None."""
    return _alone(part) if part.name == "bias" else None


def compare_presence(part: TensorPair) -> ModuleDifference | None:
    """Return the difference if only one side has the tensor; else None. The other side's value is None."""
    return _alone(part)


def _difference(part: TensorPair, a: str | float | None, b: str | float | None, **words: Any) -> ModuleDifference:
    return ModuleDifference(a, b, {"name": part.shown, **words}, partial(_hold, part.name, part.b))


def _alone(part: TensorPair) -> ModuleDifference | None:
    if part.a is not None and part.b is not None:
        return None
    return _difference(part, part.name if part.b is None else None, part.name if part.a is None else None)


def _of_another(part: TensorPair, *, embeddings: bool) -> ModuleDifference | None:
    if part.a is None or part.b is None:
        return None
    for path, module in part.modules.others.items():
        held = getattr(module, part.name, None)
        if not isinstance(held, Tensor) or held is part.a or not _equal(held, part.b):
            continue
        if embeddings and not isinstance(module, nn.Embedding):
            return None
        return _difference(part, part.modules.path, path, module=f"`{path}`")
    return None


def _no_longer_tied(part: TensorPair) -> ModuleDifference | None:
    if part.a is None or part.b is None or part.off is None:
        return None
    for path, module in part.modules.others.items():
        held = getattr(module, part.name, None)
        if module is part.modules.a or not isinstance(module, nn.Embedding) or not isinstance(held, Tensor):
            continue
        of_b = getattr(part.modules.partners.get(path), part.name, None)
        if not isinstance(of_b, Tensor) or of_b.shape != part.b.shape or not _equal(held, part.a):
            continue
        if _size(of_b.detach().to(part.b).double() - part.b.double()) > _COPY_NEAR * _size(part.b.double()):
            return _difference(part, path, None, module=f"`{path}`")
    return None


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.numel() < 2:
        return False
    few = one.reshape(-1)[:_FIRST_NUMBERS].to(other), other.reshape(-1)[:_FIRST_NUMBERS]
    # A few numbers rule out nearly every candidate without reading the whole tensor.
    return torch.equal(*few) and torch.equal(one.to(other), other)


def _rounded(part: TensorPair, exact: Tensor | None, rounded: Tensor | None, *, by_b: bool) -> ModuleDifference | None:
    if exact is None or rounded is None or part.off is None:
        return None
    dtype = rounded_to(exact, rounded) if exact.is_floating_point() and rounded.is_floating_point() else None
    if dtype is None:
        return None
    finer, coarser = (str(one).removeprefix("torch.") for one in (exact.dtype, dtype))
    a, b = (finer, coarser) if by_b else (coarser, finer)
    return _difference(part, a, b, dtype=coarser, exact=finer)


def _few(part: TensorPair) -> ModuleDifference | None:
    if part.off is None or part.numbers is None:
        return None
    rows = part.off.flatten(1).any(1) if part.off.dim() > 1 else part.off.reshape(-1)
    count = int(rows.sum())
    if not 0 < count < _SHARE_OF_FEW_ROWS * len(rows):
        return None
    x, y = (_size(numbers.reshape(len(rows), -1)[rows]) for numbers in part.numbers)
    return _difference(part, x, y, some=count, all=len(rows))


def _size(values: Tensor) -> float:
    """Return the root mean square."""
    return float(values.square().mean().sqrt())


def _hold(name: str, tensor: Tensor | None, model: nn.Module, path: str) -> None:
    """Replace a module's own parameter; a parameter shared with other modules keeps its value there."""
    module = submodule(model, path)
    held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
    like = next((x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()), None)
    if tensor is not None:
        tensor = tensor.clone()
        tensor = tensor.to(like) if like is not None and tensor.is_floating_point() else tensor
        tensor = tensor if held is module._buffers else nn.Parameter(tensor, requires_grad=False)
    held[name] = tensor


# -- which weight holds another ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """Where A has the rows of a weight.

    Attributes:
        name: A's parameter.
        rows: first row and the one after the last, of a part of it; None for all of it.
        turned: whether they are its columns.
        permuted: whether they are in another order.
    """

    name: str
    rows: tuple[int, int] | None = None
    turned: bool = False
    permuted: bool = False

    @property
    def text(self) -> Message:
        """Return the weight in words, with its rows or how it is changed: "A's `k_proj`, transposed"."""
        name = f"`{self.name.removesuffix('.weight')}`"
        if self.rows is not None:
            return Message("outputs.holds.part", name=name, first=self.rows[0], last=self.rows[1] - 1)
        how = "turned" if self.turned else "permuted" if self.permuted else "whole"
        return Message(f"outputs.holds.{how}", name=name)


def holder_of(wanted: Tensor, parameters: Mapping[str, Tensor], own: str = "") -> Holder | None:
    """Return the parameter that holds the rows of a weight, up to rounding; None if none does.

    A whole parameter is preferred to a part of one, then to a transposed one, then to one with its rows in another
    order.

    Args:
        wanted: the weight, (rows, D), with at least two rows; None is returned if all its entries are the same.
        parameters: candidates by name; only floating-point matrices are tried.
        own: name of the parameter that should hold it. If that is stored as (D, rows), so are the others.

    Example:
        >>> q, k = torch.randn(2, 4, 4)
        >>> str(holder_of(k, {"q_proj.weight": q, "k_proj.weight": k}).text)
        "A's `k_proj`"
        >>> str(holder_of(k.mT, {"q_proj.weight": q, "k_proj.weight": k}).text)
        "A's `k_proj`, transposed"
    """
    if wanted.dim() != 2 or wanted.shape[0] < 2 or bool((wanted == wanted[:1, :1]).all()):
        return None  # zeros, or ones, are held by many
    wanted = wanted.double()
    columns = own in parameters and parameters[own].shape == wanted.mT.shape != wanted.shape
    found: list[Holder] = []
    for turned in (False, True):
        for name, parameter in parameters.items():
            if parameter.dim() != 2 or not parameter.is_floating_point():
                continue
            rows = parameter.detach().mT if turned != columns else parameter.detach()
            if rows.shape[1] == wanted.shape[1] and rows.shape[0] >= wanted.shape[0]:
                place = _place(wanted, rows)
                if place is not None:
                    whole = rows.shape[0] == wanted.shape[0]
                    part = None if whole else (place, place + wanted.shape[0])
                    found.append(Holder(name, part, turned, permuted=place < 0))
    # a whole weight before a part of one, as it is before another order
    return min(found, key=lambda one: (one.permuted, one.turned, one.rows is not None), default=None)


def _place(wanted: Tensor, rows: Tensor) -> int | None:
    """Return the first of the rows from which on they are the wanted ones; -1 if all are, in another order."""
    few = wanted[0, :_FIRST_NUMBERS]
    beginnings = rows[:, :_FIRST_NUMBERS].to(few)
    starts = ((beginnings - few).abs() <= _NEAR_WEIGHT * few.abs().max()).all(-1).nonzero().flatten().tolist()
    for start in starts:
        there = rows[start : start + len(wanted)]
        if len(there) == len(wanted) and bool(same_rows(there.to(wanted), wanted).all()):
            return int(start)
    if not starts or len(rows) != len(wanted):
        return None
    parts = torch.split(wanted[:, :_FIRST_NUMBERS], _ROWS_AT_ONCE)
    order = torch.cat([torch.cdist(part, beginnings).argmin(-1) for part in parts])
    permuted = len(set(order.tolist())) == len(order) and bool(same_rows(rows[order].to(wanted), wanted).all())
    return -1 if permuted else None
