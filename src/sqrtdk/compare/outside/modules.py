"""Records what the modules of a model take and give in one run, and pairs the module calls of two models."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_modules, whole_tensor
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.modules.calls import CallPlace, OpenCalls, hooked
from sqrtdk.modules.structures import replaced, walk
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tape.recorder import unseen

_MOST_ENTRIES_KEPT = 2**20  # entries of one tensor that are kept
_MOST_BYTES = 2**28  # bytes kept in one run; beyond them
_LEAST_ENTRIES_KEPT = 2**12  # entries of one tensor that are still kept


@dataclass(frozen=True, slots=True, eq=False)
class KeptTensor:
    """A tensor that a module took or gave.

    Attributes:
        shape: shape of the whole tensor.
        stride: every stride-th entry is kept, in row-major order.
        values: the kept entries, on the CPU.
    """

    shape: torch.Size
    stride: int
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ModuleStep:
    """One call of a module.

    Attributes:
        place: the module and the number of the call.
        parent: serial number of the enclosing call; -1 for the model itself.
        number: serial number, in the order in which calls begin.
        kind: class of the module.
        size: number of parameters, inner modules included.
        takes: tensors among its arguments, as they were before it ran.
        gives: tensors that it returned.
        whole: for a module with an attention, its returned tensors in full, on its device.
        called: line of the model's code that calls it; None if the call is not in a module of the model.
    """

    place: CallPlace
    parent: int
    number: int
    kind: str
    size: int
    takes: tuple[KeptTensor, ...]
    gives: tuple[KeptTensor, ...]
    whole: tuple[Tensor, ...] = ()
    called: places.Place | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """The parts of the other model that a run contains.

    Attributes:
        returned: by place, tensors that replace a call's own output of the same shape.
        taken: by place, tensors that replace a call's own inputs of the same shape.
        edits: functions that put a part of the other model into the copy that runs.
        reads: the run's attentions are read as well.
    """

    returned: Mapping[CallPlace, tuple[Tensor, ...]] = field(default_factory=dict)
    taken: Mapping[CallPlace, tuple[Tensor, ...]] = field(default_factory=dict)
    edits: tuple[Callable[[nn.Module], None], ...] = ()
    reads: bool = False


class ModuleListener:
    """Records what the modules of a model take and give, in the order in which their calls end.

    Outputs of modules named in `whole` are kept in full.

    Attributes:
        steps: one for each call.
        replaced: places whose output or input was replaced.
    """

    def __init__(self, whole: frozenset[str] = frozenset(), patch: Patch | None = None) -> None:
        self.steps: list[ModuleStep] = []
        self.replaced: set[CallPlace] = set()
        self._whole, self._patch = whole, patch or Patch()
        self._open = OpenCalls[tuple[tuple[KeptTensor, ...], places.Place | None]]()
        self._last: list[tuple[weakref.ref[Tensor], int, KeptTensor]] = []  # outputs of the call that ended last
        self._bytes = 0
        self._modules: dict[str, tuple[str, int]] = {}  # class and number of parameters
        self._outside: places.Place | None = None

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Record every module call of the model during the block, after applying the patch's edits to the model.

        The hooks are removed at the end; the edits stay.
        """
        for edit in self._patch.edits:
            edit(model)
        self._outside = places.current_place()
        modules = dict(named_modules(model))
        for path, module in modules.items():
            self._modules[path] = type(module).__name__, sum(p.numel() for p in module.parameters())
        with hooked(modules, self._begins, self._ends):
            yield

    def _begins(self, place: CallPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = args, kwargs
        with torch.no_grad(), unseen():
            if place in self._patch.taken:
                changed = replaced(taken, self._patch.taken[place])
                if changed is not taken:
                    self.replaced.add(place)
                    taken = changed
            takes = tuple(map(self._kept, _tensors(taken)))
        called = places.current_place()
        if called is not None:
            code = called[0]  # a `__call__` that wraps torch's is not the calling line of the model
            if called == self._outside or code.co_filename == __file__ or code.co_name == "__call__":
                called = None
        self._open.begins(place[0], (takes, called))
        return taken if place in self.replaced else None

    def _kept(self, tensor: Tensor) -> KeptTensor:
        """Return a copy, shared if the previous call returned this tensor and nothing has written to it since."""
        for known, version, kept in self._last:
            if known() is tensor and tensor._version == version:
                return kept
        kept = keep_entries(tensor, _MOST_ENTRIES_KEPT if self._bytes < _MOST_BYTES else _LEAST_ENTRIES_KEPT)
        self._bytes += kept.values.nbytes
        return kept

    def _ends(self, place: CallPlace, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        path, changed, ended = place[0], output, self._open.ends(place[0])
        if ended is None:  # it began before the block
            return None
        with torch.no_grad(), unseen():
            if place in self._patch.returned:
                changed = replaced(output, self._patch.returned[place])
                if changed is not output:
                    self.replaced.add(place)
            tensors = _tensors(changed)
            whole = tuple(whole_tensor(x).clone() for x in tensors) if path in self._whole else ()
            gives = tuple(map(self._kept, tensors))
            pairs = zip(tensors, gives, strict=True)
            self._last = [(weakref.ref(x), x._version, kept) for x, kept in pairs if not x.is_inference()]
        takes, called = ended.noted
        self.steps.append(
            ModuleStep(place, ended.parent, ended.number, *self._modules[path], takes, gives, whole, called)
        )
        return None if changed is output else changed


def keep_entries(tensor: Tensor, most: int) -> KeptTensor:
    """Return a copy of about `most` evenly spaced entries of a tensor, on the CPU.

    Example:
        >>> kept = keep_entries(torch.arange(10.0), 3)
        >>> kept.stride, kept.values.tolist()
        (3, [0.0, 3.0, 6.0, 9.0])
    """
    stride = tensor.numel() // most | 1 if tensor.numel() > most else 1  # odd, to spread over rows of 2^n entries
    return KeptTensor(tensor.shape, stride, whole_tensor(tensor).reshape(-1)[::stride].clone().cpu())


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of arguments or results, in order; a cache is skipped, as it exists before and after."""
    every = (tensor for _, tensor in walk(value, objects=False))
    return [x for x in every if x.layout is torch.strided and not x.is_nested and not x.is_meta]


# -- where B's code does something else --------------------------------------------------------------------------------


def lines_of(module: nn.Module, behind: ModuleStep | None, before: ModuleStep | None) -> str | None:
    """Return file and lines of a module's code from one inner call to another, "model.py:40-41"; None if unknown.

    Args:
        module: module whose output differs.
        behind: last inner call that agrees; None: start of forward.
        before: first inner call whose input differs; None: end of forward.
    """
    first, last = (places.place_text(None if step is None else step.called) for step in (behind, before))
    code = _forward_of(module)
    if code is not None:
        begin = places.first_line(code)
        end = max(line for *_, line in code.co_lines() if line is not None)
        first = begin if behind is None else first
        last = f"{begin.rpartition(':')[0]}:{end}" if before is None else last
    if first is None or last is None:
        return first or last
    (file, _, start), (other, _, stop) = first.rpartition(":"), last.rpartition(":")
    if isinstance(module, ForeignModule) and (file != other or int(stop) < int(start)):
        return first  # a call has no line there but the first one inside
    return f"{first}-{stop}" if file == other and int(start) < int(stop) else last


def line_of(module: nn.Module, call: ModuleStep) -> str | None:
    """Return file and line of a module's forward, "model.py:40"; None if unknown.

    For modules of torch such as `nn.GELU`, it is the line that calls them.
    """
    code = _forward_of(module)
    return places.place_text(call.called) if code is None else places.first_line(code)


def _forward_of(module: nn.Module) -> CodeType | None:
    """Return the code of a module's forward, or that of the program that it runs; None if it is torch's."""
    if isinstance(module, ForeignModule):
        return module.source_code
    forward: Any = inspect.unwrap(getattr(module.forward, "__func__", module.forward))
    code: CodeType | None = getattr(forward, "__code__", None)
    return None if str(getattr(forward, "__module__", "")).startswith("torch.") else code


# -- which calls belong together ---------------------------------------------------------------------------------------


def align_steps(
    a: Sequence[ModuleStep],
    b: Sequence[ModuleStep],
    sites: Mapping[str, str],
    homes: Mapping[str, str] = MappingProxyType({}),
) -> list[tuple[ModuleStep, ModuleStep]]:
    """Return the module calls of two models that belong together, in A's order.

    Calls are paired by path, apart from a wrapper around one model (PeftModel.base_model.model); by the paired sites of
    attentions; by their weights; then by order, sizes and shapes, first those with equal numbers in their paths. A part
    of an attention belongs to a part of its partner alone: q_proj may have the shape of a gate_proj.

    Args:
        a: module calls of A.
        b: module calls of B.
        sites: paths of attentions in A to those in B.
        homes: paths of modules in A to those in B that hold the same weights.
    """
    inner_a, inner_b = _inner(a, b)
    own_sites = {own: own for own in sites.values()}
    by_place = {(_below(step.place[0], inner_b), step.place[1]): step for step in b}
    pairs: dict[int, ModuleStep] = {}
    taken: set[int] = set()
    for step in a:
        own, count = step.place
        path = _below(sites[own], inner_b) if own in sites else _below(own, inner_a)
        partner = by_place.get((path, count)) if path is not None else None
        if partner is None and own in homes:
            partner = by_place.get((_below(homes[own], inner_b), count))
        # A module of one name and size that gives another shape is where two models part: it stays a pair.
        fits = own in sites or (
            partner is not None and (_fits(step, partner) or (step.kind, step.size) == (partner.kind, partner.size))
        )
        if partner is not None and partner.number not in taken and fits:
            pairs[step.number] = partner
            taken.add(partner.number)
    # Equal numbers in the paths go first: layers.3.mlp belongs to h.3.ff, and not to the h.2.ff of equal sizes.
    for numbered in (True, False):
        left_a = [step for step in a if step.number not in pairs]
        left_b = [step for step in b if step.number not in taken]
        keys_a, keys_b = (
            [(*_key(step, numbered), _home(step, attentions)) for step in steps]
            for steps, attentions in ((left_a, sites), (left_b, own_sites))
        )
        for run in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():
            for offset in range(run.size):
                pairs[left_a[run.a + offset].number] = left_b[run.b + offset]
                taken.add(left_b[run.b + offset].number)
    return [(step, pairs[step.number]) for step in a if step.number in pairs]


def _home(step: ModuleStep, attentions: Mapping[str, str]) -> str | None:
    """Return the site in B of the attention that a module is a part of; None for a module outside all of them."""
    path = step.place[0]
    return next((site for own, site in attentions.items() if own and path.startswith(f"{own}.")), None)


def _inner(a: Sequence[ModuleStep], b: Sequence[ModuleStep]) -> tuple[str, str]:
    """Return the prefixes of A's and B's paths whose removal gives the most common paths; one of them is ""."""
    paths = [{step.place[0] for step in steps} for steps in (a, b)]
    best, found = len(paths[0] & paths[1]), ("", "")
    if 2 * best >= min(map(len, paths)):  # most paths agree as they are: no wrapper
        return found
    # base_model.model.layers.0 in A, layers.0 in B: below a wrapper of A all paths agree
    for side in (0, 1):
        for prefix in paths[side] - {""}:
            common = len({_below(path, prefix) for path in paths[side]} & paths[1 - side])
            if common > best:
                best, found = common, ("", prefix) if side else (prefix, "")
    return found


def _below(path: str, prefix: str) -> str | None:
    """Return a path relative to a module above it; None if it is not below that module."""
    if not prefix:
        return path
    return "" if path == prefix else path.removeprefix(f"{prefix}.") if path.startswith(f"{prefix}.") else None


def _fits(one: ModuleStep, other: ModuleStep) -> bool:
    return [kept.shape for kept in one.gives][:1] == [kept.shape for kept in other.gives][:1]


def _key(step: ModuleStep, numbered: bool) -> tuple[Any, ...]:
    numbers = tuple(re.findall(r"\d+", step.place[0])) if numbered else ()
    return numbers, step.size or step.kind, tuple(step.gives[0].shape) if step.gives else ()
