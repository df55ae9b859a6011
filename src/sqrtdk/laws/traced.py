"""A run of a model that keeps the tensors of its attentions, and the inputs and outputs of the modules around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from sqrtdk._wrappers import named_modules
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.declared_outputs import OUTPUT_FIELDS, declared_gate, declared_value_scale
from sqrtdk.laws.subject import Outputs, RunEnded, Subject
from sqrtdk.modules.calls import CallPlace, hooked
from sqrtdk.modules.structures import copy_structure, floating
from sqrtdk.tracing import Trace
from sqrtdk.tracing.tape.stance import fast_path_off
from sqrtdk.tracing.tensors import CallTensors

# Returns the arguments that replace a module's own; None leaves them.
Entering = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
Leaving = Callable[[Any], Any]  # returns what replaces a module's output; None leaves it


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """The first call of a module.

    Attributes:
        takes: The first floating-point tensor of its arguments.
        gives: Its output, with copied tensors.
        single: Whether its arguments hold no other floating-point tensor.
    """

    takes: Tensor | None
    gives: Any
    single: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The tensors that a run kept.

    Attributes:
        calls: Tensors of each attention, by site and index.
        unread: Names of parameters that no operation read.
        outputs: The outputs of the model.
        passages: First calls of the modules of attentions and of those around them, by path. Where the config declares
            a factor on v or a gate, those of the modules beside the attention as well, and of the children of the two
            modules around it. In the order in which they end.
        seed: The seed of the run.
    """

    calls: Mapping[tuple[str, int], CallTensors]
    unread: frozenset[str] = frozenset()
    outputs: Outputs = field(default_factory=dict)
    passages: dict[str, Passage] = field(default_factory=dict)
    seed: int = 0


def traced(subject: Subject, *, seed: int | None = None) -> Traced:
    """Return the traced run for the unchanged inputs, with the inputs and outputs of the modules around its attentions.

    It is run when first asked for, and kept in `subject.traced`.

    Args:
        subject: The model.
        seed: Seed of the run if it is not kept yet; None for the subject's own.
    """
    if subject.traced is None:
        passages: dict[str, Passage] = {}
        paths = {path for judged in subject.calls for path in upwards(judged.call.site)}
        paths |= {path for judged in subject.calls for path in _beside(subject.module, judged.call.site)}
        with ExitStack() as stack:
            for path in sorted(paths):
                stack.enter_context(_noted(subject.module, path, passages))
            run = run_traced(subject, seed=seed)
        subject.traced = replace(run, passages=passages)
    assert isinstance(subject.traced, Traced)
    return subject.traced


def run_traced(subject: Subject, changes: Mapping[str, Any] | None = None, *, seed: int | None = None) -> Traced:
    """Run the model under a trace that keeps the tensors of each attention.

    Args:
        subject: The model.
        changes: Inputs to replace, by name; None for none.
        seed: Seed of the run; None for the subject's own.

    Returns:
        The tensors of each attention by (site, index), the outputs, and the parameters that nothing read.

    Raises:
        NotAsked: The model raises.
    """
    with fast_path_off(), Trace(subject.module, stats=False, numeric=False, keep=True) as run:
        outputs = subject.run(changes or {}, seed=seed)
    calls = {(call.site, call.index): call for call in run.tensors}
    return Traced(calls, run.unread, outputs, seed=subject.seed if seed is None else seed)


def upwards(site: str) -> list[str]:
    """Return the path of a site and of all modules around it, the innermost first.

    Example:
        >>> upwards("layers.0.attn")
        ['layers.0.attn', 'layers.0', 'layers', '']
    """
    parts = site.split(".") if site else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _beside(module: nn.Module, site: str) -> list[str]:
    """Return the paths of modules inside an attention's module and its parent, if their numbers show a declared field.

    Their outputs are kept, which costs memory: only where the config declares a factor on v, or a gate.
    """
    config = config_at(module, site, OUTPUT_FIELDS)
    if declared_gate(config) is None and declared_value_scale(config) is None:
        return []
    inner: list[str] = []
    for path in upwards(site)[:2]:
        around = module_at(module, path)
        parts = [] if around is None else [(name, part) for name, part in named_modules(around) if name]
        inner += [f"{path}.{name}" if path else name for name, _ in parts]
        if any(True for _, part in parts for _ in part.parameters()):
            break  # the projection of the output is among them
    # What they take shows whether the attention's output goes on as it is.
    called = [path for path in upwards(site)[1:] if not is_container(module_at(module, path))]
    for path in called[:2]:
        around = module_at(module, path)
        children = () if around is None else around.named_children()
        inner += [f"{path}.{name}" if path else name for name, child in children if not is_container(child)]
    return inner


def may_end_early(module: nn.Module) -> bool:
    """Return whether a run may be stopped before its last module without leaving weights in a wrong place.

    False with hooks of accelerate and modules of `torch.distributed` such as FSDP, which move weights back at the end
    of the enclosing modules.
    """
    parts = list(module.modules())
    kinds = {cls.__module__ for part in parts for cls in type(part).__mro__}
    moved = any(hasattr(part, "_hf_hook") for part in parts)
    return not moved and not any(kind.startswith("torch.distributed") for kind in kinds)


@contextmanager
def ended_after(module: nn.Module, paths: Collection[str]) -> Iterator[None]:
    """Stop the forward pass within the block, with `RunEnded`, once the first calls of all these modules have returned.

    Enter it after other hooks, so that these see the last call. The run is not stopped if `paths` is empty, contains ""
    or a path without a module, or if `may_end_early` is False.

    Args:
        module: The model.
        paths: Dotted paths of submodules.
    """
    left = set(paths)
    parts = {path: part for path in left if path and (part := module_at(module, path)) is not None}

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> None:
        left.discard(place[0])
        if not left:
            raise RunEnded

    if len(parts) == len(left) and parts and may_end_early(module):
        with hooked(parts, None, ends):
            yield
    else:
        yield


def is_container(module: nn.Module | None) -> bool:
    """Return whether a module only holds others, and is never called."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


@contextmanager
def exchanged(module: nn.Module, entering: Entering | None, leaving: Leaving | None) -> Iterator[None]:
    """Replace the inputs or the output of a module in its first call within the block.

    Args:
        module: The module.
        entering: Called with args and kwargs; what it returns replaces them, or None leaves them. None: not called.
        leaving: Called with the output; what it returns replaces it, or None leaves it. None: not called.
    """

    def begins(place: CallPlace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return entering(args, kwargs) if entering is not None and place[1] == 0 else None

    def ends(place: CallPlace, args: Any, kwargs: Any, output: Any) -> Any:
        return leaving(output) if leaving is not None and place[1] == 0 else None

    with hooked({"": module}, begins, ends):
        yield


def _noted(module: nn.Module, path: str, passages: dict[str, Passage]) -> Any:
    part = module_at(module, path)
    takes: list[Tensor | None] = []
    single: list[bool] = []

    def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(floating((args, kwargs)))
        takes.append(tensors[0].detach().clone() if tensors else None)
        single.append(len(tensors) == 1)

    def leaving(output: Any) -> None:
        passages.setdefault(
            path, Passage(takes[0] if takes else None, copy_structure(output), bool(single) and single[0])
        )

    return exchanged(part if part is not None else nn.Identity(), entering, leaving)
