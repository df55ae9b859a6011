"""Differences of a module and its partner: numbers, functions and parameters that they hold, or their types.

A difference is only a suspicion. It is proven if A's model with B's part gives B's output (`sqrtdk.compare.chain`).
Some differences show only in numbers: a residual that is left out, a factor, a permutation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sqrtdk.compare.holders import LAYER_NUMBER, Holder, holder_of
from sqrtdk.compare.numbers import same, single_ratio, unequal_texts
from sqrtdk.compare.precision import rounded_to, rounding_unit
from sqrtdk.compare.words import short
from sqrtdk.messages import Message

TensorKind = Literal[
    "other_shape",
    "times",  # a multiple
    "transposed",
    "rounded",  # B's numbers are A's in a coarser dtype
    "not_rounded",  # the other way round
    "rows",  # few rows differ
    "numbers",  # few numbers of a vector differ
    "other_numbers",
    "of_another",  # B's numbers are those of another module of A
    "held",  # another weight of A has them in another form
    "alone",  # one side has no such tensor
]
# attribute names under which implementations store the same eps
EPS_NAMES = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_SHARE_OF_FEW_ROWS = 0.5  # share of a parameter's rows: fewer are reported as a count
# What a whole checkpoint differs by, in modules of all types.
OF_CHECKPOINT: tuple[TensorKind, ...] = ("other_numbers", "rounded", "not_rounded")
_MAYBE_HELD: tuple[TensorKind, ...] = ("other_numbers", "rows")  # numbers that another weight may explain
_FIRST_NUMBERS = 8  # numbers that are compared before the whole tensor
_MOST_TEXT_CHARACTERS = 60  # characters of a text that are shown
_MOST_CHANGES_NAMED = 3  # parts of one module that are named
_NUMBER_TOLERANCE = 1e-6  # relative, for numbers computed in float64
HeldValue = bool | int | float | str | None | Callable[..., Any]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleChange:
    """A part of B's module that can be put into A's.

    Attributes:
        text: what A and B have, as half a sentence: "`eps` is 1e-05 in A, 0.01 in B".
        edit: puts it into the module at `path` of a copy of A's model, its first argument.
        written: it stands in the code or a config, so it is more than a weight.
        kind: equal for modules of other layers that change alike. All other weights are one kind, "other_numbers".
    """

    text: str
    edit: Callable[..., None]
    written: bool
    kind: str


def changes_of(a: nn.Module, b: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[ModuleChange]:
    """Yield what two modules differ by, most specific first: what they hold, then their types.

    `others` are modules of A that may hold what B's module holds.
    """
    tensors, values = _of_tensors(a, b, others), _of_values(a, b)
    # one alone may be the cause
    sets = [[*tensors, value] for value in values] if 1 < len(values) <= _MOST_CHANGES_NAMED else []
    for parts in (*sets, [*tensors, *values]):
        if 0 < len(parts) <= _MOST_CHANGES_NAMED:
            texts, kinds = [part.text for part in parts], [part.kind for part in parts]
            text = reduce(lambda first, second: Message("outputs.module.also", first=first, second=second), texts)
            kind = next((kind for kind in OF_CHECKPOINT if kind in kinds), LAYER_NUMBER.sub("#", text))
            yield ModuleChange(text, partial(_apply_edits, [part.edit for part in parts]), bool(values), kind)
    yield from _of_added_bias(a, b)
    if type(a) is not type(b) and (not any(a.children()) or not any(b.children())):
        # Modules with inner modules on both sides are not swapped: the inner ones are compared themselves.
        names = [type(module).__name__ for module in (a, b)]
        if names[0] == names[1]:
            names = [f"{type(module).__module__}.{name}" for module, name in zip((a, b), names, strict=True)]
        text = Message("outputs.module.other_type", one=names[0], other=names[1])
        yield ModuleChange(text, partial(_put_module, b), True, LAYER_NUMBER.sub("#", text))


class PartChange(NamedTuple):
    """One difference: a sentence, an edit that applies it to a module, and for a tensor the kind of difference."""

    text: Message
    edit: Callable[[nn.Module], None]
    kind: TensorKind | None = None


class TensorChange(NamedTuple):
    """How a tensor differs, in words and as a code."""

    text: Message
    kind: TensorKind


def _of_added_bias(a: nn.Module, b: nn.Module) -> Iterator[ModuleChange]:
    """Yield that one side's linear layer adds its bias and the other's, of another class, does not.

    In layers of one class a bias that is missing is missing among their parameters. A layer of another class may hold a
    bias and not add it, so the bias is added to what A gives, or taken from it. Each suspicion costs a run of A, so
    only layers of one weight are suspected.
    """
    x, y = (getattr(module, "weight", None) for module in (a, b))
    if type(a) is type(b) or any(a.children()) or any(b.children()):
        return
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)) or x.dim() != 2:
        return
    if tensor_change("weight", x.detach(), y.detach().to(x.device)) is not None:
        return
    for one, other, module, sign in (("A", "B", a, -1), ("B", "A", b, 1)):
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor) and bias.dim() == 1 and bias.is_floating_point():
            text = Message("outputs.module.adds_bias", one=one, name="`bias`", other=other)
            yield ModuleChange(text, partial(_add_to_output, sign * bias.detach()), True, text)


def _add_to_output(bias: Tensor, model: nn.Module, path: str) -> None:
    """Adds a vector to what the module at a path of the model gives."""

    def added(_: nn.Module, __: object, given: Any) -> Any:
        fits = isinstance(given, Tensor) and given.shape[-1:] == bias.shape
        return given + bias.to(given) if fits else None

    model.get_submodule(path).register_forward_hook(added)


def _apply_edits(edits: Sequence[Callable[[nn.Module], None]], model: nn.Module, path: str) -> None:
    for edit in edits:
        edit(model.get_submodule(path))


def _put_module(module: nn.Module, model: nn.Module, path: str) -> None:
    """Puts a copy of a module at a path of the model, in the model's dtype and training mode."""
    parent, _, name = path.rpartition(".")
    old = model.get_submodule(path)
    # A may run as a float64 copy, into which a float32 module of B has to fit.
    dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float64)
    model.get_submodule(parent).add_module(name, copy.deepcopy(module).to(dtype).train(old.training))


def is_alike(a: nn.Module, b: nn.Module, but: Collection[str] = ()) -> bool:
    """Return whether two modules hold the same parameters, buffers, numbers and functions, up to storage.

    Parameters and buffers in `but` are not compared.
    """
    return not _of_values(a, b) and not _of_tensors(a, b, {}, but)


def _of_tensors(
    a: nn.Module, b: nn.Module, others: Mapping[str, nn.Module], but: Collection[str] = ()
) -> list[PartChange]:
    """Return the module's own parameters and buffers that differ by more than their storage, except those in `but`."""
    own = [{**dict(m.named_parameters(recurse=False)), **dict(m.named_buffers(recurse=False))} for m in (a, b)]
    found: list[PartChange] = []
    for name in dict.fromkeys((*own[0], *own[1])):
        if name in but:
            continue
        x, y = (tensors.get(name) for tensors in own)
        if x is not None and y is not None:
            change = tensor_change(name, x.detach(), y.detach().to(x.device))
            if change is not None:
                # for example a head that B ties to the embedding
                like = ((path, getattr(module, name, None)) for path, module in others.items())
                at = next((path for path, z in like if isinstance(z, Tensor) and z is not x and _equal(z, y)), None)
                if at is not None:
                    text = Message("outputs.module.of_another", name=f"`{name}`", module=f"`{at}`")
                    change = TensorChange(text, "of_another")
                elif change.kind in _MAYBE_HELD:
                    held = _held_text(name, a, y.detach().to(x.device), others)
                    change = change if held is None else TensorChange(held, "held")
        elif type(a) is type(b):
            id = "outputs.module.of_a_alone" if y is None else "outputs.module.of_b_alone"
            change = TensorChange(Message(id, name=f"`{name}`"), "alone")
        else:
            continue
        if change is not None:
            found.append(PartChange(change.text, partial(_hold, name, y), change.kind))
    return found


def _held_text(name: str, own: nn.Module, tensor: Tensor, others: Mapping[str, nn.Module]) -> Message | None:
    """Return which weight of A a matrix of B holds in another form: transposed, its rows mixed, a part of one."""
    weights = {f"{path}.{key}": x for path, m in others.items() for key, x in m.named_parameters(recurse=False)}
    place = next((f"{path}.{name}" for path, module in others.items() if module is own), "")
    holder = holder_of(tensor, weights, place)
    if holder is None or holder == Holder(place):  # its own, as rounded to bfloat16: near enough to be recognised
        return None
    return Message("outputs.module.held", name=f"`{name}`", what=holder.text)


def _hold(name: str, tensor: Tensor | None, module: nn.Module) -> None:
    """Replaces a module's own parameter; a parameter shared with other modules keeps its value there."""
    held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
    like = next((x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()), None)
    if tensor is not None:
        tensor = tensor.detach().clone()
        tensor = tensor.to(like) if like is not None and tensor.is_floating_point() else tensor
        tensor = tensor if held is module._buffers else nn.Parameter(tensor, requires_grad=False)
    held[name] = tensor


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.numel() < 2:
        return False
    few = one.reshape(-1)[:_FIRST_NUMBERS].to(other), other.reshape(-1)[:_FIRST_NUMBERS]
    # A few numbers rule out nearly every candidate without reading the whole tensor.
    return torch.equal(*few) and torch.equal(one.to(other), other)


def tensor_change(name: str, a: Tensor, b: Tensor) -> TensorChange | None:
    """Return how a parameter of B relates to A's; None if they are equal up to rounding.

    Example:
        >>> ones = torch.ones(4, 2)
        >>> tensor_change("weight", ones, 2 * ones), tensor_change("weight", ones, ones)
        (TensorChange(text="B's `weight` is 2 times A's", kind='times'), None)
        >>> tensor_change("weight", ones, ones * torch.tensor([[1.0], [1.0], [3.0], [1.0]])).text
        '`weight` differs in 1 of 4 rows'
    """
    name = f"`{name}`"
    if a.shape != b.shape:
        shapes = {"one": f"{tuple(a.shape)}", "other": f"{tuple(b.shape)}"}
        return TensorChange(Message("outputs.module.other_value", name=name, **shapes), "other_shape")
    # A checkpoint in bfloat16 and one in float32 hold the same weights, rounded.
    coarse = sum(rounding_unit(x.dtype) for x in (a, b) if x.is_floating_point()) * 2
    x, y = a.double(), b.double()
    off = (x - y).abs() > coarse * torch.maximum(x.abs(), y.abs()) if coarse else x != y
    if not bool(off.any()):
        return None
    factor = single_ratio(x, y)
    if factor is not None:
        return TensorChange(Message("outputs.module.times", name=name, factor=f"{factor:.4g}"), "times")
    if x.dim() == 2 and x.shape == x.mT.shape and same(x.mT, y):
        return TensorChange(Message("outputs.module.transposed", name=name), "transposed")
    for kind, one, other in zip(OF_CHECKPOINT[1:], (a, b), (b, a), strict=True):
        dtype = rounded_to(one, other) if one.is_floating_point() and other.is_floating_point() else None
        if dtype is not None:
            words = Message(f"outputs.module.{kind}", name=name, dtype=str(dtype).removeprefix("torch."))
            return TensorChange(words, kind)
    rows = off.flatten(1).any(1) if off.dim() > 1 else off.reshape(-1)
    if (count := int(rows.sum())) < _SHARE_OF_FEW_ROWS * len(rows):
        few: TensorKind = "rows" if off.dim() > 1 else "numbers"
        return TensorChange(Message(f"outputs.module.{few}", name=name, some=count, all=len(rows)), few)
    size, gap = (float(values.square().mean().sqrt()) for values in (x, x - y))
    text = Message("outputs.module.other_numbers", name=name, share=short(gap / size if size else 1.0))
    return TensorChange(text, "other_numbers")


def _of_values(a: nn.Module, b: nn.Module) -> list[PartChange]:
    """Return numbers, names and functions that the modules and their configs hold and that differ."""
    found: list[PartChange] = []
    for prefix, one, other in (("", a, b), ("config.", getattr(a, "config", None), getattr(b, "config", None))):
        values, others = _held_values(one), _held_values(other)
        for name, value in values.items():
            renamed = next((eps for eps in EPS_NAMES if name in EPS_NAMES and eps in others), None)
            partner = name if name in others else renamed
            if partner is None or _alike(value, others[partner]):
                continue
            own, (old, new) = f"`{prefix}{name}`", _value_texts(value, others[partner])
            if old == new:
                text = Message("outputs.module.other_function", name=own)
            elif partner == name:
                text = Message("outputs.module.other_value", name=own, one=old, other=new)
            else:
                its = f"`{prefix}{partner}`"
                text = Message("outputs.module.other_value_of", name=own, one=old, partner=its, other=new)
            found.append(PartChange(text, partial(_set, prefix.rstrip("."), name, others[partner])))
    return found


def _held_values(holder: object) -> dict[str, HeldValue]:
    fields = getattr(holder, "__dict__", {})
    return {
        name: x
        for name, x in fields.items()
        # layer_idx differs between the layers of one model, and says nothing about what they compute
        if not name.startswith("_") and name not in ("training", "layer_idx")
        if x is None or isinstance(x, bool | int | float | str) or (callable(x) and hasattr(x, "__qualname__"))
    }


def _alike(a: HeldValue, b: HeldValue) -> bool:
    """Return whether two values are equal; functions are equal if they have the same code."""
    if callable(a) and callable(b):
        return getattr(a, "__code__", a) == getattr(b, "__code__", b)
    # True == 1 in Python, but `bias=True` and `bias=1` are not the same field
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _value_texts(a: HeldValue, b: HeldValue) -> Sequence[str]:
    """Return two values as text that shows where they differ; untrusted text may be of any length, so it is cut."""
    if type(a) in (int, float) and type(b) in (int, float):
        return unequal_texts(float(a), float(b))  # type: ignore[arg-type]
    texts = [str(getattr(value, "__name__", value)) for value in (a, b)]
    apart = next((i for i, (x, y) in enumerate(zip(*texts, strict=False)) if x != y), 0)
    start = max(0, apart - _MOST_TEXT_CHARACTERS // 2)
    cut = [f"{'...' if start else ''}{text[start:][:_MOST_TEXT_CHARACTERS]}..." for text in texts]
    return [text if len(text) <= _MOST_TEXT_CHARACTERS else part for text, part in zip(texts, cut, strict=True)]


def _set(holder: str, name: str, value: HeldValue, module: nn.Module) -> None:
    setattr(getattr(module, holder) if holder else module, name, value)


# -- what numbers tell -------------------------------------------------------------------------------------------------


def relation(a: Tensor, b: Tensor, before: Sequence[tuple[str, Tensor]]) -> Message | None:
    """Return how B's numbers relate to A's, as half a sentence; None if by nothing simple.

    `before` are named tensors that are equal on both sides.

    Example:
        >>> x, y = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([4.0, 1.0, 7.0])
        >>> relation(x + y, y, [("the input of `layers.1`", x)])
        'A adds the input of `layers.1`, B does not'
        >>> relation(x, 2 * x, []), relation(x, x.flip(0), [])
        ("B's numbers are 2 times A's", "B has A's numbers in another order")
    """
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return None
    factor = single_ratio(a, b)
    if factor is not None:
        return Message("outputs.relation.times", factor=f"{factor:.4g}")
    for name, tensor in before:
        factor = single_ratio(tensor, a - b) if tensor.shape == a.shape else None
        if factor is None:
            continue
        one, other = ("A", "B") if factor > 0 else ("B", "A")
        words = {"one": one, "what": name, "other": other}
        if abs(abs(factor) - 1) <= _NUMBER_TOLERANCE:
            return Message("outputs.relation.adds", **words)
        return Message("outputs.relation.adds_more", factor=f"{abs(factor):.4g}", **words)
    if same(a.flatten().sort().values, b.flatten().sort().values, _NUMBER_TOLERANCE):
        return Message("outputs.relation.order")
    return None
